"""pass@k: the chance that at least one of k attempts at a task is correct."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import comb
from typing import Any

from environments.errors import ConfigError, DatasetError
from environments.types import JudgedBy, TerminationReason, Trajectory

_MOST_LINES = 16  # more would not be read


@dataclass(frozen=True)
class PassAtK:
    """Estimates by k, each a mean over all problems; ``result[k]`` is one of them."""

    num_problems: int
    num_samples: int
    """Number of samples of all problems together."""
    estimates: dict[int, float]
    omitted: tuple[int, ...] = ()
    """Every requested k for which some problem has too few samples."""
    num_failed: int = 0
    """Samples that ended by an error of the agent, the environment or the machinery below them."""
    num_too_long: int = 0
    """Samples whose first prompt was longer than it may be: nothing was sampled."""
    judged_by: Mapping[JudgedBy, int] = field(default_factory=dict)
    """The number of samples whose success each judge has decided."""

    def __getitem__(self, k: int) -> float:
        if k in self.omitted:
            raise ConfigError(f"pass@{k} was not estimated: some problem has fewer than {k} samples.")
        if k not in self.estimates:
            raise ConfigError(
                f"pass@{k} was not estimated: pass ks=[{k}] (there is {sorted(self.estimates)})."
            )
        return self.estimates[k]

    def __str__(self) -> str:
        failed = f", failed {self.num_failed}: see their error" if self.num_failed else ""
        long = f", prompt too long {self.num_too_long}: raise max_prompt_length" if self.num_too_long else ""
        judged = f", success by {judges(self.judged_by)}"
        lines = [f"problems {self.num_problems}, samples {self.num_samples}{failed}{long}{judged}"]
        lines += [f"pass@{k:<4} {estimate:.4f}" for k, estimate in self.estimates.items()]
        lines += [f"pass@{k:<4} too few samples" for k in self.omitted]
        return "\n".join(lines)


def compute_pass_at_k(results: Iterable[Trajectory], ks: Sequence[int] | None = None) -> PassAtK:
    """Estimate pass@k without bias, print the table, and return it.

    A problem is all trajectories with the same task. Correct is ``Trajectory.succeeded``: as the reward
    function says, else as the environment says, else by a reward above 0. A failed rollout counts as an
    incorrect attempt, even with a reward above 0. The estimate is 1 - C(n-c, k) / C(n, k) for c correct of n
    samples (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).

    ``ks`` defaults to every k up to the smallest n, or, if that is above 16, to the powers of two and n.
    Every estimate is over all problems, so that they can be compared with each other: a k above the
    smallest n is omitted.

    Raises:
        ConfigError: there are no results, or a k is below 1.
        DatasetError: a task is no JSON.
    """
    results = list(results)
    # With steps, it is the usual end of a long episode.
    without_steps = (each.termination_reason for each in results if not each.steps)
    problems = list(successes_by_task(results).values())
    if not problems:
        raise ConfigError("pass@k of no trajectories: run some tasks first.")
    if ks is not None and any(k < 1 for k in ks):
        raise ConfigError(f"ks={list(ks)} has a k below 1: pass@k is about 1 attempt or more.")
    smallest = min(len(problem) for problem in problems)
    usual = range(1, smallest + 1) if smallest <= _MOST_LINES else powers_of_two(smallest)
    wanted = usual if ks is None else sorted(set(ks))
    table = PassAtK(
        num_problems=len(problems),
        num_samples=sum(len(problem) for problem in problems),
        estimates={k: _mean_estimate(problems, k) for k in wanted if k <= smallest},
        omitted=tuple(k for k in wanted if k > smallest),
        num_failed=sum(each.failed for each in results),
        num_too_long=sum(reason is TerminationReason.PROMPT_TOO_LONG for reason in without_steps),
        judged_by=Counter(each.judged_by for each in results),
    )
    sys.stdout.write(f"{table}\n")
    return table


def successes_by_task(results: Iterable[Trajectory]) -> dict[str, list[bool]]:
    """The successes and failures at each task, by its fingerprint. Raises ``DatasetError`` as above."""
    successes: defaultdict[str, list[bool]] = defaultdict(list)
    for trajectory in results:
        successes[_fingerprint(trajectory.task)].append(trajectory.succeeded)
    return dict(successes)


def judges(numbers: Mapping[JudgedBy, int]) -> str:
    """Name the judges, with how many verdicts each has made if they are several."""
    present = [(str(judge), numbers[judge]) for judge in JudgedBy if numbers.get(judge)]
    if len(present) == 1:
        return present[0][0]
    return ", ".join(f"{judge} ({number})" for judge, number in present)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """The unbiased estimate for one problem, for k up to ``num_samples`` (Chen et al. 2021, equation 1)."""
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def _mean_estimate(problems: list[list[bool]], k: int) -> float:
    return sum(pass_at_k(len(samples), sum(samples), k) for samples in problems) / len(problems)


def powers_of_two(most: int) -> list[int]:
    """The powers of two up to ``most``, and that itself; none up to 0."""
    return sorted({*(1 << exponent for exponent in range(most.bit_length())), most} - {0})


def check_comparable(tasks: Iterable[Mapping[str, Any]]) -> None:
    """Require tasks of which equal ones can be found. Raises ``DatasetError``."""
    for task in tasks:
        _fingerprint(task)


def _fingerprint(task: Any) -> str:
    try:
        canonical = json.dumps(task, sort_keys=True, default=_plain)
    except (TypeError, ValueError) as error:
        raise DatasetError(
            f"The task {task!r} is no JSON ({error}), so equal ones are not found: write its values as "
            "texts, numbers, lists or dicts."
        ) from error
    return hashlib.md5(canonical.encode(), usedforsecurity=False).hexdigest()


def _plain(value: Any) -> Any:
    """The value of a numpy number or array, or the text of a date, as JSON has it."""
    for form in ("tolist", "isoformat"):
        if hasattr(value, form):
            return getattr(value, form)()
    raise TypeError(f"{type(value).__name__} is not JSON serializable")
