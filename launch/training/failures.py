"""Limits of failed rollouts: when a task is set aside, and when so many fail that the run ends."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Sequence

from environments.errors import EnvironmentFailure
from environments.types import TerminationReason, Trajectory, TrajectoryGroup

WORLD_FAILURES = {
    TerminationReason.ENV_ERROR,
    TerminationReason.OUT_OF_MEMORY,
    TerminationReason.CRASHED,
}
"""Endings for which the environment or its process is to blame, and neither the agent nor the server."""
MOST_SPOILT = 0.5
"""Share of the newest rollouts that an environment may spoil before the run ends."""
WINDOW = 200
"""Newest rollouts that the budget counts."""
LEAST_FAILURES = 30
"""Failures among them without which no run ends: the first few say nothing about a night."""
LEAST_ATTEMPTS = 3
"""A task has to fail so often before it is set aside."""
NUM_SAMPLES = 3
"""Tracebacks in the error that ends a run."""
RAISED = re.compile(r"raised in (\S+): (\w+)")


class FailureBudget:
    """The share of the newest rollouts that an environment class may spoil.

    Args:
        environment: name of the class.
        share: above it the run ends.
    """

    def __init__(self, environment: str, share: float = MOST_SPOILT) -> None:
        self._environment, self._share = environment, share
        self._recent: deque[str | None] = deque(maxlen=WINDOW)
        """Error of each rollout, ``None`` if the environment has not failed."""

    def record(self, trajectories: Sequence[Trajectory]) -> None:
        """Count finished rollouts.

        Raises:
            EnvironmentFailure: more of the newest rollouts have failed than the budget allows.
        """
        for each in trajectories:
            failed = each.termination_reason in WORLD_FAILURES
            self._recent.append(each.error or "no error text" if failed else None)
        errors = [each for each in self._recent if each is not None]
        if len(errors) >= LEAST_FAILURES and len(errors) > self._share * len(self._recent):
            raise EnvironmentFailure(self._verdict(errors))

    def _verdict(self, errors: Sequence[str]) -> str:
        kinds = Counter(kind_of(error) for error in errors).most_common()
        counts = "\n".join(f"  {number} times {kind}" for kind, number in kinds)
        samples = {kind_of(error): error for error in errors}
        shown = "\n\n".join(samples[kind] for kind, _ in kinds[:NUM_SAMPLES])
        return (
            f"{self._environment} failed in {len(errors)} of the last {len(self._recent)} rollouts, after "
            f"their retries, and a run bears a share of {self._share:g}. Repair the environment, or raise "
            f"fleet.retries.\n{counts}\nThe newest of the most frequent:\n\n{shown}"
        )


def kind_of(error: str) -> str:
    """Method and type of an exception, or the first line of an error that names none."""
    if found := RAISED.search(error):
        return f"{found[2]} in {found[1]}"
    return error.partition("\n")[0][:80]


def fails_everywhere(group: TrajectoryGroup, attempts_per_rollout: int) -> bool:
    """True if the environment has failed in every attempt at the task of ``group``, on actor after actor."""
    enough = len(group.trajectories) * attempts_per_rollout >= LEAST_ATTEMPTS
    return enough and all(each.termination_reason in WORLD_FAILURES for each in group.trajectories)
