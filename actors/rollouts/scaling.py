"""Numbers of rollout actors for a run, or a served agent: without actors and clocks."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean

from actors.rollouts.fleet_report import FleetStatus

LEARNER_WAITS = 0.1
"""Share of an update that the learner waits for rollouts, above which there may be too few actors."""
ACTORS_IDLE = 0.5
"""Share of their time without a rollout, above which there are too many for a learner that hardly waits."""
SPARE = 0.3
"""Share of the actors' time that a fleet which has shrunk should have left, for rollouts that take longer."""
LARGEST_CUT = 0.5
"""Smallest share of its actors that a cut leaves: a new one takes seconds to start, if the load returns."""
TO_GROW, TO_GROW_OF = 2, 3
"""Updates that have to need more actors, out of so many: one slow rollout changes nothing.

Not in a row: with a staleness of 1 a short update often follows a long one.
"""
TO_SHRINK = 5
"""Updates in a row that have to need fewer: while new actors start, a learner beside them is slow too."""
SPARE_SECONDS = 60.0
"""Actors of a served agent that were not needed for so long may go: starting one takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Load of an update: shares of its time, and counts at its end."""

    learner_waits: float
    actors_idle: float
    requests_waiting: float
    """Requests that waited for an actor, as a mean over the update."""
    num_actors: int
    num_ready: int
    """Actors that are up: for the others the cluster has no room yet."""


class ScalingPolicy:
    """Grows a fleet while the learner waits for rollouts that wait for actors; shrinks one that idles.

    It changes to the number that the last updates' shares of time call for, at once: n actors for which the
    learner waits a share w of its time would have to be n / (1 - w) to be in time, and n actors that idle a
    share i are needed for n (1 - i). More than a rollout for each actor there are never.

    Source of the thresholds: none; they keep a fleet within a factor of 2 of the smallest that the learner
    hardly waits for, which ``tests/unit/actors/test_scaling.py`` shows in a simulation.

    Args:
        smallest, largest: numbers of actors that it chooses between. Where they are equal it chooses nothing,
            and leaves a number alone that somebody has set by hand.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest
        self._loads: deque[Load] = deque(maxlen=TO_SHRINK)
        """Loads of the last updates, all with as many actors up."""

    def decide(self, load: Load) -> int:
        """The number of actors that there should be from now on."""
        if self._smallest == self._largest or not load.num_ready:
            return load.num_actors
        if self._loads and self._loads[-1].num_ready != load.num_ready:
            self._loads.clear()
        self._loads.append(load)
        number = self._number_for(load.num_ready)
        if number >= load.num_ready and load.num_ready < load.num_actors:
            number = load.num_actors  # more would wait for room too
        return max(self._smallest, min(self._largest, number))

    def _number_for(self, present: int) -> int:
        """The number that the last updates call for."""
        too_few = [load for load in list(self._loads)[-TO_GROW_OF:] if _too_few(load)]
        too_many = [load for load in self._loads if _too_many(load)]
        if len(too_few) >= TO_GROW:
            learner_busy = 1 - fmean(load.learner_waits for load in too_few)
            waiting = fmean(load.requests_waiting for load in too_few)
            return math.ceil(present / max(learner_busy, present / (present + waiting)))
        if len(too_many) == TO_SHRINK:
            busy = 1 - fmean(load.actors_idle for load in too_many)
            return math.ceil(present * max(busy / (1 - SPARE), LARGEST_CUT))
        return present


def _too_few(load: Load) -> bool:
    return load.learner_waits > LEARNER_WAITS and load.requests_waiting >= 1


def _too_many(load: Load) -> bool:
    return load.learner_waits <= LEARNER_WAITS and load.actors_idle > ACTORS_IDLE


class PoolSize:
    """Gives a served agent an actor for each message and each conversation, and one spare.

    Args:
        smallest, largest: numbers of actors that it chooses between.
    """

    def __init__(self, smallest: int, largest: int) -> None:
        self._smallest, self._largest = smallest, largest
        self._since: float | None = None
        """Time since when there have been too many without a break."""

    def decide(self, status: FleetStatus, now: float) -> int:
        """The number of actors that there should be from ``now`` on, in seconds.

        Conversations retain the actors that have them, so it only takes away those behind the last one.
        """
        if self._smallest == self._largest:
            return status.num_actors
        needed = status.num_running + status.num_waiting + status.num_warm + 1
        needed = max(self._smallest, min(self._largest, needed))
        if needed >= status.num_actors:
            self._since = None
            return needed
        self._since = now if self._since is None else self._since
        if now - self._since < SPARE_SECONDS:
            return status.num_actors
        self._since = None
        return max(needed, status.last_taken)
