"""Turns at which members of a group fork from another one: the setting ``rollout.forks.at``.

The gradient of a forked group is that of a flat one in the mean where a turn is chosen by what was there
before it. ``every`` chooses so. ``entropy`` does not: where the turn after a fork was an unlikely one, the
member that has sampled it is no fair draw any more, and likely turns count for less than they should.

This module is imported in every rollout worker and must stay light.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from environments.errors import ConfigError
from environments.named_module import load_function
from environments.types import Step

EVERY = re.compile(r"every ([1-9]\d*)")
ENTROPY = "entropy"

ChooseTurns = Callable[[Sequence[Step], int, int], Sequence[int]]
"""Function that is given the turns of a rollout that has ended, the number of its forks, and the most turns
of a rollout. It returns the number of turns with which each fork begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """The beginning of a rollout that goes on from the middle of another member of its group."""

    parent: str
    """Rollout id of that member."""
    number: int
    """Position among the forks of its parent."""
    num_turns: int = 0
    """Turns that it shares with its parent, once that has ended; 0 begins with the task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForkPoints:
    """The rollouts that fork from one, and how the turns are chosen at which they do."""

    num_forks: int
    at: str

    def turns(self, steps: Sequence[Step], max_steps: int) -> tuple[int, ...]:
        """Number of turns with which each fork begins; one that is not there stands for all turns.

        Raises:
            ConfigError: a function of the user's returns something else.
        """
        chosen = tuple(chooser(self.at)(steps, self.num_forks, max_steps))
        if len(chosen) != self.num_forks or not all(isinstance(turn, int) and turn >= 0 for turn in chosen):
            raise ConfigError(
                f"rollout.forks.at={self.at!r} has returned {chosen!r}: it has to return {self.num_forks} "
                "numbers of turns, each an integer from 0."
            )
        return chosen


def chooser(at: str) -> ChooseTurns:
    """The function that chooses turns.

    Args:
        at: "every 2", "entropy", or "module:function" of the user's.

    Raises:
        ConfigError: it is none of these.
    """
    if found := EVERY.fullmatch(at):
        distance = int(found[1])
        return lambda steps, num_forks, max_steps: _every(distance, num_forks, max_steps)
    if at == ENTROPY:
        return _most_uncertain
    if ":" not in at:
        raise ConfigError(
            f'rollout.forks.at={at!r} chooses no turns: use "every 2", {ENTROPY}, or a function of your own '
            'as "module:function".'
        )
    return load_function(f"rollout.forks.at={at!r}", at)


def _every(distance: int, num_forks: int, max_steps: int) -> list[int]:
    """The turns after each ``distance`` ones, in rounds: they depend on nothing that was sampled."""
    turns = range(distance, max_steps, distance) or [distance]
    return [turns[number % len(turns)] for number in range(num_forks)]


def _most_uncertain(steps: Sequence[Step], num_forks: int, max_steps: int) -> list[int]:
    """The turns whose tokens were the least likely on average, the most uncertain one first, in rounds."""
    ranked = sorted(range(1, len(steps)), key=lambda turn: (-_surprise(steps[turn]), turn)) or [1]
    return [ranked[number % len(ranked)] for number in range(num_forks)]


def _surprise(step: Step) -> float:
    """Mean of the negative log-probabilities of the tokens, which estimates the entropy of a turn."""
    logprobs = step.completion.logprobs if step.completion is not None else ()
    return -sum(logprobs) / len(logprobs) if logprobs else 0.0
