"""Engine and learner without Ray: the same tokens, an update, its weights handed over, sleep and wake.

    python tests/gpu/engine_and_learner.py [--device cuda] [--dtype bfloat16] [--model smollm2-135m-instruct]

Each is in a process of its own, one after the other. The engine samples; the learner scores that and makes
an update; the engine takes its weights, samples again, sleeps, wakes and answers as before; a learner of the
new weights scores the second samples. It fails where the two differ by more than ``MOST``, where the update
changes nothing, or where the engine answers otherwise after its sleep.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from machine import free_port

from launch.run_folder.model_paths import model_folder
from launch.settings.tree import ROUNDED_MISMATCH
from policies.engines.vllm_settings import environment
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig
from policies.settings import EngineConfig

MOST = {"float32": LearnerConfig().mismatch_alarm, "bfloat16": ROUNDED_MISMATCH}
"""Mean difference of log-probabilities, in nats a token."""
NUM_TOKENS = 48
NUM_ANSWERS = 8
WEIGHTS = "model.safetensors"
QUESTIONS = ("What is 12*3, in words?", "Name a colour: " + "red, green, " * 20, "Count to nine.")
Samples = list[TrainingSample]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", default="bfloat16", choices=tuple(MOST))
    parser.add_argument("--model", default="smollm2-135m-instruct", help="tiny, or one that model.path takes")
    arguments = parser.parse_args()
    device, dtype = arguments.device, arguments.dtype
    with tempfile.TemporaryDirectory() as folder:
        model, target = chosen(arguments.model, Path(folder)), Path(folder, "trained")
        sampled = alone(partial(samples_of, model, None, device, dtype))
        before = alone(partial(learned, model, sampled, device, dtype, target))
        samples = alone(partial(samples_of, model, target, device, dtype))
        after = alone(partial(learned, str(target), samples, device, dtype, None))
    for when, difference in (("before", before), ("after", after)):
        print(f"{dtype}: engine and learner differ by {difference:.2g} nats a token {when} the update")
    if not max(before, after) <= MOST[dtype]:
        raise SystemExit(f"They differ by more than {MOST[dtype]}.")


def chosen(name: str, folder: Path) -> str:
    """The folder of the tiny model, which is made in ``folder``, or of one that ``model.path`` takes."""
    if name != "tiny":
        return model_folder(name)
    from policies.tiny import build_model

    return str(build_model(folder / "tiny", [[{"role": "user", "content": each}] for each in QUESTIONS]))


def alone(work: Callable[[], Any]) -> Any:
    """Return what ``work`` does in a process of its own: engine and learner share no GPU memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work)


# -- the engine ----------------------------------------------------------------------------------------


def samples_of(model: str, weights: Path | None, device: str, dtype: str) -> Samples:
    """Samples of an engine that has loaded ``weights``, and then has slept."""
    options: dict[str, Any] = {"dtype": dtype}
    if device == "cuda":
        options |= {"enable_sleep_mode": True, "gpu_memory_utilization": 0.4}
    config = EngineConfig(num_gpus=float(device == "cuda"), max_model_tokens=256, options=options)
    os.environ.update(environment(config))
    return asyncio.run(_samples_of(model, weights, config))


async def _samples_of(model: str, weights: Path | None, config: EngineConfig) -> Samples:
    from safetensors.torch import load_file

    from actors.weights.transport import ObjectStoreTransport
    from policies.chat import ChatRenderer, load_tokenizer
    from policies.engines.vllm import VLLMEngine
    from policies.engines.weights import pack
    from policies.sampler import SamplingParams

    renderer = ChatRenderer(load_tokenizer(model))
    prompts = [renderer.prompt_ids([{"role": "user", "content": each}]) for each in QUESTIONS]
    engine = VLLMEngine(model, config, {})
    if weights is not None:
        transport = ObjectStoreTransport()
        pieces = list(transport.publish(1, pack(load_file(weights / WEIGHTS).items()), rank=0))
        await transport.fetch(1, pieces, engine)
    greedy = partial(engine.generate, prompts[0], SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS))
    answer, held = await greedy(), used_bytes(config)
    await engine.sleep()
    freed = held - used_bytes(config)
    await engine.wake()
    if (await greedy()).token_ids != answer.token_ids:
        raise RuntimeError("The engine answers otherwise after its sleep.")
    print(f"engine: asleep it holds {freed / 1e6:.0f} MB less, of {held / 1e6:.0f}", flush=True)
    calls = [
        (prompt, engine.generate(prompt, SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, seed=number)))
        for prompt in prompts
        for number in range(NUM_ANSWERS)
    ]
    outputs = await asyncio.gather(*(call for _, call in calls))
    return [
        TrainingSample(
            sample_id=f"{index}",
            prompt_ids=tuple(prompt),
            response_ids=tuple(output.token_ids),
            loss_mask=(1,) * len(output.token_ids),
            rollout_logprobs=tuple(output.logprobs),
            turns=(0,) * len(output.token_ids),
            advantages=((-1.0) ** index,) * len(output.token_ids),
        )
        for index, ((prompt, _), output) in enumerate(zip(calls, outputs, strict=True))
    ]


def used_bytes(config: EngineConfig) -> float:
    """Memory that is taken: of the GPU, or of this process."""
    import psutil
    import torch

    if not config.num_gpus:
        return float(psutil.Process().memory_full_info().uss)
    free, total = torch.cuda.mem_get_info()
    return float(total - free)


# -- the learner ---------------------------------------------------------------------------------------


def learned(model: str, samples: Samples, device: str, dtype: str, target: Path | None) -> float:
    """How far the learner is from what the engine says of ``samples``. With a ``target``, an update follows,
    and the model goes there."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(free_port())
    if device == "cpu":
        os.environ["VERL_PLATFORM"] = "cpu"
    import torch
    from safetensors.torch import load_file, save_file
    from whole_batches import WholeBatches

    from policies.learning.algorithms import resolve
    from policies.learning.verl.learner import VerlLearner

    config = LearnerConfig(device=device, dtype=dtype, optimizer=OptimizerConfig(lr=1e-5))
    algorithm = resolve(AlgorithmConfig(), NUM_TOKENS, is_exact=dtype == "float32")
    rank = WholeBatches(VerlLearner(model, config, algorithm, 10, 0))
    batch = TrainBatch(samples=tuple(samples))
    found = difference(rank.logprobs(batch), samples)
    if target is None:
        return found
    start = time.perf_counter()
    metrics = rank.update(rank.score([batch])).metrics
    weights = {name: each.detach().cpu().contiguous() for name, each in rank.weights()}
    print(f"learner: an update and its weights took {time.perf_counter() - start:.1f} s", flush=True)
    names = (
        "grad_norm",
        "rollout_logprob_diff_mean",
        "corrected_logprob_diff_mean",
        "weight_effective_fraction",
    )
    print("learner:", {each: metrics.get(f"learn/{each}") for each in names}, flush=True)
    if device == "cuda":
        print(f"learner: at most {torch.cuda.max_memory_allocated() / 1e9:.1f} GB of the GPU", flush=True)
    original = load_file(Path(model) / WEIGHTS)
    if not any(not torch.equal(each, weights[name]) for name, each in original.items() if name in weights):
        raise RuntimeError("The update has changed no weight.")
    shutil.copytree(model, target, ignore=shutil.ignore_patterns(WEIGHTS))
    save_file(weights, target / WEIGHTS, {"format": "pt"})
    return found


def difference(ours: Sequence[Sequence[float]], samples: Samples) -> float:
    """The mean over the tokens."""
    found = [
        abs(one - other)
        for row, sample in zip(ours, samples, strict=True)
        for one, other in zip(row, sample.rollout_logprobs, strict=True)
    ]
    return sum(found) / len(found)


if __name__ == "__main__":
    main()
