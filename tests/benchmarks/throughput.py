"""Two-turn episodes on real Ray, Serve and vLLM, against the bare engine on the same prompts.

    python tests/benchmarks/throughput.py [--episodes 256] [--pairs 64] [--rounds 3]
        [--replicas 1] [--model smollm2-135m-instruct]

First ``AgentExecutionEngine`` plays the episodes; then a bare in-process engine is given exactly the prompts
that it has sent, with the same limits: as many at a time as there are pairs, and all at once, as offline.
The ratios are to the former.
The tiny model answers so fast that this is the worst case for whatever surrounds the engine; with another
model an engine takes as many requests at a time as there are pairs, so that its cache fits into memory. Below
the rates stands which processes have used the CPU time of a request.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import models
import psutil
import ray
import repository  # noqa: F401
from report import Report
from sampling import BareArm, Prompts
from worlds import TalkEnvironment

from actors.engine import AgentExecutionEngine
from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel, ServerConfig
from actors.weights.store import WeightStore
from environments.types import Completion, Trajectory
from policies import GameAgent
from policies.settings import EngineConfig

NUM_TURNS = 2
TURN_TOKENS = 64
START_SECONDS = 600.0
"""For the start of the rollout actors."""
QUESTION = "What is the sum of all numbers that you can think of? "
ENGINE = EngineConfig(max_model_tokens=512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=256, help="of each round")
    parser.add_argument("--pairs", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="the median counts")
    parser.add_argument("--replicas", type=int, default=1, help="engines of the policy server")
    parser.add_argument("--model", default=models.TINY, help=f"{models.TINY}, or one that model.path takes")
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: both engines are on one GPU")
    arguments = parser.parse_args()
    os.environ["TQDM_DISABLE"] = "1"
    report = Report(
        f"throughput, model {arguments.model}: "
        f"{arguments.episodes} episodes of {NUM_TURNS} turns of at most {TURN_TOKENS} tokens, "
        f"{arguments.pairs} pairs, {arguments.replicas} replica(s), median of {arguments.rounds}",
        ("arm", "requests/s", "tokens/s", "of bare", "all rounds"),
    )
    with tempfile.TemporaryDirectory() as folder:
        options = {} if arguments.model == models.TINY else {"max_num_seqs": arguments.pairs}
        num_gpus = 0.0
        if arguments.device == "cuda":
            options, num_gpus = options | {"gpu_memory_utilization": 0.4}, 1 / arguments.replicas
        model = models.chosen(arguments.model, Path(folder))
        rates, cpu = _rounds(model, replace(ENGINE, num_gpus=num_gpus, options=options), arguments)
    bare = statistics.median(rate for rate, _ in rates[_as_many_at_a_time(arguments.pairs)])
    for arm, each in rates.items():
        middle = statistics.median(rate for rate, _ in each)
        tokens = statistics.median(tokens for _, tokens in each)
        listed = " ".join(f"{rate:.3g}" for rate, _ in each)
        report.add(arm, f"{middle:.3g}", f"{tokens:.0f}", f"{middle / bare:.2f}", listed)
    report.print()
    processes = Report("CPU time of a request of AgentExecutionEngine", ("process", "ms"))
    for title, seconds in cpu.most_common(8):
        processes.add(title, f"{seconds * 1e3:.2f}")
    processes.print()


def _as_many_at_a_time(num_pairs: int) -> str:
    return f"bare engine, {num_pairs} at a time"


def _rounds(
    model: str, engine_config: EngineConfig, arguments: argparse.Namespace
) -> tuple[dict[str, list[tuple[float, float]]], Counter[str]]:
    """Requests and tokens per second of each arm by round; CPU seconds per request by process title."""
    bare = BareArm(model, engine_config)
    # Never a cluster that happens to run here: its work would be measured too.
    os.environ.update(RAYLET_ENVIRONMENT)
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    store = WeightStore.remote()  # type: ignore[attr-defined]
    server = ServerConfig(num_replicas=arguments.replicas, engine=engine_config)
    app = PolicyApp("benchmark", ServedModel(path=model), server, store)
    app.start()
    pairs_at_once = _as_many_at_a_time(arguments.pairs)
    rates: dict[str, list[tuple[float, float]]] = {
        "AgentExecutionEngine": [],
        pairs_at_once: [],
        "bare engine, all at once": [],
    }
    cpu: Counter[str] = Counter()
    with AgentExecutionEngine(
        agent_class=GameAgent,
        env_class=TalkEnvironment,
        engine_name="serve",
        rollout_engine_args={"app_name": "benchmark", "model_path": model},
        sampling_params={"max_tokens": TURN_TOKENS},
        n_parallel_agents=arguments.pairs,
        max_steps=NUM_TURNS,
    ) as engine:
        engine.start()
        wait_for_pairs(arguments.pairs)
        play(engine, 2 * arguments.pairs)
        bare([(5, 6, 7)] * arguments.pairs, arguments.pairs)
        for _ in range(arguments.rounds):
            before = cpu_seconds()
            rate, prompts = play(engine, arguments.episodes)
            used = cpu_seconds()
            used.subtract(before)
            rates["AgentExecutionEngine"].append(rate)
            for title, seconds in used.items():
                cpu[title] += seconds / len(prompts) / arguments.rounds
            for arm, in_flight in (
                (pairs_at_once, arguments.pairs),
                ("bare engine, all at once", len(prompts)),
            ):
                measured = bare(prompts, in_flight)
                rates[arm].append((measured.requests_per_second, measured.tokens_per_second))
    app.stop()
    ray.shutdown()
    bare.close()
    return rates, cpu


def wait_for_pairs(number: int) -> None:
    """Return when ``number`` rollout actors are up: their starts are not part of a rate."""
    end = time.monotonic() + START_SECONDS
    while (present := sum(title.startswith("ray::RolloutActor") for title in titles())) < number:
        if time.monotonic() > end:
            raise SystemExit(f"{present} of {number} rollout actors are up after {START_SECONDS:g} seconds.")
        time.sleep(1)


def titles() -> Iterator[str]:
    """The command lines of this program's child processes."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            yield " ".join(process.cmdline())


def play(engine: AgentExecutionEngine, num_episodes: int) -> tuple[tuple[float, float], Prompts]:
    """Requests and tokens per second, and the prompts that the engine has sent."""
    tasks = [{"question": f"{QUESTION}{index}", "num_turns": NUM_TURNS} for index in range(num_episodes)]
    start = time.perf_counter()
    trajectories = asyncio.run(engine.execute_tasks(tasks))
    seconds = time.perf_counter() - start
    completions = [completion(trajectory, turn) for turn in range(NUM_TURNS) for trajectory in trajectories]
    num_tokens = sum(len(each.completion_ids) for each in completions)
    return (len(completions) / seconds, num_tokens / seconds), [each.prompt_ids for each in completions]


def completion(trajectory: Trajectory, turn: int) -> Completion:
    assert len(trajectory.steps) == NUM_TURNS, trajectory.error
    found = trajectory.steps[turn].completion
    assert found is not None
    return found


def cpu_seconds() -> Counter[str]:
    """CPU time of this program's Ray so far, by process title."""
    seconds: Counter[str] = Counter()
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            times = process.cpu_times()
        except psutil.Error:
            continue
        name = (
            re.split(r"[:.\s]", title.removeprefix("ray::"))[0]
            if title.startswith("ray::")
            else process_name(title)
        )
        seconds[name] += times.user + times.system
    own = psutil.Process().cpu_times()
    seconds["this program"] += own.user + own.system
    return seconds


def process_name(title: str) -> str:
    for name in ("raylet", "gcs_server"):
        if f"/{name}" in title:
            return name
    return "others"


if __name__ == "__main__":
    main()
