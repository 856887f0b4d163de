"""Turns in which the programs of a cluster start, so that none holds what another one waits for.

Serve places its replicas itself, so no program can reserve its engines. Two that start at the same time could
each get the learner's place and wait for the engine's for ever. So they start one after the other, and each
waits, holding nothing, until the cluster has room for all that it needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group

from actors.ray_tools.placement import NAMESPACE, beside_driver, start_actor

NAME = "start-turn"
"""The name that the actor of a turn has in the cluster: only one can have it."""
TURN_POLL_SECONDS = 1.0
HOLDER_SECONDS = 5.0
TURN_REMIND_SECONDS = 300.0
"""Seconds between two lines on what a start waits for."""


@ray.remote(num_cpus=0)
class TurnActor:
    """The turn of a program, which owns this actor: Ray ends it with the program, also by SIGKILL."""

    def __init__(self, program: str) -> None:
        self._program, self._waits_for = program, ""

    def note(self, waits_for: str) -> None:
        """Take down what the program waits for in its turn."""
        self._waits_for = waits_for

    def describe(self) -> str:
        """The program, and what it waits for."""
        return self._program + (f", which waits for {self._waits_for}" if self._waits_for else "")


class Turn:
    """A program's turn to start on its cluster, from ``take`` to ``end``, or to the program's end.

    Args:
        program: name of the program for others that wait.
        report: is given what is waited for whenever that changes, for example for ``launch.status``.
        announce: prints a line, at the beginning of each of the two waits and then every five minutes.
    """

    def __init__(self, program: str, report: Callable[[str], None], announce: Callable[[str], None]) -> None:
        self._program, self._report, self._announce = program, report, announce
        self._actor: Any = None
        self._announced = -TURN_REMIND_SECONDS

    def take(self) -> None:
        """Return when no other program of the cluster starts."""
        while self._actor is None:
            try:
                self._actor = start_actor(
                    TurnActor, self._program, name=NAME, namespace=NAMESPACE, **beside_driver()
                )
            except ValueError:  # the name is taken
                if holder := self._holder():
                    self._waits(f"its turn to start on this cluster, after {holder}")
                time.sleep(TURN_POLL_SECONDS)
        self._announced = -TURN_REMIND_SECONDS

    def wait_for_room(
        self, bundles: Sequence[tuple[Mapping[str, float], Mapping[str, str]]], shortage: Callable[[], str]
    ) -> None:
        """Return when the cluster has room for all ``bundles`` at once.

        Args:
            bundles: resources, each on one node, and that node's labels.
            shortage: returns what is missing.
        """
        needed = [({name: most for name, most in each.items() if most}, labels) for each, labels in bundles]
        needed = [(resources, labels) for resources, labels in needed if resources]
        if not needed:
            return
        places = placement_group(
            [dict(resources) for resources, _ in needed],
            strategy="PACK",
            bundle_label_selector=[dict(labels) for _, labels in needed],
        )
        try:
            while not places.wait(TURN_POLL_SECONDS):
                self._waits(f"room: {shortage()}")
        finally:
            remove_placement_group(places)
        self._actor.note.remote("")

    def end(self) -> None:
        """Let the next program start. More than one thread may call this."""
        actor, self._actor = self._actor, None
        if actor is not None and ray.is_initialized():
            ray.kill(actor)

    def _waits(self, reason: str) -> None:
        self._report(f"waits for {reason}")
        if self._actor is not None:  # who comes after this line is announced finds it noted
            ray.wait([self._actor.note.remote(reason)], timeout=HOLDER_SECONDS)
        if time.monotonic() - self._announced > TURN_REMIND_SECONDS:
            self._announced = time.monotonic()
            self._announce(f"Waiting for {reason}.")

    @staticmethod
    def _holder() -> str | None:
        """The program that has the turn; ``None`` if that has just ended."""
        try:
            holder = ray.get_actor(NAME, NAMESPACE)
            text: str = ray.get(holder.describe.remote(), timeout=HOLDER_SECONDS)
            return text
        except GetTimeoutError:
            return "another program"
        except (ValueError, RayActorError):
            return None
