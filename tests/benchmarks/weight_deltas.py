"""Bytes that a publish by ``server.weights.transport=deltas`` has, as shares of a whole version.

    python tests/benchmarks/weight_deltas.py [--model smollm2-135m-instruct] [--updates 1,4] [--rates 1e-5]
    python tests/benchmarks/weight_deltas.py --real

AdamW trains float32 weights on random tokens, as the learner's optimizer would but for the rate. After so
many updates the transport writes the weights in each dtype, and what it restores has to be equal bit for bit.

With --real two runs of recipe=guess in bfloat16, at staleness 0: one by the default transport, and one by
this one, in which a replica gets a SIGKILL, and then the driver, which is resumed. In the end both have to
have consumed the same rollouts and to have the same weights, bit for bit. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import models
import torch
from chaos import DURING, Moment, compare, harry
from programs import run
from report import Report
from transformers import AutoModelForCausalLM

from actors.weights.deltas import DeltaTransport, Part
from actors.weights.transport import WeightTarget
from launch.run_folder.trajectory_log import TRAIN, kept_steps, read_kept
from policies.engines.weights import WeightBucket, WholeTensors, pack
from policies.learning.settings import OptimizerConfig

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": None}
SHAPE = 4, 64
"""Sequences of an update, and their tokens, at random."""
RUN = [
    "recipe=guess",
    "server.engine.options.dtype=bfloat16",
    "server.num_replicas=2",
    "warm_start.num_steps=30",
    "run.num_steps=30",
    "run.checkpoints.every=2",
    "evaluation.num_tasks=8",
    "rollout.groups_per_step=3",
    "rollout.group_size=4",
    "fleet.num_actors=4",
    "learner.mini_batch_size=6",
    "learner.optimizer.lr=1e-5",
    "algorithm.zero_signal_groups=keep",
    "algorithm.entropy_coef=0.01",  # so that there is a gradient in every group
]
DELTAS = ["server.weights.transport=weight_deltas:RecordedDeltas", "server.weights.whole_every=100"]
IS_BACK = "driver after the replica's return"
STRIKES = Moment("replica", 3, 0.0, goes_on=True), Moment(IS_BACK, 0, 0.0, goes_on=False)
FETCHES = "TROUPE_BENCHMARK_FETCHES"
"""Environment variable: a file with a line for each version that a replica has loaded."""


class RecordedDeltas(DeltaTransport):
    """Writes down the process that loads a version, and the bytes of the whole one and of the changes."""

    async def fetch(self, version: int, pieces: Sequence[Part], engine: WeightTarget) -> None:
        await super().fetch(version, pieces, engine)
        whole, changes = (
            _num_bytes(each for each in pieces if (each.version == each.base) is is_whole)
            for is_whole in (True, False)
        )
        with open(os.environ[FETCHES], "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {version} {whole} {changes}\n")  # a replica's print is Serve's own


class Equal:
    """Takes weights, and compares them with those that were published."""

    def __init__(self, published: dict[str, torch.Tensor]) -> None:
        self._published = published

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        found = WholeTensors(buckets)
        if found.keys() != self._published.keys() or not all(
            torch.equal(found[name], tensor) for name, tensor in self._published.items()
        ):
            raise SystemExit(f"Version {version} is not what was published.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=models.TINY)
    parser.add_argument("--updates", default="1,4")
    parser.add_argument("--rates", default="1e-6,1e-5,1e-4")
    parser.add_argument("--real", action="store_true", help="compare whole runs by it and by the default")
    arguments = parser.parse_args()
    if arguments.real:
        raise SystemExit(_compared_runs())
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
            published = dict(WholeTensors(_weights(model, name)))
            before = time.process_time()
            asyncio.run(DeltaTransport().fetch(number, [*whole[name], *parts], Equal(published)))
            seconds.append((written - start, time.process_time() - before))
            shares.append(f"{_num_bytes(parts) / _num_bytes(whole[name]):.3f}")
        rows.append([str(number), *shares, *(f"{each:.2f}" for each in seconds[0])])
    return rows


def _compared_runs() -> bool:
    """Print what the replicas of a run with strikes have loaded; return if it differs from the default's."""
    report = Report("replicas of a run by deltas", ("process", "loads", "first version", "whole", "changes"))
    with tempfile.TemporaryDirectory() as temporary:
        expected, found, fetches = (Path(temporary, each) for each in ("object_store", "deltas", "fetches"))
        run([*RUN, f"run.directory={expected}"])
        os.environ[FETCHES] = str(fetches)
        DURING[IS_BACK] = lambda *_: len(_loads(fetches)) > 2
        harry([*RUN, *DELTAS, "run.resume=true"], found, STRIKES)
        for process, loads in _loads(fetches).items():
            report.add(process, str(len(loads)), *loads[0])
        faults = compare(expected, found, bits=True)
        if _answers(expected) != _answers(found):
            faults.append("Tokens or log-probabilities differ.")
    report.print()
    print("\n".join(faults) or "Final weights, tokens and log-probabilities are equal bit for bit.")
    return bool(faults)


def _answers(folder: Path) -> list[tuple[Any, ...]]:
    """Tokens and log-probabilities of all updates, by rollout."""
    return sorted(
        (each.trajectory.rollout_id, completion.prompt_ids, completion.completion_ids, completion.logprobs)
        for step in kept_steps(folder, TRAIN)
        for each in read_kept(folder, TRAIN, step)
        for completion in (turn.completion for turn in each.trajectory.steps)
        if completion is not None
    )


def _loads(fetches: Path) -> dict[str, list[list[str]]]:
    """Version and bytes of each load, by process."""
    loads: dict[str, list[list[str]]] = {}
    for line in fetches.read_text(encoding="utf-8").splitlines():
        process, *numbers = line.split()
        loads.setdefault(process, []).append(numbers)
    return loads


def _weights(model: torch.nn.Module, dtype: str) -> list[WeightBucket]:
    return list(pack(model.named_parameters(), DTYPES[dtype]))


def _num_bytes(parts: Iterable[Part]) -> int:
    return sum(len(part.bucket.buffer) for part in parts if part.bucket is not None)


if __name__ == "__main__":
    main()
