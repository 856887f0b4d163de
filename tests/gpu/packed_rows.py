"""Rows packed for flash attention against padded ones: log-probabilities and gradient of the learner.

    python tests/gpu/packed_rows.py [--device cuda] [--model smollm2-135m-instruct]

Without Ray and without an engine: each is a learner of its own in a process of its own, with the same weights
and samples of like length. It fails where they differ by more than rounding does. On a CPU, which has no such
kernels, torch's own attention takes the packed rows, in float32.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from engine_and_learner import alone, chosen, free_port

from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig

FLASH = {"model": {"override_config": {"attn_implementation": "flash_attention_2"}}}
MOST = {"cuda": (0.02, 0.03), "cpu": (1e-5, 1e-4)}
"""Mean difference of log-probabilities in nats, and of the gradient's norm as a part of it."""
NUM_SAMPLES = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=tuple(MOST))
    parser.add_argument("--model", default="smollm2-135m-instruct", help="tiny, or one that model.path takes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = chosen(arguments.model, Path(folder))
        padded, packed = (
            alone(partial(learned, model, arguments.device, is_packed)) for is_packed in (False, True)
        )
    far = [abs(one - other) for one, other in zip(padded[0], packed[0], strict=True)]
    logprobs, norm = sum(far) / len(far), abs(packed[1] / padded[1] - 1)
    print(f"log-probabilities differ by {logprobs:.2g} on average and {max(far):.2g} at most")
    print(f"gradient's norm: padded {padded[1]:.6g}, packed {packed[1]:.6g}")
    if not (logprobs <= MOST[arguments.device][0] and norm <= MOST[arguments.device][1]):
        raise SystemExit(f"They differ by more than {MOST[arguments.device]}.")


def learned(model: str, device: str, is_packed: bool) -> tuple[list[float], float]:
    """Log-probabilities of all sampled tokens, and the norm of an update's gradient."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    from whole_batches import WholeBatches

    from policies.learning.algorithms import resolve
    from policies.learning.verl import learner, token_trees

    given: dict[str, Any] = FLASH if is_packed and device == "cuda" else {}
    config = LearnerConfig(
        device=device,
        dtype="bfloat16" if device == "cuda" else "float32",
        micro_batch_tokens=4096,
        optimizer=OptimizerConfig(lr=1e-5),
        verl=given,
    )
    vars(token_trees)["obstacle"] = lambda *_: "rows are flat in both"
    if device == "cpu":
        vars(token_trees)["packs"] = lambda *_: is_packed
    algorithm = resolve(AlgorithmConfig(), 256, is_exact=device == "cpu")
    rank = WholeBatches(learner.VerlLearner(model, config, algorithm, 10, 0))
    batch = TrainBatch(samples=samples())
    start = time.perf_counter()
    logprobs = [each for row in rank.logprobs(batch) for each in row]
    metrics = rank.update(rank.score([batch])).metrics
    print(f"{'packed' if is_packed else 'padded'}: {time.perf_counter() - start:.2f} s", flush=True)
    return logprobs, metrics["learn/grad_norm"]


def samples() -> tuple[TrainingSample, ...]:
    """Random tokens, half of each sample a prompt."""
    rng = random.Random(0)

    def ids(size: int) -> tuple[int, ...]:
        return tuple(rng.randrange(40) for _ in range(size))

    return tuple(
        TrainingSample(
            sample_id=f"{number}",
            prompt_ids=ids(size),
            response_ids=ids(size),
            loss_mask=(1,) * size,
            rollout_logprobs=(-3.0,) * size,
            turns=(0,) * size,
            advantages=((-1.0) ** number,) * size,
        )
        for number, size in enumerate(rng.randint(8, 200) for _ in range(NUM_SAMPLES))
    )


if __name__ == "__main__":
    main()
