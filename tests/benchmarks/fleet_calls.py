"""The CPU milliseconds of a rollout in the processes of a fleet, with Ray's part of their calls.

    python tests/benchmarks/fleet_calls.py [--rollouts 600] [--turns 4] [--pairs 32]

The real fleet, stream and rollout actors on real Ray, which are busy all the time; the sampling actor has its
replies ready. A fleet calls its first rollout actors itself, and a part of it calls the others.
"""

from __future__ import annotations

import argparse
import os
import time
from functools import partial
from typing import Any

import psutil
import ray
from report import Report
from repository import start_ray
from worlds import TalkEnvironment

from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.settings import FleetConfig
from policies import GameAgent
from policies.sampler import ScriptedSampler

PAIRS_PER_ACTOR = 8
IDLE_SECONDS = 5
REPLY = "A reply of some words, as a model gives them. " * 4
PROCESSES = ("RolloutFleet", "FleetPart", "TrajectoryQueue")


class ReplayedTalk(TalkEnvironment):
    """Has a journal: each turn is recorded in the fleet."""

    resumes_by = "replay"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=600, help="of each row")
    parser.add_argument("--turns", type=int, default=4, help="of a rollout")
    parser.add_argument("--pairs", type=int, default=32, help=f"in actors of {PAIRS_PER_ACTOR} each")
    arguments = parser.parse_args()
    number, num_turns, num_pairs = arguments.rollouts, arguments.turns, arguments.pairs
    columns = ("called by", "journal", "rollouts/s", "fleet", "part", "queue", "idle fleet, of a second")
    report = Report(f"CPU ms of a rollout of {num_turns} turns, {num_pairs} pairs", columns)
    start_ray()
    for env_class in (TalkEnvironment, ReplayedTalk):
        for num_own, name in ((num_pairs, "the fleet"), (0, "a part")):
            rate, used = measured(env_class, num_own, number, num_turns, num_pairs)
            report.add(name, env_class.resumes_by or "-", f"{rate:.0f}", *(f"{each:.2f}" for each in used))
    ray.shutdown()
    report.print()


def measured(
    env_class: Any, num_own: int, number: int, num_turns: int, num_pairs: int
) -> tuple[float, list[float]]:
    """Rollouts a second; CPU milliseconds of a rollout in each of the processes, and of the fleet in a second
    in which nothing is played.
    """
    stream = TrajectoryStream(capacity=64)
    sampler = SamplerActor.remote(partial(ScriptedSampler, [REPLY] * num_turns))
    fleet: Any = RolloutFleet.remote(  # type: ignore[attr-defined]
        Pair(agent_class=GameAgent, env_class=env_class),
        sampler,
        stream.queue,
        RolloutLimits(timeout_seconds=60),
        FleetConfig(num_actors=num_pairs, pairs_per_actor=PAIRS_PER_ACTOR),
    )
    ray.get(fleet.__ray_call__.remote(call_so_many_itself, num_own))
    stream.connect(fleet)
    ray.get(fleet.resize.remote(num_pairs))
    play(stream, "first", number // 4, num_turns)  # first calls are slower
    before, start = cpu_seconds(), time.perf_counter()
    play(stream, "measured", number, num_turns)
    seconds, after = time.perf_counter() - start, cpu_seconds()
    time.sleep(IDLE_SECONDS)
    idle = cpu_seconds()[0] - after[0]
    stream.close()
    for each in (fleet, sampler):
        ray.kill(each)
    while any(cpu_seconds()):
        time.sleep(0.1)
    of_rollout = [1000 * (now - then) / number for now, then in zip(after, before, strict=True)]
    return number / seconds, [*of_rollout, 1000 * idle / IDLE_SECONDS]


def call_so_many_itself(fleet: Any, num_pairs: int) -> None:
    """Run in the fleet's process, before it has rollout actors."""
    from actors.rollouts import fleet_parts

    fleet_parts.PAIRS_OF_FLEET = num_pairs


def play(stream: TrajectoryStream, name: str, number: int, num_turns: int) -> None:
    task = {"question": "What is it?", "num_turns": num_turns}
    groups = [f"{name} {index}" for index in range(number)]
    requests = [RolloutRequest(rollout_id=f"{each}/0", group_id=each, task=task) for each in groups]
    assert all(len(each.trajectories[0].steps) == num_turns for each in stream.groups(requests))


def cpu_seconds() -> list[float]:
    """Used until now by each of ``PROCESSES``; 0 for one that is not there."""
    used = dict.fromkeys(PROCESSES, 0.0)
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            title, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        for name in PROCESSES:
            if f"ray::{name}" in title:
                used[name] += times.user + times.system
    return list(used.values())


if __name__ == "__main__":
    main()
