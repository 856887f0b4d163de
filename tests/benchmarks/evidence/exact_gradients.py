"""The gradient of an update against the exact policy gradient of a small world: bias and variance.

    python tests/benchmarks/evidence/exact_gradients.py [--updates 32] [--only grpo,rloo] [--minutes 110]

Every algorithm, its treatments of groups without a signal, staleness 0, 2 and 4, and each correction. World,
policy and what is real of the learner: ``tests/table_updates.py``. An update has 16 groups of 4, each of a
task drawn anew; rows of one staleness learn from the same groups. Three figures a row:

``bias``: the part of the mean gradient across the exact one, over the part along it: 0 points where the exact
one does. A row is called biased from four standard errors on. ``length``: the part along it, over the exact
one's; a factor that learning rate and optimizer take up is no bias. ``variance``: of an update of this
length, times the groups that were played for one, over that of REINFORCE with the exact baseline, on-policy.

Distillation is compared with the gradient of its own objective. Noise is taken out by the gradient of that
REINFORCE on the same episodes (its mean is known). For a biased row the causes are switched off together,
and then each is switched on alone. Finished rows are kept in ``exact_gradients.json``, and a second call goes
on there. Takes about 20 minutes of a core.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count, islice
from pathlib import Path
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[0]), str(HERE.parents[1])]

import numpy as np  # noqa: E402
import repository  # noqa: E402, F401
import torch  # noqa: E402
from report import Report  # noqa: E402

from environments.errors import ConfigError  # noqa: E402
from environments.types import Trajectory, TrajectoryGroup  # noqa: E402
from policies.learning.algorithm import Algorithm  # noqa: E402
from policies.learning.algorithms import ALGORITHMS, resolve  # noqa: E402
from policies.learning.registry import ESTIMATORS, register_estimator  # noqa: E402
from policies.learning.settings import AlgorithmConfig, CorrectionConfig  # noqa: E402

# isort: split
from table_updates import (  # noqa: E402
    LEARNER,
    RESPONSE_TOKENS,
    TASKS,
    Learner,
    Reward,
    drawn_groups,
    environment,
    exact_gradient,
    versions,
)

GROUPS, MEMBERS = 16, 4
STALENESS = (0, 2, 4)
TREATMENTS = ("keep", "drop", "refill")
CORRECTIONS = {
    "none": CorrectionConfig(level="none"),
    "token": CorrectionConfig(level="token"),
    "sequence": CorrectionConfig(level="sequence"),
    "bypass": CorrectionConfig(level="bypass"),
    "token, masked": CorrectionConfig(level="token", mask_outside=[0.5, 2.0]),
    "sequence, masked": CorrectionConfig(level="sequence", mask_outside=[0.5, 2.0]),
}
MANY_ERRORS = 4.0
"""Standard errors from which on a row is called biased: one of ten thousand rows without a bias."""


@register_estimator("returns", by_token=True)
def returns(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rewards from each token on: what reinforce_plus_plus normalizes."""
    found = token_level_rewards.flip(-1).cumsum(-1).flip(-1) * response_mask
    return found, found


@register_estimator("returns_above_values", by_token=True, uses_critic=True)
def returns_above_values(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same above the critic's values: what ppo normalizes, with lambda 1."""
    found, _ = returns(token_level_rewards, response_mask)
    return (found - values) * response_mask, found


# -- why a row is biased -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cause:
    """A part of an algorithm that makes its gradient another one's."""

    sentence: str
    applies: Callable[[Algorithm], bool]
    without: dict[str, Any]
    """Settings of the algorithm that leave it out; ``options`` are added to those that it has."""
    by: str = ""
    """Another cause, without which this one does nothing."""

    def removed(self, algorithm: Algorithm) -> Algorithm:
        settings = dict(self.without)
        options = {**algorithm.options, **settings.pop("options", {})}
        return replace(algorithm, options=options, **settings)


WHOLE_EPISODE = {"bypass": False, "correction_level": "sequence", "truncate_above": 1e9}
NO_DEVIATION = {"options": {"normalize_by_std": False}}
CAUSES = {
    "deviation": Cause(
        "division by the group's deviation weighs groups by how rare their rewards are",
        lambda one: bool(one.options.get("normalize_by_std")),
        NO_DEVIATION,
    ),
    "turns": Cause(
        "the part of a turn has another objective (discounted, or the turn's reward alone)",
        lambda one: one.turn_weight > 0,
        {"options": {"omega": 0.0}},
    ),
    "whitening, group": Cause(
        "normalization over the update has each reward in its own mean and deviation",
        lambda one: one.advantage == "reinforce_plus_plus_baseline",
        {"advantage": "grpo"} | NO_DEVIATION,
    ),
    "whitening, returns": Cause(
        "normalization over the update's tokens subtracts a mean in which the episode itself has part",
        lambda one: one.advantage == "reinforce_plus_plus",
        {"advantage": "returns"},
    ),
    "whitening, critic": Cause(
        "normalization over the update's tokens subtracts a mean in which the episode itself has part",
        lambda one: one.advantage == "gae",
        {"advantage": "returns_above_values"},
    ),
    "weighted mean": Cause(
        "the mean by length counts the compared episode itself, long ones more than short ones",
        lambda one: one.advantage == "opo",
        {"advantage": "rloo"},
    ),
    "alpha": Cause(
        "alpha divides by the groups with a signal, which are other ones in each update",
        lambda one: one.advantage == "gpg",
        {"advantage": "grpo"} | NO_DEVIATION,
    ),
    "token mean": Cause(
        "the mean over the update's tokens divides by lengths that the policy has drawn with the rewards",
        lambda one: one.loss_aggregation == "token-mean",
        {"loss_aggregation": "seq-mean-token-sum"},
    ),
    "response mean": Cause(
        "the mean over a response's tokens weighs short episodes more",
        lambda one: one.loss_aggregation == "seq-mean-token-mean",
        {"loss_aggregation": "seq-mean-token-sum"},
    ),
    "own terms": Cause(
        "each token has its own term of the reverse KL, and pays for none that follows",
        lambda one: one.advantage == "reverse_kl",
        {},
    ),
    "uncorrected": Cause(
        "nothing corrects for the older policy",
        lambda one: one.correction_level is None and not one.bypass,
        WHOLE_EPISODE,
    ),
    "by token": Cause(
        "a token's weight leaves out how likely the rest of its episode was, and is cut",
        lambda one: one.correction_level == "token",
        WHOLE_EPISODE | {"mask_below": None, "mask_above": None},
    ),
    "truncated": Cause(
        "weights above the bound are cut",
        lambda one: one.correction_level == "sequence" and (one.truncate_above or math.inf) < 1e9,
        WHOLE_EPISODE,
    ),
    "masked": Cause(
        "episodes with a weight outside of the bounds are left out",
        lambda one: one.correction_level == "sequence" and one.masks_far_tokens,
        WHOLE_EPISODE | {"mask_below": None, "mask_above": None},
    ),
    "clipped": Cause(
        "the loss clips the ratio to the policy that sampled: what has become likelier teaches nothing",
        lambda one: one.bypass and one.policy_loss.clips,
        {"clip_low": 1e9, "clip_high": 1e9},
        by="ratio to the engine",
    ),
    "ratio to the engine": Cause(
        "the loss's ratio, of a token or a mean over the response, leaves out the rest of the episode",
        lambda one: one.bypass,
        WHOLE_EPISODE,
    ),
}


def causes_of(algorithm: Algorithm, staleness: int) -> dict[str, Cause]:
    """The causes that an algorithm has."""
    found = {name: each for name, each in CAUSES.items() if each.applies(algorithm)}
    return {name: each for name, each in found.items() if staleness or not each.without.get("truncate_above")}


# -- bias and variance ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """What the updates of a row were in the mean."""

    bias: float
    low: float
    high: float
    """Ends of the 95 % interval of the bias."""
    errors: float
    """Standard errors that the square of the bias is above 0."""
    length: float
    length_error: float
    variance: float
    whole_bias: float
    """Length of the difference of mean and exact gradient, over the exact one's."""

    @property
    def is_biased(self) -> bool:
        return self.errors > MANY_ERRORS

    def __str__(self) -> str:
        return f"{self.bias:.3f}" if self.is_biased else f"< {self.high:.3f}"


def measured(found: np.ndarray, control: np.ndarray, exact: np.ndarray, cost: float) -> Measured:
    """Compare gradients with the exact one.

    Args:
        found: [updates, parameters]
        control: [updates, parameters] of the same episodes, with mean ``exact``.
        cost: groups that were played for an update, over those that are in it; times the variance of an
            update of plain REINFORCE it is what a variance is a multiple of.
    """
    number, centred = len(found), control - control.mean(0)
    factor = float(((found - found.mean(0)) * centred).sum() / (centred**2).sum())
    values = found - factor * (control - exact)
    along = values @ exact / (exact @ exact)
    across = values - np.outer(along, exact)
    length, mean = float(along.mean()), across.mean(0)
    covariance = np.cov(across.T) / number
    square = float(mean @ mean - np.trace(covariance))
    noise = 2 * float((covariance**2).sum())
    error = math.sqrt(noise + 4 * max(0.0, float(mean @ covariance @ mean)))
    unit = length**2 * float(exact @ exact)
    bias, low, high = (
        math.sqrt(max(0.0, each) / unit) for each in (square, square - 2 * error, square + 2 * error)
    )
    return Measured(
        bias=bias,
        low=low,
        high=high,
        errors=square / math.sqrt(noise) if noise else 0.0,
        length=length,
        length_error=float(along.std(ddof=1)) / math.sqrt(number),
        variance=cost * float(found.var(0, ddof=1).sum()) / length**2,
        whole_bias=float(np.linalg.norm(values.mean(0) - exact) / np.linalg.norm(exact)),
    )


class Supply:
    """Groups without end, the same ones for each who goes through them."""

    def __init__(self, groups: Iterator[TrajectoryGroup]) -> None:
        self._groups, self._drawn = groups, list[TrajectoryGroup]()

    def __iter__(self) -> Iterator[TrajectoryGroup]:
        for index in count():
            if index == len(self._drawn):
                self._drawn.append(next(self._groups))
            yield self._drawn[index]


class Bench:
    """Updates on the same groups for all rows of a staleness.

    Args:
        num_updates: of a row.
        kept: what has been measured, by row.
    """

    def __init__(self, num_updates: int, kept: dict[str, dict[str, float]]) -> None:
        self.kept, self._num_updates = kept, num_updates
        tables = versions()
        self._table, self._teacher = tables[LEARNER], tables[-1]
        self._older = {staleness: tables[LEARNER - staleness] for staleness in STALENESS}
        self._groups: dict[int, list[Supply]] = {}
        self._plain = float(self._control(0, environment).var(0, ddof=1).sum())

    def divergence(self, task: str, path: Any) -> float:
        """The reward of which the gradient is that of minus the divergence from the teacher."""
        return float((self._teacher.logprobs(task, path) - self._table.logprobs(task, path)).sum())

    def groups(self, staleness: int) -> list[Supply]:
        """The groups of each update."""
        if staleness not in self._groups:
            table = self._older[staleness]
            self._groups[staleness] = [
                Supply(drawn_groups(table, MEMBERS, 1000 * staleness + seed))
                for seed in range(self._num_updates)
            ]
        return self._groups[staleness]

    def _control(self, staleness: int, reward: Reward) -> np.ndarray:
        """Plain REINFORCE of each update: weighted by whole episodes, above the expected reward."""
        older, terms = self._older[staleness], {}
        for task in TASKS:
            paths, chances = self._table.draws(task)
            expected = sum(chance * reward(task, path) for path, chance in zip(paths, chances, strict=True))
            for path in paths:
                weight = math.exp((self._table.logprobs(task, path) - older.logprobs(task, path)).sum())
                score = self._table.score(task, path).ravel()
                terms[task, path] = weight * (reward(task, path) - expected) * score
        episodes = (
            [_episode(each) for group in islice(groups, GROUPS) for each in group.trajectories]
            for groups in self.groups(staleness)
        )
        return np.array([np.mean([terms[each] for each in update], 0) for update in episodes])

    def key(self, algorithm: Algorithm, staleness: int) -> str:
        """Name under which a row is kept: all that decides it."""
        settings = {name: str(getattr(algorithm, name)) for name in algorithm.__slots__ if name != "name"}
        settings["options"] = str(sorted(algorithm.options.items()))
        return json.dumps([staleness, self._num_updates, settings], sort_keys=True)

    def measure(self, algorithm: Algorithm, staleness: int) -> Measured:
        """Bias and variance of a row; taken from what was kept, if it is there."""
        key = self.key(algorithm, staleness)
        if key not in self.kept:
            learner = Learner(self._table, self._teacher, algorithm, staleness)
            updates = [learner.update(iter(groups), GROUPS) for groups in self.groups(staleness)]
            reward = self.divergence if algorithm.advantage == "reverse_kl" else environment
            exact = exact_gradient(self._table, reward).ravel()
            cost = float(np.mean([each.num_groups for each in updates])) / GROUPS / self._plain
            found = np.array([each.gradient.ravel() for each in updates])
            self.kept[key] = asdict(measured(found, self._control(staleness, reward), exact, cost))
        return Measured(**self.kept[key])

    def causes(self, algorithm: Algorithm, staleness: int) -> tuple[Measured, dict[str, Measured]]:
        """A row with all of its causes switched off, and with each of them alone."""
        own = causes_of(algorithm, staleness)

        def without(names: Sequence[str]) -> Measured:
            changed = algorithm
            for name in names:
                changed = own[name].removed(changed)
            return self.measure(changed, staleness)

        off = without(list(own))
        alone = {name: without([each for each in own if each not in (name, own[name].by)]) for name in own}
        return off, alone


def _episode(trajectory: Trajectory) -> tuple[str, tuple[int, ...]]:
    task = trajectory.rollout_id.partition(" ")[0]
    return task, tuple(step.completion.completion_ids[0] for step in trajectory.steps)


# -- the rows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """A setting that is measured."""

    name: str
    treatment: str
    staleness: int
    correction: str

    def algorithm(self) -> Algorithm:
        """The algorithm with its settings. Raises ``ConfigError`` where they make no sense together."""
        return resolve(
            AlgorithmConfig(
                name=self.name,
                zero_signal_groups=self.treatment if _compares(self.name) else None,
                correction=CORRECTIONS[self.correction],
                options={"teacher": "the last version"} if self.name == "distillation" else {},
            ),
            RESPONSE_TOKENS,
            self.staleness,
        )


def rows(names: Sequence[str]) -> list[Row]:
    """All rows, but for those that would be the same as another: without staleness nothing is corrected."""
    every = [
        Row(name, treatment, staleness, correction)
        for treatment in TREATMENTS
        for staleness in STALENESS
        for name in names
        for correction in CORRECTIONS
    ]
    return [
        each
        for each in every
        if (each.staleness or each.correction == "none")
        and (each.treatment == "keep" or _compares(each.name))
    ]


def _compares(name: str) -> bool:
    return ESTIMATORS[ALGORITHMS[name].advantage].compares


def note(off: Measured, alone: dict[str, Measured]) -> str:
    """Why a row is biased, in words: the causes by their size alone."""
    parts = [
        f"{CAUSES[each].sentence} (alone {one})"
        for each, one in sorted(alone.items(), key=lambda pair: -pair[1].bias)
        if one.is_biased
    ]
    return "; ".join(parts) + f"; with these causes off {off}"


def save(path: Path, content: object) -> None:
    """Write JSON so that a cut leaves the former file or the new one."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1), encoding="utf-8")
    part.replace(path)


def collect(bench: Bench, wanted: Sequence[Row], path: Path, until: float) -> dict[Row, tuple[Measured, str]]:
    """Measure the rows one after the other; what the settings' checks refuse is left out.

    Args:
        until: no row is begun after this time.
    """
    found: dict[Row, tuple[Measured, str]] = {}
    num_left = 0
    for row in wanted:
        try:
            algorithm = row.algorithm()
        except ConfigError:
            continue
        if time.monotonic() > until and bench.key(algorithm, row.staleness) not in bench.kept:
            num_left += 1
            continue
        one, kept = bench.measure(algorithm, row.staleness), found.get(replace(row, treatment="keep"))
        why = ""
        if one.is_biased:
            as_kept = row.treatment != "keep" and kept is not None and kept[0].is_biased
            why = "as with keep" if as_kept else note(*bench.causes(algorithm, row.staleness))
        found[row] = one, why
        save(path, bench.kept)
        print(f"{row.name}, {row.treatment}, {row.staleness}, {row.correction}: {one} {why}", flush=True)
    if num_left:
        print(f"The time was over before {num_left} rows: call again to go on.")
    return found


def draw(found: dict[Row, tuple[Measured, str]], path: Path) -> None:
    """The bias and the variance of all rows, an algorithm and its treatment a line."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    lines = list(dict.fromkeys((row.name, row.treatment) for row in found))
    columns = sorted({(row.staleness, list(CORRECTIONS).index(row.correction)) for row in found})
    figure = Figure(figsize=(17, 1.5 + 0.28 * len(lines)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, field, limits in zip(panels, ("bias", "variance"), ((0.01, 1), (0.3, 10)), strict=True):
        values = np.full((len(lines), len(columns)), np.nan)
        for row, (one, _) in found.items():
            place = lines.index((row.name, row.treatment))
            column = columns.index((row.staleness, list(CORRECTIONS).index(row.correction)))
            values[place, column] = value = getattr(one, field)
            text = "·" if field == "bias" and not one.is_biased else f"{value:.2f}"
            panel.text(column, place, text, ha="center", va="center", fontsize=7)
        image = panel.imshow(values, cmap="YlOrRd", norm=LogNorm(*limits), aspect="auto")
        figure.colorbar(image, ax=panel, shrink=0.5)
        names = [f"{staleness}, {list(CORRECTIONS)[index]}" for staleness, index in columns]
        panel.set_xticks(range(len(columns)), names, rotation=60, ha="right", fontsize=8)
        panel.set_yticks(range(len(lines)), [f"{name}, {how}" for name, how in lines], fontsize=8)
    panels[0].set_title("bias: across the exact gradient, over along it (· none is seen)")
    panels[1].set_title("variance, over that of REINFORCE on-policy")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=int, default=32, help="updates of each row")
    parser.add_argument("--only", default=",".join(ALGORITHMS), help="some of: %(default)s")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the JSON and the picture")
    parser.add_argument("--minutes", type=float, default=110, help="no row is begun after so many")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    torch.set_num_threads(1)
    report = Report(
        f"exact gradients: {arguments.updates} updates a row",
        ("algorithm, groups, staleness, correction", "bias", "95 %", "length", "variance"),
    )
    path = arguments.output / "exact_gradients_updates.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = collect(Bench(arguments.updates, kept), rows(arguments.only.split(",")), path, until)
    named = {
        f"{row.name}, {row.treatment}, {row.staleness}, {row.correction}": asdict(one) | {"note": why}
        for row, (one, why) in found.items()
    }
    for name, one in named.items():
        ends = f"{one['low']:.3f} to {one['high']:.3f}"
        length = f"{one['length']:.3f} ± {2 * one['length_error']:.3f}"
        report.add(name, f"{one['bias']:.3f}", ends, length, f"{one['variance']:.2f}")
    save(arguments.output / "exact_gradients.json", named)
    draw(found, arguments.output / "exact_gradients.png")
    report.print()


if __name__ == "__main__":
    main()
