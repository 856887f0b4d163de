"""How many rollout actors a run, or a served agent, should have: without actors and clocks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from actors.rollouts.fleet_report import FleetStatus

LEARNER_WAITS = 0.25
"""Share of an update that the learner waits for rollouts, above which there may be too few actors."""
ACTORS_IDLE = 0.5
"""Share of the actors' time without a rollout, above which there may be too many."""
LEARNER_BUSY = 0.1
"""An actor less is only noticed by a learner that waits for a larger share than this."""
GROWTH, SHRINKAGE = 1.5, 0.75
PATIENCE = 2
"""Updates in a row that have to ask for the same, so that one slow rollout changes nothing."""
SPARE_SECONDS = 60.0
"""Actors of a served agent that were not needed for so long may go: starting one takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What an update has shown: shares of its time, and counts at its end."""

    learner_waits: float
    actors_idle: float
    requests_waiting: float
    """Requests that waited for an actor, as a mean over the update."""
    num_actors: int
    num_ready: int
    """Those of the actors that are up: for the others the cluster has no room yet."""


class ScalingPolicy:
    """Grows a fleet while the learner waits for rollouts that wait for actors; shrinks one that idles.

    Source of the thresholds: none; they keep a fleet within a factor of ``GROWTH`` of the smallest that the
    learner hardly waits for, which ``tests/actors/test_scaling.py`` shows in a simulation.

    Args:
        smallest, largest: numbers of actors that it chooses between. Where they are equal it chooses nothing,
            and leaves a number alone that somebody has set by hand.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest
        self._wish, self._num_wishes = 0, 0

    def decide(self, load: Load) -> int:
        """How many actors there should be from now on."""
        if self._smallest == self._largest:
            return load.num_actors
        wish = self._wish_of(load)
        self._num_wishes = self._num_wishes + 1 if wish == self._wish else 1
        self._wish = wish
        number = load.num_actors
        if wish and self._num_wishes >= PATIENCE:
            self._num_wishes = 0
            number = math.ceil(number * GROWTH) if wish > 0 else math.floor(number * SHRINKAGE)
        return max(self._smallest, min(self._largest, number))

    @staticmethod
    def _wish_of(load: Load) -> int:
        """1 for more actors, -1 for fewer, 0 for as many."""
        if load.num_ready < load.num_actors:
            return 0  # more would wait for room too
        if load.learner_waits > LEARNER_WAITS and load.requests_waiting >= 1:
            return 1
        if load.learner_waits < LEARNER_BUSY and load.actors_idle > ACTORS_IDLE:
            return -1
        return 0


class PoolSize:
    """Gives a served agent an actor for each message and each conversation, and one for who comes next.

    Args:
        smallest, largest: numbers of actors that it chooses between.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest
        self._since: float | None = None
        """When there were too many for the first time without a break."""

    def decide(self, status: FleetStatus, now: float) -> int:
        """How many actors there should be from ``now`` on, in seconds.

        Conversations keep the actors that have them, so it only takes away those behind the last one.
        """
        needed = status.num_running + status.num_waiting + status.num_kept + 1
        needed = max(self._smallest, min(self._largest, needed))
        if needed >= status.num_actors:
            self._since = None
            return needed
        self._since = now if self._since is None else self._since
        if now - self._since < SPARE_SECONDS:
            return status.num_actors
        self._since = None
        return max(needed, status.last_taken)
