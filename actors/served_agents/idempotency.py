"""Answers that requests with the same idempotency key share: the episode is played once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing

from actors.served_agents.conversations import check_name
from actors.served_agents.store import PerKeyLRU
from environments.types import StepEvent, Trajectory
from policies.agent_api.context import ReplayedAnswer, RequestContext, TokenUsage
from policies.model_api.errors import KeyReusedError

Part = StepEvent | Trajectory | TokenUsage
MAX_RECORDINGS = 256
"""Answers of one key that can be repeated: the oldest are forgotten first."""


class IdempotentAnswer:
    """An episode that goes on whoever still listens. ``play`` gives all of it, from the beginning."""

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.is_forgotten = False
        """Whether its answer must not be kept any more."""
        self._parts: list[Part] = []
        self._error: Exception | None = None
        self._has_ended = False
        self._num_played = 0
        """Parts that somebody has got: their tokens are paid."""
        self._news = asyncio.Condition()

    async def record(self, parts: AsyncGenerator[Part, None]) -> bool:
        """Take in ``parts`` to their end; return whether they have an answer."""
        try:
            async with aclosing(parts):
                async for part in parts:
                    self._parts.append(part)
                    await self._tell()
        except Exception as error:  # noqa: BLE001  # those who listen raise it
            self._error = error
        self._has_ended = True
        await self._tell()
        last = self._parts[-1] if self._parts else None
        return self._error is None and isinstance(last, Trajectory) and last.has_answer

    async def play(self) -> AsyncGenerator[Part, None]:
        """Yield the parts that are there and those that come; tokens only to who comes first.

        Raises:
            What has ended the episode.
        """
        for number in itertools.count():
            async with self._news:
                while number == len(self._parts) and not self._has_ended:
                    await self._news.wait()
            if number == len(self._parts):
                break
            is_paid = number < self._num_played
            self._num_played = max(self._num_played, number + 1)
            if not (is_paid and isinstance(self._parts[number], TokenUsage)):
                yield self._parts[number]
        if self._error is not None:
            raise self._error

    async def _tell(self) -> None:
        async with self._news:
            self._news.notify_all()


class IdempotentAnswers:
    """The newest answers by idempotency key, each of the API key that it came with.

    What has failed is not kept: the same request may be tried again.
    """

    def __init__(self, most: int = MAX_RECORDINGS) -> None:
        self._recordings: PerKeyLRU[IdempotentAnswer] = PerKeyLRU(most)
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, context: RequestContext) -> IdempotentAnswer | None:
        """The answer that a request has got, or gets. Raises ``KeyReusedError`` for another body."""
        assert context.idempotency_key is not None
        check_name("The idempotency key", context.idempotency_key)
        recording = self._recordings.kept(context.owner, context.idempotency_key)
        if recording is not None and recording.context.body != context.body:
            raise KeyReusedError(
                f"The Idempotency-Key {context.idempotency_key!r} came with another body before: send a new "
                "key, or the same body.",
                code="idempotency_key_reused",
            )
        return recording

    def start(self, context: RequestContext, parts: AsyncGenerator[Part, None]) -> IdempotentAnswer:
        """Play ``parts`` for this request and all that repeat it."""
        assert context.idempotency_key is not None
        recording = IdempotentAnswer(context)
        self._recordings.keep(context.owner, context.idempotency_key, recording)
        task = asyncio.create_task(self._record(recording, parts))
        self._tasks.add(task)  # asyncio itself keeps no reference to a running task
        task.add_done_callback(self._tasks.discard)
        return recording

    def forget_answer(self, owner: str, answer_id: str) -> None:
        """The client has deleted an answer: a request that repeats its own does not bring it back."""
        for recording in self._recordings.all_kept(owner):
            recording.is_forgotten |= recording.context.answer_id == answer_id

    def is_forgotten(self, owner: str, answer_id: str) -> bool:
        """Whether the client has deleted this answer."""
        recordings = self._recordings.all_kept(owner)
        return any(each.is_forgotten and each.context.answer_id == answer_id for each in recordings)

    async def _record(self, recording: IdempotentAnswer, parts: AsyncGenerator[Part, None]) -> None:
        if await recording.record(parts):
            return
        owner, key = recording.context.owner, recording.context.idempotency_key or ""
        if self._recordings.kept(owner, key) is recording:
            self._recordings.forget(owner, key)


def repeated(recording: IdempotentAnswer) -> ReplayedAnswer:
    """What those who ask again hear first."""
    return ReplayedAnswer(recording.context.answer_id, recording.context.created)
