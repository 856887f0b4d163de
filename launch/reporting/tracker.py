"""Reports a run's progress: a line per update, a JSON-lines file, its trackers, and two plots at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import yaml

from environments.bounds import near_name
from environments.command_name import command_name
from environments.data.trajectory_json import plain_json
from environments.errors import ConfigError, TroupeError
from environments.types import Trajectory, TrajectoryGroup
from launch.reporting.conversation import conversation
from launch.reporting.metrics import has_failed
from launch.reporting.plots import draw_curve, draw_timeline
from launch.reporting.trackers.base import BaseTracker
from launch.reporting.trackers.chosen import Trackers
from launch.run_folder.jsonl_log import JsonlLog, read_records

METRICS = "metrics.jsonl"
ALARMS = "alarms.jsonl"
SETTINGS = "settings.yaml"
CURVE = "learning_curve.png"
TIMELINE = "timeline.png"
BAR_WIDTH = 10
OVER = "\r\x1b[2K"
"""Makes a terminal write over its last line."""
LINE_WIDTH = 109
EVALUATION = "eval/"
"""Begins the names of an evaluation's metrics."""


class Goal:
    """Compares what a run records with ``run.stop_at``.

    Args:
        metric: ``None`` for a run without a goal.
    """

    def __init__(self, metric: str | None = None, value: float | None = None) -> None:
        self._metric, self._value = metric, value
        self._was_missed = False
        self.reached: str | None = None
        """The sentence about the record that has reached the goal."""

    def note(self, record: Mapping[str, float]) -> None:
        """Compare a record with the goal: a resumed run compares those of before too."""
        metric, value = self._metric, self._value
        if metric is None or value is None or self.reached or metric not in record:
            return
        if record[metric] >= value:
            step = int(record["step"])
            self.reached = f"{metric}={record[metric]:.4g} after step {step} has reached run.stop_at={value}"

    def missing(self, record: Mapping[str, float]) -> str | None:
        """Return a sentence, once, about the first record that should have the metric and has not."""
        metric = self._metric
        if metric is None or self._was_missed or metric in record:
            return None
        is_evaluation = any(name.startswith(EVALUATION) for name in record)
        if is_evaluation != metric.startswith(EVALUATION):
            return None
        self._was_missed = True
        return (
            f"run.stop_metric={metric!r} is not among the metrics of step {int(record['step'])}: the run "
            "stops by it only if an environment or a tracker of yours names it later."
            f"{near_name(metric, record)}"
        )


class Tracker:
    """Writes a run's progress to its folder and to the terminal.

    Args:
        directory: the run's folder.
        num_steps: policy updates of the whole run, for the progress bar.
        last_step: the step from which the run goes on. Records of later steps are dropped, since the run
            makes them again.
        chosen: trackers by their names, which are opened with the settings.
        goal: the metric at whose value the run ends early; none by default.
    """

    def __init__(
        self,
        directory: Path,
        num_steps: int,
        last_step: int = 0,
        chosen: Mapping[str, BaseTracker] | None = None,
        goal: Goal | None = None,
    ) -> None:
        self._directory = directory
        self._num_steps = num_steps
        self._start = time.monotonic()
        self._last_tenth = -1
        self._has_passing_line = False
        self._first_step = last_step
        self._file = JsonlLog(directory / METRICS, last_step)
        self.evaluated = {record["step"] for record in self._file.kept if _is_evaluation(record)}
        """The steps whose evaluation is recorded, those from before a resume included."""
        self._alarms = JsonlLog(directory / ALARMS, last_step)
        self._new_alarms: list[str] = []
        self._num_alarms = sum(int(record.get("learn/alarms", 0)) for record in self._file.kept)
        self._trackers = Trackers(chosen or {}, directory, last_step, self.announce)
        self.goal = goal or Goal()
        """The metric at whose value the run ends early, compared with all records, also those of before."""
        for record in self._file.kept:
            self.goal.note(record)

    def announce(self, text: str) -> None:
        """Print one line about the state of the run, with the seconds since its start."""
        self._print(f"[{time.monotonic() - self._start:6.1f} s] {text}")

    def settings(self, config: Any) -> None:
        """Write all settings of the run, defaults too, to its folder, and open its trackers with them."""
        settings = plain_json(config)
        text = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
        (self._directory / SETTINGS).write_text(text, encoding="utf-8")
        self._trackers.open(settings)

    def alarm(self, text: str) -> None:
        """Announce something that a person should look into; it is recorded with the next step, or at the
        end."""
        self._new_alarms.append(text)
        self.announce(f"ALARM: {text}")

    def failures(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Announce how many rollouts failed or ran out of time, with the first error."""
        played = [each for group in groups for each in group.trajectories]
        if errors := [each.error for each in played if has_failed(each)]:
            self.announce(f"{len(errors)} of {len(played)} rollouts failed, the first with: {errors[0]}")

    def offline_step(self, stage: str, step: int, num_steps: int, text: str) -> None:
        """Progress of a stage that rolls out nothing, such as the warm start.

        Args:
            text: on the metrics of the step.
        """
        tenth = 10 * step // num_steps
        if tenth == self._last_tenth and not sys.stdout.isatty():
            return  # no terminal shows it move
        self._last_tenth = tenth
        line = f"{self._bar(step, num_steps)} {stage} {step:4d}/{num_steps}"
        self._print(f"{line}  {text}", passes=step < num_steps)

    def step(
        self,
        step: int,
        metrics: dict[str, float],
        histograms: Mapping[str, Sequence[float]] | None = None,
        groups: Sequence[TrajectoryGroup] = (),
    ) -> None:
        """Record the metrics of one policy update.

        Args:
            metrics: with ``time/step`` and ``rollout/reward_mean``.
            histograms: values by name, such as the staleness of every trajectory, for trackers.
            groups: played for the update, of which trackers may have numbers of their own.
        """
        counted = {**metrics, "learn/alarms": len(self._new_alarms)}
        self._record_alarms(step)
        self._record("rollout", step, counted, groups, histograms or {})
        left = (self._num_steps - step) * (time.monotonic() - self._steps_since) / (step - self._first_step)
        self._print(self._step_line(step, metrics, left))

    def begin_steps(self) -> None:
        """Note that the updates begin: the time left is estimated from here."""
        self._steps_since = time.monotonic()

    def evaluation(
        self, step: int, metrics: dict[str, float], groups: Sequence[TrajectoryGroup] = ()
    ) -> None:
        """Record the reward on held-out tasks after ``step`` updates; later steps may be recorded already.

        One evaluation is recorded per step: the first, also if the run was resumed in between.
        """
        if step not in self.evaluated:
            self.evaluated.add(step)
            self._record("eval", step, metrics, groups, {})
        sets = "".join(
            f", {name.split('/')[1]} {value:.3f}"
            for name, value in metrics.items()
            if fnmatch(name, "eval/*/reward_mean")
        )
        self._print(
            f"  held-out reward after step {step}: {metrics['eval/reward_mean']:.3f}{sets} "
            f"({int(metrics['eval/num_tasks'])} tasks, {metrics['time/evaluate']:.1f} s)"
        )

    def sample(self, trajectory: Trajectory) -> None:
        """Print a conversation of the policy."""
        self._print(conversation(trajectory))

    def summary(self) -> None:
        """Announce what was reached against before, and where it is shown."""
        found = [record for record in read_metrics(self._directory) if _is_evaluation(record)]
        if len(found) > 1:
            before, after = (each["eval/reward_mean"] for each in (found[0], found[-1]))
            self.announce(
                f"The mean reward on held-out tasks went from {before:.3f} to {after:.3f} in "
                f"{found[-1]['step']} updates."
            )
        if self.goal.reached:
            self.announce(
                f"{self.goal.reached}: the run ends before its {self._num_steps} updates are made. To train "
                "on, set run.resume=true with a higher run.stop_at, or without both settings."
            )
        self.announce(f"Look at it: {command_name('view')} {self._directory}")

    def close(self) -> None:
        """Close the trackers, and draw the learning curve and the timeline."""
        if self._has_passing_line:
            self._print("")
        self._trackers.close()
        records = read_metrics(self._directory)
        self._record_alarms(max((record["step"] for record in records), default=0))  # of the last evaluation
        if any("rollout/reward_mean" in record for record in records):
            draw_curve(records, self._directory / CURVE)
            draw_timeline(records, self._directory / TIMELINE)

    def _record_alarms(self, step: int) -> None:
        for text in self._new_alarms:
            self._alarms.append({"step": step, "text": text})
        self._num_alarms += len(self._new_alarms)
        self._new_alarms.clear()

    def _record(
        self,
        kind: str,
        step: int,
        metrics: Mapping[str, float],
        groups: Sequence[TrajectoryGroup],
        histograms: Mapping[str, Sequence[float]],
    ) -> None:
        """Record an update or an evaluation, first in the folder, then with the trackers."""
        numbers = {**metrics, **self._trackers.measure(kind, step, groups, metrics)}
        record = {"step": step, **numbers}
        self._file.append(record)
        self._trackers.log(kind, step, numbers, {name: each for name, each in histograms.items() if each})
        self.goal.note(record)
        if missing := self.goal.missing(record):
            self.alarm(missing)

    def _step_line(self, step: int, metrics: Mapping[str, float], seconds_left: float) -> str:
        """Line of a step of at most ``LINE_WIDTH`` characters: less important parts go for want of room."""
        line = (
            f"{self._bar(step, self._num_steps)} step {step:4d}/{self._num_steps}"
            f"  reward {metrics['rollout/reward_mean']:.3f}  loss {metrics.get('learn/loss', 0.0):+.4f}"
        )
        end = f"  {_duration(metrics['time/step'])}  {_duration(seconds_left)} left"
        for part in (
            f"  ALARMS {self._num_alarms}" if self._num_alarms else "",
            f"  stale {metrics['stream/staleness_mean']:.1f}" if metrics.get("stream/staleness_max") else "",
            f"  idle {metrics['time/learner_idle']:.0%}" if "time/learner_idle" in metrics else "",
            f"  grad {metrics['learn/grad_norm']:.2f}" if "learn/grad_norm" in metrics else "",
        ):
            if len(line) + len(part) + len(end) <= LINE_WIDTH:
                line += part
        return line + end

    @staticmethod
    def _bar(done: int, total: int) -> str:
        filled = BAR_WIDTH * done // max(1, total)
        return "█" * filled + "░" * (BAR_WIDTH - filled)

    def _print(self, line: str, passes: bool = False) -> None:
        """Print a line. On a terminal the next one stands in the place of a line that ``passes``."""
        begin = OVER if self._has_passing_line else ""
        self._has_passing_line = passes and sys.stdout.isatty()
        with suppress(OSError):  # the folder has it all: a run outlives a terminal, or `tee`, that has gone
            sys.stdout.write(begin + line + ("" if self._has_passing_line else "\n"))
            sys.stdout.flush()


def read_settings(run: Path) -> tuple[str, Any]:
    """The settings file in the folder ``run``, as text and as data. Raises ``TroupeError`` without one, or
    for one that is damaged.
    """
    path = run / SETTINGS
    if not path.exists():
        raise TroupeError(f"{run} has no {SETTINGS}: name the folder of a run, which is its run.directory.")
    try:
        text = path.read_text(encoding="utf-8")
        return text, yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"{path} is damaged ({reason}): copy it again, or delete it.") from error


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of a run in the order of the file; a line that a crash has cut off is left out."""
    return read_records(directory / METRICS)


def _is_evaluation(record: Mapping[str, Any]) -> bool:
    return "eval/reward_mean" in record


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.0f} h"
