"""A cluster without processes, on which the real ``RolloutFleet`` runs: simulated nodes, actors and time."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ActorUnschedulableError, RayActorError, RayError

from actors import timing
from actors.ray_tools import node_watch
from actors.rollouts import actor_factory, dispatcher, fleet, fleet_parts, slot, slot_loop
from actors.rollouts.player import Attempt, RolloutResult
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.sampling import node_samplers
from actors.settings import FleetConfig
from environments import BaseEnv
from environments.types import TerminationReason, Trajectory
from policies import GameAgent

DECLARED_DEAD_SECONDS = 60.0
"""Ray takes so long to notice that a node's network was cut."""
NOTICE_SECONDS = 30.0
"""A node that drains leaves after so long."""
NOTICED_SECONDS = timing.NODE_SILENCE_SECONDS + 3.01 * timing.NODE_PROBE_SECONDS
"""Seconds after which the fleet knows that a node is silent."""
CAPACITY = 2
"""Rollout actors that a node has room for, where nobody chooses another number."""
HEAD = "e" * 56
PAIRS_OF_FLEET, PAIRS_PER_PART = 16, 32
"""Few, so that small fleets have parts, too."""


class SimulatedLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer: a minute passes as soon as nothing is left to do."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise AssertionError("The fleet waits for something that nobody will do.")
        self._loop.now += max(0.0, timeout)
        return []


@dataclass
class Node:
    """A node of the cluster, as it is and as Ray knows it."""

    name: str
    draining_since: float | None = None
    silent_since: float | None = None
    actors: set[Actor] = field(default_factory=set)
    probes: set[Probe] = field(default_factory=set)
    late: list[Callable[[], None]] = field(default_factory=list)
    """Answers that it could not send while it was silent."""

    def say(self, word: Callable[[], None]) -> None:
        """Tell the cluster something, as soon as the network is there."""
        if self.silent_since is None:
            word()
        else:
            self.late.append(word)


class Probe:
    """Stands in for ``NodeProbe`` or ``SamplerActor``: where its node is dead, Ray cannot start it again."""

    def __init__(self, cluster: Cluster, node: Node | None) -> None:
        self._node = node
        self._calls: list[asyncio.Future[None]] = []
        self.respond = self.status = SimpleNamespace(remote=self._respond)
        self.cancel = SimpleNamespace(remote=lambda _: self._respond())
        if node is not None:
            node.probes.add(self)

    def _respond(self) -> asyncio.Future[None]:
        call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._node is None:
            call.set_exception(ActorUnschedulableError("its node is dead"))
        else:
            self._calls = [each for each in self._calls if not each.done()] + [call]
            self._node.say(partial(_settle, call, None))
        return call

    def end(self) -> None:
        for call in self._calls:
            _fail(call, ActorUnschedulableError("its node is dead"))
        if self._node is not None:
            self._node.probes.discard(self)
            self._node = None


class Actor:
    """Stands in for ``RolloutActor``: plays a rollout in random time, and may retain its pair."""

    def __init__(self, cluster: Cluster, avoided: Collection[str]) -> None:
        self._cluster, self.avoided = cluster, avoided
        self.node: Node | None = None
        self.playing: dict[int, str] = {}
        """The rollout of each of its places."""
        self._pairs: dict[int, str] = {}
        """The message whose pair is at a place."""
        self._calls: list[asyncio.Future[Any]] = []
        self.ready = SimpleNamespace(remote=self._ready)
        self.run = SimpleNamespace(remote=self._run)
        self.close_pair = SimpleNamespace(remote=self._close_pair)
        self.connect = SimpleNamespace(remote=self._connect)
        self.end_pair = SimpleNamespace(remote=self._end_pair)
        self._is_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        cluster.waiting.append(self)
        cluster.place_waiting()

    def put_on(self, node: Node) -> None:
        """Ray has chosen a node for it, where it starts."""
        self.node = node
        node.actors.add(self)
        seconds = self._cluster.rng.uniform(0.2, 1.0)
        word = partial(_settle, self._is_up, node.name)
        asyncio.get_running_loop().call_later(seconds, self._say, node, word)

    def _say(self, node: Node, word: Callable[[], None]) -> None:
        if self.node is node:  # it is still there
            node.say(word)

    def _ready(self, place: int) -> asyncio.Future[str]:
        if not self._is_up.done():
            return self._is_up
        call = self._call()
        if self.node is not None:
            self.node.say(partial(_settle, call, self.node.name))
        return call

    def _connect(self, sampler: Any) -> asyncio.Future[Any]:
        call = self._call()
        if self.node is not None:
            self.node.say(partial(_settle, call, None))
        return call

    def _call(self) -> asyncio.Future[Any]:
        call: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self.node is None:
            call.set_exception(RayActorError())
        self._calls = [each for each in self._calls if not each.done()] + [call]
        return call

    def _run(self, place: int, attempt: Attempt) -> asyncio.Future[Any]:
        call, request, history = self._call(), attempt.request, attempt.history
        if self.node is not None:
            self._cluster.check_start(self.node, request.rollout_id)
            self._cluster.check_beginning(request, attempt.entries)
            after = request.follow_up.after if request.follow_up else None
            rebuilt = history[-1].request.rollout_id if history else None
            assert place not in self.playing, "one at a time"
            here = self._pairs.pop(place, None)
            assert (here or rebuilt) == after, "each message goes on with its own conversation"
            self.playing[place] = request.rollout_id
            self._play(self.node, place, call, attempt)
        return call

    def _play(self, node: Node, place: int, call: asyncio.Future[Any], attempt: Attempt) -> None:
        request = attempt.request
        seconds = self._cluster.rng.uniform(0.5, 4.0)
        trajectory = Trajectory(
            rollout_id=request.rollout_id, termination_reason=TerminationReason.ENV_DONE, steps=[]
        )
        asyncio.get_running_loop().call_later(seconds, self._end, node, place, call, request, trajectory)

    def _end(
        self,
        node: Node,
        place: int,
        call: asyncio.Future[Any],
        request: RolloutRequest,
        trajectory: Trajectory,
    ) -> None:
        if self.node is node and self.playing.pop(place, None) is not None:
            if retained := request.keep_seconds is not None:
                self._pairs[place] = request.rollout_id
            self._cluster.ended.add(request.rollout_id)
            turns = (b"a turn",) if retained else ()
            num_forks = request.forked_at.num_forks if request.forked_at else 0
            beginnings = tuple((f"turn of {request.rollout_id}".encode(),) for _ in range(num_forks))
            result = RolloutResult(
                trajectory, usable=True, retained=retained, turns=turns, beginnings=beginnings
            )
            node.say(partial(_settle, call, result))

    def _close_pair(self, place: int) -> asyncio.Future[Any]:
        call = self._call()
        if self.node is not None:
            seconds = self._cluster.rng.uniform(0.0, 2.0)
            asyncio.get_running_loop().call_later(seconds, self._closed, self.node, place, call)
        return call

    def _closed(self, node: Node, place: int, call: asyncio.Future[Any]) -> None:
        self._pairs.pop(place, None)
        self._say(node, partial(_settle, call, True))

    def _end_pair(self, place: int) -> None:
        self.playing.pop(place, None)
        self._pairs.pop(place, None)

    def end(self, is_placed_again: bool = False) -> None:
        """Its process ends, or Ray knows that its node has died."""
        if self.node is not None:
            self.node.actors.discard(self)
        self.node, self.playing = None, {}
        for call in self._calls:
            _fail(call)
        if is_placed_again and not self._is_up.done():  # an actor that was never up is only put elsewhere
            self._cluster.waiting.append(self)
        else:
            _fail(self._is_up)


class Cluster:
    """Nodes that come and go, and what is played on them."""

    def __init__(self, rng: random.Random, num_nodes: int, capacity: int = CAPACITY) -> None:
        self.rng, self._capacity = rng, capacity
        self.nodes = {HEAD: Node(HEAD)}
        self.waiting: list[Actor] = []
        self.delivered: list[Trajectory] = []
        self.ended: set[str] = set()
        self._num_joined = 0
        for _ in range(num_nodes):
            self.join()

    # -- what Ray does -------------------------------------------------------------------------------

    def place_waiting(self) -> None:
        """Put actors on the nodes with the fewest of them."""
        for actor in list(self.waiting):
            able = [
                node
                for node in self.nodes.values()
                if len(node.actors) < self._capacity
                and node.draining_since is None
                and node.name not in actor.avoided
            ]
            if able:
                self.waiting.remove(actor)
                actor.put_on(min(able, key=lambda node: len(node.actors)))

    def kill(self, actor: Actor | Probe) -> None:
        """``ray.kill``."""
        if isinstance(actor, Actor) and actor in self.waiting:
            self.waiting.remove(actor)
        actor.end()
        self.place_waiting()

    def draining(self) -> frozenset[str]:
        return frozenset(name for name, node in self.nodes.items() if node.draining_since is not None)

    # -- what happens to nodes -----------------------------------------------------------------------

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def join(self) -> None:
        """A node comes."""
        self._num_joined += 1
        name = f"{self._num_joined:056x}"
        self.nodes[name] = Node(name)
        self.place_waiting()

    def die(self, node: Node) -> None:
        """End a node, as Ray knows."""
        if self.nodes.pop(node.name, None) is None:
            return
        for probe in list(node.probes):
            probe.end()
        for actor in list(node.actors):
            actor.end(is_placed_again=True)
        node.late.clear()
        self.place_waiting()

    def drain(self, node: Node) -> None:
        """Announce that a node leaves."""
        if node.draining_since is None:
            node.draining_since = self.now
            asyncio.get_running_loop().call_later(NOTICE_SECONDS, self.die, node)

    def cut(self, node: Node, seconds: float) -> None:
        """Its network is cut for so long, and Ray declares it dead if that is too long."""
        if node.silent_since is not None:
            return
        node.silent_since = self.now
        if seconds < DECLARED_DEAD_SECONDS:
            asyncio.get_running_loop().call_later(seconds, self._come_back, node)
        else:
            asyncio.get_running_loop().call_later(DECLARED_DEAD_SECONDS, self.die, node)

    def _come_back(self, node: Node) -> None:
        if node.name in self.nodes:
            node.silent_since = None
            late, node.late = node.late, []
            for word in late:
                word()

    def crash(self, node: Node) -> None:
        """End one of a node's actors."""
        if node.actors:
            min(node.actors, key=id).end()
            self.place_waiting()

    def silent_seconds(self, name: str) -> float:
        """Seconds for which a node has been silent."""
        node = self.nodes.get(name)
        return 0.0 if node is None or node.silent_since is None else self.now - node.silent_since

    # -- what must hold ------------------------------------------------------------------------------

    def check_start(self, node: Node, rollout_id: str) -> None:
        """A rollout begins on ``node``."""
        if node.draining_since is not None:
            assert self.now - node.draining_since < 2 * fleet.DRAIN_POLL_SECONDS, (
                "no new work where a node leaves"
            )
        assert self.silent_seconds(node.name) <= NOTICED_SECONDS, "no new work where a node is silent"
        heard = [
            actor
            for each in self.nodes.values()
            if each.silent_since is None
            for actor in each.actors
            if rollout_id in actor.playing.values()
        ]
        assert not heard, "no rollout is played twice at the same time"

    def check_beginning(self, request: RolloutRequest, entries: Sequence[bytes]) -> None:
        """A fork begins with the turns of its parent, which has ended."""
        if request.fork is not None:
            assert request.fork.parent in self.ended
            assert list(entries) == [f"turn of {request.fork.parent}".encode()]


def _begun(work: Callable[..., Any], *arguments: Any) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(work(*arguments))


def _settle(call: asyncio.Future[Any], value: Any) -> None:
    if not call.done():
        call.set_result(value)


def _fail(call: asyncio.Future[Any], error: RayError | None = None) -> None:
    if not call.done():
        call.set_exception(error or RayActorError())
        call.exception()  # whoever waits for it is told; where nobody does any more, that is no news


class NeverMade(BaseEnv):
    """Its rollouts are only pretended."""

    resumes_by = "replay"

    @staticmethod
    def from_dict(info: dict[str, Any]) -> NeverMade:
        raise AssertionError


class SilentSampling:
    """Sampling actors that are there, and sample nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.first: Any = SimpleNamespace(
            recipe=SimpleNamespace(remote=self._recipe), cancel=SimpleNamespace(remote=self._cancel)
        )

    async def _recipe(self) -> str:
        return "recipe"

    async def _cancel(self, rollout_id: str) -> None:
        pass

    def start(self, node: Node | None, _: Any) -> Probe:
        return Probe(self._cluster, node)


@contextmanager
def simulated_fleet(
    cluster: Cluster,
    loop: SimulatedLoop,
    retries: int,
    pairs_per_actor: int = 1,
    actor_class: Callable[[Cluster, Collection[str]], Actor] = Actor,
    sampling: Any = None,
    consumer: Any = None,
    pairs_of_fleet: int = PAIRS_OF_FLEET,
) -> Iterator[Any]:
    """The fleet's own code on the cluster.

    Args:
        sampling: has the first sampling actor as ``first``, and makes one of another node by ``start``.
        consumer: where the fleet delivers, in place of ``cluster.delivered``.
    """

    class Options:
        def __init__(self, make: Callable[..., Any]) -> None:
            self._make = make

        def options(self, **options: Any) -> Any:
            return SimpleNamespace(remote=partial(self._make, options))

    def make_actor(options: dict[str, Any], *_: Any) -> Actor:
        avoided = options.get("label_selector", {}).get("ray.io/node-id", "")
        return actor_class(cluster, avoided.removeprefix("!in(").removesuffix(")").split(","))

    def make_probe(options: dict[str, Any]) -> Probe:
        return Probe(cluster, cluster.nodes.get(options["scheduling_strategy"].node_id))

    def make_sampler(options: dict[str, Any], recipe: Any) -> Any:
        return sampling.start(cluster.nodes.get(options["scheduling_strategy"].node_id), recipe)

    part_class = fleet_parts.FleetPart.__ray_metadata__.modified_class

    def make_part(_: dict[str, Any]) -> Any:
        part = part_class()
        return SimpleNamespace(
            **{
                name: SimpleNamespace(remote=partial(_begun, getattr(part, name)))
                for name in ("play", "take", "drop")
            }
        )

    async def put(trajectories: Sequence[Trajectory]) -> None:
        cluster.delivered.extend(trajectories)

    async def here(function: Callable[[], Any]) -> Any:
        return function()

    sampling = sampling or SilentSampling(cluster)
    consumer = consumer or SimpleNamespace(put=SimpleNamespace(remote=put))
    clock = SimpleNamespace(monotonic=loop.time)
    context = SimpleNamespace(get_node_id=lambda: HEAD, current_actor=None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(actor_factory, "RolloutActor", Options(make_actor))
        patch.setattr(node_watch, "NodeProbe", Options(make_probe))
        patch.setattr(node_samplers, "SamplerActor", Options(make_sampler))
        patch.setattr(fleet_parts, "FleetPart", Options(make_part))
        patch.setattr(fleet_parts, "PAIRS_OF_FLEET", pairs_of_fleet)
        patch.setattr(fleet_parts, "PAIRS_PER_PART", PAIRS_PER_PART)
        patch.setattr(fleet, "draining_nodes", cluster.draining)
        patch.setattr(actor_factory, "num_cores", lambda: 2 * len(cluster.nodes))
        patch.setattr(fleet.asyncio, "to_thread", here)
        for module in (fleet, dispatcher, slot, slot_loop):
            patch.setattr(module, "time", clock)
        patch.setattr(ray, "kill", cluster.kill)
        patch.setattr(ray, "get_runtime_context", lambda: context)
        fleet_class = fleet.RolloutFleet.__ray_metadata__.modified_class
        pair = Pair(agent_class=GameAgent, agent_args={}, env_class=NeverMade, env_args={})
        config = FleetConfig(retries=retries, pairs_per_actor=pairs_per_actor)
        yield fleet_class(pair, sampling.first, consumer, RolloutLimits(), config)
