"""Turns of engines and a learner on the same devices: the engines sleep from a call of the learner until
rollouts are waited for (``server.colocated``).

    learner  RankGroup.begin ──────────▶ asleep ──▶  EngineTurns  ──▶ follow_turns, in each replica
    driver   TrajectoryStream.take ────▶ awake ───▶  in the store        Engine.sleep, Engine.wake

Nobody has to remember whose turn it is: who needs the devices takes them, and a turn that is taken twice
changes nothing.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from actors.ray_tools.calls import own_errors, wait_with_timeout
from policies.engines.base import Engine

REPLICA_CHECK_SECONDS = 2.0
"""Seconds after which a replica that does not fall asleep is called: it may have died."""


class EngineTurns:
    """The present turn, and the replicas that follow it. The learner begins: it loads its model first."""

    def __init__(self) -> None:
        self._asleep = True
        self._replicas: dict[Any, bool] = {}
        """True for a replica without memory on the devices: it sleeps, or has no engine yet."""
        self._changed = asyncio.Condition()

    async def take(self, asleep: bool) -> None:
        """Have the engines sleep, and return when all do; or wake, and do not wait: requests do."""
        async with self._changed:
            self._asleep = asleep
            self._changed.notify_all()
        while awake := self._awake():
            await wait_with_timeout(self._changed, lambda: not self._awake(), REPLICA_CHECK_SECONDS)
            for replica in set(awake) & set(self._awake()):
                if await _has_died(replica):
                    self._replicas.pop(replica, None)  # an interrupted call may find it too

    def _awake(self) -> list[Any]:
        """Replicas that the learner has to wait for."""
        return [each for each, sleeps in self._replicas.items() if not sleeps] if self._asleep else []

    async def next(self, replica: Any, asleep: bool) -> bool:
        """Take note of what ``replica`` does, and return what it is to do: at once when that is another
        thing, else after a minute at most. It counts as awake from the answer on.
        """
        async with self._changed:
            self._replicas[replica] = asleep
            self._changed.notify_all()
        await wait_with_timeout(self._changed, lambda: self._asleep != asleep)
        self._replicas[replica] = asleep and self._asleep
        return self._asleep


async def _has_died(replica: Any) -> bool:
    try:
        async with asyncio.timeout(REPLICA_CHECK_SECONDS):
            await replica.__ray_ready__.remote()
    except ActorDiedError:
        return True
    except (RayError, TimeoutError):  # Serve replaces one that hangs
        return False
    return False


def take_turn(store: ray.actor.ActorHandle, asleep: bool) -> None:
    """Have the engines that follow ``store`` sleep, or wake: see ``EngineTurns.take``."""
    with own_errors():
        ray.get(store.take_turn.remote(asleep))


async def wait_for_turn(store: Any, replica: Any) -> None:
    """Return when a replica may load its engine: one that takes the place of another may come in the turn of
    the learner."""
    while await store.next_turn.remote(replica, True):
        pass


async def follow_turns(store: Any, replica: Any, engine: Engine) -> None:
    """consumes turns · waits for the store · produces an engine that sleeps in those of the learner

    Raises:
        ActorDiedError: the store is gone, and the program that has made it.
        SamplerError: the engine has failed.
    """
    asleep = False
    while True:
        wanted: bool = await store.next_turn.remote(replica, asleep)
        if wanted != asleep:
            await (engine.sleep() if wanted else engine.wake())
            asleep = wanted
