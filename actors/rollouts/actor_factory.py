"""Start of rollout actors: what one needs, where there is room for it, and how many start at a time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.ray_tools.node_watch import NodeWatch
from actors.ray_tools.placement import EVERYWHERE, has_labels, start_actor, with_labels
from actors.rollouts.fleet_parts import FleetParts, PartCalls
from actors.rollouts.player import Attempt, RolloutResult
from actors.rollouts.rollout import Pair, RolloutLimits
from actors.rollouts.rollout_actor import RolloutActor
from actors.sampling.node_samplers import NodeSamplers
from actors.settings import FleetConfig
from environments.errors import ConfigError
from policies.settings import node_labels, node_resources

ACTOR_START_SECONDS = 1.0
"""CPU time of a core that an actor is given to start. Many at a time would starve a learner beside them."""


class StartThrottle:
    """Lets as many actors start at a time as the cluster has cores, each for ``ACTOR_START_SECONDS``."""

    def __init__(self) -> None:
        self._free = asyncio.Semaphore(1)

    async def count(self) -> None:
        """Count the cores of the cluster anew."""
        self._free = asyncio.Semaphore(await asyncio.to_thread(num_cores))

    async def acquire(self) -> None:
        """Wait for a free core."""
        free = self._free  # ``count`` may put another in its place meanwhile
        await free.acquire()
        asyncio.get_running_loop().call_later(ACTOR_START_SECONDS, free.release)


def num_cores() -> int:
    """CPU cores of the cluster, as if all nodes were like this one: what Ray counts may be set by hand."""
    return (os.cpu_count() or 1) * sum(node["Alive"] for node in ray.nodes())


@dataclass(eq=False, slots=True)
class SharedActor:
    """A rollout actor that slots share. Each takes a place with a number that none has had before."""

    starting: asyncio.Task[ray.actor.ActorHandle]
    number: int
    """No other one of the fleet has it."""
    part: PartCalls | None
    """The part of the fleet that has it play; ``None`` for the fleet's own process."""
    num_taken: int = 0
    next_number: int = 0
    node: str = ""
    """The node that it is on, once it is up."""


@dataclass(frozen=True, slots=True)
class Place:
    """A place of a rollout actor, for one pair."""

    shared: SharedActor
    actor: ray.actor.ActorHandle
    number: int

    def ready(self) -> ray.ObjectRef[str]:
        """The actor's node, once the place can play."""
        return self.actor.ready.remote(self.number)

    def connect(self, sampler: ray.actor.ActorHandle) -> ray.ObjectRef[None]:
        """Have the actor sample by ``sampler`` from now on."""
        return self.actor.connect.remote(sampler)

    def run(self, attempt: Attempt) -> Awaitable[RolloutResult]:
        """Play a request; see ``Player.run``."""
        if self.shared.part is None:
            return self.actor.run.remote(self.number, attempt)
        return self.shared.part.run(self.shared.number, self.number, attempt)

    def close_pair(self) -> ray.ObjectRef[bool]:
        """Close the environment that waits there."""
        return self.actor.close_pair.remote(self.number)


@dataclass(slots=True)
class ActorFactory:
    """Makes the rollout actors of a fleet, which all have the same arguments, and hands out their places.

    Args:
        num_pairs: places of an actor.
        options: of Ray, see ``actor_options``.
        listener: an actor whose ``on_step`` is called with each step, if anybody follows the rollouts.
    """

    pair: Pair
    samplers: NodeSamplers
    limits: RolloutLimits
    options: dict[str, Any]
    parts: FleetParts
    listener: ray.actor.ActorHandle | None = None
    num_pairs: int = 1
    node_watch: NodeWatch = field(default_factory=NodeWatch)
    throttle: StartThrottle = field(default_factory=StartThrottle)
    _actors: set[SharedActor] = field(default_factory=set)
    """Actors in use."""
    _with_places: dict[SharedActor, None] = field(default_factory=dict)
    """Actors of these whose places are not all taken."""
    _num_made: int = 0

    async def make(self) -> Place:
        """Take a place of an actor that has one to spare, else start another actor."""
        shared = next((each for each in self._with_places if self._may_be_used(each)), None)
        if shared is None:
            part = self.parts.take(self.num_pairs)
            self._num_made += 1
            starting = asyncio.create_task(self._start(self._num_made, part))
            shared = SharedActor(starting, self._num_made, part)
            self._actors.add(shared)
            self._with_places[shared] = None
        number = shared.next_number
        shared.next_number += 1
        shared.num_taken += 1
        if shared.num_taken == self.num_pairs:
            del self._with_places[shared]
        try:
            return Place(shared, await asyncio.shield(shared.starting), number)
        except BaseException:
            self._leave(shared)
            raise

    def release(self, place: Place) -> None:
        """End what is at a place, and its actor with the last of them."""
        if self._leave(place.shared):
            ray.kill(place.actor)
        else:
            place.actor.end_pair.remote(place.number)

    def retire(self, shared: SharedActor) -> bool:
        """Hand out no places of an actor any more; return whether it had some to hand out until now."""
        is_first = shared in self._actors
        self._actors.discard(shared)
        self._with_places.pop(shared, None)
        return is_first

    def _leave(self, shared: SharedActor) -> bool:
        """Take note that a place is left; return whether that was the last one."""
        shared.num_taken -= 1
        if shared.num_taken:
            if shared in self._actors:
                self._with_places[shared] = None
            return False
        self.retire(shared)
        shared.starting.cancel()
        self.parts.leave(shared.part, shared.number, self.num_pairs)
        return True

    def _may_be_used(self, shared: SharedActor) -> bool:
        """True unless its node leaves or is silent."""
        return shared.node not in self.node_watch.draining and not self.node_watch.is_silent(shared.node)

    async def _start(self, number: int, part: PartCalls | None) -> ray.actor.ActorHandle:
        """Start an actor on a node that answers, as soon as a core is free for its start."""
        await self.throttle.acquire()
        labels = self.options["label_selector"] | self.node_watch.away_from_silent_nodes()
        fleet = part.handle if part else ray.get_runtime_context().current_actor
        arguments = (self.pair, self.samplers.first, self.limits, fleet, self.listener, self.num_pairs)
        actor = start_actor(RolloutActor, *arguments, **self.options | {"label_selector": labels})
        if part is not None:
            part.add(number, actor)
        return actor


async def wait_until_ready(place: Place, node_watch: NodeWatch) -> str | None:
    """The node of an actor that has started; ``None`` where a silent node is back before.

    The actor was kept away from that node, and the cluster may have no room elsewhere.
    """
    ready: asyncio.Future[str] = asyncio.ensure_future(place.ready())
    waits_for: list[asyncio.Future[Any]] = [ready]
    if node_watch.away_from_silent_nodes():
        waits_for.append(node_watch.next_return())
    try:
        await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
        return await ready if ready.done() else None
    finally:
        ready.cancel()


def actor_options(pair: Pair, config: FleetConfig) -> dict[str, Any]:
    """The Ray options of an actor: the needs of its pairs' environment class, else the fleet's settings."""
    needs, reserved = pair.env_class.actor_needs, node_resources(config.nodes)
    cpus, num_pairs = reserved.pop("CPU", 0.0), config.pairs_per_actor
    return {
        "num_cpus": num_pairs * (cpus if needs.num_cpus is None else needs.num_cpus),
        "memory": None if needs.memory_bytes is None else num_pairs * needs.memory_bytes,
        "resources": {name: num_pairs * amount for name, amount in {**reserved, **needs.resources}.items()},
        "max_concurrency": 1 if num_pairs == 1 else 2 * num_pairs + 1,
        "label_selector": node_labels(config.nodes),
        "runtime_env": dict(needs.runtime_env),
        **EVERYWHERE,
    }


def check_room(options: dict[str, Any]) -> None:
    """Check that a node can hold the actors: else their rollouts would wait for ever.

    Raises:
        ConfigError: names what is needed and the most that a node has.
    """
    needed = {"CPU": options["num_cpus"], "memory": options["memory"] or 0, **options["resources"]}
    labels = options["label_selector"]
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and has_labels(node, labels)]
    if any(all(node.get(name, 0) >= amount for name, amount in needed.items()) for node in nodes):
        return
    most = {name: max((node.get(name, 0) for node in nodes), default=0) for name in needed}
    raise ConfigError(
        f"One rollout actor needs {needed} and no node of the cluster{with_labels(labels)} has that (most of "
        f"each: {most}): lower the environment class's actor_needs or fleet.nodes, or add a node."
    )
