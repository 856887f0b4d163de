"""The Ray actor that plays rollouts: with one pair in its own process, or several in processes of their own.

::

    fleet.pairs_per_actor=1                  more

    RolloutActor                             RolloutActor ── Zygote ── forks ──┐
      Player: agent, environment               PairProcess ── a pipe ── Player: agent, environment
                                               PairProcess ── a pipe ── Player ...

This module is imported in every rollout worker. It must stay light: no torch, no transformers, no Serve.
"""

from __future__ import annotations

import logging
import os
import threading
import time

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address

from actors.rollouts.pair_process import PairProcess, Zygote
from actors.rollouts.player import NODE_ADDRESS, Attempt, Player, RolloutResult
from actors.rollouts.rollout import Pair, RolloutLimits
from actors.rollouts.time_limit import TimeLimitReached
from actors.timing import SAMPLER_RESTART_SECONDS, SAMPLER_RETRY_SECONDS
from environments.errors import SamplerError, TroupeError
from environments.types import Completion, StepEvent
from policies.sampler import SampleRequest

logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0)
class RolloutActor:
    """Places for pairs, each of which plays many rollouts.

    consumes one request a place · waits for the sampling actor's completion · produces one trajectory

    Args:
        num_pairs: its places. One pair plays in this process, and several in processes of their own.
    """

    def __init__(
        self,
        pair: Pair,
        sampler: ray.actor.ActorHandle,
        limits: RolloutLimits,
        fleet: ray.actor.ActorHandle,
        listener: ray.actor.ActorHandle | None = None,
        num_pairs: int = 1,
    ) -> None:
        self._pair, self._limits = pair, limits
        self._link = RayLink(sampler, fleet, listener)
        os.environ[NODE_ADDRESS] = get_node_ip_address()
        self._zygote = Zygote(pair) if num_pairs > 1 else None
        self._players: dict[int, Player | PairProcess] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        """Held where ``ready`` and ``end_pair`` find and store: calls of a place may overtake each other."""
        if self._zygote is None:
            self._players[0] = Player(pair, limits, self._link)

    def ready(self, place: int = 0) -> str:
        """Return the id of the node, once the place's process is up, which this starts if there is none.

        Raises:
            ChildProcessError: the process has ended, or nobody wants it any more.
            RuntimeError: it does not start.
        """
        with self._lock:
            player = self._players.get(place)
        if player is None and place not in self._ended:
            player = self._start(place)
        if player is None:
            raise ChildProcessError("The place has been left.")
        if isinstance(player, PairProcess):
            player.check()
        return str(ray.get_runtime_context().get_node_id())

    def _start(self, place: int) -> PairProcess | None:
        """Start the process of a place; ``None`` where that was left meanwhile."""
        assert self._zygote is not None
        if not self._zygote.is_alive:
            logger.error("The zygote was killed, and all pairs with it: this rollout actor ends.")
            os._exit(1)
        process = PairProcess(self._zygote, self._pair, self._limits, self._link)
        with self._lock:
            if place not in self._ended:
                self._players[place] = process
                return process
        process.end()
        return None

    def connect(self, sampler: ray.actor.ActorHandle) -> None:
        """Sample by ``sampler``, the sampling actor of this node, from now on."""
        self._link.sampler = sampler

    def run(self, place: int, attempt: Attempt) -> RolloutResult:
        """Play a request at a place; see ``Player.run``."""
        return self._players[place].run(attempt)

    def close_pair(self, place: int) -> bool:
        """Close the environment that waits there for a follow-up, and return whether it was in time."""
        return self._players[place].close_pair()

    def end_pair(self, place: int) -> None:
        """End the process of a place, if it has one of its own."""
        with self._lock:
            self._ended.add(place)
            player = self._players.pop(place, None)
        if isinstance(player, PairProcess):
            player.end()


class RayLink:
    """The way from a rollout actor to the other actors of a run."""

    def __init__(
        self,
        sampler: ray.actor.ActorHandle,
        fleet: ray.actor.ActorHandle,
        listener: ray.actor.ActorHandle | None,
    ) -> None:
        self.sampler = self._first_sampler = sampler
        self._fleet, self._listener = fleet, listener
        self.is_followed = listener is not None

    def record_turn(self, rollout_id: str, attempt: int, index: int, entry: bytes) -> None:
        """Send a turn without a result."""
        self._fleet.record_turn.options(num_returns=0).remote(rollout_id, attempt, index, entry)

    def on_step(self, rollout_id: str, step: StepEvent) -> None:
        """Send a step without a result."""
        assert self._listener is not None
        self._listener.on_step.options(num_returns=0).remote(rollout_id, step)

    def sample(self, request: SampleRequest, deadline: float) -> Completion:
        """One completion. Ray starts a sampling actor that has died anew; meanwhile this waits for it.

        Where it has ended for good, the one beside the driver stands in.
        """
        lost_at: float | None = None
        while True:
            sampler = self.sampler
            try:
                return self._call(sampler, request, deadline)
            except ActorUnavailableError as error:
                now = time.monotonic()
                lost_at = lost_at or now
                if now - lost_at > SAMPLER_RESTART_SECONDS:
                    raise SamplerError(f"The sampler's process has not come back: {error}") from error
                time.sleep(SAMPLER_RETRY_SECONDS)
            except RayActorError as error:  # for good; not ours, so a new rollout actor would not help
                if sampler is self._first_sampler:
                    raise SamplerError(f"The sampler's process has ended: {error}") from error
                logger.warning("The one beside the driver samples for this node from now on: %s", error)
                self.sampler = self._first_sampler
            except RayError as error:
                raise SamplerError(f"The sampler's answer was lost: {error}") from error

    def _call(self, sampler: ray.actor.ActorHandle, request: SampleRequest, deadline: float) -> Completion:
        completion = sampler.sample.remote(request)
        try:
            left = max(0.0, deadline - time.monotonic())
            return ray.get(completion, timeout=left)
        except (GetTimeoutError, KeyboardInterrupt):
            ray.cancel(completion)  # else the engine would go on sampling without need
            raise TimeLimitReached from None
        except RayTaskError as error:  # Ray's wrapper around what the sampler raised
            if isinstance(error.cause, TroupeError):
                raise error.cause from None
            raise SamplerError(f"The sampler failed: {error}") from error
