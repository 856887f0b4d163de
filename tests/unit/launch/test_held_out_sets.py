"""Several sets of held-out tasks by their names: their metrics, checks and results."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from environments import Dataset, SingleTurnEnvironment
from environments.errors import ConfigError, DatasetError
from environments.types import TerminationReason, Trajectory, TrajectoryGroup
from launch.evaluate import report_sets
from launch.recipes.task_file import workload_of
from launch.reporting.metrics import evaluation_metrics
from launch.reporting.tracker import Tracker
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig
from launch.training.rollout_requests import evaluation_requests
from launch.validation.settings import check_settings
from launch.validation.workload import check_datasets
from launch.workload import Workload
from policies import MathAgent

TASKS = Dataset([{"question": "?"}])
NAMED = {"math": TASKS, "code": TASKS}


def played(name: str, reward: float, reason: TerminationReason = TerminationReason.ENV_DONE) -> Any:
    each = Trajectory(rollout_id=f"{name}/0", reward=reward, termination_reason=reason)
    return TrajectoryGroup(group_id=name, task={}, trajectories=(each,))


def check(val_dataset: Any, *settings: str) -> None:
    workload = Workload(
        agent_class=MathAgent, env_class=SingleTurnEnvironment, train_dataset=TASKS, val_dataset=val_dataset
    )
    config = compose(["evaluation.every=10", *settings])
    check_settings(config)
    check_datasets(config, workload)


def test_each_set_has_metrics_beside_those_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = {"math": [played("a", 1.0)], "code": [played("b", 0.0), played("c", 0.5)], "": []}
    metrics = evaluation_metrics([group for each in sets.values() for group in each], sets)
    assert metrics["eval/reward_mean"] == 0.5 and metrics["eval/num_tasks"] == 3
    assert (metrics["eval/math/reward_mean"], metrics["eval/code/reward_mean"]) == (1.0, 0.25)
    assert metrics["eval/code/num_tasks"] == 2 and metrics["eval/code/pass_at_1"] == 0.5
    one = evaluation_metrics([played("a", 1.0)], {"": [played("a", 1.0)]})
    assert one == evaluation_metrics([played("a", 1.0)]), "one set has the names of before"
    tracker = Tracker(tmp_path, 5)
    tracker.evaluation(0, metrics | {"time/evaluate": 1.0})
    tracker.close()
    assert "step 0: 0.500, math 1.000, code 0.250 (3 tasks" in capsys.readouterr().out


def test_set_whose_rollouts_failed_has_no_metrics() -> None:
    failed = [played("b", 0.0, TerminationReason.CRASHED)]
    metrics = evaluation_metrics([played("a", 1.0), *failed], {"math": [played("a", 1.0)], "code": failed})
    assert "eval/math/reward_mean" in metrics and "eval/code/reward_mean" not in metrics


def test_tasks_of_two_sets_have_different_ids() -> None:
    plain, math, code = (
        evaluation_requests(TrainConfig(), TASKS, 3, 1, name)[0] for name in ("", "math", "code")
    )
    assert plain.group_id == "eval-3-000000", "as before"
    assert math.group_id == "eval-3-math-000000" and code.rollout_id == "eval-3-code-000000/0000"


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["eval/reward_mean", "eval/math/reward_mean", "eval/code/pass_at_1"])
def test_best_and_last_policy_are_found_by_a_set(metric: str) -> None:
    check(NAMED, f"run.best_metric={metric}", f"run.stop_metric={metric}", "run.stop_at=0.5")


@pytest.mark.parametrize(
    ("val_dataset", "setting", "error", "message"),
    [
        (NAMED, "run.best_metric=eval/maths/reward_mean", ConfigError, "'maths', and the workload has math"),
        (TASKS, "run.best_metric=eval/math/reward_mean", ConfigError, "no sets with names"),
        (NAMED, "run.best_metric=eval/math/reward", ConfigError, "'eval/math/reward' is not one of"),
        (NAMED, "run.best_metric=eval/math", ConfigError, "'eval/math' is not one of"),
        ({"a/b": TASKS}, "seed=1", DatasetError, "'a/b', which is a part of metrics' names"),
        ({"math": Dataset([])}, "seed=1", DatasetError, "held-out dataset 'math' is empty"),
        ({"math": [{}]}, "seed=1", DatasetError, r"val_dataset['math'] is a list"),
    ],
)
def test_wrong_name_is_refused(val_dataset: Any, setting: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        check(val_dataset, setting)


def test_files_of_held_out_tasks_have_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [tmp_path / f"{name}.jsonl" for name in ("train", "math", "code")]
    for number, path in enumerate(paths):
        path.write_text(json.dumps({"question": f"{number}?", "answer": str(number)}) + "\n")
    named = f"held_out={{math: {paths[1]}, code: {paths[2]}}}"
    workload = workload_of(compose([f"dataset={paths[0]}", "reward=math", named]))
    assert {name: each[0]["ground_truth"] for name, each in workload.held_out.items()} == {
        "math": "1",
        "code": "2",
    }
    report_sets(
        {"math": 1, "code": 2}, [played(n, r).trajectories[0] for n, r in (("a", 1), ("b", 0), ("c", 1))]
    )
    shown = capsys.readouterr().out
    assert "math: success 1.000 (1 of 1" in shown and "code: success 0.500 (1 of 2 rollouts)" in shown


@pytest.mark.slow
def test_held_out_tasks_that_name_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps({"question": "1?", "answer": "1"}) + "\n")
    tasks = [f"dataset={path}", "reward=math"]
    assert list(workload_of(compose([*tasks, f"held_out={{2024: {path}}}"])).held_out) == ["2024"]
    for wrong in ("[a,b]", "{a: 5}", "{a: {b: c}}"):
        with pytest.raises(ConfigError, match=r"names no tasks: write a file or"):
            workload_of(compose([*tasks, f"held_out={wrong}"]))
    chats = tmp_path / "chats.jsonl"
    chats.write_text(json.dumps({"prompt": "1?", "completion": "1"}) + "\n")
    with pytest.raises(ConfigError, match=r"held_out=.* belongs to a dataset"):
        workload_of(compose([f"demonstrations={chats}", f"held_out={path}"]))
