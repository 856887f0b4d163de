"""Seconds and memory of an update where samples share prefixes, beside what their tokens cost in plain rows.

    python tests/benchmarks/token_trees.py [--models tiny,smollm2] [--loads groups,turns,forks] [--size 1.0]

Updates of one optimizer step, in turns by the learner, on one rank in this process, and by a loop of plain
transformers on flat rows, in CPU seconds of one thread each: other programs on the machine lengthen those
least. Loads: groups of 8 whose prompt is ten times their response,
20 turns whose thoughts are taken out of the history, and forks of depth 4 and fan-out 2. What they should
cost is a x (unique tokens) + b x (pairs of tokens on a path); a and b are those of plain rows of the learner,
short and long, in the same run, with as large a part of their tokens to predict. The memory is what the
process has at its peak above what it had before, beside that of plain rows that fill a micro-batch.
``smollm2`` has random weights in the shape of SmolLM2-135M.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, takewhile
from pathlib import Path

os.environ.update(VERL_PLATFORM="cpu", RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")

import models
import numpy as np
import repository
import torch
import torch.distributed as dist
from learner_speed import LR, MAX_GRAD_NORM, NUM_IDS, Model, PlainLoop, Samples
from report import Report

from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig

sys.path.insert(0, str(repository.ROOT / "tests"))
from whole_batches import WholeBatches

Ids = tuple[int, ...]


# -- loads ---------------------------------------------------------------------------------------------


class Writer:
    """Samples of random tokens."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._samples: list[TrainingSample] = []

    def tokens(self, count: float) -> Ids:
        """``count`` new ones, at least one."""
        return tuple(self._rng.randrange(NUM_IDS) for _ in range(max(1, round(count))))

    def add(self, prompt: Ids, response: Ids, num_context: int = 0) -> None:
        """A sample; the first ``num_context`` tokens of its response are trained in another one."""
        mask = (0,) * num_context + (1,) * (len(response) - num_context)
        advantage = self._rng.choice([-1.0, 1.0])
        self._samples.append(
            TrainingSample(
                sample_id=f"{len(self._samples):08d}/0000#0",
                prompt_ids=prompt,
                response_ids=response,
                loss_mask=mask,
                rollout_logprobs=tuple(-5.0 * bit for bit in mask),
                turns=tuple(bit - 1 for bit in mask),
                advantages=tuple(advantage * bit for bit in mask),
            )
        )

    def samples(self) -> Samples:
        """All of them, in any order."""
        self._rng.shuffle(self._samples)
        return tuple(self._samples)


def groups(size: float) -> Samples:
    """Two groups of 8 with a prompt of ten times the response."""
    writer = Writer()
    for _ in range(2):
        prompt = writer.tokens(480 * size)
        for _ in range(8):
            writer.add(prompt, writer.tokens(48 * size))
    return writer.samples()


def stripped_thoughts(size: float) -> Samples:
    """A trajectory of 20 turns; a turn's thought is in no later turn's history."""
    writer = Writer()
    history = writer.tokens(100 * size)
    for _ in range(20):
        thought, answer = writer.tokens(30 * size), writer.tokens(10 * size)
        writer.add(history, thought + answer)
        history += answer + writer.tokens(40 * size)
    return writer.samples()


def forks(size: float) -> Samples:
    """The 16 leaves of a tree of four levels, each a turn; a turn is trained in the first leaf below it."""
    writer = Writer()
    prompt = writer.tokens(300 * size)

    def grow(path: Ids, num_context: int, levels: int) -> None:
        if not levels:
            writer.add(prompt, path, num_context)
            return
        grow(path + writer.tokens(60 * size), num_context, levels - 1)
        grow(path + writer.tokens(60 * size), len(path), levels - 1)

    grow((), 0, 4)
    return writer.samples()


LOADS: dict[str, Callable[[float], Samples]] = {
    "groups": groups,
    "turns": stripped_thoughts,
    "forks": forks,
}


def plain_rows(num_tokens: int, length: int, share: float) -> Samples:
    """Rows of ``length`` tokens, ``num_tokens`` in all, of which ``share`` are predicted."""
    writer = Writer()
    for _ in range(max(1, num_tokens // length)):
        predicted = max(1, round(length * share))
        writer.add(writer.tokens(length - predicted), writer.tokens(predicted))
    return writer.samples()


@dataclass(frozen=True)
class Size:
    """Size of a load.

    Attributes:
        flat: tokens of all samples.
        unique, pairs: tokens, each counted once, and pairs of one of them and one on its path.
        sampled: tokens that are trained.
    """

    flat: int
    unique: int
    pairs: int
    sampled: int

    @classmethod
    def of(cls, samples: Samples) -> Size:
        ids = sorted(sample.prompt_ids + sample.response_ids for sample in samples)
        unique, pairs = len(ids[0]), len(ids[0]) * (len(ids[0]) + 1) // 2
        for before, row in pairwise(ids):
            same = takewhile(lambda pair: pair[0] == pair[1], zip(before, row, strict=False))
            shared = sum(1 for _ in same)
            unique += len(row) - shared
            pairs += (len(row) * (len(row) + 1) - shared * (shared + 1)) // 2
        sampled = sum(sample.num_sampled_tokens for sample in samples)
        return cls(sum(map(len, samples)), unique, pairs, sampled)


# -- what is measured ----------------------------------------------------------------------------------


class Learner:
    """A rank of the learner in this process."""

    def __init__(self, path: str, model: Model) -> None:
        import policies.learning.verl.config  # noqa: F401  # before verl
        from policies.learning.verl.learner import VerlLearner

        config = LearnerConfig(
            optimizer=OptimizerConfig(lr=LR, max_grad_norm=MAX_GRAD_NORM),
            num_threads=model.num_threads,
            micro_batch_tokens=model.micro_batch_tokens,
        )
        self._rank = WholeBatches(VerlLearner(path, config, resolve(AlgorithmConfig(), 4096), 1000, 0))

    def __call__(self, samples: Samples) -> None:
        """One optimizer step."""
        self._rank.update(self._rank.score([TrainBatch(samples=samples)]))


def seconds(arms: dict[str, Callable[[], None]], num_rounds: int) -> dict[str, float]:
    """CPU seconds of each arm, in turns: the least of all rounds."""
    taken = dict.fromkeys(arms, math.inf)
    for _ in range(num_rounds):
        for name, arm in arms.items():
            start = time.process_time()
            arm()
            taken[name] = min(taken[name], time.process_time() - start)
    return taken


def peak_bytes(call: Callable[[], None]) -> int:
    """Memory of the process at its peak during ``call``, above what it has before."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free would not count otherwise
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS:")
    call()
    return _memory("VmHWM:") - before


def _memory(name: str) -> int:
    return 1024 * int(Path("/proc/self/status").read_text().partition(name)[2].split()[0])


def smollm2_shape(folder: Path) -> str:
    """Random weights in the shape of SmolLM2-135M, with the tiny model's tokenizer; returns its folder."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(models.tiny(folder))
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "smollm2")
    tokenizer.save_pretrained(folder / "smollm2")
    return str(folder / "smollm2")


MODELS = {
    "tiny": Model(models.tiny, 1, 16384, {}),
    "smollm2": Model(smollm2_shape, 1, 2048, {}),
}


def measure(report: Report, name: str, loads: Sequence[str], size: float, num_rounds: int) -> None:
    """Add a row for each of these loads of a model."""
    model = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        path = model.make(Path(folder))
        learner, plain = Learner(path, model), PlainLoop(path, model)
    for arm in (learner, plain):
        arm(plain_rows(256, 64, 0.5))  # the first update is slower
    for load in loads:
        samples = LOADS[load](size)
        counts = Size.of(samples)
        longest = max(map(len, samples))
        share = counts.sampled / counts.unique
        rows = [plain_rows(counts.unique, length, share) for length in (longest // 8, longest)]
        arms: dict[str, Callable[[], None]] = {
            "trees": partial(learner, samples),
            "short": partial(learner, rows[0]),
            "long": partial(learner, rows[1]),
            "plain": partial(plain, samples),
        }
        took = seconds(arms, num_rounds)
        sizes = [Size.of(each) for each in rows]
        costs = np.linalg.solve(
            [[each.unique, each.pairs] for each in sizes], [took["short"], took["long"]]
        ).clip(min=0)
        expected = float(costs @ [counts.unique, counts.pairs])
        full = partial(learner, plain_rows(model.micro_batch_tokens, longest, share))
        memory = peak_bytes(arms["trees"]) / peak_bytes(full)
        row = (
            f"{name}, {load}",
            f"{counts.flat}",
            f"{counts.unique}",
            f"{took['trees']:.3f}",
            f"{took['trees'] / expected:.2f}",
            f"{took['plain'] / took['trees']:.1f}",
            f"{memory:.2f}",
        )
        print(*row, sep="; ", flush=True)
        report.add(*row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="tiny (353k), smollm2 (135M), or both")
    parser.add_argument("--size", type=float, default=1.0, help="lengths, as a multiple of the loads'")
    parser.add_argument("--loads", default=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=3, help="updates of each arm; the least counts")
    arguments = parser.parse_args()
    report = Report(
        f"token trees: an update, least of {arguments.rounds}, lengths x {arguments.size}",
        ("model, load", "tokens", "unique", "CPU s", "of a, b", "plain / trees", "peak of a full batch"),
    )
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    for name in arguments.models.split(","):
        measure(report, name, arguments.loads.split(","), arguments.size, arguments.rounds)
    dist.destroy_process_group()
    report.print()


if __name__ == "__main__":
    main()
