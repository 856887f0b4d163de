"""What a run tells: a line per step, a JSON-lines file, TensorBoard, and a learning curve at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

METRICS = "metrics.jsonl"
CURVE = "learning_curve.png"
BAR_WIDTH = 20


class Tracker:
    """Writes a run's progress to its folder and to the terminal.

    Args:
        directory: the run's folder.
        num_steps: policy updates of the whole run, for the progress bar.
        last_step: what was recorded after it is dropped: a resumed run records it again.
    """

    def __init__(self, directory: Path, num_steps: int, last_step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._directory = directory
        self._num_steps = num_steps
        self._start = time.monotonic()
        self._first_step = last_step
        directory.mkdir(parents=True, exist_ok=True)
        self._keep_up_to(last_step)
        self._file = (directory / METRICS).open("a", encoding="utf-8")
        self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=last_step + 1)

    def announce(self, text: str) -> None:
        """One line about what is going on, with the seconds since the start."""
        self._print(f"[{time.monotonic() - self._start:6.1f} s] {text}")

    def warm_start(self, step: int, num_steps: int, metrics: dict[str, float]) -> None:
        """Progress of the supervised warm start."""
        self._print(
            f"{self._bar(step, num_steps)} warm start {step:4d}/{num_steps}  loss {metrics['learn/loss']:.3f}"
        )

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of one policy update."""
        self._record({"step": step, **metrics})
        seconds = metrics["time/step"]
        left = (self._num_steps - step) * (time.monotonic() - self._steps_since) / (step - self._first_step)
        self._print(
            f"{self._bar(step, self._num_steps)} step {step:4d}/{self._num_steps}"
            f"  reward {metrics['rollout/reward_mean']:.3f}  loss {metrics.get('learn/loss', 0.0):+.4f}"
            f"  grad {metrics.get('learn/grad_norm', 0.0):.2f}  {seconds:.1f} s  {left:.0f} s left"
        )

    def begin_steps(self) -> None:
        """The updates begin: the time left is estimated from here."""
        self._steps_since = time.monotonic()

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Success on the held-out tasks after ``step`` updates."""
        self._record({"step": step, **metrics})
        self._print(
            f"  held-out success after step {step}: {metrics['eval/reward_mean']:.3f} "
            f"({int(metrics['eval/num_tasks'])} tasks, {metrics['time/evaluate']:.1f} s)"
        )

    def close(self) -> None:
        """Draw the learning curve and close the files."""
        self._file.close()
        self._board.close()
        records = read_metrics(self._directory)
        if any("rollout/reward_mean" in record for record in records):
            draw_curve({self._directory.name: records}, self._directory / CURVE)

    def _record(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            self._board.add_scalar(name, value, record["step"])

    def _keep_up_to(self, last_step: int) -> None:
        path = self._directory / METRICS
        if path.exists():
            kept = [record for record in read_metrics(self._directory) if record["step"] <= last_step]
            temporary = path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
            os.replace(temporary, path)

    @staticmethod
    def _bar(done: int, total: int) -> str:
        filled = BAR_WIDTH * done // max(1, total)
        return "█" * filled + "░" * (BAR_WIDTH - filled)

    @staticmethod
    def _print(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The records of a run, oldest first; a line that was cut off by a crash is left out."""
    path = directory / METRICS
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


def draw_curve(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Plot reward in training (line) and success on held-out tasks (dots) over the updates of ``runs``."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, records in runs.items():
        steps = [
            (each["step"], each["rollout/reward_mean"]) for each in records if "rollout/reward_mean" in each
        ]
        (line,) = axes.plot(*zip(*steps, strict=True), label=name, alpha=0.7)
        tests = [(each["step"], each["eval/reward_mean"]) for each in records if "eval/reward_mean" in each]
        if tests:
            axes.plot(*zip(*tests, strict=True), "o", color=line.get_color(), markersize=7)
    axes.plot([], [], "-", color="gray", label="reward in training")
    axes.plot([], [], "o", color="gray", label="success on held-out tasks")
    axes.set(xlabel="policy updates", ylabel="reward", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=130)
