"""Calls of a program on their way from its client to the rollout, and their answers on the way back."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple

from environments.messages import same_types
from environments.types import Message
from policies.gateway.session import Json, PolicyCall

MAX_REMEMBERED = 16
"""Requests whose answers a client may have lost after they were sent: as many as a program makes at once."""


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call whose answer the program's client waits for."""

    call: PolicyCall
    num_choices: int = 1
    """Choices of its request, each of which is a call."""
    name: str = ""
    """Name of its request; see ``SentRequest``."""
    is_count: bool = False
    """True where only the number of its prompt's tokens is wanted."""
    answer: Future[Json] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """Value that a program has returned, or the error that it has raised."""

    value: Any = None
    error: BaseException | None = None


class PlayedCall(NamedTuple):
    """A call that has an answer, as the journal has it."""

    call: PolicyCall
    """Without the messages and the tools that it has from the one before it."""
    num_repeated: int
    """Number of these messages."""
    has_new_tools: bool
    num_choices: int
    name: str
    """Name of its request."""
    unseen: list[int]
    """Numbers of the answers before it whose client has gone."""


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request that its client may send again: the calls that it has made so far, one for each choice."""

    calls: list[WaitingCall]
    num_choices: int
    try_number: int
    """Number of the client's last try; -1 where the client has gone."""
    name: str = ""
    """Name that the session server has given it, the same each time that it sends it."""

    def is_repeated_by(self, call: PolicyCall, num_choices: int, try_number: int) -> bool:
        """Return whether a later try asks for the same."""
        is_later = self.try_number < try_number and self.num_choices == num_choices
        if not is_later or not self.calls:
            return False
        first = self.calls[0].call
        return first == call and same_types(first.messages, call.messages)


class ProgramCalls:
    """Hands a program's calls, which come in the gateway's thread, to the thread that plays the rollout."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        """Signed entries of the session's journal, each there before its answer."""
        self._events: queue.SimpleQueue[WaitingCall | ProgramEnd] = queue.SimpleQueue()
        self._open: list[SentRequest] = []
        """Requests that have no answer yet. The gateway's thread alone changes it."""
        self._gone: list[SentRequest] = []
        """Requests whose client has gone before it had the answer; so with this one."""
        self._answered: deque[SentRequest] = deque(maxlen=MAX_REMEMBERED)
        """The last requests that were answered; so with this one."""
        self._moved = 0.0
        self._over = ""
        self._lock = threading.Lock()
        """Held while a call comes in, or none may come any more: so each is played or refused."""

    def begin(self, call: PolicyCall, num_choices: int, try_number: int, name: str = "") -> SentRequest:
        """Take a request in, with the calls that an earlier try of it has made.

        Args:
            try_number: number of times that the client has sent the request before, where it names that.
            name: of the request, by which it is known where the session server sends it again.
        """
        self._moved = time.monotonic()
        request = SentRequest([], num_choices, try_number, name)
        known = [(sent, each) for sent in (self._gone, self._answered, self._open) for each in reversed(sent)]
        same = (each for each in known if name and each[1].name == name)
        repeated = (each for each in known if each[1].is_repeated_by(call, num_choices, try_number))
        if (found := next(chain(same, repeated), None)) is not None:
            sent, earlier = found
            sent.remove(earlier)
            request.calls = earlier.calls
        self._open.append(request)
        return request

    def resume(self, played: Sequence[PlayedCall]) -> PolicyCall | None:
        """Take the calls in that were answered in another process, in their order, before any new one.

        Their clients may have lost the answers: one that comes again, as a retry or by name, gets the same.

        Returns:
            The last one.
        """
        messages: list[Message] = []
        call: PolicyCall | None = None
        for number, each in enumerate(played):
            messages = [*messages[: each.num_repeated], *each.call.messages]
            tools = each.call.tools if call is None or each.has_new_tools else call.tools
            call = replace(each.call, messages=messages, tools=tools)
            is_gone, known = number in played[-1].unseen, (*self._gone, *self._answered)
            request = next((request for request in known if each.name and request.name == each.name), None)
            if request is None:
                request = SentRequest([], each.num_choices, -1 if is_gone else 0, each.name)
                (self._gone if is_gone else self._answered).append(request)
            request.calls.append(self.take(call, each.num_choices, each.name))
        return call

    def take(
        self, call: PolicyCall, num_choices: int = 1, name: str = "", is_count: bool = False
    ) -> WaitingCall:
        """Take a call in, or the wish to know how many tokens its prompt has."""
        waiting = WaitingCall(call, num_choices, name, is_count)
        self._moved = time.monotonic()
        with self._lock:
            if self._over:
                self.fail(waiting)
            else:
                self._events.put(waiting)
        return waiting

    def idle_seconds(self) -> float:
        """Return the seconds since the last answer or call; 0 before the first call, and while one waits."""
        return 0.0 if self._open or not self._moved else time.monotonic() - self._moved

    def abandon(self, request: SentRequest) -> None:
        """Take note of a request whose client has gone without an answer: it may come back."""
        if request in self._open:  # else it has come back already
            self._moved = time.monotonic()
            self._open.remove(request)
            request.try_number = -1
            if request.calls:
                self._gone.append(request)

    def remember(self, request: SentRequest) -> None:
        """Take note of a request whose answer is sent: its client may lose it on the way."""
        if request in self._open:
            self._moved = time.monotonic()
            self._open.remove(request)
            self._answered.append(request)

    def unseen(self) -> list[int]:
        """Return the numbers of the answers whose client has gone before it had them."""
        answers = [each.answer for sent in list(self._gone) for each in sent.calls if each.answer.done()]
        return sorted(int(each.result()["id"]) for each in answers if each.exception() is None)

    def end(self, end: ProgramEnd) -> None:
        """Take note of the program's end."""
        self._events.put(end)

    def next(self) -> WaitingCall | ProgramEnd:
        """Wait for what the program does next."""
        return self._events.get()

    def refuse(self, why: str) -> ProgramEnd | None:
        """Answer all calls with an error from now on; return the program's end if it is there."""
        with self._lock:
            self._over = why
        return self.wait_for_end(0.0)

    def wait_for_end(self, seconds: float) -> ProgramEnd | None:
        """Wait for the program's end, and answer what it asks until then with an error."""
        while True:
            try:
                event = self._events.get(timeout=seconds)
            except queue.Empty:
                return None
            if isinstance(event, ProgramEnd):
                return event
            self.fail(event)

    def fail(self, waiting: WaitingCall) -> None:
        """Answer a call with the error that the rollout is over."""
        from policies.model_api.errors import RequestError  # it loads pydantic, which most pairs need not

        error = RequestError(f"The policy answers no more: {self._over}.", code="rollout_ended")
        waiting.answer.set_exception(error)
