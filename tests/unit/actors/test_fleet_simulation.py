"""The fleet's own code on a simulated cluster of 200 nodes that join, drain, die, fall silent and return."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cluster import (
    DECLARED_DEAD_SECONDS,
    HEAD,
    NOTICED_SECONDS,
    Cluster,
    SimulatedLoop,
    simulated_fleet,
)

from actors.rollouts.forks import Fork, ForkPoints
from actors.rollouts.rollout import FollowUp, RolloutRequest
from environments.types import TerminationReason

NUM_NODES, NUM_ACTORS, NUM_ROLLOUTS = 200, 80, 100
NUM_CONVERSATIONS, NUM_MESSAGES = 12, 4
MAX_STRUCK = 80
"""Nodes to which the same happens at the same time."""
LIMIT_SECONDS = 120.0
"""Time until all is delivered: a minute after the last event Ray has declared every silent node dead."""

Event = tuple[str, float, int]
"""Kind of an event, seconds since the event before, and a number for where or how many."""
events = st.lists(
    st.tuples(
        st.sampled_from(["join", "drain", "die", "cut", "return", "crash", "resize"]),
        st.floats(0, 1),
        st.integers(0, 2**16),
    ),
    max_size=12,
)


async def play(script: list[Event], cluster: Cluster, fleet: Any) -> None:
    """Play a script while rollouts are under way; check after each event and at the end."""
    ids = [f"group/{number:04d}" for number in range(NUM_ROLLOUTS)]
    await fleet.resize(NUM_ACTORS)
    await fleet.submit([RolloutRequest(rollout_id=each, group_id="group", task={}) for each in ids])
    for kind, seconds, number in script:
        await asyncio.sleep(seconds)
        happen(kind, number, cluster)
        if kind == "resize":
            await fleet.resize(NUM_ACTORS // 4 + number % NUM_ACTORS)
        await check(cluster, fleet)
    cluster.join()  # where all others have left
    deadline = cluster.now + LIMIT_SECONDS
    while len(cluster.delivered) < NUM_ROLLOUTS and cluster.now < deadline:
        await asyncio.sleep(1)
        await check(cluster, fleet)
    assert sorted(each.rollout_id for each in cluster.delivered) == ids
    reasons = {each.termination_reason for each in cluster.delivered}
    assert reasons == {TerminationReason.ENV_DONE}, "nothing of it was the agent's"


def happen(kind: str, number: int, cluster: Cluster) -> None:
    """Let an event happen to some of the nodes, but not to the head: with that the run ends."""
    others = sorted(name for name in cluster.nodes if name != HEAD)
    first, count = number % max(1, len(others)), 1 + number % MAX_STRUCK
    for name in others[first : first + count]:
        node = cluster.nodes[name]
        match kind:
            case "join":
                cluster.join()
            case "drain":
                cluster.drain(node)
            case "die":
                cluster.die(node)
            case "cut":
                cluster.cut(node, 1000)
            case "return":
                cluster.cut(node, 1 + number % 30)
            case "crash":
                cluster.crash(node)


async def check(cluster: Cluster, fleet: Any) -> None:
    """Check what holds at any time; ``Cluster.check_start`` checks what holds when a rollout begins."""
    ids = [each.rollout_id for each in cluster.delivered]
    assert len(ids) == len(set(ids)), "none is delivered twice"
    report = await fleet.report()  # raises if one of the fleet's tasks has died
    status = report.status
    assert 0 <= status.num_running <= status.num_ready <= status.num_actors
    for rollout in report.in_play:
        assert cluster.silent_seconds(rollout.node) <= NOTICED_SECONDS, "it goes on elsewhere"


def simulate(
    work: Callable[[Cluster, Any], Awaitable[None]], seed: int, retries: int, pairs_per_actor: int = 1
) -> None:
    """Let ``work`` play with a fleet on a fresh cluster; end what it leaves."""
    loop = SimulatedLoop()
    asyncio.set_event_loop(loop)

    async def run() -> None:
        cluster = Cluster(random.Random(seed), NUM_NODES)
        with simulated_fleet(cluster, loop, retries, pairs_per_actor) as fleet:
            await work(cluster, fleet)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    try:
        loop.run_until_complete(run())
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_actors_that_died_idle_cost_a_rollout_no_attempt() -> None:
    async def work(cluster: Cluster, fleet: Any) -> None:
        await fleet.resize(NUM_ACTORS)
        await asyncio.sleep(5)
        for name in sorted(cluster.nodes)[: NUM_NODES - 10]:
            cluster.crash(cluster.nodes[name])
        await play([], cluster, fleet)
        assert (await fleet.status()).num_retries == 0

    simulate(work, seed=0, retries=0)


def test_forks_begin_with_turns_of_their_parents_in_a_storm() -> None:
    ids = [f"group/{number:04d}" for number in range(NUM_ROLLOUTS)]
    roots, forks = ids[: NUM_ROLLOUTS // 4], ids[NUM_ROLLOUTS // 4 :]
    points = ForkPoints(num_forks=3, at="every 1")
    requests = [
        RolloutRequest(rollout_id=each, group_id="group", task={}, forked_at=points) for each in roots
    ]
    requests += [
        RolloutRequest(
            rollout_id=each,
            group_id="group",
            task={},
            fork=Fork(parent=roots[position % len(roots)], number=position // len(roots)),
        )
        for position, each in enumerate(forks)
    ]

    async def work(cluster: Cluster, fleet: Any) -> None:
        await fleet.resize(NUM_ACTORS)
        await fleet.submit(requests)
        for number in range(10):
            await asyncio.sleep(0.7)
            happen("crash", 20 * number, cluster)
        await asyncio.sleep(LIMIT_SECONDS)
        await check(cluster, fleet)
        assert sorted(each.rollout_id for each in cluster.delivered) == ids
        assert (await fleet.status()).num_resumed_turns == 0, "shared turns are no resumed ones"

    simulate(work, seed=1, retries=100)


def test_node_that_ray_declares_dead_does_not_end_the_fleet() -> None:
    async def work(cluster: Cluster, fleet: Any) -> None:
        await fleet.resize(NUM_ACTORS)
        await asyncio.sleep(5)  # its probe is up
        cluster.cut(next(node for node in cluster.nodes.values() if node.probes), DECLARED_DEAD_SECONDS)
        await asyncio.sleep(DECLARED_DEAD_SECONDS + 5)
        await fleet.status()

    simulate(work, seed=0, retries=0)


@pytest.mark.slow
@given(script=events, seed=st.integers(0, 2**16), pairs_per_actor=st.sampled_from([1, 4]))
@settings(max_examples=200, derandomize=True)  # a failure is of the change under test
def test_rollouts_are_delivered_once_whatever_happens_to_nodes(
    script: list[Event], seed: int, pairs_per_actor: int
) -> None:
    async def work(cluster: Cluster, fleet: Any) -> None:
        await play(script, cluster, fleet)

    simulate(work, seed, retries=20, pairs_per_actor=pairs_per_actor)


@pytest.mark.slow
@given(
    script=events,
    seed=st.integers(0, 2**16),
    seconds=st.sampled_from([0.0, 2.0, 600.0]),
    pairs_per_actor=st.sampled_from([1, 4]),
)
@settings(max_examples=100, derandomize=True)
def test_messages_find_their_pair_or_rebuild_it_whatever_happens(
    script: list[Event], seed: int, seconds: float, pairs_per_actor: int
) -> None:
    """Conversations on half as many actors: their pairs are used again, displaced and lost."""

    def message(conversation: int, number: int) -> RolloutRequest:
        after = FollowUp(after=f"{conversation}-{number - 1}/0", message="Go on.") if number else None
        name = f"{conversation}-{number}"
        return RolloutRequest(
            rollout_id=f"{name}/0", group_id=name, task={}, follow_up=after, keep_seconds=seconds
        )

    async def work(cluster: Cluster, fleet: Any) -> None:
        await fleet.resize(NUM_CONVERSATIONS // 2)
        await fleet.submit([message(each, 0) for each in range(NUM_CONVERSATIONS)])
        waiting, num_seen, deadline = list(script), 0, cluster.now + LIMIT_SECONDS
        while len(cluster.delivered) < NUM_CONVERSATIONS * NUM_MESSAGES:
            assert cluster.now < deadline
            if waiting:
                kind, _, number = waiting.pop(0)
                happen(kind, number, cluster)
            await asyncio.sleep(1)
            for trajectory in cluster.delivered[num_seen:]:
                assert trajectory.termination_reason is TerminationReason.ENV_DONE
                conversation, number = map(int, trajectory.rollout_id.removesuffix("/0").split("-"))
                if number + 1 < NUM_MESSAGES:
                    await fleet.submit([message(conversation, number + 1)])
                num_seen += 1
            await check(cluster, fleet)
        await fleet.end()

    simulate(work, seed, retries=20, pairs_per_actor=pairs_per_actor)
