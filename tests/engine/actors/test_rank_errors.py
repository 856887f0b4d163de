"""The error of one learner rank is told, whatever the others do meanwhile. The model is a stand-in."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from machine import wait_until

from actors.learning import ranks as rank_actors
from actors.learning.ranks import RankGroup, RankWorker, create_placement_group
from environments.errors import ConfigError, LearnerError, LearnerLostError
from policies.learning.settings import LearnerConfig


class FaultyModel:
    """Of the second rank. The first one waits for it, as in a collective, until ``told`` is there."""

    pairs_per_token = 0

    def __init__(self, environment: dict[str, str]) -> None:
        self._rank, self._num_threads = int(environment["RANK"]), environment["OMP_NUM_THREADS"]

    def num_threads(self) -> str:
        return self._num_threads

    def fail(self, kind: str, told: Path) -> None:
        import torch

        if self._rank == 0:
            wait_until(told.exists, 60)
        raise {"index": IndexError("no such row"), "memory": torch.OutOfMemoryError("2 GiB wanted")}[kind]

    def pieces(self, kind: str, told: Path) -> Iterator[bytes]:
        """One, and then the error, of the rank that is the second, or the first for "disk"."""
        yield from [bytes(1 << 20)]  # a list, as some transports return
        if kind == "disk" and self._rank == 0:
            raise ConfigError("The disk is full.")
        if kind == "killed" and self._rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind not in ("none", "disk", "killed"):
            self.fail(kind, told)


class FaultyRank(RankWorker):
    def _load(self, **_: Any) -> Any:
        return FaultyModel(dict(os.environ))


@pytest.fixture(scope="module")
def ranks(ray_cluster: None) -> Iterator[RankGroup]:
    """The last test kills one of them."""
    settings = LearnerConfig(num_workers=2, num_threads=3, micro_batch_tokens=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_actors, "CALL_ANSWER_SECONDS", 1.0)
        group = RankGroup(
            FaultyRank, create_placement_group(settings), settings, shared_file=None, learner=settings
        )
        yield group
    group.close()


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Path]:
    """Is there once a test has its error: the first rank is free for the next one."""
    yield tmp_path / "told"
    (tmp_path / "told").touch()


def test_rank_has_its_threads_where_it_imports_torch(ranks: RankGroup) -> None:
    assert ranks.call(FaultyModel.num_threads) == "3"


def test_error_of_one_rank_is_told_while_another_waits_for_it(ranks: RankGroup, told: Path) -> None:
    with pytest.raises(IndexError, match="no such row"):
        ranks.call(FaultyModel.fail, "index", told)


def test_full_gpu_names_the_setting_to_lower(ranks: RankGroup, told: Path) -> None:
    with pytest.raises(LearnerError, match=r"2 GiB wanted.*Lower learner\.micro_batch_tokens=4096"):
        ranks.call(FaultyModel.fail, "memory", told)


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("disk", ConfigError, "^The disk is full"),
        ("index", IndexError, "no such row"),
        ("killed", LearnerLostError, "A learner rank has died"),
    ],
)
def test_error_in_the_middle_of_a_stream_is_raised(
    ranks: RankGroup, told: Path, kind: str, error: type[Exception], message: str
) -> None:
    assert [len(each) for each in ray.get(ranks.stream(FaultyModel.pieces, "none", told))] == [1 << 20] * 2
    with pytest.raises(error, match=message):
        ranks.stream(FaultyModel.pieces, kind, told)
    if kind == "disk":  # all ranks are there, and none waits for another
        assert len(ranks.stream(FaultyModel.pieces, "none", told)) == 2
