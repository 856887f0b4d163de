"""What the engine adds to each step and each episode, and what an idle pair costs, at 8 to 128 pairs.

    python tests/benchmarks/overhead.py [--pairs 8 32 64 128] [--seconds 1.0] [--pairs-per-actor 1]

The sampler plays a script and the environment sleeps, so whatever passes between two steps is the engine's
own. Beside it stands what Ray takes alone: as many bare actors that sleep as long and then call another one.
Times of one machine's processes compare with each other: all read the same monotonic clock.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import psutil
import ray
import repository  # noqa: F401
from report import Report
from worlds import TalkEnvironment

from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.settings import FleetConfig
from environments.types import Trajectory
from policies import GameAgent
from policies.sampler import ScriptedSampler

NUM_TURNS = 5
EPISODES_PER_PAIR = 3
NUM_CALLS = 8


@ray.remote(num_cpus=0)
class BareActor:
    """The least that Ray starts."""

    def ready(self) -> bool:
        return True

    def call(self, other: ray.actor.ActorHandle, step_seconds: float) -> list[float]:
        """Seconds of each call of ``other``, after as long a sleep as a step takes."""
        seconds = []
        for _ in range(NUM_CALLS):
            time.sleep(step_seconds * random.uniform(0.5, 1.5))
            start = time.perf_counter()
            ray.get(other.ready.remote())
            seconds.append(time.perf_counter() - start)
        return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", type=int, nargs="+", default=[8, 32, 64, 128])
    parser.add_argument("--seconds", type=float, default=1.0, help="mean duration of a step")
    parser.add_argument("--pairs-per-actor", type=int, default=1)
    arguments = parser.parse_args()
    columns = (
        "pairs",
        "start s",
        "CPU s",
        "bare s",
        "PSS MB",
        "bare",
        "ratio",
        "step ms",
        "p95",
        "bare",
        "growth",
        "episode ms",
    )
    report = Report(
        f"overhead: {NUM_TURNS} steps of {arguments.seconds} s (±50 %) an episode; "
        f"{arguments.pairs_per_actor} pair(s) an actor; start, CPU and memory of an idle pair; added per "
        "step and between two episodes (medians)",
        columns,
    )
    first_step = 0.0
    for num_pairs in arguments.pairs:
        bare_start, bare_memory, bare_call = measure_bare(num_pairs, arguments.seconds)
        start, cpu, memory, trajectories = measure_engine(
            num_pairs, arguments.pairs_per_actor, arguments.seconds
        )
        steps, episodes = added_seconds(trajectories)
        step = statistics.median(steps)
        first_step = first_step or step
        report.add(
            str(num_pairs),
            f"{start / num_pairs:.2f}",
            f"{cpu:.2f}",
            f"{bare_start / num_pairs:.2f}",
            f"{memory:.1f}",
            f"{bare_memory:.1f}",
            f"{memory / bare_memory:.2f}",
            f"{step * 1e3:.2f}",
            f"{statistics.quantiles(steps, n=20)[-1] * 1e3:.2f}",
            f"{bare_call * 1e3:.2f}",
            f"{step / first_step:.2f}",
            f"{statistics.median(episodes) * 1e3:.2f}",
        )
    report.print()


def measure_bare(num_actors: int, step_seconds: float) -> tuple[float, float, float]:
    """Seconds until all actors are up, the memory of one in MB, and the median seconds of a call."""
    with_ray()
    start = time.perf_counter()
    actors = [BareActor.remote() for _ in range(num_actors)]  # type: ignore[attr-defined]
    ray.get([actor.ready.remote() for actor in actors])
    seconds = time.perf_counter() - start
    memory, _ = costs("ray::BareActor", num_actors)
    other = BareActor.remote()  # type: ignore[attr-defined]
    calls = ray.get([actor.call.remote(other, step_seconds) for actor in actors])
    ray.shutdown()
    return seconds, memory, statistics.median(call for each in calls for call in each)


def measure_engine(
    num_pairs: int, pairs_per_actor: int, step_seconds: float
) -> tuple[float, float, float, list[Trajectory]]:
    """Seconds until all pairs are up, CPU and memory of one before its task, and what they then play."""
    with_ray()
    start = time.perf_counter()
    sampler = SamplerActor.remote(  # type: ignore[attr-defined]
        partial(ScriptedSampler, ["A reply of some words, as a model gives them."] * NUM_TURNS)
    )
    stream = TrajectoryStream(capacity=1024)
    fleet = RolloutFleet.remote(  # type: ignore[attr-defined]
        Pair(agent_class=GameAgent, env_class=TalkEnvironment),
        sampler,
        stream.queue,
        RolloutLimits(max_steps=NUM_TURNS),
        FleetConfig(nodes={"CPU": 0}, pairs_per_actor=pairs_per_actor),
    )
    stream.connect(fleet)
    ray.get(fleet.resize.remote(num_pairs))
    wait_for(lambda: ray.get(fleet.status.remote()).num_ready == num_pairs)
    seconds = time.perf_counter() - start
    memory, cpu = costs("ray::RolloutActor", num_pairs)
    rng = random.Random(0)
    orders = [
        RolloutRequest(
            rollout_id=str(index),
            group_id=str(index),
            task={
                "question": "Begin.",
                "num_turns": NUM_TURNS,
                "seconds": step_seconds * rng.uniform(0.5, 1.5),
            },
        )
        for index in range(num_pairs * EPISODES_PER_PAIR)
    ]
    ray.get(fleet.submit.remote(orders))
    trajectories = list(stream.trajectories(len(orders)))
    ray.shutdown()
    return seconds, cpu, memory, trajectories


def added_seconds(trajectories: list[Trajectory]) -> tuple[list[float], list[float]]:
    """Between two steps of an episode, and between the last step of one and the first of the next."""
    steps: list[float] = []
    visits: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for trajectory in trajectories:
        times = [(step.info["entered"], step.info["left"]) for step in trajectory.steps]
        assert len(times) == NUM_TURNS, trajectory.error
        steps += [later[0] - earlier[1] for earlier, later in itertools.pairwise(times)]
        visits[trajectory.steps[0].info["process"]].append((times[0][0], times[-1][1]))
    episodes = [
        later[0] - earlier[1]
        for played in map(sorted, visits.values())
        for earlier, later in itertools.pairwise(played)
    ]
    return steps, episodes


def with_ray() -> None:
    """A Ray of this benchmark's own; never one that happens to run here."""
    os.environ.update(RAYLET_ENVIRONMENT)
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("The actors were not up within 600 s.")
        time.sleep(0.2)


def costs(title: str, number: int) -> tuple[float, float]:
    """Proportional set size in MB and CPU seconds of the processes with this title and of those below them.

    Both are divided by ``number``.
    """
    actors = [
        process
        for process in psutil.process_iter(["cmdline"])
        if " ".join(process.info["cmdline"] or ()).startswith(title)
    ]
    processes = [each for actor in actors for each in (actor, *actor.children(recursive=True))]
    times = [process.cpu_times() for process in processes]
    memory = sum(process.memory_full_info().pss for process in processes) / 1e6
    return memory / number, sum(each.user + each.system for each in times) / number


if __name__ == "__main__":
    main()
