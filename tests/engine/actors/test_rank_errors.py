"""The error of one learner rank is told, whatever the others do meanwhile. The model is a stand-in."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from actors.learning import ranks as rank_actors
from actors.learning.ranks import RankGroup, RankWorker, create_placement_group
from environments.errors import ConfigError, LearnerError, LearnerLostError
from policies.learning.settings import LearnerConfig


class FaultyModel:
    """Of the second rank. The first one waits for it, as in a collective."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def fail(self, kind: str) -> None:
        import torch

        if self._rank == 0:
            time.sleep(60)
        raise {"index": IndexError("no such row"), "memory": torch.OutOfMemoryError("2 GiB wanted")}[kind]

    def pieces(self, kind: str) -> Iterator[bytes]:
        """One, and then the error, of the rank that is the second, or the first for "disk"."""
        yield from [bytes(1 << 20)]  # a list, as some transports return
        if kind == "disk" and self._rank == 0:
            raise ConfigError("The disk is full.")
        if kind == "killed" and self._rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if kind not in ("none", "disk", "killed"):
            self.fail(kind)


class FaultyRank(RankWorker):
    def _load(self, **_: Any) -> Any:
        return FaultyModel(int(os.environ["RANK"]))


@pytest.fixture
def ranks(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    monkeypatch.setattr(rank_actors, "CALL_ANSWER_SECONDS", 1.0)
    settings = LearnerConfig(num_workers=2, micro_batch_tokens=4096)
    group = RankGroup(
        FaultyRank, create_placement_group(settings), settings, shared_file=None, learner=settings
    )
    yield group
    group.close()


def test_error_of_one_rank_is_told_while_another_waits_for_it(ranks: RankGroup) -> None:
    with pytest.raises(IndexError, match="no such row"):
        ranks.call(FaultyModel.fail, "index")


def test_full_gpu_names_the_setting_to_lower(ranks: RankGroup) -> None:
    with pytest.raises(LearnerError, match=r"2 GiB wanted.*Lower learner\.micro_batch_tokens=4096"):
        ranks.call(FaultyModel.fail, "memory")


@pytest.mark.parametrize(
    ("kind", "error", "message"),
    [
        ("disk", ConfigError, "^The disk is full"),
        ("index", IndexError, "no such row"),
        ("memory", LearnerError, r"2 GiB wanted.*Lower learner\.micro_batch_tokens=4096"),
        ("killed", LearnerLostError, "A learner rank has died"),
    ],
)
def test_error_in_the_middle_of_a_stream_is_raised(
    ranks: RankGroup, kind: str, error: type[Exception], message: str
) -> None:
    assert [len(each) for each in ray.get(ranks.stream(FaultyModel.pieces, "none"))] == [1 << 20]
    with pytest.raises(error, match=message):
        ranks.stream(FaultyModel.pieces, kind)
    if kind == "disk":  # all ranks are there, and none waits for another
        assert len(ranks.stream(FaultyModel.pieces, "none")) == 1
