"""Seconds that a run waits for a checkpoint, memory of the ranks, and equality of what is resumed.

    python tests/benchmarks/checkpoint.py [--models tiny,medium,large] [--ranks 2]

A rank's share is its part of what is written: weights and two moments in fp32. ``most added`` is what a rank
adds at most to its own memory, in shares: in an update, while a checkpoint becomes whole and the rank learns
beside it, and while it loads one. The last column compares the files after one more update of a learner that
has gone on and of one that was resumed on as many ranks, and all tensors after a resume on another number.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import models
import psutil
import ray
import repository
from publish import Peak
from report import Report

from actors.learning.learner_group import LearnerGroup
from actors.weights.store import WeightStore
from actors.weights.transport import make_transport
from environments.disk import FileDigest
from launch.health.members import members
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig

sys.path.insert(0, str(repository.ROOT / "tests"))

from learner_samples import ragged_samples, with_random_columns

OPTIMIZER = OptimizerConfig(lr=1e-4)
VOCABULARY = 16
"""Tokens that all of the models have."""
COLUMNS = (
    *("model", "a share", "an update", "copy: the loop waits", "whole after", "an update beside it"),
    *("most added: an update", "save beside one", "load", "same bits on ranks"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default="tiny", help="tiny, medium, large: 353k, 175M, 493M weights")
    parser.add_argument("--ranks", type=int, default=2, help="of the learner that saves")
    arguments = parser.parse_args()
    report = Report(f"checkpoint of {arguments.ranks} ranks, by seconds and shares", COLUMNS)
    # Never a cluster that happens to run here: its work would be measured too.
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    for name in arguments.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            model = models.chosen(name, Path(folder))
            report.add(name, *_measured(model, Path(folder, "checkpoint"), arguments.ranks))
    ray.shutdown()
    report.print()


def _learner(model: str, num_ranks: int) -> LearnerGroup:
    store = WeightStore.remote(make_transport({"transport": "object_store"}, "", "training"))  # type: ignore[attr-defined]
    settings, algorithm = LearnerConfig(num_workers=num_ranks), resolve(AlgorithmConfig(), 64)
    learner = LearnerGroup(model, settings, algorithm, 9, 0, store)
    learner.begin_phase(OPTIMIZER, 9)
    return learner


def _ranks() -> list[psutil.Process]:
    return [psutil.Process(each.pid) for each in members(below=os.getpid()) if each.role == "learner"]


def _close(learner: LearnerGroup) -> None:
    learner.close()
    while _ranks():
        time.sleep(0.1)


def _update(learner: LearnerGroup) -> None:
    samples = [
        replace(
            each,
            prompt_ids=tuple(token % VOCABULARY for token in each.prompt_ids),
            response_ids=tuple(token % VOCABULARY for token in each.response_ids),
        )
        for each in with_random_columns(ragged_samples(2, most=12))
    ]
    learner.update(learner.score([TrainBatch(samples=tuple(samples))]))


def _digests(learner: LearnerGroup, folder: Path) -> dict[str, FileDigest]:
    """Digests of the files that the learner saves, by name."""
    folder.mkdir()
    digests = {Path(path).name: each for path, each in learner.begin_save(str(folder))().items()}
    shutil.rmtree(folder)
    return digests


def _measured(model: str, folder: Path, num_ranks: int) -> tuple[str, ...]:
    """A row of the table: seconds and shares, and if what is resumed is the same to the last bit."""
    learner = _learner(model, num_ranks)
    for _ in range(2):  # with the first one come the moments, and memory that is kept
        with Peak(_ranks()) as alone:
            start = time.perf_counter()
            _update(learner)
            update = time.perf_counter() - start
    folder.mkdir()
    with Peak(_ranks()) as peak:
        start = time.perf_counter()
        finish = learner.begin_save(str(folder))
        waited = time.perf_counter() - start
        _update(learner)
        learned = time.perf_counter() - start
        saved = {Path(path).name: each for path, each in finish().items()}
        written = time.perf_counter() - start
    share = sum(each.num_bytes for name, each in saved.items() if name.startswith("state_")) / num_ranks
    gone_on = _digests(learner, folder.with_name("gone on"))
    _close(learner)

    found = []
    loading = 0.0
    for other_ranks in (num_ranks, 3 - min(num_ranks, 2)):
        resumed = _learner(model, other_ranks)
        with Peak(_ranks()) as of_load:
            resumed.load(str(folder))
        if other_ranks == num_ranks:
            loading = of_load.held
            _update(resumed)
            found.append(f"{num_ranks}: {_digests(resumed, folder.with_name('resumed')) == gone_on}")
        else:
            other = folder.with_name("other")
            other.mkdir()
            resumed.begin_save(str(other))()
            found.append(f"{other_ranks}: {_state_digest(other) == _state_digest(folder)}")
        _close(resumed)
    seconds = (f"{each:.2f}" for each in (update, waited, written, learned - waited))
    shares = (f"{each / share:.2f}x" for each in (alone.held, peak.held, loading))
    return f"{share / 1e6:.0f} MB", *seconds, *shares, ", ".join(found)


def _state_digest(folder: Path) -> str:
    """A hash of all whole tensors of a checkpoint, however they are divided."""
    from policies.learning.verl.shards import ShardFiles

    files, digest = ShardFiles(str(folder)), hashlib.sha256()
    for name in sorted(files.shapes):
        digest.update(name.encode())
        digest.update(files.whole(name).numpy())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
