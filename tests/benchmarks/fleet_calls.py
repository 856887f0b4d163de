"""The CPU milliseconds of a rollout in the fleet, with Ray's part of its calls: by turns, and with a journal.

    python tests/benchmarks/fleet_calls.py [--rollouts 600]

The real fleet, stream and rollout actors on real Ray, with a sampling actor that has its replies ready: the
fleet's process alone is measured. Its actors are busy all the time, as in a training.
"""

from __future__ import annotations

import argparse
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

NUM_ACTORS = 4
NUM_TURNS = (4,)
REPLY = "A reply of some words, as a model gives them. " * 4


class ReplayedTalk(TalkEnvironment):
    """Has a journal: each turn is recorded in the fleet."""

    resumes_by = "replay"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=600, help="of each row")
    number = parser.parse_args().rollouts
    columns = ("turns", "without a journal", "with one", "rollouts/s")
    report = Report(f"CPU ms of a rollout in the fleet, {NUM_ACTORS} rollout actors", columns)
    start_ray()
    for num_turns in NUM_TURNS:
        (plain, rate), (recorded, _) = (
            measured(env, num_turns, number) for env in (TalkEnvironment, ReplayedTalk)
        )
        report.add(str(num_turns), f"{plain:.2f}", f"{recorded:.2f}", f"{rate:.0f}")
    ray.shutdown()
    report.print()


def measured(env_class: Any, num_turns: int, number: int) -> tuple[float, float]:
    """CPU milliseconds of a rollout, and rollouts a second."""
    stream = TrajectoryStream(capacity=64)
    sampler = SamplerActor.remote(partial(ScriptedSampler, [REPLY] * num_turns))
    fleet = RolloutFleet.remote(  # type: ignore[attr-defined]
        Pair(agent_class=GameAgent, env_class=env_class),
        sampler,
        stream.queue,
        RolloutLimits(timeout_seconds=60),
        FleetConfig(num_actors=NUM_ACTORS),
    )
    stream.connect(fleet)
    ray.get(fleet.resize.remote(NUM_ACTORS))
    play(stream, "first", num_turns, number // 4)  # first calls are slower
    process = process_of_the_fleet()
    before, start = sum(process.cpu_times()[:2]), time.perf_counter()
    play(stream, "measured", num_turns, number)
    seconds = time.perf_counter() - start
    used = sum(process.cpu_times()[:2]) - before
    stream.close()
    for each in (fleet, sampler):
        ray.kill(each)
    return 1000 * used / number, number / seconds


def play(stream: TrajectoryStream, name: str, num_turns: int, number: int) -> None:
    task = {"question": "What is it?", "num_turns": num_turns}
    groups = [f"{name} {index}" for index in range(number)]
    requests = [RolloutRequest(rollout_id=f"{each}/0", group_id=each, task=task) for each in groups]
    assert all(len(each.trajectories[0].steps) == num_turns for each in stream.groups(requests))


def process_of_the_fleet() -> psutil.Process:
    children = psutil.Process().children(recursive=True)
    (process,) = (each for each in children if "RolloutFleet" in " ".join(each.cmdline()))
    return process


if __name__ == "__main__":
    main()
