"""The plots of a run, which ``Tracker`` draws at its end: what was learned, and where the time went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.reporting.metrics import is_standard

Records = Sequence[dict[str, Any]]

PARTS = {
    "time/wait": "#c7c7c7",
    "time/score": "#98b6d8",
    "time/learn": "#2a6fb0",
    "time/publish": "#e8a33d",
    "time/checkpoint": "#8c6bb1",
    "time/evaluate": "#5aa469",
}
"""Parts of the seconds of an update, from the bottom of the plot upward, with the colours."""
OTHER = "#ececec"
STALE_COLOUR = "#c44e52"
MAX_COLUMNS = 150


def draw_curve(records: Records, path: Path) -> None:
    """Plot reward in training (line) and success on held-out tasks (dots) over the updates of a run.

    Metrics that the environment names are drawn below it in the same way.
    """
    from matplotlib.figure import Figure

    recorded = {name for record in records for name in record if name.startswith("rollout/")}
    names = sorted(name.removeprefix("rollout/") for name in recorded if not is_standard(name))
    figure = Figure(figsize=(7, 6 if names else 4), layout="constrained")
    panels = figure.subplots(2 if names else 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes, metrics in zip(panels, (["reward_mean"], names), strict=False):
        for name in metrics:
            (line,) = axes.plot(*_series(records, f"rollout/{name}"), label=name, alpha=0.7)
            axes.plot(*_series(records, f"eval/{name}"), "o", color=line.get_color(), markersize=7)
        axes.plot([], [], "-", color="gray", label="in training")
        axes.plot([], [], "o", color="gray", label="on held-out tasks")
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize="small")
    panels[0].set_ylabel("reward")
    if all(0 <= value <= 1 for line in panels[0].lines for value in line.get_ydata()):
        panels[0].set_ylim(0, 1.02)
    panels[-1].set_xlabel("policy updates")
    figure.savefig(path, dpi=130)


def draw_timeline(records: Records, path: Path) -> None:
    """Plot the seconds of each update, one part stacked upon the other, and below them the staleness.

    In a run with many updates, one column stands for several of them.

    Args:
        records: of one run. Records without ``time/step`` are ignored; at least one must have it.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = sorted((each for each in records if "time/step" in each), key=lambda each: each["step"])
    columns = _columns(steps)
    edges = [column[0]["step"] - 0.5 for column in columns] + [columns[-1][-1]["step"] + 0.5]
    figure = Figure(figsize=(7, 5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    _stack_parts(upper, columns, edges)
    oldest = [max(each.get("stream/staleness_max", 0) for each in column) for column in columns]
    lower.stairs(oldest, edges, color=STALE_COLOUR, alpha=0.3, fill=True, label="oldest")
    lower.stairs(
        _means(columns, "stream/staleness_mean"), edges, color=STALE_COLOUR, label="mean", baseline=None
    )
    lower.set(xlabel="policy updates", ylabel="staleness", ylim=(0, max([1, *oldest]) * 1.1))
    for axis in (lower.xaxis, lower.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    for axes in (upper, lower):
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize="small", reverse=True)
    figure.savefig(path, dpi=130)


def _stack_parts(axes: Any, columns: Sequence[Records], edges: Sequence[float]) -> None:
    below = [0.0] * len(columns)
    for name, color in PARTS.items():
        seconds = _means(columns, name)
        if any(seconds):
            above = [low + more for low, more in zip(below, seconds, strict=True)]
            label = name.removeprefix("time/")
            axes.stairs(above, edges, baseline=below, fill=True, color=color, label=label)
            below = above
    whole = [max(pair) for pair in zip(below, _means(columns, "time/step"), strict=True)]
    axes.stairs(whole, edges, baseline=below, fill=True, color=OTHER, label="other")
    axes.set(ylabel="seconds per update", xlim=(edges[0], edges[-1]), ylim=(0, None))


def _columns(steps: Records) -> list[Records]:
    """Columns of the plot, ``MAX_COLUMNS`` at most: runs of as many consecutive steps each."""
    width = math.ceil(len(steps) / MAX_COLUMNS)
    return [steps[start : start + width] for start in range(0, len(steps), width)]


def _means(columns: Sequence[Records], name: str) -> list[float]:
    """The mean of a metric over each column; 0 where it was not recorded."""
    return [sum(each.get(name, 0.0) for each in column) / len(column) for column in columns]


def _series(records: Records, name: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric where it was recorded, by step."""
    points = sorted((each["step"], each[name]) for each in records if name in each)
    return [step for step, _ in points], [value for _, value in points]
