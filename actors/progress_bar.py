"""The progress bar of an evaluation."""

from __future__ import annotations

import sys
from typing import Self

from tqdm import tqdm

from environments.types import Trajectory

LOG_SECONDS = 30.0
"""Seconds between two lines where the output is no terminal."""


class RolloutProgress:
    """Counts of rollouts that are done, of those a second, and of the successful ones.

    Written to the standard error stream; ``TQDM_DISABLE=1`` in the environment leaves it out.

    Args:
        num_rollouts: how many there will be.
    """

    def __init__(self, num_rollouts: int) -> None:
        seconds = 0.5 if sys.stderr.isatty() else LOG_SECONDS
        self._bar = tqdm(total=num_rollouts, desc="rollouts", unit="rollout", mininterval=seconds)
        self._num_done = self._num_passed = self._num_failed = self._num_tokens = 0

    def add(self, trajectory: Trajectory, replayed: bool = False) -> None:
        """Count a rollout; ``replayed`` says that it was played in an earlier call."""
        reason = trajectory.termination_reason
        self._num_done += 1
        self._num_passed += trajectory.succeeded
        self._num_failed += reason is not None and reason.is_infrastructure
        self._num_tokens += 0 if replayed else trajectory.num_sampled_tokens
        if replayed and not self._bar.disable:  # one that is left out has no such attribute
            self._bar.initial += 1  # it must not count as speed
        tokens_per_second = self._num_tokens / max(self._bar.format_dict["elapsed"], 1e-3)
        self._bar.set_postfix_str(
            f"pass rate {self._num_passed / self._num_done:.3f}, {self._num_failed} failed, "
            f"{tokens_per_second:.0f} tokens/s",
            refresh=False,
        )
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()
