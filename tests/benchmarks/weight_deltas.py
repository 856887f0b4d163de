"""Bytes that a publish by ``server.weights.transport=deltas`` has, as shares of a whole version.

    python tests/benchmarks/weight_deltas.py [--model smollm2-135m-instruct] [--updates 1,4] [--rates 1e-5]

AdamW trains float32 weights on random tokens, as the learner's optimizer would but for the rate. After so
many updates the transport writes the weights in each dtype, and what it restores has to be equal bit for bit.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import models
import torch
from report import Report
from transformers import AutoModelForCausalLM

from actors.weights.deltas import DeltaTransport, Part
from policies.engines.weights import WeightBucket, narrowed
from policies.learning.settings import OptimizerConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": None}
SHAPE = 4, 64
"""Sequences of an update, and their tokens, at random."""


class Equal:
    """Takes weights, and compares them with those that were published."""

    def __init__(self, published: dict[str, torch.Tensor]) -> None:
        self._published = published

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        found = {name: tensor for bucket in buckets for name, tensor in bucket.tensors()}
        if found.keys() != self._published.keys() or not all(
            torch.equal(found[name], tensor) for name, tensor in self._published.items()
        ):
            raise SystemExit(f"Version {version} is not what was published.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=models.TINY)
    parser.add_argument("--updates", default="1,4")
    parser.add_argument("--rates", default="1e-6,1e-5,1e-4")
    arguments = parser.parse_args()
    report = Report(
        f"bytes of changes, as shares of a whole version; {arguments.model}",
        ("rate", "updates since the whole one", *DTYPES, "CPU s: written", "restored"),
    )
    with tempfile.TemporaryDirectory() as folder:
        path = models.chosen(arguments.model, Path(folder))
        for rate in map(float, arguments.rates.split(",")):
            for row in _measured(path, rate, [int(each) for each in arguments.updates.split(",")]):
                report.add(f"{rate:g}", *row)
    report.print()


def _measured(path: str, rate: float, updates: Sequence[int]) -> list[list[str]]:
    """A row for each number of updates: shares by dtype, and seconds of the first dtype."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    settings = OptimizerConfig(lr=rate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=settings.weight_decay)
    transports = {name: DeltaTransport(whole_every=100) for name in DTYPES}
    whole = {name: list(each.publish(0, _weights(model, name), 0)) for name, each in transports.items()}
    rows = []
    for number in range(1, max(updates) + 1):
        ids = torch.randint(model.config.vocab_size, SHAPE)
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if number not in updates:
            continue
        shares, seconds = [], []
        for name, transport in transports.items():
            start = time.process_time()
            parts = list(transport.publish(number, _weights(model, name), 0))
            written = time.process_time()
            published = dict(_weights(model, name))
            before = time.process_time()
            asyncio.run(DeltaTransport().fetch(number, [*whole[name], *parts], Equal(published)))
            seconds.append((written - start, time.process_time() - before))
            shares.append(f"{_num_bytes(parts) / _num_bytes(whole[name]):.3f}")
        rows.append([str(number), *shares, *(f"{each:.2f}" for each in seconds[0])])
    return rows


def _weights(model: torch.nn.Module, dtype: str) -> list[tuple[str, torch.Tensor]]:
    return list(narrowed(model.named_parameters(), DTYPES[dtype]))


def _num_bytes(parts: Sequence[Part]) -> int:
    return sum(len(part.bucket.buffer) for part in parts if part.bucket is not None)


if __name__ == "__main__":
    main()
