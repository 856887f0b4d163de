"""The plot and the table of ``learning_curves``: means over seeds, their spread, and confidence intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from readme_tables import markdown

Points = Sequence[tuple[int, float]]
"""Steps and values of a metric in one run."""
Runs = dict[str, dict[str, dict[str, list[tuple[int, float]]]]]
"""Points by method, metric and seed."""

CURVE = "reinforce"
"""The method that is drawn over its updates; the others are lines at the height where they end."""
BEFORE = "before the first update"
GRAY = "#777777"
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Of Student's t at 97.5 %, from 1 degree of freedom to 9; for more, that of 9 is a little too wide."""


@dataclass(frozen=True)
class Method:
    """How a method is called and drawn."""

    label: str
    color: str


@dataclass(frozen=True)
class Summary:
    """Values of several seeds."""

    mean: float
    low: float
    high: float
    margin: float
    """Half the width of the 95 % confidence interval of the mean, by Student's t; NaN with one seed."""

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Summarize at least one value."""
        number = len(values)
        margin = math.nan
        if number > 1:
            quantile = T_QUANTILES[min(number - 1, len(T_QUANTILES)) - 1]
            margin = quantile * statistics.stdev(values) / math.sqrt(number)
        return cls(statistics.fmean(values), min(values), max(values), margin)

    def __str__(self) -> str:
        if math.isnan(self.margin):
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ± {self.margin:.2f} ({self.low:.2f} to {self.high:.2f})"


def by_step(seeds: Mapping[str, Points]) -> dict[int, Summary]:
    """The values of all seeds at each step."""
    values: dict[int, list[float]] = {}
    for points in seeds.values():
        for step, value in points:
            values.setdefault(step, []).append(value)
    return {step: Summary.of(values[step]) for step in sorted(values)}


def ends(seeds: Mapping[str, Points]) -> Summary | None:
    """The last value of each seed."""
    values = [max(points)[1] for points in seeds.values() if points]
    return Summary.of(values) if values else None


def beginnings(seeds: Mapping[str, Points]) -> Summary | None:
    """The values before the first update."""
    values = [value for points in seeds.values() for step, value in points if step == 0]
    return Summary.of(values) if values else None


def metric_names(runs: Runs) -> list[str]:
    """The reward first, then what the environment names."""
    names = {name.partition("/")[2] for metrics in runs.values() for name in metrics}
    return sorted(names, key=lambda name: (name != "reward_mean", name))


# -- the table -------------------------------------------------------------------------------------------


def table(runs: Runs, methods: Mapping[str, Method]) -> str:
    """In Markdown: held-out values of each method at its end, and before any reinforcement."""
    names = metric_names(runs)
    heads = ["success" if name == "reward_mean" else f"`{name}`" for name in names]
    before = [beginnings(runs.get(CURVE, {}).get(f"eval/{name}", {})) for name in names]
    rows = [_row(BEFORE, before)]
    for name, method in methods.items():
        if name in runs:
            rows.append(_row(method.label, [ends(runs[name].get(f"eval/{metric}", {})) for metric in names]))
    return markdown(["held-out tasks", *heads], rows)


def _row(label: str, cells: Sequence[Summary | None]) -> list[str]:
    return [label, *("" if each is None else str(each) for each in cells)]


# -- the plot --------------------------------------------------------------------------------------------


def draw(runs: Runs, methods: Mapping[str, Method], path: Path) -> None:
    """One panel for each metric.

    The line is the mean over the seeds in training, the band around it reaches from the lowest seed to the
    highest. Dots are the mean on held-out tasks with its 95 % confidence interval. A baseline is a dashed
    line at its mean on held-out tasks, with a band from its lowest seed to its highest.
    """
    from matplotlib.figure import Figure

    names = metric_names(runs)
    figure = Figure(figsize=(7.5, 2.2 + 2.2 * len(names)), layout="constrained")
    ratios = [2.0] + [1.3] * (len(names) - 1)
    panels = figure.subplots(len(names), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    for axes, name in zip(panels, names, strict=True):
        _draw_curve(axes, runs.get(CURVE, {}), name, methods[CURVE])
        for key, method in methods.items():
            end = ends(runs.get(key, {}).get(f"eval/{name}", {})) if key != CURVE else None
            if end is not None:
                _draw_baseline(axes, end, method)
        before = beginnings(runs.get(CURVE, {}).get(f"eval/{name}", {}))
        if before is not None:
            _draw_baseline(axes, before, Method(BEFORE, GRAY))
        axes.set(ylabel="success" if name == "reward_mean" else name.replace("_", " "), ylim=(0, 1.03))
        axes.grid(alpha=0.3)
    panels[-1].set_xlabel("policy updates")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside lower center", fontsize="small", ncols=2
    )
    figure.savefig(path, dpi=110)


def _draw_curve(axes: Any, metrics: Mapping[str, Mapping[str, Points]], name: str, method: Method) -> None:
    training = by_step(metrics.get(f"rollout/{name}", {}))
    steps = list(training)
    label, color = method.label, method.color
    axes.plot(steps, [each.mean for each in training.values()], color=color, label=f"{label}, in training")
    low, high = [each.low for each in training.values()], [each.high for each in training.values()]
    axes.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    tests = by_step(metrics.get(f"eval/{name}", {}))
    margins = [0.0 if math.isnan(each.margin) else each.margin for each in tests.values()]
    axes.errorbar(
        list(tests),
        [each.mean for each in tests.values()],
        yerr=margins,
        fmt="o",
        color=color,
        capsize=3,
        label=f"{label}, on held-out tasks",
    )


def _draw_baseline(axes: Any, end: Summary, method: Method) -> None:
    axes.axhline(end.mean, color=method.color, linestyle="--", linewidth=1.2, label=method.label)
    axes.axhspan(end.low, end.high, color=method.color, alpha=0.15, linewidth=0)
