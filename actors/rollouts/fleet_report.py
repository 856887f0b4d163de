"""Reports of a fleet: counts for the training loop, and what is in play for ``launch.status``."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import ray

from actors.sampling.node_samplers import Place
from actors.timing import NO_ACTOR_SECONDS

logger = logging.getLogger(__name__)

WHY_NOT = (
    "the cluster may have no CPUs or memory left for them (`ray status` shows it), or the modules of the "
    "agent and the environment may take long to import."
)


@dataclass(slots=True)
class FleetStatus:
    """Counts of a fleet: requests that wait, rollouts in play, actors lost since it started.

    Of ``num_actors``, ``num_ready`` are up and can play. ``busy_seconds`` are those that all actors together
    have played in the ``seconds`` since the fleet started, ``waited_seconds`` those that all requests
    together have waited for an actor. ``num_replayed_tokens`` were sampled in rollouts that have failed and
    were played again, unless their process died with them. There were ``num_retries`` attempts after a
    failure, which began after ``num_resumed_turns`` turns of the attempts before. ``num_warm`` actors retain
    the pair of a conversation; ``last_taken`` counts all up to the last one that plays or retains a pair.
    """

    num_actors: int = 0
    num_ready: int = 0
    num_waiting: int = 0
    num_running: int = 0
    num_lost: int = 0
    busy_seconds: float = 0.0
    seconds: float = 0.0
    num_replayed_tokens: int = 0
    waited_seconds: float = 0.0
    num_retries: int = 0
    num_resumed_turns: int = 0
    num_warm: int = 0
    last_taken: int = 0


class NoActorWarning:
    """Warns those who wait for a fleet once a minute while none of its actors is up."""

    def __init__(self) -> None:
        self._since: float | None = None

    def note(self, status: FleetStatus) -> None:
        """Take the newest counts."""
        now = time.monotonic()
        if status.num_ready:
            self._since = None
        elif self._since is None:
            self._since = now
        elif now - self._since > NO_ACTOR_SECONDS:
            self._since = now
            logger.warning("Of %d rollout actors none is up: %s", status.num_actors, WHY_NOT)


@dataclass(frozen=True, slots=True)
class RolloutInPlay:
    """A rollout that an actor on ``node`` (Ray's id) plays, and the seconds since its start and last turn."""

    rollout_id: str
    node: str
    seconds: float
    seconds_since_turn: float


@dataclass(frozen=True, slots=True)
class ActorFailure:
    """The youngest failure of the rollout actor number ``actor``, and of those before it in its place.

    Args:
        node: where the actor was (Ray's id).
        error: its first line, then the traceback of the agent or environment, as its process reported it.
        seconds: since then.
    """

    actor: int
    node: str
    rollout_id: str
    error: str
    seconds: float


@dataclass(frozen=True, slots=True)
class FleetReport:
    """A fleet's view of itself and of the actors that it works with, for ``launch.status``."""

    status: FleetStatus
    in_play: tuple[RolloutInPlay, ...]
    num_undelivered: int
    """Trajectories that wait for room in the stream, at most ``MAX_UNDELIVERED``."""
    env_class: str
    needs: dict[str, float]
    """Ray's resources that an actor takes."""
    failures: tuple[ActorFailure, ...]
    """Youngest one of each rollout actor that has failed, the youngest of all first."""
    samplers: dict[Place, ray.actor.ActorHandle]
    """Sampling actors by their places, the one beside the driver first."""
    stream: ray.actor.ActorHandle
    """The actor of the stream's queue."""
