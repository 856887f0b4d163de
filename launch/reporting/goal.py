"""The goal of a run: a metric, and the value at which the run ends before its last update."""

from __future__ import annotations

from collections.abc import Mapping

from environments.bounds import near_name

EVALUATION = "eval/"


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
