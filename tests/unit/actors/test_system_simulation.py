"""A small training of the real classes while nodes, replicas and samplers die, and rollouts are cancelled."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_cluster import HEAD
from simulated_system import CountingLoop, Size, System, simulated_system

from actors.rollouts.rollout import RolloutRequest

SIZE = Size(
    *(12, 3, 5),
    num_turns=3,
    turn_seconds=1.0,
    groups_per_step=3,
    group_size=4,
    num_updates=3,
    gives_credit=False,
)
OTHERS = [f"other-{number}/0" for number in range(3)]
"""Rollouts that the training has not requested; some are cancelled."""
LIMIT_SECONDS = 300.0

Event = tuple[str, float, int]
"""Kind of an event, seconds since the one before, and a number for where."""
events = st.lists(
    st.tuples(
        st.sampled_from(["join", "drain", "die", "crash", "replica", "sampler", "cancel"]),
        st.floats(0, 2),
        st.integers(0, 2**16),
    ),
    max_size=10,
)


def happen(kind: str, number: int, system: System) -> None:
    """Let an event happen; a replica that has died is replaced, and a sampler is started anew."""
    cluster = system.cluster
    nodes = [node for name, node in sorted(cluster.nodes.items()) if name != HEAD]
    match kind:
        case "join":
            cluster.join()
        case "replica":
            names = sorted(system.replicas)
            system.end_replica(names[number % len(names)])
            asyncio.get_running_loop().call_later(number % 5, system.start_replica)
        case "sampler":
            alive = [each for each in system.samplers if not each.has_ended]
            alive[number % len(alive)].restart()
        case "drain" | "die" | "crash" if nodes:
            getattr(cluster, kind)(nodes[number % len(nodes)])


async def play(script: list[Event], system: System) -> None:
    """Train while the script is played, and check what has become of each rollout."""
    await system.fleet.resize.remote(SIZE.num_pairs)
    training = system.driver.run(system.driver.target.train)
    others = [RolloutRequest(rollout_id=each, group_id=each[:-2], task={}) for each in OTHERS]
    await system.fleet.submit.remote(others)
    cancelled = set()
    for kind, seconds, number in script:
        await asyncio.sleep(seconds)
        name = OTHERS[number % len(OTHERS)]
        if kind == "cancel" and name not in system.rollouts_ended:
            system.fleet.cancel.remote(name)
            cancelled.add(name)
        happen(kind, number, system)
    system.cluster.join()  # where all others have left
    await asyncio.wait_for(training, LIMIT_SECONDS)  # a version that is wrong or a stale group is an error
    while not {*OTHERS} - cancelled <= {each.rollout_id for each in system.cluster.delivered}:
        await asyncio.sleep(1)
        assert asyncio.get_running_loop().time() < 2 * LIMIT_SECONDS, "nothing is lost"
    delivered = Counter(each.rollout_id for each in system.cluster.delivered)
    assert set(delivered.values()) == {1}, "nothing is delivered twice"
    assert not delivered.keys() & cancelled
    updates = system.driver.target.updates
    trained = [each for update in updates for group in update.groups for each in group.trajectories]
    assert len({each.rollout_id for each in trained}) == len(trained) == 3 * 3 * 4
    assert {len(each.steps) for each in system.cluster.delivered} == {SIZE.num_turns}
    for trajectory in system.cluster.delivered:
        played = [system.turns_played[trajectory.rollout_id, index] for index in range(SIZE.num_turns)]
        assert played == [1] * SIZE.num_turns, "no turn that was finished is played again"
    await system.fleet.status.remote()  # raises if one of the fleet's tasks has died


@given(script=events, seed=st.integers(0, 2**16))
@settings(max_examples=6, derandomize=True)
@pytest.mark.slow
def test_rollouts_are_trained_once_in_right_versions_in_a_storm(script: list[Event], seed: int) -> None:
    loop = CountingLoop()
    asyncio.set_event_loop(loop)

    async def run() -> None:
        with simulated_system(loop, lambda: System(SIZE, seed)) as system:
            await play(script, system)
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    try:
        loop.run_until_complete(run())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
