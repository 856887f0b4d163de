"""A replica's side of a request queue: it fetches requests and delivers the engine's answers."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from ray.exceptions import ActorUnavailableError

from actors.sampling.request_queue import BUSY_REQUESTS, Assignment, ReplicaReport
from actors.timing import GATHER_ANSWERS_SECONDS, LEASE_SECONDS, QUEUE_RETRY_SECONDS
from environments.errors import SamplerError, TroupeError
from policies.engines.base import Engine
from policies.sampler import TokenOutput, TokenRequest

CONNECTION = ", connection "
"""Separates, in the name of a ``QueueWorker``, the replica from the number of its connection."""

LOAD_POLLS = 500.0
"""Most polls of a replica in a second, of all its queues, that only report another load."""
UNREPORTED_REQUESTS = 4
"""Requests by which the reported load may be wrong, and a sixteenth of all where that is more."""

_connections = itertools.count(1)

ReadCalls = Callable[[TokenRequest, TokenOutput], TokenOutput]


def _as_sampled(_: TokenRequest, output: TokenOutput) -> TokenOutput:
    return output


class _LoadWatch:
    """Watches how many requests an engine has beside those of one queue, and wakes the worker of that queue
    if it has reported another number: the queue would split by a load that is no more.
    """

    def __init__(self, engine: Engine, wake: Callable[[], None]) -> None:
        self._engine, self._wake = engine, wake
        self._num_own = self._num_reported = 0
        self._time = -math.inf
        """Time of the report."""
        self._next_check: asyncio.TimerHandle | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch in the block."""
        self._engine.load_watchers += (self._check,)
        try:
            yield
        finally:
            watchers = self._engine.load_watchers
            self._engine.load_watchers = tuple(each for each in watchers if each != self._check)
            if self._next_check is not None:
                self._next_check.cancel()

    @contextmanager
    def of_own_queue(self) -> Iterator[None]:
        """Count a request of the queue's own that the engine has in the block."""
        self._num_own += 1
        try:
            yield
        finally:
            self._num_own -= 1

    def reported(self) -> int:
        """The number, which is reported now."""
        self._time, self._num_reported = time.monotonic(), self._num_others
        return self._num_reported

    @property
    def _num_others(self) -> int:
        return self._engine.requests_in_flight - self._num_own

    def _check(self) -> None:
        most = max(UNREPORTED_REQUESTS, self._engine.requests_in_flight // 16)
        if abs(self._num_others - self._num_reported) <= most:
            return
        pause = self._time + len(self._engine.load_watchers) / LOAD_POLLS - time.monotonic()
        if pause <= 0:
            self._wake()
        elif self._next_check is None:  # it may not change again for long
            self._next_check = asyncio.get_running_loop().call_later(pause, self._check_late)

    def _check_late(self) -> None:
        self._next_check = None
        self._check()


class QueueWorker:
    """Polls one ``RequestQueue``: one poll always waits there, and each delivers the finished answers.

    Args:
        replica: this replica's name, for messages.
        engine: samples.
        poll: the queue's ``poll``, wherever the queue is.
        catch_up: loads the newest weights. Called when this process may have been stopped for a while.
        read_calls: adds to an answer the tool calls that its request wants.
    """

    def __init__(
        self,
        replica: str,
        engine: Engine,
        poll: Callable[[ReplicaReport], Awaitable[Assignment]],
        catch_up: Callable[[], Awaitable[None]],
        read_calls: ReadCalls = _as_sampled,
    ) -> None:
        self._replica, self._engine = replica, engine
        self._poll, self._catch_up, self._read_calls = poll, catch_up, read_calls
        self._running: dict[str, asyncio.Task[None]] = {}
        self._load = _LoadWatch(engine, self.wake)
        self._answers: list[tuple[str, TokenOutput | Exception]] = []
        self._has_news = asyncio.Event()
        self._newest_call: asyncio.Task[None] | None = None
        self._is_leaving = self._has_left = False

    def leave(self, is_leaving: bool = True) -> None:
        """Fetch no more, deliver what is there, and end; or go on after all, where it has not ended yet."""
        if is_leaving != self._is_leaving:
            self._is_leaving = is_leaving
            self.wake()

    def wake(self) -> None:
        """Poll now: there is something new to report, such as a version."""
        self._has_news.set()

    async def run(self) -> None:
        """consumes requests · waits for the queue and the engine · produces an answer for each

        Returns after ``leave``, once all that it has fetched is delivered.

        Raises:
            SamplerError: the engine has failed. What it has not answered is left to other replicas.
            What ``poll`` raises: the queue is gone.
        """
        try:
            with self._load.watching():
                while True:
                    start = time.monotonic()
                    self._engine.check_alive()
                    self._has_news.clear()
                    earlier = self._newest_call
                    self._newest_call = asyncio.create_task(self._call(self._report()))
                    self._newest_call.add_done_callback(self._call_ended)
                    if earlier is not None:
                        await earlier  # the queue ends it, now that there is a newer one
                    await self._has_news.wait()
                    if self._is_leaving and self._has_left and self._newest_call.done():
                        return
                    if len(self._running) >= BUSY_REQUESTS:
                        await asyncio.sleep(GATHER_ANSWERS_SECONDS)
                    await self._catch_up_after_a_stop(start)
        finally:
            for task in (*self._running.values(), *([self._newest_call] if self._newest_call else [])):
                task.cancel()

    def _call_ended(self, call: asyncio.Task[None]) -> None:
        if call is self._newest_call:  # an older one was ended by a newer one: no reason to poll again
            self._has_news.set()

    def _report(self) -> ReplicaReport:
        """All news until now, so that none of it is a reason for another poll."""
        answers, self._answers = self._answers, []
        return ReplicaReport(
            self._replica,
            self._engine.version,
            answers,
            self._engine.stats(),
            self._load.reported(),
            self._is_leaving,
        )

    async def _call(self, report: ReplicaReport) -> None:
        start = time.monotonic()
        assignment = await self._poll(report)
        await self._catch_up_after_a_stop(start)
        for ticket in assignment.revoked:
            if ticket in self._running:
                self._running.pop(ticket).cancel()
        for ticket, request in assignment.requests:
            self._running[ticket] = asyncio.create_task(self._answer(ticket, request))
        self._has_left = report.is_leaving and not self._running and not self._answers

    async def _catch_up_after_a_stop(self, start: float) -> None:
        """Load the newest weights, if this process may have been stopped while they were published."""
        if time.monotonic() - start > LEASE_SECONDS:
            await self._catch_up()

    async def _answer(self, ticket: str, request: TokenRequest) -> None:
        answer: TokenOutput | Exception
        try:
            answer = self._read_calls(request, await self._sample(request))
        except Exception as error:  # noqa: BLE001  # an engine may raise anything, and the request has to end with it
            try:
                self._engine.check_alive()
            except SamplerError:  # run() raises the engine's failure
                self._has_news.set()
                return
            answer = error if isinstance(error, TroupeError) else self._explained(error)
        del self._running[ticket]
        self._answers.append((ticket, answer))
        self._has_news.set()

    async def _sample(self, request: TokenRequest) -> TokenOutput:
        with self._load.of_own_queue(), self._engine.in_flight(request.prompt_ids, request.params):
            return await self._engine.generate(request.prompt_ids, request.params, request.pictures)

    def _explained(self, error: Exception) -> SamplerError:
        """The error as text: an engine's own class might not be known where it is read."""
        return SamplerError(
            f"{type(self._engine).__name__} of replica {self._replica} could not answer a request: "
            f"{type(error).__name__}: {error}"
        )


async def serve_queue(
    replica: str,
    engine: Engine,
    poll: Callable[[ReplicaReport], Awaitable[Assignment]],
    catch_up: Callable[[], Awaitable[None]],
    connected: Callable[[QueueWorker], None],
    read_calls: ReadCalls = _as_sampled,
) -> None:
    """Sample for one queue until its worker leaves, by another ``QueueWorker`` after each lost connection.

    Args:
        replica, engine, poll, catch_up, read_calls: as for ``QueueWorker``.
        connected: called with each worker.

    Raises:
        As ``QueueWorker.run``, but for a queue that is only unavailable.
    """
    # A name of its own: the queue gives to others what a connection had, once that one polls no more.
    for number in _connections:
        worker = QueueWorker(f"{replica}{CONNECTION}{number}", engine, poll, catch_up, read_calls)
        connected(worker)
        try:
            await worker.run()
            return
        except ActorUnavailableError:
            await asyncio.sleep(QUEUE_RETRY_SECONDS)
