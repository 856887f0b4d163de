"""Calls of a program on their way from its client to the rollout, and their answers on the way back."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from policies.gateway.session import Json, PolicyCall

MAX_REMEMBERED = 16
"""Requests whose answers a client may have lost after they were sent: as many as a program makes at once."""


def _unanswered() -> Future[Json]:
    answer = Future[Json]()
    answer.set_running_or_notify_cancel()  # so that a client that has gone cannot cancel it
    return answer


@dataclass(frozen=True, slots=True)
class WaitingCall:
    """A call whose answer the program's client waits for."""

    call: PolicyCall
    is_count: bool = False
    """True where only the number of its prompt's tokens is wanted."""
    answer: Future[Json] = field(default_factory=_unanswered)


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """Value that a program has returned, or the error that it has raised."""

    value: Any = None
    error: BaseException | None = None


class ProgramCalls:
    """Hands a program's calls, which come in the gateway's thread, to the thread that plays the rollout."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[WaitingCall | ProgramEnd] = queue.SimpleQueue()
        self._abandoned: defaultdict[str, deque[WaitingCall]] = defaultdict(deque)
        """Calls whose client has gone before it had the answer; the gateway's thread alone changes them."""
        self._answered: deque[tuple[int, list[WaitingCall]]] = deque(maxlen=MAX_REMEMBERED)
        """The last requests that were answered: the number of the retry that has had the answer, and the
        calls. The same thread alone changes it."""
        self._newest: WaitingCall | None = None
        self._moved = 0.0
        self._over = ""
        self._lock = threading.Lock()
        """Held while a call comes in, or none may come any more: so each is played or refused."""

    def take(self, call: PolicyCall) -> WaitingCall:
        """Take a call in. One that a client repeats, since its connection was lost, is the same call."""
        if self._abandoned and (abandoned := self._abandoned.get(call.digest)):
            self._moved = time.monotonic()
            return abandoned.popleft()
        return self._enter(WaitingCall(call))

    def count(self, call: PolicyCall) -> WaitingCall:
        """Take the wish in to know the number of tokens that a call's prompt has."""
        return self._enter(WaitingCall(call, is_count=True))

    def _enter(self, waiting: WaitingCall) -> WaitingCall:
        self._newest, self._moved = waiting, time.monotonic()
        waiting.answer.add_done_callback(self._note_answer)
        with self._lock:
            if self._over:
                self.fail(waiting)
            else:
                self._events.put(waiting)
        return waiting

    def _note_answer(self, _: Future[Json]) -> None:
        self._moved = time.monotonic()

    def idle_seconds(self) -> float:
        """Return the seconds since the last answer or call; 0 before the first call, and while one waits."""
        newest = self._newest
        return 0.0 if newest is None or not newest.answer.done() else time.monotonic() - self._moved

    def abandon(self, waiting: WaitingCall) -> None:
        """Take note that the client of a call has gone: it may ask again."""
        self._abandoned[waiting.call.digest].append(waiting)

    def remember(self, answered: list[WaitingCall], retries: int) -> None:
        """Take note of a request whose answer is sent: its client may lose it on the way.

        Args:
            retries: number of times that the client has sent the request before.
        """
        self._answered.append((retries, answered))

    def earlier(self, call: PolicyCall, num_choices: int, retries: int) -> list[WaitingCall]:
        """Take the calls out that an earlier try of a request has had an answer of; empty without one.

        A call whose client has gone comes first: ``take`` returns it.
        """
        if not self._abandoned.get(call.digest):
            for number, answered in reversed(self._answered):
                same = answered[0].call.digest == call.digest and len(answered) == num_choices
                if same and number < retries:
                    self._answered.remove((number, answered))
                    return answered
        return []

    def unseen(self) -> list[int]:
        """Return the numbers of the answers whose client has gone before it had them."""
        waiting = [each for calls in list(self._abandoned.values()) for each in list(calls)]
        answers = [each.answer for each in waiting if each.answer.done()]
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
