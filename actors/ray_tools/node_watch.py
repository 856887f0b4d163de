"""Notices within seconds that a node has fallen silent. The fleet uses it.

Ray takes about a minute to declare a node dead whose network was cut, and reports nothing until then. Its
health check cannot stand for this watch: a node that it declares dead ends with all of its actors, also one
that answers again, and its settings belong to whoever starts the cluster.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.exceptions import ActorUnavailableError, ActorUnschedulableError, RayActorError

from actors.ray_tools.placement import on_node, start_actor
from actors.timing import NODE_PROBE_SECONDS, NODE_SILENCE_SECONDS


@ray.remote(num_cpus=0, max_restarts=-1)
class NodeProbe:
    """Answers for its node."""

    async def respond(self) -> None:
        """Return."""


class NodeWatch:
    """Asks each node on which rollout actors live, once a second, whether it answers.

    It lives in one asyncio loop. The node of this process is never asked. On a node without rollout actors
    nothing of it stays, so that an autoscaler may take the node away.
    """

    def __init__(self) -> None:
        self._own = ray.get_runtime_context().get_node_id()
        self._silences: dict[str, asyncio.Future[None]] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._num_actors: Counter[str] = Counter()
        self._return: asyncio.Future[None] | None = None
        self.draining: frozenset[str] = frozenset()
        """Nodes that are about to leave, as noted here by whoever lists them in Ray."""

    @contextmanager
    def watched(self, node: str) -> Iterator[None]:
        """Probe ``node`` (Ray's id), on which a rollout actor lives, until its last one is gone."""
        self._num_actors[node] += 1
        self.watch(node)
        try:
            yield
        finally:
            self._num_actors[node] -= 1

    def watch(self, node: str) -> None:
        """Probe ``node``, if that is not done already.

        A node that falls silent before its ``NodeProbe`` is up, which takes seconds, is noticed by Ray only.
        """
        if node not in self._silences:
            self._silences[node] = asyncio.get_running_loop().create_future()
        if node != self._own and (node not in self._watches or self._watches[node].done()):
            self._watches[node] = asyncio.create_task(self._watch(node))

    def silence(self, node: str) -> asyncio.Future[None]:
        """Done once ``node``, which is watched, is silent."""
        self.watch(node)  # its watch has ended where Ray took it for dead, and it came back
        return self._silences[node]

    def is_silent(self, node: str) -> bool:
        """Return whether ``node`` has been watched and does not answer."""
        return node in self._silences and self._silences[node].done()

    def away_from_silent_nodes(self) -> dict[str, str]:
        """Labels that keep an actor away from silent nodes, which Ray may still take for healthy."""
        silent = sorted(filter(self.is_silent, self._silences))
        return {"ray.io/node-id": f"!in({','.join(silent)})"} if silent else {}

    def next_return(self) -> asyncio.Future[None]:
        """Done once a silent node answers again. An actor kept away from it may find no room."""
        if self._return is None or self._return.done():
            self._return = asyncio.get_running_loop().create_future()
        return self._return

    def check(self) -> None:
        """Raise the error of a watch that has failed: no silence would be noticed any more."""
        for watch in self._watches.values():
            if watch.done() and not watch.cancelled():
                watch.result()

    async def _watch(self, node: str) -> None:
        """consumes time · waits for the node's answer · produces its silence, until the node is dead or empty

        Seconds are counted one by one: those in which this process itself was stopped are not the node's.
        """
        probe = start_actor(NodeProbe, **on_node(node))
        try:
            await probe.respond.remote()  # its process starts: for how long says nothing
            missed = 0
            # One that is silent is asked without actors, too: to learn that it is back.
            while self._num_actors[node] or self._silences[node].done():
                answer = asyncio.ensure_future(probe.respond.remote())
                while not (await asyncio.wait({answer}, timeout=NODE_PROBE_SECONDS))[0]:
                    missed += 1
                    self._judge(node, missed)
                try:
                    await answer
                    missed = 0
                except ActorUnavailableError:
                    missed += 1
                self._judge(node, missed)
                await asyncio.sleep(NODE_PROBE_SECONDS)
        except (RayActorError, ActorUnschedulableError):  # the latter: Ray would start the probe there again
            pass  # Ray knows; actors that were there end with an error of their own
        finally:
            ray.kill(probe)

    def _judge(self, node: str, missed: int) -> None:
        """Take note of a node that has missed so many beats, one after the other."""
        is_silent = self._silences[node].done()
        if missed >= NODE_SILENCE_SECONDS and not is_silent:
            self._silences[node].set_result(None)
        elif not missed and is_silent:  # it is back
            self._silences[node] = asyncio.get_running_loop().create_future()
            if self._return is not None and not self._return.done():
                self._return.set_result(None)
