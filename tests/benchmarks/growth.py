"""How the seconds of an update grow: with its samples, with the rollout actors, with the tokens of an answer.

    python tests/benchmarks/growth.py [--only samples,actors,tokens] [--up-to 256] [--plot growth.png]

Single-turn answers of the tiny model in groups of 8 and in turns, as in ``peers.py``, with one optimizer step
an update. One of the three numbers grows and the other two stay. The model is changed so that it never ends
an answer by itself: each answer has as many tokens as it may have. Each size is a program of its own, whose
first two updates do not count, nor do those in which an actor still starts; the figures are medians of the
others.

More samples and longer answers are more work: the line that they are compared with is linear growth from the
smallest size. More rollout actors play the same samples: their line is flat. The table has the seconds as a
multiple of that line, and whether they grew at most as fast as the size, up to a tenth. Takes about half
an hour and, with 128 rollout actors, 13 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import models
import repository  # noqa: F401
from peers import GROUP_SIZE, NOT_COUNTED, RUN
from programs import run
from report import Report
from safetensors.numpy import load, save_file

from launch.reporting.metrics import LEARNER_STAGES
from launch.reporting.tracker import read_metrics

MAX_PROMPT_TOKENS = 64
TOLERANCE = 1.1
"""Growth that still counts as linear, as a multiple of it."""
END_LOGIT = -100.0
"""About what the end token gets in the model that never ends an answer; others get 3 at most."""


@dataclass(frozen=True)
class Update:
    """What an update is made of, and how many actors play it."""

    samples: int = 64
    actors: int = 16
    tokens: int = 48
    """Of each answer."""

    def __str__(self) -> str:
        return f"{self.samples} samples of {self.tokens} tokens, {self.actors} rollout actors"


@dataclass(frozen=True)
class Series:
    """Updates by the number that grows, the smallest first."""

    label: str
    updates: Mapping[int, Update]
    is_flat: bool = False
    """Whether the work stays the same, so that the seconds should too."""

    def up_to(self, largest: int) -> Series:
        """Without the larger sizes.

        Raises:
            ValueError: none is left but the smallest, or not even that.
        """
        updates = {size: update for size, update in self.updates.items() if size <= largest}
        if len(updates) < 2:
            raise ValueError(f"{self.label}: of {', '.join(map(str, self.updates))} two have to be left")
        return replace(self, updates=updates)

    def times(self, size: int) -> float:
        """``size`` as a multiple of the smallest one."""
        return size / min(self.updates)

    def line(self, size: int) -> float:
        """The seconds that are compared with, as a multiple of those of the smallest size."""
        return 1.0 if self.is_flat else self.times(size)


SERIES = {
    "samples": Series("samples of an update", {size: Update(samples=size) for size in (64, 256, 1024)}),
    "actors": Series(
        "rollout actors", {size: Update(samples=128, actors=size) for size in (16, 64, 128)}, is_flat=True
    ),
    "tokens": Series("tokens of an answer", {size: Update(tokens=size) for size in (48, 256, 1024)}),
}
LONGEST = max(SERIES["tokens"].updates)
LARGEST = max(size for series in SERIES.values() for size in series.updates)


@dataclass(frozen=True)
class Cost:
    """An update's seconds and tokens: medians of a program."""

    seconds: float
    rollouts: float
    """Seconds in which the learner waited for rollouts."""
    learner: float
    """Seconds in which it worked."""
    answer_tokens: float
    """Mean of the update's answers."""
    sampled_tokens: float
    """Of all its answers."""


def without_end(model: str) -> str:
    """Have the tiny model never end an answer; returns its folder.

    One number of the hidden state is the same for all tokens, and no layer adds to it. The output layer is
    the embedding: a row with a low value in that place gives its token a low logit, whatever the others are.
    """
    file = Path(model) / "model.safetensors"
    weights = {name: weight.copy() for name, weight in load(file.read_bytes()).items()}
    end = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 0] = 1.0
    embedding[end, 0] = END_LOGIT
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight[0] = 0.0
    save_file(weights, file, metadata={"format": "pt"})
    return model


def measure(update: Update, model: str, folder: Path, num_updates: int, options: Sequence[str]) -> Cost:
    """Train once."""
    overrides = [
        f"model.path={model}",
        f"run.directory={folder}",
        f"run.num_steps={num_updates}",
        f"rollout.groups_per_step={update.samples // GROUP_SIZE}",
        f"rollout.max_prompt_tokens={MAX_PROMPT_TOKENS}",
        f"rollout.max_response_tokens={update.tokens}",
        f"learner.mini_batch_size={update.samples}",
        f"fleet.num_actors={update.actors}",
        # The same for all, so that the engines differ in nothing but their requests.
        f"server.engine.max_model_tokens={MAX_PROMPT_TOKENS + LONGEST}",
    ]
    run([*RUN, *overrides, *options], {"RAY_worker_niceness": "0"})
    updates = [each for each in read_metrics(folder) if "learn/loss" in each][NOT_COUNTED:]
    counted = [each for each in updates if each["time/actors_ready"] == update.actors]
    if not counted:
        sys.exit(f"{update}: in no update all actors were up. Give more --updates than {num_updates}.")
    return Cost(
        seconds=statistics.median(each["time/step"] for each in counted),
        rollouts=statistics.median(each["time/wait"] for each in counted),
        learner=statistics.median(sum(each.get(stage, 0.0) for stage in LEARNER_STAGES) for each in counted),
        answer_tokens=statistics.median(each["rollout/response_tokens_mean"] for each in counted),
        sampled_tokens=statistics.median(each["rollout/sampled_tokens"] for each in counted),
    )


def add_rows(report: Report, series: Series, costs: Mapping[Update, Cost]) -> None:
    """A row for each size of ``series``."""
    smallest = costs[series.updates[min(series.updates)]].seconds
    for size, update in series.updates.items():
        cost = costs[update]
        growth = cost.seconds / smallest
        is_linear = growth <= TOLERANCE * series.times(size)
        report.add(
            series.label,
            f"{size:,}",
            f"{cost.seconds:.2f}",
            f"{cost.rollouts:.2f}",
            f"{cost.learner:.2f}",
            f"{cost.answer_tokens:.0f}",
            f"{1000 * cost.seconds / cost.sampled_tokens:.3f}",
            f"{series.times(size):.1f} x the size, {growth:.2f} x the seconds",
            f"{growth / series.line(size):.2f}",
            "yes" if is_linear else "no",
        )


def draw(chosen: Sequence[Series], costs: Mapping[Update, Cost], path: Path) -> None:
    """A panel for each series: the seconds over the size, and the line that they are compared with."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import LogFormatter

    figure, panels = plt.subplots(
        1, len(chosen), sharey=True, squeeze=False, figsize=(3.5 * len(chosen), 3.5)
    )
    for series, axes in zip(chosen, panels[0], strict=True):
        sizes = list(series.updates)
        seconds = [costs[update].seconds for update in series.updates.values()]
        line = [seconds[0] * series.line(size) for size in sizes]
        axes.loglog(sizes, seconds, marker="o", label="measured")
        axes.loglog(sizes, line, "--", color="#777777", label="no growth" if series.is_flat else "linear")
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.set_xticks([], minor=True)
        axes.set_xlabel(series.label)
        axes.legend()
    seconds_axis = panels[0][0].yaxis
    seconds_axis.set_label_text("seconds of an update")
    seconds_axis.set_major_formatter(LogFormatter())  # 20, not 2 x 10^1
    seconds_axis.set_minor_formatter(LogFormatter())
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(SERIES), help="what grows, with commas between")
    parser.add_argument(
        "--updates", type=int, default=25, help=f"of each program; the first {NOT_COUNTED} do not count"
    )
    parser.add_argument("--plot", type=Path, help="draw the seconds over the sizes into this file")
    parser.add_argument("overrides", nargs="*", help="settings of the runs, such as rollout.max_staleness=1")
    parser.add_argument("--up-to", type=int, default=LARGEST, help="leave out larger sizes")
    arguments = parser.parse_args()
    names = arguments.only.split(",")
    if unknown := sorted({*names} - {*SERIES}):
        parser.error(f"--only: {unknown[0]!r} is none of {', '.join(SERIES)}")
    if arguments.updates <= NOT_COUNTED:
        parser.error(f"--updates: the first {NOT_COUNTED} do not count, so {NOT_COUNTED + 1} are the fewest")
    try:
        chosen = [SERIES[name].up_to(arguments.up_to) for name in names]
    except ValueError as error:
        parser.error(f"--up-to {arguments.up_to}: {error}")
    report = Report(
        f"an update of single-turn answers, tiny model: medians of programs of {arguments.updates} updates",
        (
            "what grows",
            "size",
            "seconds",
            "rollouts",
            "learner",
            "tokens an answer",
            "ms a token",
            "growth",
            "of the line",
            "linear at most",
        ),
    )
    costs: dict[Update, Cost] = {}
    with tempfile.TemporaryDirectory() as temporary:
        model = without_end(models.tiny(Path(temporary)))
        # The smallest updates of two series are the same: it is measured once.
        for update in dict.fromkeys(each for series in chosen for each in series.updates.values()):
            folder = Path(temporary) / str(len(costs))
            costs[update] = measure(update, model, folder, arguments.updates, arguments.overrides)
            print(f"{update}: {costs[update].seconds:.2f} s", flush=True)
    for series in chosen:
        add_rows(report, series, costs)
    report.print()
    if arguments.plot:
        draw(chosen, costs, arguments.plot)


if __name__ == "__main__":
    main()
