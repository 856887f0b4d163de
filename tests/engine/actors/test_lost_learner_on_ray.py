"""A rank that is killed or stopped is noticed and replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learner_samples import batches

from environments.errors import LearnerLostError
from launch.health.members import members
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig

RISING = OptimizerConfig(lr=1e-3, warmup_steps=10)


def ranks() -> set[int]:
    return {member.pid for member in members(below=os.getpid()) if member.role == "learner"}


def rank_of(others: set[int]) -> int:
    """The rank beside those of others. One that was stopped may live a while after it was replaced."""
    deadline = time.monotonic() + 60
    while len(own := ranks() - others) != 1:
        assert time.monotonic() < deadline, own
        time.sleep(0.1)
    return own.pop()


@pytest.fixture(scope="module")
def learner(ray_cluster: None, tiny_model: Path) -> Iterator[tuple[Any, set[int]]]:
    """A learner of one rank that has answered once, and the ranks of others."""
    from actors.learning.learner_group import LearnerGroup
    from actors.weights.store import WeightStore

    others = ranks()
    algorithm, store = resolve(AlgorithmConfig(), 64), WeightStore.remote()
    group = LearnerGroup(str(tiny_model), LearnerConfig(), algorithm, 100, 0, store)
    group.check_ranks()
    yield group, others
    group.close()


def test_phase_before_first_publish_keeps_rate_of_its_checkpoint(
    learner: tuple[Any, set[int]], tmp_path: Path
) -> None:
    group, others = learner
    rank = rank_of(others)
    group.begin_phase(RISING, 100)
    group.begin_save(str(tmp_path / "unpublished"))()
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(LearnerLostError, match="has died"):
        group.score(batches(1))
    assert group.rebuild(RISING, 100, str(tmp_path / "unpublished")) is None

    group.publish(3)
    group.finish_publish()
    later = OptimizerConfig(lr=1e-5)
    group.begin_phase(later, 100)
    group.begin_save(str(tmp_path / "later"))()
    assert group.rebuild(later, 100, str(tmp_path / "later")) == 3
    metrics = group.update(group.score(batches(1))).metrics
    assert metrics["learn/lr"] == pytest.approx(1e-5), "that of the phase before was 1e-3"


def test_stopped_or_killed_rank_returns_with_published_weights(
    learner: tuple[Any, set[int]], tmp_path: Path
) -> None:
    group, others = learner
    group.begin_phase(RISING, 100)
    group.update(group.score(batches(1)))
    group.begin_save(str(tmp_path))()
    group.update(group.score(batches(1)))
    group.publish(7)
    group.finish_publish()
    published = group.logprobs(batches(1)[0])
    settings = group._policy._settings
    for number, text in ((signal.SIGSTOP, "did not answer for 2 s"), (signal.SIGKILL, "has died")):
        rank = rank_of(others)
        group._policy._settings = replace(settings, max_call_seconds=2)  # not for what has to succeed
        os.kill(rank, number)
        with pytest.raises(LearnerLostError, match=text):
            group.score(batches(1))

        group._policy._settings = settings
        assert group.rebuild(RISING, 100, str(tmp_path)) == 7
        assert group.logprobs(batches(1)[0]) == published, "not those of the checkpoint"
    metrics = group.update(group.score(batches(1))).metrics
    assert metrics["learn/lr"] == pytest.approx(3e-4), "the third step's"
