"""Trackers of a run: chosen, given every step once, and left out when they fail; and the goal of a run."""

from __future__ import annotations

import re
import sqlite3
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from machine import wait_until
from own_tracker import OwnTracker
from shown_programs import LENGTHS
from trained_run import save_whole

from environments.background import end_background_work
from environments.errors import ConfigError
from environments.types import Step, Trajectory, TrajectoryGroup
from launch.health.restart_budget import RestartBudget
from launch.reporting.tracker import ALARMS, Goal, Tracker, read_metrics
from launch.reporting.trackers.base import BaseTracker
from launch.reporting.trackers.chosen import TRACKERS, chosen_trackers
from launch.run_folder.checkpoint import Progress, StreamState
from launch.run_folder.jsonl_log import read_records
from launch.run_folder.lock import RunLock
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig
from launch.training import trainer
from launch.training.run_state import RunState

METRICS = {"time/step": 1.0, "rollout/reward_mean": 0.5}
EVALUATION = {"eval/reward_mean": 0.5, "eval/num_tasks": 1.0, "time/evaluate": 1.0}
GROUPS = [TrajectoryGroup(group_id="0", task={}, trajectories=(Trajectory(steps=[Step(), Step()]),))]


class Failing(BaseTracker):
    """Raises in one of its methods, and counts the calls of all."""

    def __init__(self, method: str) -> None:
        self.method, self.num_calls = method, 0

    def _note(self, method: str) -> None:
        self.num_calls += 1
        if method == self.method:
            raise RuntimeError("the disk of the others is full")

    def open(self, run: Any) -> None:
        self._note("open")

    def measure(self, step: int, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        self._note("measure")
        return {}

    def log(self, step: int, metrics: Any, histograms: Any) -> None:
        self._note("log")

    def close(self) -> None:
        self._note("close")


def tracker_of(folder: Path, last_step: int = 0, goal: Goal | None = None, **chosen: BaseTracker) -> Tracker:
    tracker = Tracker(folder, 10, last_step, chosen, goal)
    tracker.settings(TrainConfig(workload="mine"))
    tracker.begin_steps()
    return tracker


def play(folder: Path, steps: range, last_step: int = 0, **chosen: BaseTracker) -> None:
    tracker = tracker_of(folder, last_step, **chosen)
    for step in steps:
        tracker.step(step, METRICS, groups=GROUPS)
    tracker.close()


class OfOneThread(OwnTracker):
    """Keeps its numbers in a database that one thread may use, as many libraries do."""

    def open(self, run: Any) -> None:
        self._base = sqlite3.connect(":memory:")

    def log(self, step: int, metrics: Any, histograms: Any) -> None:
        self._base.execute("select 1")
        super().log(step, metrics, histograms)


class Hanging(OwnTracker):
    """Waits for a server that does not answer."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = threading.Event()

    def measure(self, step: int, groups: Any) -> dict[str, float]:
        return {}

    def log(self, step: int, metrics: Any, histograms: Any) -> None:
        super().log(step, metrics, histograms)
        self.answers.wait()


@pytest.mark.slow
def test_tracker_that_hangs_is_named_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("launch.reporting.trackers.chosen.CALL_SECONDS", 0.2)
    hanging, other = Hanging(), OfOneThread()
    play(tmp_path, range(1, 4), hanging=hanging, other=other)
    assert (len(hanging.logged), hanging.num_closed, len(other.logged)) == (1, 0, 3)
    printed = capsys.readouterr().out
    assert printed.count("The tracker hanging has failed") == 2, "when it happens, and among the last lines"
    assert "TimeoutError: it has not answered for 0.2 s" in printed
    hanging.answers.set()
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("tracker ")])


def test_tracker_is_closed_after_the_end_of_background_work(tmp_path: Path) -> None:
    """A run leaves Ray before it closes its trackers."""
    chosen = Failing("none")
    tracker = tracker_of(tmp_path, chosen=chosen)
    end_background_work(seconds=0.1)
    tracker.close()
    assert chosen.num_calls == 2, "opened and closed"


# -- the choice ----------------------------------------------------------------------------------------


class OfNoPackage(BaseTracker):
    package = "package_that_is_nowhere"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tensorbord"], r"run\.trackers: there is no 'tensorbord'\. Did you mean 'tensorboard'"),
        (["tensorboard", "tensorboard"], r"has 'tensorboard' twice: name it once"),
        (["test_trackers:OfNoPackage"], r"not installed here: run `pip install package_that_is_nowhere`"),
        (["test_trackers:Failing"], r"run\.trackers='test_trackers:Failing' failed: TypeError"),
        (["pathlib:Path"], r"has to be a class that is derived from .*BaseTracker"),
    ],
)
def test_tracker_that_cannot_be_made_is_refused(names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen_trackers(names)


def test_folder_is_not_taken_for_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An offline run of wandb leaves a folder of that name where it was started."""
    (tmp_path / "package_that_is_nowhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="not installed"):
        chosen_trackers(["test_trackers:OfNoPackage"])


def test_choice_imports_no_package() -> None:
    before = set(sys.modules)
    assert set(chosen_trackers(["tensorboard"])) == {"tensorboard"}
    assert compose([]).run.trackers == ["tensorboard"]
    assert not {"wandb", "mlflow", "trackio"} & (set(sys.modules) - before)
    assert set(TRACKERS) == {"tensorboard", "wandb", "mlflow", "trackio"}


# -- what a tracker is given ---------------------------------------------------------------------------


@pytest.mark.slow
def test_own_tracker_gets_settings_and_adds_its_numbers(tmp_path: Path) -> None:
    (own,) = chosen_trackers(["own_tracker:OwnTracker"]).values()
    assert isinstance(own, OwnTracker)
    tracker = tracker_of(tmp_path, own=own)
    tracker.step(1, METRICS, groups=GROUPS)
    tracker.evaluation(1, EVALUATION, GROUPS)
    tracker.close()
    assert own.runs[0].settings["workload"] == "mine" and own.num_closed == 1
    update, evaluated = read_metrics(tmp_path)
    assert (update["rollout/longest"], evaluated["eval/longest"]) == (2, 2)
    assert own.logged == [
        (1, {name: value for name, value in record.items() if name != "step"})
        for record in (update, evaluated)
    ]


def test_tracker_of_the_guide_adds_its_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tracker.py").write_text(LENGTHS)
    monkeypatch.syspath_prepend(tmp_path)
    play(tmp_path / "run", range(1, 2), **chosen_trackers(["my_tracker:Lengths"]))
    assert [each["rollout/short_share"] for each in read_metrics(tmp_path / "run")] == [1.0]


class Late(OwnTracker):
    """Chosen when the run is resumed."""

    def measure(self, step: int, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
        return {}


@pytest.mark.slow
def test_resumed_run_gives_no_step_twice(tmp_path: Path) -> None:
    own, late = OwnTracker(), Late()
    play(tmp_path, range(1, 5), own=own)
    play(tmp_path, range(3, 4), last_step=2, own=own)  # killed before it has made step 4 again
    play(tmp_path, range(3, 7), last_step=2, own=own, late=late)
    assert [step for step, _ in own.logged] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in late.logged] == [3, 4, 5, 6]
    assert len({run.run_id for run in own.runs + late.runs}) == 1


@pytest.mark.slow
def test_run_that_begins_anew_in_the_folder_is_another(tmp_path: Path) -> None:
    own = OwnTracker()
    for _ in range(2):
        play(tmp_path, range(1, 3), own=own)
    assert [step for step, _ in own.logged] == [1, 2, 1, 2]
    assert len({run.run_id for run in own.runs}) == 2


# -- one that fails ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("method", "num_calls"), [("open", 1), ("measure", 2), ("log", 3), ("close", 6)])
def test_failed_tracker_is_named_and_not_called_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, num_calls: int
) -> None:
    failing, own = Failing(method), OwnTracker()
    tracker = tracker_of(tmp_path, failing=failing, own=own)
    for step in (1, 2):
        tracker.step(step, METRICS, groups=GROUPS)
    during = capsys.readouterr().out
    tracker.close()
    reason = "The tracker failing has failed, .*RuntimeError: the disk of the others is full"
    assert failing.num_calls == num_calls
    assert during.count("disk of the others") == (method != "close")
    (last,) = capsys.readouterr().out.splitlines()
    assert re.search(reason, last)
    assert [step for step, _ in own.logged] == [each["step"] for each in read_metrics(tmp_path)] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("numbers", "reason"),
    [({"reward_mean": 1.0}, "rollout/reward_mean, which the run has"), ({"a": "much"}, "could not convert")],
)
def test_number_that_cannot_be_recorded_fails_its_tracker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], numbers: Any, reason: str
) -> None:
    class Measuring(BaseTracker):
        def measure(self, step: int, groups: Sequence[TrajectoryGroup]) -> Mapping[str, float]:
            return numbers

    play(tmp_path, range(1, 3), own=Measuring())
    assert reason in capsys.readouterr().out
    assert [each["rollout/reward_mean"] for each in read_metrics(tmp_path)] == [0.5, 0.5]


# -- the goal ------------------------------------------------------------------------------------------


def test_goal_is_reached_at_its_value_and_by_records_of_before(tmp_path: Path) -> None:
    goals = [Goal("eval/reward_mean", value) for value in (0.51, 0.5, 0.5)]
    for goal in goals[:2]:
        tracker = tracker_of(tmp_path, goal=goal)
        tracker.evaluation(0, EVALUATION)
        tracker.close()
    resumed = tracker_of(tmp_path, goal=goals[2])
    resumed.close()
    assert [goal.reached for goal in goals] == [
        None,
        *["eval/reward_mean=0.5 after step 0 has reached run.stop_at=0.5"] * 2,
    ]


def test_goal_may_be_a_number_of_ones_own(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, goal=Goal("rollout/longest", 2.0), own=OwnTracker())
    tracker.step(1, METRICS, groups=GROUPS)
    tracker.close()
    assert tracker.goal.reached


def test_metric_that_the_run_lacks_is_an_alarm(tmp_path: Path) -> None:
    tracker = tracker_of(tmp_path, goal=Goal("rollout/reward_maen", 1.0))
    tracker.evaluation(0, EVALUATION)  # evaluations have other metrics
    for step in (1, 2, 3):
        tracker.step(step, METRICS)
    tracker.close()
    (alarm,) = read_records(tmp_path / ALARMS)
    assert "run.stop_metric='rollout/reward_maen' is not among" in alarm["text"]
    assert "Did you mean 'rollout/reward_mean'?" in alarm["text"]


@pytest.mark.slow
def test_resumed_run_that_has_reached_its_goal_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload: Any = SimpleNamespace(policies=(), held_out={})

    def resumed(stop_at: float) -> None:
        config = compose(
            [
                *(f"run.directory={tmp_path}", "run.resume=true", "evaluation.every=1"),
                *("run.stop_metric=eval/reward_mean", f"run.stop_at={stop_at}"),
            ]
        )
        with RunLock(tmp_path) as lock:
            assert trainer._train(config, workload, lock, RestartBudget(0, 1.0))

    def start(*arguments: Any) -> Any:
        raise RuntimeError("Engines are started.")

    monkeypatch.setattr("launch.training.start.start", start)
    state = RunState(compose([f"run.directory={tmp_path}"]), tmp_path)
    state.progress = Progress(step=1)
    save_whole(state, StreamState(), lambda folder: None)
    tracker = tracker_of(tmp_path)
    tracker.step(1, METRICS)
    tracker.evaluation(1, EVALUATION)
    tracker.close()
    resumed(0.5)
    assert "has reached run.stop_at=0.5: the run ends before" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="Engines are started"):
        resumed(0.6)
