"""Trainings whose reward compares the answers of a group, by a scripted judge behind a real server.

    python tests/benchmarks/group_judge.py [--updates 6]

The calculator recipe on the real stack, whose judge gives the number that is nearest to the truth the first
place. One run as it is; one that goes on from its checkpoint, with an empty cache; one whose judge is down
for a sixth of its calls, so that three of ten groups have no verdict. An answer there that was in no whole
comparison and counts all the same would have a low reward that nobody has given: the column ``low`` has to be
0 everywhere.
"""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import repository
from report import Report

sys.path.insert(0, str(repository.ROOT / "tests"))

from scripted_judge import judged, serving, verdict

from environments.rewards.group_judge import GroupJudge
from environments.rewards.judge import Judge
from environments.rewards.judge_ledger import Spent
from environments.types import Trajectory
from launch.chaos import COUNTED
from launch.recipes.calculator import workload
from launch.reporting.tracker import read_metrics
from launch.run_folder.checkpoint import LATEST
from launch.run_folder.trajectory_log import TRAIN, kept_steps, read_kept
from launch.settings.compose import compose
from launch.training.trainer import run_training

SETTINGS = [
    "recipe=calculator",
    "warm_start.num_steps=60",
    "evaluation.num_tasks=48",
    "rollout.groups_per_step=6",
    "rollout.group_size=4",
    "fleet.num_actors=4",
    "learner.mini_batch_size=12",
    "learner.optimizer.lr=5e-4",
]


def distance(data: dict[str, Any], answer: str) -> float:
    """Distance of the number in ``answer`` from the truth, as a share of it."""
    numbers = re.findall(r"-?\d+", answer)
    truth = int(data["task"]["ground_truth"])
    return abs(int(numbers[-1][:9]) - truth) / truth if numbers else math.inf


def by_distance(body: dict[str, Any], number: int) -> str:
    data = judged(body)
    if "answer" in data:
        return verdict(distance(data, data["answer"]) < 0.5)
    distances = [distance(data, each) for each in data["answers"].values()]
    return verdict(*(1 + sum(other < each for other in distances) for each in distances))


def often_down(body: dict[str, Any], number: int) -> Any:
    is_down = "answers" in judged(body) and zlib.crc32(str(body["messages"]).encode()) % 6 == 0
    return (503, {"error": {"message": "down"}}) if is_down else by_distance(body, number)


def train(folder: Path, script: Callable[..., Any], *settings: str) -> Spent:
    """Train in ``folder``; return what the judge has cost."""
    config = compose([*SETTINGS, f"run.directory={folder}", *settings])
    made = workload(config.seed)
    with serving(script) as server:
        endpoint = server.endpoint(retries=0)
        judge = Judge(endpoint, {"It is near the truth.": 1.0}, task_fields=("question", "ground_truth"))
        env_args = made.env_args | {"reward_fn": GroupJudge(judge)}
        run_training(config, replace(made, env_args=env_args, demonstrations=made.demonstrations[:1000]))
    return judge.ledger.spent


def rollouts(folder: Path) -> list[Trajectory]:
    return [kept.trajectory for step in kept_steps(folder, TRAIN) for kept in read_kept(folder, TRAIN, step)]


def row(folder: Path, spent: Spent) -> tuple[str, ...]:
    played = rollouts(folder)
    failed = [each for each in played if each.failed]
    compared = [
        each for each in played if any("places" in step.info.get("metadata", {}) for step in each.steps)
    ]
    # An episode without an answer is worse than any other, and nobody had to compare it.
    low = [each for each in played if each not in compared and not each.failed and each.has_answer]
    success = [each["eval/reward_mean"] for each in read_metrics(folder) if "eval/reward_mean" in each]
    mean = statistics.fmean(each.reward for each in compared)
    return (
        *(f"{success[0]:.2f}", f"{success[-1]:.2f}", f"{mean:.3f}"),
        *(str(len(each)) for each in (played, compared, failed, low)),
        str(spent.calls),
    )


def comparable(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run without those of a clock."""
    return [
        {name: value for name, value in each.items() if "time/" not in name and "seconds" not in name}
        | dict.fromkeys(COUNTED, 0)
        for each in read_metrics(folder)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=int, default=6, help="of each run, an even number")
    updates = parser.parse_args().updates
    columns = ("judge", "before", "after", "reward", "rollouts", "compared", "failed", "low", "calls")
    report = Report(
        f"calculator, {updates} updates: held-out success (within half of the truth), mean reward, rollouts",
        columns,
    )
    half = updates // 2
    ends = [f"run.num_steps={updates}", f"run.checkpoints={{every: {half}, kept: 99}}"]
    with tempfile.TemporaryDirectory() as name:
        whole, resumed, down = (Path(name, each) for each in ("whole", "resumed", "down"))
        report.add("nearest number", *row(whole, train(whole, by_distance, *ends)))
        shutil.copytree(whole, resumed, symlinks=True)
        checkpoints = resumed / "checkpoints"
        shutil.rmtree(checkpoints / f"step_{updates:06d}")
        (checkpoints / LATEST).unlink()
        (checkpoints / LATEST).symlink_to(f"step_{half:06d}")
        report.add("resumed", *row(resumed, train(resumed, by_distance, *ends, "run.resume=true")))
        report.add("down for a sixth", *row(down, train(down, often_down, *ends)))
        is_same = comparable(whole) == comparable(resumed)
        report.print()
    print(f"The resumed run has {'the same' if is_same else 'OTHER'} numbers.")
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
