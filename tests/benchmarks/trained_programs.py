"""Success of programs of others that learn the calculator recipe, beside its ``ToolAgent``.

    python tests/benchmarks/trained_programs.py [--runs tool_agent/0,tool_agent/1,agents/0] [--folder ...]

A run is a program and a seed. All of a seed start from the same model, but mini-swe-agent, whose
conversations are others: it starts from conversations of a scripted model, as the gateway has them. A run
that is finished is not run again, and one that was interrupted goes on from its last checkpoint: the command
may be given part by part. Frameworks run in an environment of their own, which is made with the packages of
``tests/outside_programs.txt``; processes that stay answer its questions.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import repository
from programs import run, warm_started_model
from report import Report

from launch.reporting.tracker import read_metrics
from launch.run_folder.trajectory_log import TRAIN, read_kept
from policies.learning.samples import training_samples

TESTS = repository.ROOT / "tests"
sys.path.insert(0, str(TESTS))

from calculator_program import MINI, PROGRAM, SOCKET  # noqa: E402  # which is of tests/
from outside_packages import answering_program  # noqa: E402

TOOL_AGENT = "tool_agent"
IN_THE_ACTOR = (TOOL_AGENT, "openai", "anthropic")
"""Programs that need no environment of their own."""
RUNS = "tool_agent/0,tool_agent/1,tool_agent/2,openai/0,agents/0,anthropic/0,langgraph/0,pydantic_ai/0,mini/0"
FINISHED = "finished.json"
COUNTS = ("calls", "sampled tokens", "trained tokens", "retokenized", "foreign answers", "branches")
COLUMNS = ("before", "after", *COUNTS, "seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", default=RUNS, help="default: %(default)s")
    parser.add_argument("--updates", type=int, default=10, help="default: %(default)s")
    parser.add_argument("--warm-steps", type=int, default=350, help="default: %(default)s, as the recipe has")
    parser.add_argument("--folder", type=Path, default=Path("runs/trained_programs"), help="of the runs")
    parser.add_argument("overrides", nargs="*", help="settings of all runs, such as fleet.num_actors=8")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(
        f"calculator by programs: {arguments.updates} updates of 64 rollouts", ("program", "seed", *COLUMNS)
    )
    for name in arguments.runs.split(","):
        program, seed = name.split("/")
        directory = folder / program / f"seed-{seed}"
        if not (directory / FINISHED).exists():
            with answering(program, folder) as environment:
                model = warm_started(program, folder, arguments.warm_steps, int(seed), environment)
                settings = [f"model.path={model}", f"seed={seed}", *arguments.overrides]
                trained(program, settings, arguments.updates, directory, environment)
        found = json.loads((directory / FINISHED).read_text())
        report.add(program, seed, *(f"{found[each]:g}" for each in COLUMNS))
    report.print()


def warm_started(program: str, folder: Path, num_steps: int, seed: int, environment: dict[str, str]) -> str:
    """The model from which the program learns: one of the seed for all, and one for mini-swe-agent."""
    own = workload_of(program) if program == MINI else []
    place = folder / (MINI if program == MINI else "shared")
    return warm_started_model("calculator", place, num_steps, seed, own, environment)


def workload_of(program: str) -> list[str]:
    if program == TOOL_AGENT:
        return []
    # mini-swe-agent's last call has 46 tokens, and the recipe's limit is 48.
    return ["workload=calculator_program", *(["rollout.max_turn_tokens=64"] if program == MINI else [])]


def trained(
    program: str, settings: Sequence[str], updates: int, directory: Path, environment: dict[str, str]
) -> None:
    """Train to the end; leave what was counted in a file."""
    run(
        [
            *("recipe=calculator", "stages=[reinforce]", "warm_start.num_steps=0", "run.resume=true"),
            "run.checkpoints.every=5",
            *workload_of(program),
            f"run.directory={directory}",
            f"run.num_steps={updates}",
            f"run.trajectories_kept={updates}",
            f"evaluation.every={updates}",
            *settings,
        ],
        environment,
    )
    (directory / FINISHED).write_text(json.dumps(counted(directory, updates)))


def counted(directory: Path, updates: int) -> dict[str, float]:
    """Success on held-out problems, seconds of updates and evaluations, and what rollouts were made of."""
    records = read_metrics(directory)
    success = [each["eval/reward_mean"] for each in records if "eval/reward_mean" in each]
    seconds = round(sum(each.get("time/step", 0.0) for each in records))
    counts: dict[str, float] = {"before": success[0], "after": success[-1], "seconds": seconds}
    counts |= dict.fromkeys(COUNTS, 0)
    for step in range(1, updates + 1):
        for kept in read_kept(directory, TRAIN, step):
            trajectory = kept.trajectory
            completions = [each.completion for each in trajectory.steps if each.completion is not None]
            retokenized = [each.num_completion_tokens for each in completions if each.retokenized]
            counts["calls"] += len(trajectory.steps)
            counts["sampled tokens"] += trajectory.num_sampled_tokens
            counts["trained tokens"] += sum(each.num_sampled_tokens for each in training_samples(trajectory))
            counts["retokenized"] += sum(retokenized)
            counts["foreign answers"] += trajectory.metrics.get("foreign_answers", 0)
            counts["branches"] += trajectory.metrics.get("branches", 0)
    return counts


@contextmanager
def answering(program: str, folder: Path) -> Iterator[dict[str, str]]:
    """Variables for a run of the program, which answers at a socket if it does not run in the actor."""
    path = os.pathsep.join(map(str, (TESTS / "benchmarks", TESTS)))
    environment = {"PYTHONPATH": path, PROGRAM: program}
    if program in IN_THE_ACTOR:
        yield environment
        return
    with answering_program(program, folder / f"{program}.log") as socket:
        yield {**environment, SOCKET: str(socket)}


if __name__ == "__main__":
    main()
