"""Requests that wait for a policy replica to fetch them, and who is at work on which.

Plain asyncio: the sampling actor owns a queue, ``QueueWorker`` is a replica's side of it.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from environments.errors import SamplerError
from policies.sampler import EngineStats, QueueStatus, ReplicaStatus, TokenOutput, TokenRequest

BATCH_SECONDS = 0.01
"""How long a request waits for others that a replica can fetch with it."""
LEASE_SECONDS = 3.0
"""A replica that has not called for so long has stopped or died: others get its requests."""
PATIENCE_SECONDS = 120.0
"""A request that has waited for so long without any replica at work fails. Serve replaces one in less, if it
can."""
MAX_ATTEMPTS = 4
"""Replicas that may be lost over a request until it fails: it may be what ends them."""
MAX_SESSIONS = 10_000
"""Conversations whose replica is remembered."""
SLACK = 4
"""Requests that a replica may have more than another one that is just not calling. A conversation leaves its
replica if that has so many more than twice another's."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """What a replica says when it calls: who it is, which version it samples with, and what is finished.

    ``answers`` holds a ticket with the output for it, or with the error that this request alone has caused.
    """

    replica: str
    version: int
    answers: Sequence[tuple[str, TokenOutput | Exception]]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Assignment:
    """What a replica is told: requests by ticket, and the tickets that it need not work on any more."""

    requests: Sequence[tuple[str, TokenRequest]] = ()
    revoked: Sequence[str] = ()


@dataclass(eq=False, slots=True)
class _QueuedRequest:
    request: TokenRequest
    answer: asyncio.Future[TokenOutput]
    waited: float = 0.0
    """Seconds without any replica at work."""
    ticket: str = ""
    holder: _Replica | None = None
    lost: list[str] = field(default_factory=list)
    """Replicas that had it and fell silent."""


@dataclass(eq=False, slots=True)
class _Replica:
    name: str
    heard: float = 0.0
    is_live: bool = True
    version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    num_answered: int = 0
    held: dict[str, _QueuedRequest] = field(default_factory=dict)
    """By ticket."""
    revoked: list[str] = field(default_factory=list)
    call: asyncio.Future[Sequence[tuple[str, TokenRequest]]] | None = None
    """Its call, while that waits for requests."""

    @property
    def is_calling(self) -> bool:
        return self.call is not None and not self.call.done()


class RequestQueue:
    """Gives each request to one replica at a time, and its first answer to whoever asked.

    A request goes to a replica that is calling, serves ``min_version`` and no older version than any other
    replica does, and has the fewest requests, or hardly more than one that is just not calling; within a
    conversation to the same one, as long as that is not overloaded. It is leased: from a replica that falls
    silent it is taken, and what that one still answers is ignored.

    Args:
        name: of the policy server, for messages.
        lease_seconds: see ``LEASE_SECONDS``. Calls are answered within a sixth of it.
        patience_seconds: see ``PATIENCE_SECONDS``.
    """

    def __init__(
        self, name: str, lease_seconds: float = LEASE_SECONDS, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        self._name = name
        self._lease_seconds, self._patience_seconds = lease_seconds, patience_seconds
        self._hold_seconds = lease_seconds / 6
        self._waiting: deque[_QueuedRequest] = deque()
        self._replicas: dict[str, _Replica] = {}
        self._session_replicas: OrderedDict[str, _Replica] = OrderedDict()
        # No two queues have a ticket in common: an actor that was started anew gets answers to old ones.
        self._tickets = map(f"{uuid.uuid4().hex[:8]}-{{}}".format, itertools.count())
        self._newest_version = 0
        self._num_late_tokens = 0
        self._gathering = False
        self._watch: asyncio.Task[None] | None = None

    @property
    def is_deserted(self) -> bool:
        """Whether no replica calls, for now."""
        return not any(replica.is_live for replica in self._replicas.values())

    # -- those who ask -------------------------------------------------------------------------------

    async def sample(self, request: TokenRequest) -> TokenOutput:
        """Have ``request`` answered by some replica. If the caller goes away, nobody samples for it.

        Raises:
            SamplerError: no replica is left, or too many were lost over this request.
            ConfigError, PromptTooLongError: the replica's engine refuses it.
        """
        self._keep_watch()
        loop = asyncio.get_running_loop()
        queued = _QueuedRequest(request, loop.create_future())
        self._waiting.append(queued)
        if not self._gathering:
            self._gathering = True
            loop.call_later(BATCH_SECONDS, self._gathered)
        try:
            return await queued.answer
        except asyncio.CancelledError:
            if queued.holder is not None:
                queued.holder.revoked.append(queued.ticket)
                self._take_back(queued)
            elif queued in self._waiting:
                self._waiting.remove(queued)
            raise

    def _gathered(self) -> None:
        self._gathering = False
        self._hand_out()

    # -- replicas ------------------------------------------------------------------------------------

    async def poll(self, report: ReplicaReport) -> Assignment:
        """Take what a replica has finished, and return what it shall do next, as soon as there is something.

        Answered after ``lease_seconds / 6`` at the latest, so that silence means something. A replica's next
        call ends the one before it.
        """
        self._keep_watch()
        replica = self._heard_from(report)
        for ticket, answer in report.answers:
            self._settle(replica, ticket, answer)
        if replica.call is not None:
            _end(replica.call)
        call = replica.call = asyncio.get_running_loop().create_future()
        if not self._gathering:
            self._hand_out()
        seconds = 0 if replica.revoked else self._hold_seconds
        timer = asyncio.get_running_loop().call_later(seconds, _end, call)
        try:
            requests = await call
        finally:
            timer.cancel()
            if replica.call is call:
                replica.call = None
        revoked, replica.revoked = replica.revoked, []
        return Assignment(requests, revoked)

    def _heard_from(self, report: ReplicaReport) -> _Replica:
        replica = self._replicas.setdefault(report.replica, _Replica(report.replica))
        replica.heard, replica.is_live = time.monotonic(), True
        replica.version, replica.stats = report.version, report.stats
        self._newest_version = max(self._newest_version, report.version)
        return replica

    def _settle(self, replica: _Replica, ticket: str, answer: TokenOutput | Exception) -> None:
        queued = replica.held.get(ticket)
        if queued is None:  # taken away in the meantime
            if isinstance(answer, TokenOutput):
                self._num_late_tokens += len(answer.token_ids)
            return
        self._take_back(queued)
        replica.num_answered += 1
        if queued.answer.done():
            return
        if isinstance(answer, Exception):
            queued.answer.set_exception(answer)
        else:
            queued.answer.set_result(answer)

    # -- leases --------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        """Give what waits to the replicas that are calling."""
        current = [
            replica
            for replica in self._replicas.values()
            if replica.is_live and replica.version >= self._newest_version
        ]
        batches: dict[_Replica, list[tuple[str, TokenRequest]]] = {
            replica: [] for replica in current if replica.is_calling
        }
        if not batches or not self._waiting:
            return
        waiting, self._waiting = self._waiting, deque()
        for queued in waiting:
            replica = self._choose(queued.request, current)
            if replica is None:
                self._waiting.append(queued)
                continue
            queued.ticket, queued.holder = next(self._tickets), replica
            replica.held[queued.ticket] = queued
            batches[replica].append((queued.ticket, queued.request))
        for replica, batch in batches.items():
            if batch and replica.call is not None:
                replica.call.set_result(batch)
                replica.call = None

    def _choose(self, request: TokenRequest, current: Sequence[_Replica]) -> _Replica | None:
        """Which of those that are calling gets ``request``; ``None`` if it had better wait."""
        able = [replica for replica in current if replica.version >= request.min_version]
        calling = [replica for replica in able if replica.is_calling]
        if not calling:
            return None
        chosen = min(calling, key=_load)
        usual = self._session_replicas.get(request.session_id)
        if usual in able and _load(usual) < 2 * _load(chosen) + SLACK:
            return usual if usual.is_calling else None  # it calls again in a moment
        since = time.monotonic() - 2 * self._hold_seconds
        if any(_load(each) + SLACK <= _load(chosen) for each in able if each.heard > since):
            return None  # so does one that has less to do
        if request.session_id:
            self._session_replicas[request.session_id] = chosen
        if len(self._session_replicas) > MAX_SESSIONS:
            self._session_replicas.popitem(last=False)
        return chosen

    def _take_back(self, queued: _QueuedRequest) -> None:
        assert queued.holder is not None
        del queued.holder.held[queued.ticket]
        queued.holder = None

    def _keep_watch(self) -> None:
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._watch_leases())

    async def _watch_leases(self) -> None:
        """consumes time · waits for the next tick · produces requests that are free again, or have failed"""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._hold_seconds)
            # Where this process itself did not get to run, nobody else was silent.
            own_delay = time.monotonic() - before - self._hold_seconds
            for replica in self._replicas.values():
                replica.heard += own_delay
                if replica.is_live and time.monotonic() - replica.heard > self._lease_seconds:
                    self._end_leases(replica)
            self._hand_out()
            if self.is_deserted:
                self._fail_the_oldest()

    def _end_leases(self, replica: _Replica) -> None:
        replica.is_live = False
        for ticket, queued in reversed(list(replica.held.items())):
            self._take_back(queued)
            replica.revoked.append(ticket)
            queued.lost.append(replica.name)
            if len(queued.lost) < MAX_ATTEMPTS:
                self._waiting.appendleft(queued)
            elif not queued.answer.done():
                text = (
                    f"{MAX_ATTEMPTS} replicas of {self._name!r} were lost over this request: {queued.lost}."
                )
                queued.answer.set_exception(SamplerError(text))

    def _fail_the_oldest(self) -> None:
        """To be called at each tick without a replica at work."""
        now = time.monotonic()
        silent = [f"{each.name}, silent for {now - each.heard:.0f} s" for each in self._replicas.values()]
        text = (
            f"No replica of the policy server {self._name!r} has asked for work for "
            f"{self._patience_seconds:g} s. Known are: {'; '.join(silent) or 'none'}. A process that was "
            "stopped goes on after `kill -CONT`; why one has died or does not start is in Serve's logs."
        )
        for queued in self._waiting:
            queued.waited += self._hold_seconds
            if queued.waited >= self._patience_seconds and not queued.answer.done():
                queued.answer.set_exception(SamplerError(text))
        self._waiting = deque(queued for queued in self._waiting if not queued.answer.done())

    # -- for metrics ---------------------------------------------------------------------------------

    def status(self) -> QueueStatus:
        """Counts."""
        return QueueStatus(
            num_waiting=len(self._waiting),
            num_late_tokens=self._num_late_tokens,
            replicas={
                each.name: ReplicaStatus(
                    each.version, each.is_live, len(each.held), each.num_answered, each.stats
                )
                for each in self._replicas.values()
            },
        )


def _load(replica: _Replica) -> int:
    """Requests that it works on."""
    return len(replica.held)


def _end(call: asyncio.Future[Sequence[tuple[str, TokenRequest]]]) -> None:
    if not call.done():
        call.set_result(())
