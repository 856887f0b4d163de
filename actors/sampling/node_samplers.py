"""Sampling actors of a fleet: the first beside the driver, and one on each other node with rollout actors.

A node with more than ``PAIRS_PER_SAMPLER`` pairs has more of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count

import ray
from ray.exceptions import RayError

from actors.ray_tools.placement import on_node, start_actor
from actors.sampling.queue_worker import CONNECTION
from actors.sampling.sampler_actor import SamplerActor
from actors.timing import INSPECTION_SECONDS, SAMPLER_RESTART_SECONDS
from policies.sampler import QueueStatus, ReplicaStatus

logger = logging.getLogger(__name__)

PAIRS_PER_SAMPLER = 512
"""Pairs of a node that one sampling actor serves: a request of each in a second is most of a core, with Ray's
part."""
UNUSED_SECONDS = 30.0
"""Seconds that a node's sampling actor outlives the last rollout actor there: the next may be on its way."""

Place = tuple[str, int]
"""Ray's id of a node, and the number of a sampling actor there."""


@dataclass(eq=False, slots=True)
class _NodeSampler:
    """A sampling actor, and the pairs that it serves."""

    starting: asyncio.Task[ray.actor.ActorHandle] | None
    """``None`` for the first one, which the program has started and ends."""
    handle: ray.actor.ActorHandle | None = None
    num_users: int = 0
    ending: asyncio.TimerHandle | None = None
    status: QueueStatus | None = None
    """Last counts that it gave. They grow: if they were missing once, all would look new the next time."""


class NodeSamplers:
    """Starts the sampling actors of a node with the first pairs there that need one, and ends them after the
    last. A place is a node and the number of the sampling actor there.

    It lives in one asyncio loop. Ray starts an actor anew whose process has died; one on a lost node ends
    with it, as the rollout actors there do.

    Args:
        first: the first sampling actor.
        first_node: Ray's id of its node.
    """

    def __init__(self, first: ray.actor.ActorHandle, first_node: str) -> None:
        self.first = first
        self._samplers = {(first_node, 0): _NodeSampler(None, first)}

    @contextmanager
    def used(self, node: str) -> Iterator[asyncio.Task[ray.actor.ActorHandle] | None]:
        """The start of a sampling actor of ``node``, to be used by a pair in the block.

        ``None`` for the first one: rollout actors have that from their own start on.
        """
        place = next(each for each in ((node, number) for number in count()) if self._has_room(each))
        if place not in self._samplers:
            self._samplers[place] = _NodeSampler(asyncio.create_task(self._start(place)))
        sampler = self._samplers[place]
        sampler.num_users += 1
        if sampler.ending is not None:
            sampler.ending.cancel()
        try:
            yield sampler.starting
        finally:
            sampler.num_users -= 1
            if not sampler.num_users and sampler.starting is not None:
                sampler.ending = asyncio.get_running_loop().call_later(UNUSED_SECONDS, self._end, place)

    def _has_room(self, place: Place) -> bool:
        return place not in self._samplers or self._samplers[place].num_users < PAIRS_PER_SAMPLER

    async def _start(self, place: Place) -> ray.actor.ActorHandle:
        """Start the sampling actor of ``place``. The first one stands in where that fails, or may not be.

        A node may lack the tokenizer's files, which otherwise only the driver and the replicas need.
        """
        try:
            recipe = await self.first.recipe.remote()
            if recipe is None:
                return self.first
            sampler = start_actor(SamplerActor, recipe, **on_node(place[0]))
            try:
                async with asyncio.timeout(SAMPLER_RESTART_SECONDS):
                    await sampler.status.remote()  # its process is up
            except BaseException:  # also where nobody waits for it any more
                ray.kill(sampler)
                raise
        except (RayError, TimeoutError) as error:
            logger.warning(
                "The sampling actor of node %s did not start; its rollouts use the one beside the driver: %r",
                place[0],
                error,
            )
            return self.first
        self._samplers[place].handle = sampler
        return sampler

    def _end(self, place: Place) -> None:
        sampler = self._samplers.pop(place)
        assert sampler.starting is not None
        sampler.starting.cancel()
        if sampler.handle is not None:
            ray.kill(sampler.handle)

    # -- all of them ---------------------------------------------------------------------------------

    def by_place(self) -> dict[Place, ray.actor.ActorHandle]:
        """The sampling actors, the first one first."""
        return {place: each.handle for place, each in self._samplers.items() if each.handle is not None}

    async def cancel(self, session_id: str) -> None:
        """End what waits for this conversation, wherever it is sampled; a silent node is not waited for."""
        await _answers(each.cancel.remote(session_id) for each in self.by_place().values())

    async def other_statuses(self) -> list[QueueStatus]:
        """The counts of all but the first: the last ones of those that do not answer."""
        known = list(self._samplers.values())[1:]
        others = [(each, each.handle) for each in known if each.handle is not None]
        answers = await _answers(handle.status.remote() for _, handle in others)
        for (each, _), status in zip(others, answers, strict=True):
            each.status = status or each.status
        return [each.status for each, _ in others if each.status is not None]


async def _answers(references: Iterable[ray.ObjectRef[QueueStatus | None]]) -> list[QueueStatus | None]:
    """The results, ``None`` for those that are not there within ``INSPECTION_SECONDS``."""
    calls: list[asyncio.Future[QueueStatus | None]] = [asyncio.ensure_future(each) for each in references]
    if not calls:
        return []
    done, late = await asyncio.wait(calls, timeout=INSPECTION_SECONDS)
    for call in late:
        call.cancel()
    return [call.result() if call in done and call.exception() is None else None for call in calls]


def combined(statuses: list[QueueStatus]) -> QueueStatus:
    """The counts of several queues with the same replicas, each of which counts once.

    A single status stays as it is. Queues number their connections to a replica on their own, so a replica is
    known by its name alone here.
    """
    if len(statuses) == 1:
        return statuses[0]
    replicas: dict[str, ReplicaStatus] = {}
    for name, each in ((name, each) for status in statuses for name, each in status.replicas.items()):
        name = name.partition(CONNECTION)[0]
        there = replicas.get(name)
        replicas[name] = each if there is None else _joined(there, each)
    return QueueStatus(
        num_waiting=sum(each.num_waiting for each in statuses),
        num_late_tokens=sum(each.num_late_tokens for each in statuses),
        replicas=replicas,
    )


def _joined(one: ReplicaStatus, other: ReplicaStatus) -> ReplicaStatus:
    """A replica as two queues see it: what is newest of both, and the sum of what each counts."""
    newest = max(one, other, key=lambda each: each.engine.seconds)
    return replace(
        newest,
        version=max(one.version, other.version),
        is_live=one.is_live or other.is_live,
        num_running=one.num_running + other.num_running,
        num_answered=one.num_answered + other.num_answered,
        silent_seconds=min(one.silent_seconds, other.silent_seconds),
    )
