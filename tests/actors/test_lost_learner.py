"""A rank that is killed or stopped ends the calls of the learner with an error of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from environments.errors import LearnerLostError
from launch.chaos import members
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig, LearnerConfig


def ranks() -> set[int]:
    return {member.pid for member in members(below=os.getpid()) if member.role == "learner"}


@pytest.fixture
def learner(weight_store: Any, tiny_model: Path) -> Iterator[tuple[Any, list[int]]]:
    """A learner of one rank that has answered once, and the rank's process."""
    from actors.learning.learner_group import LearnerGroup

    before = ranks()
    settings = LearnerConfig(max_call_seconds=2)
    group = LearnerGroup(str(tiny_model), settings, resolve(AlgorithmConfig()), 100, 0, weight_store)
    group.check_ranks()
    yield group, sorted(ranks() - before)
    group.close()


@pytest.mark.engine
@pytest.mark.parametrize(
    ("number", "text"), [(signal.SIGKILL, "has died"), (signal.SIGSTOP, "did not answer for 2 s")]
)
def test_a_killed_and_a_stopped_rank_are_noticed(
    learner: tuple[Any, list[int]], number: signal.Signals, text: str, tmp_path: Path
) -> None:
    group, (rank,) = learner
    os.kill(rank, number)
    with pytest.raises(LearnerLostError, match=text):
        group.save(str(tmp_path))
