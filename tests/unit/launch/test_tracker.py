from __future__ import annotations

import sys
from pathlib import Path

import pytest
from machine import cpu_seconds

from launch.reporting.plots import draw_curve, draw_timeline
from launch.reporting.tracker import ALARMS, METRICS, OVER, Tracker, read_metrics
from launch.reporting.trackers.chosen import chosen_trackers
from launch.run_folder.jsonl_log import read_records
from launch.settings.tree import TrainConfig

EVALUATION = {"eval/reward_mean": 0.5, "eval/num_tasks": 4, "time/evaluate": 2.0}


def record(directory: Path, steps: range, last_step: int = 0) -> None:
    tracker = Tracker(directory, num_steps=10, last_step=last_step)
    tracker.begin_steps()
    for step in steps:
        tracker.step(step, {"time/step": 1.0, "rollout/reward_mean": step / 10})
    tracker.close()


def steps_of(directory: Path) -> list[int]:
    return [each["step"] for each in read_metrics(directory)]


def evaluations(directory: Path) -> dict[int, float]:
    """Value by step; fails where a step has two."""
    records = [each for each in read_metrics(directory) if "eval/reward_mean" in each]
    assert len({each["step"] for each in records}) == len(records)
    return {each["step"]: each["eval/reward_mean"] for each in records}


# -- records -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_step_is_recorded(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    assert steps_of(tmp_path) == [1, 2, 3]
    assert read_metrics(tmp_path)[1]["rollout/reward_mean"] == 0.2


@pytest.mark.slow
def test_records_after_the_resumed_step_are_made_again(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    record(tmp_path, range(3, 5), last_step=2)
    assert steps_of(tmp_path) == [1, 2, 3, 4]


@pytest.mark.slow
def test_fresh_start_in_the_same_folder_drops_everything(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    record(tmp_path, range(1, 2))
    assert steps_of(tmp_path) == [1]


@pytest.mark.slow
def test_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "rew')
    assert steps_of(tmp_path) == [1, 2, 3]
    record(tmp_path, range(4, 5), last_step=3)
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_folder_without_metrics_has_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []


@pytest.mark.slow
def test_evaluation_that_ends_late_belongs_to_its_own_step(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, num_steps=10)
    tracker.begin_steps()
    assert tracker.evaluated == set()
    for step in (1, 2, 3):
        tracker.step(step, {"time/step": 1.0, "rollout/reward_mean": 0.0})
    tracker.evaluation(1, EVALUATION)
    tracker.step(4, {"time/step": 1.0, "rollout/reward_mean": 0.0})
    tracker.evaluation(3, EVALUATION | {"eval/reward_mean": 0.75})
    tracker.close()
    assert steps_of(tmp_path) == [1, 2, 3, 1, 4, 3]

    resumed = Tracker(tmp_path, num_steps=10, last_step=2)
    assert steps_of(tmp_path) == [1, 2, 1], "that of step 1 is kept, that of step 3 is yet to come"
    assert resumed.evaluated == {1}
    resumed.evaluation(3, EVALUATION)
    resumed.close()
    assert evaluations(tmp_path) == {1: 0.5, 3: 0.5}


def test_evaluation_that_resumed_run_repeats_is_recorded_once(tmp_path: Path) -> None:
    for _ in range(2):
        tracker = Tracker(tmp_path, num_steps=10, last_step=2)
        tracker.evaluation(2, EVALUATION)
        tracker.close()
    assert evaluations(tmp_path) == {2: 0.5}


@pytest.mark.slow
def test_histograms_and_scalars_reach_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker(tmp_path, num_steps=2, chosen=chosen_trackers(["tensorboard"]))
    tracker.settings(TrainConfig())
    tracker.begin_steps()
    metrics = {"time/step": 1.0, "rollout/reward_mean": 0.5}
    tracker.step(1, metrics, {"stream/staleness": [0, 0, 1], "rollout/reward": []})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Scalars("rollout/reward_mean")[0].value == 0.5
    assert events.Tags()["histograms"] == ["stream/staleness"]
    assert events.Histograms("stream/staleness")[0].histogram_value.num == 3


# -- what is printed -----------------------------------------------------------------------------------


def printed_step(tracker: Tracker, capsys: pytest.CaptureFixture[str], step: int, **metrics: float) -> str:
    capsys.readouterr()
    tracker.begin_steps()
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    tracker.step(step, {"time/step": 1.5, "rollout/reward_mean": 0.5, **named})
    return capsys.readouterr().out.rstrip("\n")


def test_step_line_says_what_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = Tracker(tmp_path, num_steps=10)
    line = printed_step(tracker, capsys, 5, learn__loss=-0.01, learn__grad_norm=0.5, stream__staleness_max=0)
    assert line == "█████░░░░░ step    5/10  reward 0.500  loss -0.0100  grad 0.50  1.5 s  0.0 s left"
    metrics = {"stream__staleness_mean": 0.6, "stream__staleness_max": 2, "time__learner_idle": 0.25}
    line = printed_step(tracker, capsys, 6, **metrics)
    assert "  stale 0.6  idle 25%  " in line
    tracker.close()


@pytest.mark.slow
@pytest.mark.parametrize("num_steps", [30, 1_000_000])
def test_step_line_fits_whatever_there_is_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_steps: int
) -> None:
    tracker = Tracker(tmp_path, num_steps=num_steps)
    for _ in range(12):
        tracker.alarm("The engine is stale.")
    line = printed_step(
        tracker,
        capsys,
        num_steps,
        rollout__reward_mean=-123.4,
        learn__loss=-0.1234,
        learn__grad_norm=12.34,
        stream__staleness_mean=1.4,
        stream__staleness_max=2,
        time__learner_idle=1.0,
        time__step=99.9,
    )
    tracker.close()
    assert len(line) < 110
    assert "ALARMS 12" in line, "what matters most is there"
    assert "idle 100%" in line or num_steps > 30
    assert "grad" not in line, "what matters least is not"


def test_warm_start_is_one_line_on_terminal_and_few_in_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = Tracker(tmp_path, num_steps=10)
    for step in range(5, 355, 5):
        tracker.offline_step("warm start", step, 350, "loss 0.500")
    assert len(capsys.readouterr().out.splitlines()) == 11
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for step in range(5, 355, 5):
        tracker.offline_step("warm start", step, 350, "loss 0.500")
    tracker.announce("Policy server: up.")
    *passing, last, announced = capsys.readouterr().out.replace(OVER, "\n").splitlines()
    assert len(passing) == 69 and "350/350" in last and announced.endswith("Policy server: up.")
    tracker.offline_step("warm start", 5, 350, "loss 0.500")
    tracker.close()
    assert capsys.readouterr().out.endswith("\n"), "the prompt of the shell has a line of its own"


@pytest.mark.slow
def test_alarms_are_announced_recorded_and_counted_after_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tracker = Tracker(tmp_path, num_steps=10)
    assert "ALARM" not in printed_step(tracker, capsys, 1)
    tracker.alarm("The engine is stale.")
    assert "ALARM: The engine is stale." in capsys.readouterr().out
    printed_step(tracker, capsys, 2)
    printed_step(tracker, capsys, 3)
    tracker.alarm("Lost with the steps that are played again.")
    printed_step(tracker, capsys, 4)
    tracker.close()
    assert [each["learn/alarms"] for each in read_metrics(tmp_path)] == [0, 1, 0, 1]
    assert [each["step"] for each in read_records(tmp_path / ALARMS)] == [2, 4]

    resumed = Tracker(tmp_path, num_steps=10, last_step=3)
    assert read_records(tmp_path / ALARMS) == [{"step": 2, "text": "The engine is stale."}]
    assert "ALARMS 1 " in printed_step(resumed, capsys, 4)
    resumed.alarm("No step comes after the last evaluation.")
    resumed.close()
    assert read_records(tmp_path / ALARMS)[1:] == [
        {"step": 4, "text": "No step comes after the last evaluation."}
    ]


# -- pictures ------------------------------------------------------------------------------------------


def test_pictures_are_drawn_at_the_end(tmp_path: Path) -> None:
    record(tmp_path, range(1, 2))
    assert (tmp_path / "learning_curve.png").stat().st_size > 1000
    assert (tmp_path / "timeline.png").stat().st_size > 1000


@pytest.mark.slow
def test_timeline_of_a_long_run_is_drawn_in_a_moment(tmp_path: Path) -> None:
    records = [
        {"step": step, "time/step": 2.0, "time/wait": 0.5, "time/learn": 1.0, "stream/staleness_max": 1}
        for step in range(1, 50_001)
    ]
    assert cpu_seconds(lambda: draw_timeline(records, tmp_path / "timeline.png"), attempts=2) < 10
    assert (tmp_path / "timeline.png").stat().st_size > 1000


def test_run_that_ends_before_its_first_update_has_no_pictures(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, num_steps=10)
    tracker.evaluation(0, EVALUATION)
    tracker.close()
    assert list(tmp_path.glob("*.png")) == []


@pytest.mark.slow
def test_learning_curve_has_panel_for_what_environment_names(tmp_path: Path) -> None:
    from matplotlib.image import imread

    standard = [{"step": step, "rollout/reward_mean": 0.5, "rollout/pass_at_8": 1.0} for step in (1, 2)]
    named = [{**record, "rollout/called": 0.3, "eval/called": 0.4} for record in standard]
    draw_curve(standard, tmp_path / "standard.png")
    draw_curve(named, tmp_path / "named.png")
    (low, *_), (high, *_) = imread(tmp_path / "standard.png").shape, imread(tmp_path / "named.png").shape
    assert high > low


def test_learning_curve_shows_rewards_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[tuple[float, float]] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self.axes[0].get_ylim()))
    for rewards in ((0.25, 0.5), (-0.8, -0.4), (3.0, 12.5)):
        records = [{"step": step, "rollout/reward_mean": reward} for step, reward in enumerate(rewards)]
        draw_curve([*records, {"step": 1, "eval/reward_mean": rewards[1]}], tmp_path / "curve.png")
    usual, low, high = drawn
    assert usual == (0, 1.02)
    assert low[0] < -0.8 and low[1] > -0.4
    assert high[0] < 3 and high[1] > 12.5
