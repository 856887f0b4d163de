"""Sampling actors by node, and their pairs with replicas: who starts, who serves whom, and what adds up."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from actors.sampling import node_samplers
from actors.sampling.directory import MAX_REPLICAS, RELIEF_SECONDS, Pairing
from actors.sampling.node_samplers import NodeSamplers, combined
from actors.timing import PAIRING_SECONDS
from policies.sampler import EngineStats, QueueStatus, ReplicaStatus

Pairs = dict[str, set[int]]


class StandIn:
    """A sampling actor without a process. It does not start where ``breaks``."""

    def __init__(self, breaks: bool = False, recipe: str | None = "recipe") -> None:
        self.recipe_of_others = recipe
        self.breaks, self.is_killed, self.cancelled = breaks, False, list[str]()
        self.hangs = False
        for method in (self._recipe, self._status, self._cancel):
            setattr(self, method.__name__[1:], SimpleNamespace(remote=method))

    async def _recipe(self) -> str | None:
        return self.recipe_of_others

    async def _status(self) -> QueueStatus:
        if self.breaks:
            raise RayActorError(error_msg="no such folder")
        if self.hangs:
            await asyncio.Event().wait()
        return QueueStatus(1, 2, {})

    async def _cancel(self, session_id: str) -> None:
        if self.breaks:
            await asyncio.Event().wait()
        self.cancelled.append(session_id)


class Started:
    """The sampling actors that were started, by node."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.by_node: dict[str, StandIn] = {}
        self.broken: set[str] = set()
        self.hanging: set[str] = set()
        patch.setattr(node_samplers, "start_actor", self._start)
        patch.setattr(node_samplers, "INSPECTION_SECONDS", 0.05)
        patch.setattr(ray, "kill", lambda actor: setattr(actor, "is_killed", True))

    def _start(self, _: Any, recipe: str, scheduling_strategy: Any) -> StandIn:
        assert recipe == "recipe" and not scheduling_strategy.soft
        node = scheduling_strategy.node_id
        self.by_node[node] = StandIn(node in self.broken)
        self.by_node[node].hangs = node in self.hanging
        return self.by_node[node]


A, B = "a" * 56, "b" * 56


async def test_nodes_share_one_start_and_the_first_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    first: Any = StandIn()
    samplers = NodeSamplers(first, A)
    with samplers.used(A) as nothing, samplers.used(B) as one, samplers.used(B) as other:
        assert nothing is None and one is other and one is not None
        assert await one is started.by_node[B]
        assert list(samplers.by_place().values()) == [first, started.by_node[B]]
        assert await samplers.other_statuses() == [QueueStatus(1, 2, {})]
        await samplers.cancel("a rollout")
        assert first.cancelled == started.by_node[B].cancelled == ["a rollout"]
    assert list(started.by_node) == [B]


async def test_node_of_many_pairs_has_more_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its number of pairs at the most. A later pair takes the first place that is free."""
    started = Started(monkeypatch)
    monkeypatch.setattr(node_samplers, "PAIRS_PER_SAMPLER", 2)
    first: Any = StandIn()
    samplers = NodeSamplers(first, A)
    with ExitStack() as pairs:
        used = [pairs.enter_context(samplers.used(node)) for node in (A, A, A, B, B, B)]
        assert used[0] is used[1] is None and used[3] is used[4]
        others = [await each for each in used if each is not None]
        assert len(set(map(id, others))) == 3 and first not in others
        assert list(samplers.by_place()) == [(A, 0), (A, 1), (B, 0), (B, 1)]
        assert len(await samplers.other_statuses()) == 3
    with samplers.used(A) as starting:
        assert starting is None
    assert list(started.by_node) == [A, B]


@pytest.mark.slow
async def test_node_without_rollout_actors_loses_its_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    monkeypatch.setattr(node_samplers, "UNUSED_SECONDS", 0.2)
    first: Any = StandIn()
    samplers = NodeSamplers(first, A)
    with samplers.used(B) as starting:
        assert starting is not None
        await starting
    await asyncio.sleep(0.1)
    with samplers.used(B):  # the next rollout actor comes in time
        await asyncio.sleep(0.2)
        assert not started.by_node[B].is_killed
    await asyncio.sleep(0.3)
    assert started.by_node[B].is_killed and list(samplers.by_place()) == [(A, 0)]
    assert not first.is_killed


async def test_first_stands_in_where_another_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    started.broken = {B}
    first: Any = StandIn()
    samplers = NodeSamplers(first, A)
    with samplers.used(B) as starting:
        assert starting is not None and await starting is first
        assert list(samplers.by_place()) == [(A, 0)]


async def test_first_stands_in_where_another_start_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    started.hanging = {B}
    monkeypatch.setattr(node_samplers, "SAMPLER_RESTART_SECONDS", 0.05)
    first: Any = StandIn()
    with NodeSamplers(first, A).used(B) as starting:
        assert starting is not None
        assert await asyncio.wait_for(asyncio.shield(starting), 5) is first


async def test_sampler_for_one_place_serves_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    first: Any = StandIn(recipe=None)
    samplers = NodeSamplers(first, A)
    with samplers.used(B) as starting:
        assert starting is not None and await starting is first
    assert not started.by_node


async def test_cancel_does_not_wait_for_a_silent_node(monkeypatch: pytest.MonkeyPatch) -> None:
    started = Started(monkeypatch)
    first: Any = StandIn()
    samplers = NodeSamplers(first, A)
    with samplers.used(B) as starting:
        assert starting is not None
        await starting
        started.by_node[B].breaks = True
        await samplers.cancel("a rollout")
        assert first.cancelled == ["a rollout"]


async def test_silent_node_keeps_its_last_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They grow from the start of a run: without them, all would count as new when it answers again."""
    started = Started(monkeypatch)
    first: Any = StandIn()
    samplers = NodeSamplers(first, A)
    with samplers.used(B) as starting:
        assert starting is not None
        await starting
        counts = await samplers.other_statuses()
        started.by_node[B].hangs = True
        assert await samplers.other_statuses() == counts == [QueueStatus(1, 2, {})]


def test_status_of_several_queues_counts_each_replica_once() -> None:
    old, new = EngineStats(seconds=1.0, num_tokens=10), EngineStats(seconds=2.0, num_tokens=30)
    one = QueueStatus(3, 1, {"r": ReplicaStatus(1, True, 4, 7, old, 0.5)})
    other = QueueStatus(
        2,
        4,
        {
            "r, connection 1": ReplicaStatus(1, False, 0, 2, old, 9.0),
            "r, connection 2": ReplicaStatus(2, True, 5, 8, new, 0.1),
        },
    )
    assert combined([other]) is other
    assert combined([one, other]) == QueueStatus(5, 5, {"r": ReplicaStatus(2, True, 9, 17, new, 0.1)})


# -- pairs of replicas and sampling actors -----------------------------------------------------------


def pairing(num_samplers: int, num_replicas: int) -> Pairing:
    there = Pairing()
    for number in range(num_samplers):
        there.add(number)
    for number in range(num_replicas):
        there.report(f"replica {number}", 0, now=0.0)
    return there


def pairs(there: Pairing, replicas: Iterable[int]) -> Pairs:
    return {(name := f"replica {number}"): there.samplers_of(name) for number in replicas}


def test_few_replicas_serve_all_sampling_actors() -> None:
    there = pairing(3, MAX_REPLICAS)
    assert all(each == {0, 1, 2} for each in pairs(there, range(MAX_REPLICAS)).values())
    assert not there.report("replica 0", 1000, now=1.0), "there is no other one to take its place"


def test_many_replicas_serve_equally_many_and_stay_with_them() -> None:
    there = pairing(50, 64)
    before = pairs(there, range(64))
    assert Counter(number for each in before.values() for number in each) == dict.fromkeys(
        range(50), MAX_REPLICAS
    )
    assert max(map(len, before.values())) < 2 * 50 * MAX_REPLICAS / 64
    there.report("replica 64", 0, now=1.0)
    changed = sum(len(before[name] ^ after) for name, after in pairs(there, range(64)).items())
    assert changed == len(there.samplers_of("replica 64")), "only what the new one takes"


def test_replica_that_is_gone_is_replaced() -> None:
    there = pairing(4, MAX_REPLICAS + 1)
    late = 3.1 * PAIRING_SECONDS
    for number in range(1, MAX_REPLICAS + 1):
        there.report(f"replica {number}", 0, now=late)
    assert all(len(each) == 4 for each in pairs(there, range(1, MAX_REPLICAS + 1)).values())
    assert there.samplers_of("replica 0") == set()


def test_full_replica_leaves_one_sampling_actor_at_a_time() -> None:
    there = pairing(40, 2 * MAX_REPLICAS)
    before = pairs(there, range(2 * MAX_REPLICAS))
    full = max(before, key=lambda name: len(before[name]))
    assert there.report(full, 100, now=1.0)
    assert not there.report(full, 100, now=RELIEF_SECONDS / 2), "its load takes time to sink"
    (left,) = before[full] - there.samplers_of(full)
    (taker,) = (name for name in before if left in there.samplers_of(name) - before[name])
    assert taker != full
    for then in (RELIEF_SECONDS / 2, 1.0 + RELIEF_SECONDS):  # the others are still there
        for name in before.keys() - {full}:
            there.report(name, 0, then)
    assert there.report(full, 100, now=1.0 + RELIEF_SECONDS)
    assert len(before[full] - there.samplers_of(full)) == 2
    assert not there.report(full, 4, now=2.0 + RELIEF_SECONDS), "it has enough room"


def test_replica_without_room_beside_it_keeps_its_pairs() -> None:
    there = pairing(40, 2 * MAX_REPLICAS)
    for number in range(1, 2 * MAX_REPLICAS):
        there.report(f"replica {number}", 100, now=1.0)
    least = pairs(there, range(2 * MAX_REPLICAS))
    assert not there.report("replica 0", 100, now=1.0)
    assert pairs(there, range(2 * MAX_REPLICAS)) == least
