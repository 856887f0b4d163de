"""Requests that wait for a replica of the policy server to fetch them, and those leased to one.

::

    sample ──▶ waiting ── a replica's poll ──▶ held by it, a lease ── its next poll ──▶ answered
                  ▲                                │
                  └── it polls no more (a lease) ──┘     after MAX_ATTEMPTS leases, or without any replica
                                                         for REQUEST_WAIT_SECONDS: SamplerError

Those that wait stand in lines: a conversation's next request in that of the replica that has its prefix,
others in one for the version that they need. So a poll costs what it hands out and a look at each replica,
however many go on waiting.

Plain asyncio: the sampling actor owns a queue, ``QueueWorker`` is a replica's side of it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
import uuid
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from actors.timing import GATHER_REQUESTS_SECONDS, LEASE_SECONDS, REQUEST_WAIT_SECONDS
from environments.errors import SamplerError
from policies.sampler import EngineStats, QueueStatus, ReplicaStatus, TokenOutput, TokenRequest

BUSY_REQUESTS = 16
"""Number of requests from which on a replica waits to batch its polls."""
MAX_ATTEMPTS = 4
"""Replicas that may be lost while they have a request, before it fails: it may be the cause."""
BURST_SECONDS = 0.1
"""Time that a conversation beyond its replica's share waits for the rest of a burst, which may make that
larger, before another replica takes it.
"""
MAX_SESSIONS = 10_000
"""Conversations whose replica is remembered."""


def most_beside(fewest: int) -> int:
    """Return the requests that a replica may have beside one with ``fewest``: with more it is overloaded."""
    return 2 * fewest + 4


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """Report of a replica with a poll: its name, its version, and its finished requests.

    ``answers`` holds, by ticket, the output, or the error of this request alone. ``num_others`` counts the
    requests that it has from other queues and over HTTP. One that ``is_leaving`` wants no more requests, only
    to deliver what it has.
    """

    replica: str
    version: int
    answers: Sequence[tuple[str, TokenOutput | Exception]]
    stats: EngineStats
    num_others: int = 0
    is_leaving: bool = False


@dataclass(frozen=True, slots=True)
class Assignment:
    """The answer to a poll: requests by ticket, and the tickets of requests to abort."""

    requests: Sequence[tuple[str, TokenRequest]] = ()
    revoked: Sequence[str] = ()


@dataclass(eq=False, slots=True)
class _QueuedRequest:
    request: TokenRequest
    answer: asyncio.Future[TokenOutput]
    since: float
    """Time at which it came."""
    line: _Line | None = None
    """Line in which it waits."""
    waited: float = 0.0
    """Seconds without a live replica."""
    ticket: str = ""
    holder: _Replica | None = None
    lost: list[str] = field(default_factory=list)
    """Replicas that were lost while they had it."""


_Line = OrderedDict[_QueuedRequest, None]
"""Requests that wait, in their order; any of them may leave."""


@dataclass(eq=False, slots=True)
class _Replica:
    name: str
    last_poll: float = 0.0
    is_live: bool = True
    version: int = 0
    stats: EngineStats = field(default_factory=EngineStats)
    num_answered: int = 0
    num_others: int = 0
    """Requests that it had from elsewhere when it last polled."""
    is_leaving: bool = False
    held: dict[str, _QueuedRequest] = field(default_factory=dict)
    """Requests by ticket."""
    line: _Line = field(default_factory=OrderedDict)
    """Requests of conversations that it has answered before."""
    revoked: list[str] = field(default_factory=list)
    poll: asyncio.Future[Sequence[tuple[str, TokenRequest]]] | None = None
    """Future of its poll, while that waits for requests."""

    @property
    def load(self) -> int:
        """Number of requests that it has from anywhere."""
        return len(self.held) + self.num_others

    @property
    def takes_more(self) -> bool:
        return self.is_live and not self.is_leaving

    @property
    def is_polling(self) -> bool:
        return self.poll is not None and not self.poll.done()


_Batch = list[tuple[str, TokenRequest]]
"""Answer to a poll: requests with their tickets."""
_Batches = dict[_Replica, _Batch]


@dataclass(frozen=True, slots=True)
class _Crowd:
    """The replicas among which requests are split, in the order in which they came."""

    polls_soon: Collection[_Replica]
    """Replicas that poll, or will in a moment."""
    still_loads: Collection[_Replica]
    """Replicas that do not have the newest version, and are not late."""
    loads: dict[_Replica, int]
    """Number of requests that each of both has, with those of this round that fall to it."""

    def able(self, needed: int) -> list[_Replica]:
        """List those that serve version ``needed``, or will."""
        return [
            each
            for each in self.loads
            if each in (self.polls_soon if each.version >= needed else self.still_loads)
        ]


class RequestQueue:
    """Leases each request to one replica at a time, and returns the first answer.

    Requests are split evenly among all replicas that can be counted on, so one that polls first, or is the
    first to serve a new version, leaves the others their share. A request goes to a replica that serves
    ``min_version``; of those with equally many requests to the one with the newest version; within a
    conversation to the same replica, as long as that is not overloaded. When a replica stops polling, its
    lease ends: the request goes to another one, and a late answer is ignored.

    Args:
        name: of the policy server, for messages.
        lease_seconds: see ``LEASE_SECONDS``. Polls are answered within a sixth of it.
        wait_seconds: see ``REQUEST_WAIT_SECONDS``.
    """

    def __init__(
        self, name: str, lease_seconds: float = LEASE_SECONDS, wait_seconds: float = REQUEST_WAIT_SECONDS
    ) -> None:
        self._name = name
        self._lease_seconds, self._wait_seconds = lease_seconds, wait_seconds
        self._hold_seconds = lease_seconds / 6
        self._lines: defaultdict[int, _Line] = defaultdict(OrderedDict)
        """Requests that any replica may answer, by the oldest version that may."""
        self._replicas: dict[str, _Replica] = {}
        self._session_replicas: OrderedDict[str, _Replica] = OrderedDict()
        # No two queues have a ticket in common: an actor that was started anew gets answers to old ones.
        self._tickets = map(f"{uuid.uuid4().hex[:8]}-{{}}".format, itertools.count())
        self._newest_version = 0
        self._newest_since = -math.inf
        """Time when a replica last began to serve the newest version."""
        self._num_late_tokens = 0
        self._gathering = self._in_burst = False
        self._watch: asyncio.Task[None] | None = None

    @property
    def has_no_replica(self) -> bool:
        """True while no replica takes requests."""
        return not any(replica.takes_more for replica in self._replicas.values())

    # -- requests ------------------------------------------------------------------------------------

    async def sample(self, request: TokenRequest) -> TokenOutput:
        """Have ``request`` answered by a replica. If the caller is cancelled, the request is aborted.

        Raises:
            SamplerError: no replica is left, or too many were lost over this request.
            TroupeError: the engine cannot answer this request.
        """
        self._keep_watch()
        loop = asyncio.get_running_loop()
        queued = _QueuedRequest(request, loop.create_future(), time.monotonic())
        _append(queued, self._line_of(queued))
        if not self._gathering:
            self._gathering = True
            loop.call_later(GATHER_REQUESTS_SECONDS if self._all_are_busy() else 0, self._gathered)
        try:
            return await queued.answer
        except asyncio.CancelledError:
            if queued.holder is not None:
                queued.holder.revoked.append(queued.ticket)
                self._take_back(queued)
            elif queued.line is not None:
                queued.line.pop(queued, None)  # it is not there if it has failed at the same moment
            raise

    def _line_of(self, queued: _QueuedRequest) -> _Line:
        """The line of its conversation's replica, or of the version that it needs."""
        usual = self._session_replicas.get(queued.request.session_id)
        if usual is not None and usual.takes_more:
            return usual.line
        return self._lines[queued.request.min_version]

    @property
    def _num_waiting(self) -> int:
        return sum(map(len, self._all_lines()))

    def _all_lines(self) -> list[_Line]:
        return [*self._lines.values(), *(each.line for each in self._replicas.values())]

    def _all_are_busy(self) -> bool:
        loads = [replica.load for replica in self._replicas.values() if replica.takes_more]
        return min(loads, default=0) >= BUSY_REQUESTS

    def _gathered(self) -> None:
        self._gathering = False
        self._hand_out()

    # -- replicas ------------------------------------------------------------------------------------

    async def poll(self, report: ReplicaReport) -> Assignment:
        """Take a replica's finished answers, and return its next requests as soon as there are some.

        Answered after ``lease_seconds / 6`` at the latest, so that a replica that does not poll again has
        stopped. A replica's next poll ends the one before it.
        """
        self._keep_watch()
        replica = self._update_replica(report)
        for ticket, answer in report.answers:
            self._settle(replica, ticket, answer)
        if replica.poll is not None:
            _end(replica.poll)
        poll = replica.poll = asyncio.get_running_loop().create_future()
        if not self._gathering:
            self._hand_out()
        seconds = 0 if replica.revoked else self._hold_seconds
        timer = asyncio.get_running_loop().call_later(seconds, _end, poll)
        try:
            requests = await poll
        finally:
            timer.cancel()
            if replica.poll is poll:
                replica.poll = None
        revoked, replica.revoked = replica.revoked, []
        return Assignment(requests, revoked)

    def _update_replica(self, report: ReplicaReport) -> _Replica:
        replica = self._replicas.setdefault(report.replica, _Replica(report.replica))
        replica.last_poll, replica.is_live = time.monotonic(), True
        if report.version > max(replica.version, self._newest_version - 1):
            self._newest_version, self._newest_since = report.version, replica.last_poll
        replica.version, replica.stats = report.version, report.stats
        replica.num_others, replica.is_leaving = report.num_others, report.is_leaving
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
        """Give the waiting requests to the replicas that poll, to each those that fall to it."""
        batches: _Batches = {
            replica: [] for replica in self._replicas.values() if replica.takes_more and replica.is_polling
        }
        if not batches or not self._num_waiting:
            return
        crowd = self._crowd()
        lost = self._give_conversations(crowd, batches)
        self._give_by_version(crowd, batches)
        self._give_lost_conversations(lost, crowd, batches)
        for replica, batch in batches.items():
            if batch and replica.poll is not None:
                replica.poll.set_result(batch)
                replica.poll = None

    def _crowd(self) -> _Crowd:
        now = time.monotonic()
        is_late = now > self._newest_since + self._lease_seconds
        live = [replica for replica in self._replicas.values() if replica.takes_more]
        polls_soon = {
            each for each in live if each.is_polling or each.last_poll > now - 2 * self._hold_seconds
        }
        still_loads = {each for each in live if each.version < self._newest_version and not is_late}
        loads = {each: each.load for each in live if each in polls_soon or each in still_loads}
        return _Crowd(polls_soon, still_loads, loads)

    def _give_conversations(self, crowd: _Crowd, batches: _Batches) -> dict[_Replica, int]:
        """Give each replica what is in its line, as long as it is not overloaded; return how many the others
        lose: silent replicas all of them, and others what is left when a burst has ended.
        """
        loads = crowd.loads
        share = -(-(self._num_waiting + sum(loads.values())) // len(loads))
        most = max(share, most_beside(min(loads.values())))
        lost = {}
        for replica in self._replicas.values():
            room = max(0, most - loads[replica]) if replica in crowd.polls_soon else 0
            own = min(room, len(replica.line))
            rest = len(replica.line) - own
            if replica in batches:
                own = self._lease(own, replica.line, replica, batches[replica])
            if own:
                loads[replica] += own
            lost[replica] = 0 if rest and self._waits_for_burst(next(iter(replica.line))) else rest
        return lost

    def _waits_for_burst(self, queued: _QueuedRequest) -> bool:
        """Return whether the burst that a request came with may go on, and look again when it cannot."""
        seconds = queued.since + BURST_SECONDS - time.monotonic()
        if seconds > 0 and not self._in_burst:
            self._in_burst = True
            asyncio.get_running_loop().call_later(seconds, self._burst_ended)
        return seconds > 0

    def _burst_ended(self) -> None:
        self._in_burst = False
        self._hand_out()

    def _give_by_version(self, crowd: _Crowd, batches: _Batches) -> None:
        """Split each version's line among all that have it or still load it, whose part waits."""
        for needed in sorted(self._lines):
            line = self._lines[needed]
            if not line:
                del self._lines[needed]
            elif needed <= self._newest_version:
                for replica, number in _spread(len(line), crowd.able(needed), crowd.loads):
                    if replica in batches and replica.version >= needed:
                        self._lease(number, line, replica, batches[replica])

    def _give_lost_conversations(self, lost: dict[_Replica, int], crowd: _Crowd, batches: _Batches) -> None:
        able = [each for each in crowd.loads if each in crowd.polls_soon]
        for replica, number in _spread(sum(lost.values()), able, crowd.loads):
            for loser in lost if replica in batches else ():
                given = min(number, lost[loser])
                self._lease(given, loser.line, replica, batches[replica])
                lost[loser] -= given
                number -= given

    def _lease(self, number: int, line: _Line, replica: _Replica, batch: _Batch) -> int:
        """Give the first ``number`` requests of ``line`` to ``replica``; return how many it has got.

        Those that need a newer version than it has go on waiting, for any replica.
        """
        before = len(batch)
        for _ in range(number):
            queued, _ = line.popitem(last=False)
            needed, queued.line = queued.request.min_version, None
            if needed > replica.version:
                _append(queued, self._lines[needed])
                continue
            self._remember(queued.request.session_id, replica)
            queued.ticket, queued.holder = next(self._tickets), replica
            replica.held[queued.ticket] = queued
            batch.append((queued.ticket, queued.request))
        return len(batch) - before

    def _remember(self, session_id: str, replica: _Replica) -> None:
        """Let the conversation stay with ``replica``."""
        if session_id:
            self._session_replicas[session_id] = replica
        if len(self._session_replicas) > MAX_SESSIONS:
            self._session_replicas.popitem(last=False)

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
            # Time in which this process itself did not run does not count as a replica's silence.
            own_delay = time.monotonic() - before - self._hold_seconds
            for replica in list(self._replicas.values()):
                replica.last_poll += own_delay
                if replica.is_live and time.monotonic() - replica.last_poll > self._lease_seconds:
                    self._end_leases(replica)
                    if replica.is_leaving and not replica.revoked:  # it has delivered all that it had
                        del self._replicas[replica.name]
            self._hand_out()
            if self.has_no_replica:
                self._fail_the_oldest()

    def _end_leases(self, replica: _Replica) -> None:
        replica.is_live = False
        while replica.line:
            queued, _ = replica.line.popitem(last=False)
            _append(queued, self._line_of(queued))
        for ticket, queued in reversed(list(replica.held.items())):
            self._take_back(queued)
            replica.revoked.append(ticket)
            queued.lost.append(replica.name)
            if len(queued.lost) < MAX_ATTEMPTS:
                line = self._line_of(queued)
                _append(queued, line)
                line.move_to_end(queued, last=False)
            elif not queued.answer.done():
                text = (
                    f"{MAX_ATTEMPTS} replicas of {self._name!r} were lost over this request: {queued.lost}."
                )
                queued.answer.set_exception(SamplerError(text))

    def _fail_the_oldest(self) -> None:
        """Fail requests that have waited too long. Called at each tick without a live replica."""
        now = time.monotonic()
        silent = [f"{each.name}, silent for {now - each.last_poll:.0f} s" for each in self._replicas.values()]
        text = (
            f"No replica of the policy server {self._name!r} has polled its queue for "
            f"{self._wait_seconds:g} s. Known are: {'; '.join(silent) or 'none'}. A process that was "
            "stopped goes on after `kill -CONT`; why one has died or does not start is in Serve's logs."
        )
        for line in self._all_lines():
            for queued in list(line):
                queued.waited += self._hold_seconds
                if queued.waited >= self._wait_seconds and not queued.answer.done():
                    queued.answer.set_exception(SamplerError(text))
                    del line[queued]

    # -- for metrics ---------------------------------------------------------------------------------

    def status(self) -> QueueStatus:
        """Return the counts."""
        now = time.monotonic()
        return QueueStatus(
            num_waiting=self._num_waiting,
            num_late_tokens=self._num_late_tokens,
            replicas={
                each.name: ReplicaStatus(
                    each.version,
                    each.is_live,
                    len(each.held),
                    each.num_answered,
                    each.stats,
                    now - each.last_poll,
                )
                for each in self._replicas.values()
            },
        )


def _end(poll: asyncio.Future[Sequence[tuple[str, TokenRequest]]]) -> None:
    if not poll.done():
        poll.set_result(())


def _append(queued: _QueuedRequest, line: _Line) -> None:
    queued.line = line
    line[queued] = None


def _spread(
    number: int, replicas: Sequence[_Replica], loads: dict[_Replica, int]
) -> list[tuple[_Replica, int]]:
    """Give ``number`` requests one by one to the least loaded replica, of equal ones to that with the newest
    version; return how many each gets, and count them in ``loads``.
    """
    if not number or not replicas:
        return []
    least_first = sorted(replicas, key=loads.__getitem__)
    total = number
    for count, replica in enumerate(least_first, start=1):
        total += loads[replica]
        if count == len(least_first) or total <= count * loads[least_first[count]]:
            break
    level, rest = divmod(total, count)
    newest_first = sorted(least_first[:count], key=lambda each: -each.version)
    parts = [(each, level + (place < rest) - loads[each]) for place, each in enumerate(newest_first)]
    for replica, part in parts:
        loads[replica] += part
    return parts
