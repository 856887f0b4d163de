"""Turns of engines and a learner on the same devices, with stand-ins for the replicas and their engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from ray.exceptions import ActorDiedError

from actors.learning import ranks as rank_actors
from actors.learning.ranks import RankGroup, RankWorker
from actors.rollouts import stream as streams
from actors.weights import turns as engine_turns
from actors.weights.turns import EngineTurns, follow_turns, wait_for_turn
from policies.learning.settings import LearnerConfig

LEARNER, ENGINES = True, False
"""Turns, by whether the engines are asleep."""


class Replica:
    """A replica with an engine that takes a moment to sleep, and the store as it calls it."""

    def __init__(self, turns: EngineTurns) -> None:
        self.events: list[str] = []
        self.is_dead = False
        self.store: Any = SimpleNamespace(next_turn=SimpleNamespace(remote=turns.next))
        self.__ray_ready__ = SimpleNamespace(remote=self._answer)
        self.task = asyncio.create_task(self._run())

    async def _answer(self) -> None:
        await asyncio.sleep(0.01)  # a call of an actor takes a moment
        if self.is_dead:
            raise ActorDiedError

    async def _run(self) -> None:
        await wait_for_turn(self.store, self)
        self.events.append("loaded")
        engine: Any = self
        await follow_turns(self.store, self, engine)

    async def sleep(self) -> None:
        await asyncio.sleep(0.01)
        self.events.append("asleep")

    async def wake(self) -> None:
        self.events.append("awake")

    def die(self) -> None:
        self.is_dead = True
        self.task.cancel()


def played(work: Callable[[EngineTurns], Awaitable[None]]) -> None:
    """Run ``work``, and end the replicas that it leaves."""

    async def run() -> None:
        async with asyncio.timeout(10):
            await work(EngineTurns())
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    asyncio.run(run())


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def test_engines_are_loaded_in_their_first_turn_and_not_before() -> None:
    async def work(turns: EngineTurns) -> None:
        replica = Replica(turns)
        await settled()
        await turns.take(LEARNER)  # nothing is in its way
        assert replica.events == []
        await turns.take(ENGINES)
        await settled()
        assert replica.events == ["loaded"]

    played(work)


def test_learner_waits_until_all_engines_sleep() -> None:
    async def work(turns: EngineTurns) -> None:
        replicas = [Replica(turns), Replica(turns)]
        await turns.take(ENGINES)
        await settled()
        for number in (1, 2):
            await turns.take(LEARNER)
            await turns.take(LEARNER)  # a second call of the learner
            assert [each.events[-1] for each in replicas] == ["asleep"] * 2
            await turns.take(ENGINES)
            await settled()
            assert replicas[0].events == ["loaded", *["asleep", "awake"] * number]

    played(work)


def test_engine_that_is_about_to_wake_counts_as_awake() -> None:
    """Else the learner would begin beside it: the answer that wakes it may still be on its way."""

    async def work(turns: EngineTurns) -> None:
        replica = Replica(turns)
        replica.task.cancel()  # the test speaks for it
        await turns.take(ENGINES)
        assert await turns.next(replica, True) is ENGINES
        learner = asyncio.create_task(turns.take(LEARNER))
        await settled()
        assert not learner.done()
        falls_asleep = await turns.next(replica, False)
        assert falls_asleep and not learner.done()
        reported = asyncio.create_task(turns.next(replica, True))
        await learner
        reported.cancel()

    played(work)


def test_replica_that_dies_in_its_turn_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_turns, "REPLICA_CHECK_SECONDS", 0.05)

    async def work(turns: EngineTurns) -> None:
        lost, other = Replica(turns), Replica(turns)
        await turns.take(ENGINES)
        await settled()
        lost.die()
        await turns.take(LEARNER)
        assert (lost.events, other.events) == (["loaded"], ["loaded", "asleep"])

    played(work)


def test_two_calls_of_the_learner_find_the_same_dead_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupted call goes on in the store, beside the one that saves the run."""
    monkeypatch.setattr(engine_turns, "REPLICA_CHECK_SECONDS", 0.05)

    async def work(turns: EngineTurns) -> None:
        lost = Replica(turns)
        await turns.take(ENGINES)
        await settled()
        lost.die()
        await asyncio.gather(turns.take(LEARNER), turns.take(LEARNER))

    played(work)


def test_replica_that_replaces_another_waits_for_its_turn() -> None:
    async def work(turns: EngineTurns) -> None:
        first = Replica(turns)
        await turns.take(ENGINES)
        await settled()
        await turns.take(LEARNER)
        first.die()
        second = Replica(turns)
        await settled()
        assert second.events == []
        await turns.take(ENGINES)
        await settled()
        await turns.take(LEARNER)
        assert second.events == ["loaded", "asleep"]

    played(work)


def test_ranks_take_their_turn_before_each_piece_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup, "_start", lambda group: None)
    monkeypatch.setattr(RankGroup, "_wait_for", lambda group, references, *_: events.append(references))
    monkeypatch.setattr(rank_actors.ray, "put", lambda each: each)
    events: list[Any] = []
    rank: Any = SimpleNamespace(work=SimpleNamespace(remote=lambda *_: events.append("work")))
    places: Any = None
    group = RankGroup(RankWorker, places, LearnerConfig(), before_work=lambda: events.append("turn"))
    group._opened, group._ranks = ["opened"], [rank]  # type: ignore[list-item]
    group.begin(RankWorker.open, ("host", 1))
    assert events == [["opened"], "turn", "work"]


class FreeingRank(RankWorker):
    def _load(self, **_: Any) -> Any:
        return SimpleNamespace(learn=self._learn, begin_save=lambda _: self._learn())

    def _learn(self) -> int:
        """Free 64 MiB in pieces that the C library keeps, below one in use; return the memory."""
        pieces = [bytes(1 << 16) for _ in range(1 << 10)]
        self._top = bytes(1 << 16)
        del pieces
        return psutil.Process().memory_info().rss


@pytest.mark.parametrize(
    "work",
    [
        lambda rank: rank.work("learn"),
        lambda rank: rank.begin_save("folder") or rank._writes["folder"],
    ],
)
def test_rank_that_shares_its_device_gives_memory_back(work: Callable[[RankWorker], int]) -> None:
    held = []
    for gives_back in (False, True):
        rank = FreeingRank(None, gives_back)
        rank._model = rank._load()
        held.append(work(rank) - psutil.Process().memory_info().rss)
    assert held[0] < 8 << 20 < 32 << 20 < held[1]


def test_wait_for_group_begins_turn_of_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    monkeypatch.setattr(streams, "start_actor", lambda *_, **__: None)
    monkeypatch.setattr(streams, "beside_driver", dict)
    stream = streams.TrajectoryStream(4, lambda: events.append("awake"))
    trajectory: Any = SimpleNamespace(rollout_id="a/0")
    monkeypatch.setattr(stream, "_next", lambda: trajectory)
    stream._groups = {"a": {"a/0": None}, "b": {"b/0": trajectory}}
    stream._complete = {"b"}
    monkeypatch.setattr(streams, "_group", lambda name, members: name)
    taken: Any = stream.take("b")
    assert (taken, events) == ("b", []), "it is there: the learner may go on"
    taken = stream.take("a")
    assert (taken, events) == ("a", ["awake"])
