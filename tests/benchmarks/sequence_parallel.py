"""Memory and CPU time of two ranks that compute each row together, beside ranks with rows of their own.

    python tests/benchmarks/sequence_parallel.py [--tokens 4096] [--model tiny]

An update of two rows of so many tokens, all but the first 64 sampled, on two ranks in float32 over gloo. The
memory is what a rank's process has at its peak above what it
had before; an update before it is not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path

import models
import repository
import torch
from learner_speed import NUM_IDS
from report import Report

from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig

sys.path.insert(0, str(repository.ROOT / "tests"))
from machine import free_port
from two_ranks import on_two_ranks
from whole_batches import WholeBatches

PROMPT = 64


def rows(num_tokens: int) -> TrainBatch:
    """Two samples of random tokens."""
    rng, size = random.Random(0), num_tokens - PROMPT
    samples = [
        TrainingSample(
            sample_id=str(number),
            prompt_ids=tuple(rng.randrange(NUM_IDS) for _ in range(PROMPT)),
            response_ids=tuple(rng.randrange(NUM_IDS) for _ in range(size)),
            loss_mask=(1,) * size,
            rollout_logprobs=(-5.0,) * size,
            advantages=(1.0 - number * 2,) * size,
        )
        for number in range(2)
    ]
    return TrainBatch(samples=tuple(samples))


def resident(field: str) -> int:
    """Bytes of this process, by a field of /proc/self/status."""
    [kilobytes] = re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    return 1024 * int(kilobytes)


def measure(model: str, num_tokens: int, ranks_of_row: int, folder: str) -> None:
    """Two updates on this rank; write what the second has taken."""
    from policies.learning.verl.learner import VerlLearner

    learner = LearnerConfig(
        num_workers=2,
        micro_batch_tokens=num_tokens // ranks_of_row,
        verl={"engine": {"ulysses_sequence_parallel_size": ranks_of_row}},
    )
    worker = WholeBatches(VerlLearner(model, learner, resolve(AlgorithmConfig(), num_tokens), 100, 0))
    batch = rows(num_tokens)
    worker.update([batch])
    ctypes.CDLL(None).malloc_trim(0)  # what the first has left
    before, begin = resident("VmRSS"), time.process_time()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    worker.update([batch])
    figures = [resident("VmHWM") - before, time.process_time() - begin]
    torch.save(figures, os.path.join(folder, f"{ranks_of_row}_{worker.rank}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="of each of two rows")
    parser.add_argument("--model", default=models.TINY, help="tiny, medium, large or a folder")
    arguments = parser.parse_args()
    report = Report(
        f"An update of two rows of {arguments.tokens} tokens by the model {arguments.model} on two ranks",
        ("ranks of a row", "MB at the peak, first rank", "second", "CPU s, first rank", "second"),
    )
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"  # of the ranks: what is free goes back to the system
    with tempfile.TemporaryDirectory() as folder:
        model = models.chosen(arguments.model, Path(folder))
        for ranks_of_row in (1, 2):
            on_two_ranks(measure, free_port(), model, arguments.tokens, ranks_of_row, folder)
            found = [torch.load(os.path.join(folder, f"{ranks_of_row}_{rank}")) for rank in range(2)]
            sizes, seconds = zip(*found, strict=True)
            megabytes = [f"{size / 1e6:.0f}" for size in sizes]
            report.add(str(ranks_of_row), *megabytes, *(f"{each:.1f}" for each in seconds))
    report.print()


if __name__ == "__main__":
    main()
