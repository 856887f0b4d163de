"""Parts of a large fleet: processes that call its rollout actors, and exchange lists with it.

Ray's part of a call costs several times what the fleet's own code does, so that one process has room for some
hundreds a second. Pairs beyond the first ``PAIRS_OF_FLEET`` are called by parts::

    RolloutFleet ── play: attempts ──▶ FleetPart ── run ──▶ RolloutActor
        ▲                                │  ▲                   │
        └─────── take: turns, results ───┘  └── record_turn ────┘

A part decides and stores nothing: slots, journals and retries are the fleet's. Parts live on the fleet's
node, one for so many pairs: on each of many nodes so few rollouts end in a second that its lists would be of
one. The fleet fails with a part that dies, as with any other process that it needs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.ray_tools.placement import beside_driver, start_actor
from actors.rollouts.player import Attempt, RolloutResult
from actors.rollouts.rollout import RolloutRequest, failed
from actors.settings import MANY_CALLS
from environments.types import TerminationReason

PAIRS_OF_FLEET = 256
"""Pairs that the fleet's own process calls."""
PAIRS_PER_PART = 1536
GATHER_SECONDS = 0.1
"""Seconds from one list of what goes to a part or comes from it to the next, in a large fleet."""

Turn = tuple[str, int, int, bytes]
"""Arguments of ``RolloutFleet.record_turn``."""


class Order(NamedTuple):
    """An attempt for a place of a rollout actor; ``key`` is its number, ``actor`` that of the actor."""

    key: int
    actor: int
    place: int
    attempt: Attempt


async def result_of(call: Awaitable[RolloutResult], request: RolloutRequest) -> RolloutResult:
    """The result that a rollout actor returns; a failed rollout where it can return nothing."""
    reason = TerminationReason.CRASHED
    try:
        return await call
    except RayActorError as error:
        text = f"The rollout actor died: {error}"
    except RayTaskError as error:  # mostly: what it returned cannot be sent
        reason = TerminationReason.ENV_ERROR
        text = f"The rollout could not be returned: {error}"
    except RayError as error:  # lost with its node, or it cannot be read in this process
        text = f"The rollout's result was lost: {error}"
    return RolloutResult(failed(request, reason, text), usable=False)


@ray.remote(num_cpus=0, max_concurrency=MANY_CALLS)
class FleetPart:
    """Makes calls for the fleet."""

    def __init__(self) -> None:
        self._actors: dict[int, ray.actor.ActorHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._turns: list[Turn] = []
        self._results: list[tuple[int, RolloutResult]] = []
        self._there = asyncio.Event()
        self._error: BaseException | None = None

    async def play(self, orders: list[Order], actors: dict[int, ray.actor.ActorHandle]) -> None:
        """Begin attempts, with ``actors`` that are new here."""
        self._actors |= actors
        for order in orders:
            task = asyncio.create_task(self._play(order))
            self._tasks.add(task)
            task.add_done_callback(self._end)

    async def _play(self, order: Order) -> None:
        if (actor := self._actors.get(order.actor)) is None:
            return  # it has ended meanwhile, and nobody waits
        result = await result_of(actor.run.remote(order.place, order.attempt), order.attempt.request)
        self._results.append((order.key, result))
        self._there.set()

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error  # a fault of this file's: the fleet is not to wait for the result
            self._there.set()

    async def record_turn(self, rollout_id: str, attempt: int, index: int, entry: bytes) -> None:
        """Hand on a turn."""
        self._turns.append((rollout_id, attempt, index, entry))
        self._there.set()

    async def take(self) -> tuple[list[Turn], list[tuple[int, RolloutResult]]]:
        """Turns and results that have come since the call before.

        Raises:
            The error of an attempt that has no result: the fleet fails with it.
        """
        await asyncio.sleep(GATHER_SECONDS)
        await self._there.wait()
        if self._error is not None:
            raise self._error
        self._there.clear()
        turns, self._turns = self._turns, []
        results, self._results = self._results, []
        return turns, results

    async def drop(self, actor: int) -> None:
        """Forget an actor that has ended."""
        self._actors.pop(actor, None)


class PartCalls:
    """The fleet's calls of a part, which this starts.

    Args:
        record_turn: stores a turn in the fleet.
    """

    def __init__(self, record_turn: Callable[[str, int, int, bytes], Awaitable[None]]) -> None:
        self.handle = start_actor(FleetPart, **beside_driver())
        self.num_pairs = 0
        self._record_turn = record_turn
        self._num_orders = 0
        self._orders: list[Order] = []
        self._new: dict[int, ray.actor.ActorHandle] = {}
        self._results: dict[int, asyncio.Future[RolloutResult]] = {}
        self._there = asyncio.Event()
        self.loops = [asyncio.create_task(each()) for each in (self._send, self._receive)]

    def add(self, number: int, actor: ray.actor.ActorHandle) -> None:
        """Have the part know an actor, by a number that no other one has."""
        self._new[number] = actor

    def drop(self, number: int) -> None:
        """Have it forget that one."""
        self._new.pop(number, None)
        self.handle.drop.remote(number)

    def run(self, actor: int, place: int, attempt: Attempt) -> asyncio.Future[RolloutResult]:
        """The result of an attempt, which the part has played."""
        key = self._num_orders = self._num_orders + 1
        self._orders.append(Order(key, actor, place, attempt))
        result: asyncio.Future[RolloutResult] = asyncio.get_running_loop().create_future()
        result.add_done_callback(lambda _: self._results.pop(key))
        self._results[key] = result
        self._there.set()
        return result

    async def _send(self) -> None:
        """consumes attempts · waits for the next ones · produces calls of the part"""
        while True:
            await self._there.wait()
            self._there.clear()
            orders, self._orders = self._orders, []
            new, self._new = self._new, {}
            await self.handle.play.remote(orders, new)
            await asyncio.sleep(GATHER_SECONDS)

    async def _receive(self) -> None:
        """consumes the part's turns and results · waits for them · produces journals, and ends of attempts"""
        while True:
            turns, results = await self.handle.take.remote()
            for turn in turns:
                await self._record_turn(*turn)
            for key, value in results:
                result = self._results.get(key)
                if result is not None and not result.done():
                    result.set_result(value)


class FleetParts:
    """The parts of a fleet, which start as it grows. It lives in one asyncio loop.

    Args:
        record_turn: stores a turn in the fleet.
    """

    def __init__(self, record_turn: Callable[[str, int, int, bytes], Awaitable[None]]) -> None:
        self._record_turn = record_turn
        self._num_own = 0
        self._parts: list[PartCalls] = []

    def take(self, num_pairs: int) -> PartCalls | None:
        """The part for an actor of so many pairs; ``None`` for the fleet's own process."""
        if self._num_own < PAIRS_OF_FLEET:
            self._num_own += num_pairs
            return None
        part = next((each for each in self._parts if each.num_pairs < PAIRS_PER_PART), None)
        if part is None:
            part = PartCalls(self._record_turn)
            self._parts.append(part)
        part.num_pairs += num_pairs
        return part

    def leave(self, part: PartCalls | None, actor: int, num_pairs: int) -> None:
        """Take note that an actor has ended."""
        if part is None:
            self._num_own -= num_pairs
        else:
            part.num_pairs -= num_pairs
            part.drop(actor)

    def check(self) -> None:
        """Raise the error of a part that has died."""
        for loop in (loop for part in self._parts for loop in part.loops):
            if loop.done():
                loop.result()  # raises: it has no end of its own
