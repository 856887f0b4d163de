"""Updates of a finished run, computed again: how many come out bit for bit, and in how many seconds.

    python tests/benchmarks/replayed_updates.py [--folder runs/replayed_updates] [overrides of launch.train]

Trains the calculator recipe for 20 updates with a checkpoint after ten, and computes the last ten again. The
eleventh is computed with another algorithm and a group less, which no other run can confirm. The first is
computed with another reward, and compared with a run that was trained with it: both have the same rollouts
then, so that every number of that run's first update has to come out, to the last bit, and the share of each
group in its gradient, which the same change shows of that run, where it changes nothing.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import repository  # noqa: F401
from programs import run, warm_started_model
from report import Report

from environments import RewardOutput, math_reward_fn
from launch.cluster.session import connected
from launch.recipes import calculator
from launch.replay import Replay, ReplayedUpdate, scratch_folder
from launch.training.past_run import PastRun
from launch.training.recomputation import number_differences, started_learner
from launch.training.update_change import Change
from launch.workload import Workload

TRAIN = (
    "recipe=calculator",
    "stages=[reinforce]",
    "warm_start.num_steps=0",
    "run.num_steps=20",
    "run.checkpoints.every=10",
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "learner.mini_batch_size=8",
    "evaluation.num_tasks=8",
)


def close_reward_fn(task_info: dict[str, Any], action: str) -> RewardOutput:
    """1 for a right answer, and up to a half for a wrong one whose last digits are right."""
    verdict, truth = math_reward_fn(task_info, action), str(task_info["ground_truth"])
    given = action.rpartition("{")[2].rstrip("}")
    right = next((n for n in range(len(truth), 0, -1) if given.endswith(truth[-n:])), 0)
    return verdict if verdict.reward else replace(verdict, reward=0.5 * right / len(truth))


def workload(seed: int) -> Workload:
    """The recipe's with that reward: what the other run is trained on."""
    own = calculator.workload(seed)
    return replace(own, env_args={**own.env_args, "reward_fn": close_reward_fn})


def replayed(run: PastRun, update: int, change: Change) -> tuple[ReplayedUpdate, list[str], str]:
    """An update of a run computed again, the lines that ``launch.replay`` writes of it, and its seconds."""
    lines: list[str] = []
    start = time.monotonic()
    with scratch_folder(run.folder) as scratch:
        result = Replay(run, scratch, started_learner, lines.append).replay(update, change)
    print("\n".join(lines), flush=True)
    return result, lines, f"{time.monotonic() - start:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/replayed_updates"), help="of the runs")
    parser.add_argument("overrides", nargs="*", help="settings of the runs")
    arguments = parser.parse_args()
    report = Report("20 updates, and some of them again", ("what", "seconds", "to the last bit"))
    model = warm_started_model("calculator", arguments.folder, 350)
    runs = []
    for name, own in (("right", []), ("close", ["workload=replayed_updates"])):
        directory = (arguments.folder / name).resolve()
        if not (directory / "checkpoints" / "step_000020").exists():
            run([*TRAIN, *own, f"model.path={model}", f"run.directory={directory}", *arguments.overrides])
        runs.append(PastRun(directory))
    right, close = runs
    with connected():
        _, lines, seconds = replayed(right, 20, Change())
        same = [line for line in lines if line.startswith("same")]
        numbers, weights = (sum(what in line for line in same) for what in ("numbers", "weights"))
        report.add("updates 11 to 20", seconds, f"{numbers} of 10, {weights} of 1 checkpoint")
        first = right.groups(11)[0].group_id
        without = Change(overrides=["algorithm.name=dr_grpo"], without=int(first))
        _, _, seconds = replayed(right, 11, without)
        report.add("update 11 by dr_grpo, without a group", seconds, "-")
        for_close = Change(reward="replayed_updates:close_reward_fn")
        predicted, _, seconds = replayed(right, 1, for_close)
        trained, _, _ = replayed(close, 1, for_close)
    assert predicted.changed is not None
    computed = predicted.changed.metrics
    others = number_differences(close.metrics(1), computed)
    print("\n".join(others))
    came_out = (
        f"{len(computed) - len(others)} of {len(computed)} numbers of the run that was trained for them"
    )
    report.add("update 1 for close answers", seconds, came_out)
    are_same = predicted.changed.gradients == trained.as_it_was.gradients
    report.add("its groups' gradients", "", "yes" if are_same else "no")
    report.print()
    moved = number_differences(right.metrics(1), computed)
    print(f"{len(moved)} numbers of update 1 are not those of the run for right answers")


if __name__ == "__main__":
    main()
