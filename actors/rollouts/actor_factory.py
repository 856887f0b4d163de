"""Start of rollout actors: what one needs, where there is room for it, and how many start at a time."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.ray_tools.node_watch import NodeWatch
from actors.ray_tools.placement import EVERYWHERE, has_labels, start_actor, with_labels
from actors.rollouts.rollout import Pair, RolloutLimits
from actors.rollouts.rollout_actor import RolloutActor
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


@dataclass(slots=True)
class ActorFactory:
    """Makes the rollout actors of a fleet, which all have the same arguments.

    Args:
        options: of Ray, see ``actor_options``.
        listener: an actor whose ``on_step`` is called with each step, if anybody follows the rollouts.
    """

    pair: Pair
    sampler: ray.actor.ActorHandle
    limits: RolloutLimits
    options: dict[str, Any]
    listener: ray.actor.ActorHandle | None = None
    node_watch: NodeWatch = field(default_factory=NodeWatch)
    throttle: StartThrottle = field(default_factory=StartThrottle)

    async def make(self) -> ray.actor.ActorHandle:
        """Start an actor on a node that answers, as soon as a core is free for its start."""
        await self.throttle.acquire()
        labels = self.options["label_selector"] | self.node_watch.away_from_silent_nodes()
        fleet = ray.get_runtime_context().current_actor
        arguments = (self.pair, self.sampler, self.limits, fleet, self.listener)
        return start_actor(RolloutActor, *arguments, **self.options | {"label_selector": labels})


async def wait_until_ready(actor: ray.actor.ActorHandle, node_watch: NodeWatch) -> str | None:
    """The node of an actor that has started; ``None`` where a silent node is back before.

    The actor was kept away from that node, and the cluster may have no room elsewhere.
    """
    ready: asyncio.Future[str] = asyncio.ensure_future(actor.ready.remote())
    waits_for: list[asyncio.Future[Any]] = [ready]
    if node_watch.away_from_silent_nodes():
        waits_for.append(node_watch.next_return())
    try:
        await asyncio.wait(waits_for, return_when=asyncio.FIRST_COMPLETED)
        return await ready if ready.done() else None
    finally:
        ready.cancel()


def actor_options(pair: Pair, config: FleetConfig) -> dict[str, Any]:
    """The Ray options of an actor: the needs of its environment class, else the fleet's settings."""
    needs, reserved = pair.env_class.actor_needs, node_resources(config.nodes)
    cpus = reserved.pop("CPU", 0.0)
    return {
        "num_cpus": cpus if needs.num_cpus is None else needs.num_cpus,
        "memory": needs.memory_bytes,
        "resources": {**reserved, **needs.resources},
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
        f"One rollout actor needs {needed} and no node of the cluster{with_labels(labels)} has that (the "
        f"most of each: {most}): lower the environment class's actor_needs or fleet.nodes, or "
        "add a node."
    )
