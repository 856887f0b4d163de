from __future__ import annotations

from pathlib import Path

from launch.tracking import METRICS, Tracker, read_metrics


def record(directory: Path, steps: range, last_step: int = 0) -> None:
    tracker = Tracker(directory, num_steps=10, last_step=last_step)
    tracker.begin_steps()
    for step in steps:
        tracker.step(step, {"time/step": 1.0, "rollout/reward_mean": step / 10})
    tracker.close()


def steps_of(directory: Path) -> list[int]:
    return [each["step"] for each in read_metrics(directory)]


def test_every_step_is_recorded(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    assert steps_of(tmp_path) == [1, 2, 3]
    assert read_metrics(tmp_path)[1]["rollout/reward_mean"] == 0.2


def test_what_came_after_the_resumed_step_is_dropped_and_recorded_again(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    record(tmp_path, range(3, 5), last_step=2)
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_a_fresh_start_in_the_same_folder_drops_everything(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    record(tmp_path, range(1, 2))
    assert steps_of(tmp_path) == [1]


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "rew')
    assert steps_of(tmp_path) == [1, 2, 3]
    record(tmp_path, range(4, 5), last_step=3)
    assert steps_of(tmp_path) == [1, 2, 3, 4]


def test_the_learning_curve_is_drawn_at_the_end(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    assert (tmp_path / "learning_curve.png").stat().st_size > 1000


def test_a_folder_without_metrics_has_none(tmp_path: Path) -> None:
    assert read_metrics(tmp_path) == []
