"""The rollout service: the actors that turn rollout requests into trajectories, wired together.

Trainings, their evaluations and ``AgentExecutionEngine`` have one each, and served agents an asynchronous
one. This is the one place that starts a sampling actor, a stream and a fleet.
"""

from __future__ import annotations

import math
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any, Protocol

import ray

from actors.ray_tools.calls import detached_call, get_or_raise, own_errors, wait_or_raise
from actors.ray_tools.placement import NAMESPACE, beside_driver, start_actor
from actors.rollouts.actor_factory import actor_options, check_room
from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.fleet_report import FleetStatus
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.stream import STREAM_POLL_SECONDS, TrajectoryStream
from actors.sampling.node_samplers import combined
from actors.sampling.sampler_actor import SamplerActor
from actors.settings import ACTORS_PER_CORE, FleetConfig
from environments.background import in_background
from environments.rewards.base import GroupReward
from policies.sampler import QueueStatus, Sampler, TokenRequest

FLEET = "fleet-"
"""Beginning of the fleets' names, by which ``launch.scale`` finds them."""
FIRST_ACTORS = ACTORS_PER_CORE * max(0, (os.cpu_count() or 1) - 2)
"""Rollout actors that start beside the engines. Two cores are left to an engine and a learner, which start
more slowly: on a machine with no more, all rollout actors start when the engines are up."""
NOT_STARTED = "The sampler did not start"
STREAM_CAPACITY = 1024
"""Trajectories that wait for their consumer before the fleet waits for it."""


def fleet_name() -> str:
    """A name for another fleet."""
    return f"{FLEET}{uuid.uuid4().hex[:8]}"


def start_fleet(name: str, *arguments: object) -> ray.actor.ActorHandle:
    """Start a fleet beside this process; ``arguments`` are those of ``RolloutFleet``."""
    return start_actor(RolloutFleet, *arguments, name=name, namespace=NAMESPACE, **beside_driver())


class SampledServer(Protocol):
    """Policy server that starts and ends with the rollouts that sample it, such as ``PolicyApp``."""

    def start(self) -> None: ...

    def wake(self) -> None: ...

    def check_replicas(self) -> None: ...

    def stop(self) -> None: ...


class AsyncRolloutService:
    """A sampling actor and a fleet that deliver to an actor, and what it calls of them in its own event loop.

    The calls outlive their callers, which may be cancelled: what they ask for goes on.

    Args:
        pair, make_sampler, limits, fleet: as for ``RolloutService``.
        consumer: the actor that starts this. Its ``put`` is called with trajectories, its ``on_step`` with
            each step of each rollout as soon as it has ended, and its ``on_conversation_lost``.

    Raises:
        ConfigError: no node of the cluster has what the environment needs.
        TroupeError: from each call, the fleet does not answer.
        RayActorError: from each call, the fleet has died.
    """

    def __init__(
        self,
        pair: Pair,
        make_sampler: Callable[[], Sampler],
        limits: RolloutLimits,
        fleet: FleetConfig,
        consumer: ray.actor.ActorHandle,
    ) -> None:
        check_room(actor_options(pair, fleet))
        self._sampler = start_actor(SamplerActor, make_sampler, **beside_driver())
        self._fleet: Any = start_fleet(fleet_name(), pair, self._sampler, consumer, limits, fleet, consumer)

    async def start(self, num_actors: int) -> None:
        """Return when rollouts can be requested. Raises ``SamplerError`` where there is nothing to sample."""
        await self.resize(num_actors)
        with own_errors(NOT_STARTED):
            await self._sampler.open.remote()

    async def submit(self, request: RolloutRequest) -> None:
        """Have one request rolled out; the consumer is given its trajectory when it ends."""
        await self._call(self._fleet.submit.remote, [request])

    async def resize(self, num_actors: int) -> None:
        """Have ``num_actors`` rollout actors. One too many ends with the rollout that it is playing."""
        await self._call(self._fleet.resize.remote, num_actors)

    async def status(self) -> FleetStatus:
        """Counts of the fleet, now."""
        return await self._call(self._fleet.status.remote)

    async def end_idle(self) -> None:
        """End the rollout actors that play nothing, and close the environments that they keep."""
        await self._call(self._fleet.end.remote)

    def cancel(self, rollout_id: str) -> None:
        """Have nothing more sampled for a rollout; its trajectory does not come. This does not wait."""
        detached_call(self._fleet.cancel.options(num_returns=0).remote, rollout_id)

    def forget(self, rollout_id: str) -> None:
        """Close the environment of a rollout that no follow-up comes after. This does not wait."""
        detached_call(self._fleet.forget.options(num_returns=0).remote, rollout_id)

    async def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return await wait_or_raise(detached_call(method, *arguments), "The fleet")


class RolloutService:
    """A stream, a fleet, its sampling actors, and the policy servers that these sample if they belong to it.

    Args:
        pair: what the rollout actors play.
        make_sampler: makes the sampler, in the process of each sampling actor.
        limits: of one trajectory.
        fleet: settings of the rollout actors. How many there are, ``start`` says.
        servers: policy servers that start and end with this service; none if another program has them.
        group_reward: judges the groups that the stream hands out.

    Raises:
        ConfigError: no node of the cluster has what the environment needs.
    """

    def __init__(
        self,
        pair: Pair,
        make_sampler: Callable[[], Sampler],
        limits: RolloutLimits,
        fleet: FleetConfig,
        servers: Sequence[SampledServer] = (),
        group_reward: GroupReward | None = None,
    ) -> None:
        check_room(actor_options(pair, fleet))
        self.stream = TrajectoryStream(STREAM_CAPACITY, self.wake, group_reward)
        self._pair, self._make_sampler, self._limits, self._fleet_settings = pair, make_sampler, limits, fleet
        self._servers = servers
        for server in servers:
            self.stream.watch(server.check_replicas)
        self.fleet_name = fleet_name()
        self._num_actors = 0
        self._fleet: Any = None  # as the sampling actor is, until ``start_actors``
        self._sampler: Any = None
        self._started = Future[None]()

    # -- start and end -------------------------------------------------------------------------------

    def start_actors(self, num_actors: int) -> None:
        """Have at least ``num_actors`` rollout actors, up or on their way."""
        if self._fleet is None:
            self._sampler = start_actor(SamplerActor, self._make_sampler, **beside_driver())
            arguments = (self._pair, self._sampler, self.stream.queue, self._limits)
            self._fleet = start_fleet(self.fleet_name, *arguments, self._fleet_settings)
            self.stream.connect(self._fleet)
        if num_actors > self._num_actors:
            self.resize(num_actors)

    def start(self, num_actors: int) -> None:
        """Start everything, and return when rollouts can be requested. A second call only adds actors.

        Raises:
            SamplerError: a policy server did not start, or there is nothing to sample.
        """
        for server in self._servers:
            self.start_actors(min(num_actors, FIRST_ACTORS))  # they start while the engines load
            server.start()
        self.start_actors(num_actors)
        with own_errors(NOT_STARTED):
            ray.get(self._sampler.open.remote())

    def start_in_background(self, num_actors: int) -> None:
        """``start`` in a thread; ``wait_until_up`` waits for it."""
        self._started = in_background(partial(self.start, num_actors), "rollout service")

    def wake(self) -> None:
        """Have the policy servers sample, if they may be asleep."""
        for server in self._servers:
            server.wake()

    @property
    def is_up(self) -> bool:
        """True once rollouts can be requested."""
        return self._started.done() and self._started.exception() is None

    def check_start(self) -> None:
        """Raise the error that has kept the service from starting, or will: what it starts with has died."""
        if self._started.done():
            self._started.result()
            return
        for server in self._servers:  # else Serve would start replicas, or wait for them, for ever
            server.check_replicas()

    def wait_until_up(self, seconds: float = math.inf) -> bool:
        """Return when rollouts can be requested, or after ``seconds``; and whether they can.

        Raises:
            As ``check_start`` does.
        """
        deadline = time.monotonic() + seconds
        while True:
            self.check_start()
            left = deadline - time.monotonic()
            if self._started.done() or left <= 0:
                return self.is_up
            wait([self._started], min(left, STREAM_POLL_SECONDS))

    def stop(self) -> None:
        """End all that was started here."""
        with ExitStack() as ending:
            ending.callback(self.stream.close)
            if self._sampler is not None:
                ending.callback(ray.kill, self._sampler)
            for server in self._servers:
                ending.callback(server.stop)
            if self._fleet is not None:
                ending.callback(ray.kill, self._fleet)  # Ray ends the rollout actors with their fleet

    def resize(self, num_actors: int) -> None:
        """Have ``num_actors`` rollout actors. One too many ends with the rollout that it is playing."""
        get_or_raise([self._fleet.resize.remote(num_actors)], "The fleet")
        self._num_actors = num_actors

    # -- work ----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[RolloutRequest]) -> None:
        """Have ``requests`` rolled out; ``stream.trajectories`` yields them as they end."""
        get_or_raise([self._fleet.submit.remote(list(requests))], "The fleet")

    def sample(self, request: TokenRequest) -> ray.ObjectRef:
        """Ask for one completion outside any rollout; the reference is to a ``TokenOutput``."""
        return self._sampler.sample_tokens.remote(request)

    def request_status(self) -> list[ray.ObjectRef]:
        """Ask fleet and engines for their counts; ``status`` waits for the answers."""
        fleet = self._fleet
        return [fleet.status.remote(), self._sampler.status.remote(), fleet.node_sampling.remote()]

    @staticmethod
    def status(calls: list[ray.ObjectRef]) -> tuple[FleetStatus, QueueStatus]:
        """The counts of the fleet and of the engines, as of their ``request_status``."""
        fleet, queue, others = get_or_raise(calls, "Fleet or sampling actor")
        return fleet, combined([queue, *others])
