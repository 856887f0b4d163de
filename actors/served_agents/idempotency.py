"""Answers that requests with the same idempotency key share: the episode is played once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator
from contextlib import aclosing

from actors.served_agents.conversations import check_name
from actors.served_agents.store import PerKeyLRU
from environments.types import StepEvent, Trajectory
from policies.agent_api.context import RecordingNotice, ReplayedAnswer, RequestContext, TokenUsage
from policies.model_api.errors import RequestError

Part = StepEvent | Trajectory | TokenUsage | RecordingNotice
MAX_ANSWERS = 256
"""Answers of one key that can be repeated: the oldest are forgotten first."""


class IdempotentAnswer:
    """Episode that goes on without any client. ``play`` yields all of it, from the beginning."""

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.is_forgotten = False
        """True once its client has deleted the answer."""
        self._parts: list[Part] = []
        self._error: Exception | None = None
        self._has_ended = False
        self._num_played = 0
        """Number of parts already delivered and charged."""
        self._changed = asyncio.Event()

    async def record(self, parts: AsyncGenerator[Part, None]) -> bool:
        """Take in ``parts`` to their end; return whether they have an answer."""
        try:
            async with aclosing(parts):
                async for part in parts:
                    self._parts.append(part)
                    self._wake()
        except Exception as error:  # noqa: BLE001  # ``play`` raises it
            self._error = error
        self._has_ended = True
        self._wake()
        last = self._parts[-1] if self._parts else None
        return self._error is None and isinstance(last, Trajectory) and last.has_answer

    async def play(self) -> AsyncGenerator[Part, None]:
        """Yield the parts that are there and those that come; tokens only to who comes first.

        Raises:
            The error that has ended the episode.
        """
        for number in itertools.count():
            while number == len(self._parts) and not self._has_ended:
                await self._changed.wait()
            if number == len(self._parts):
                break
            is_paid = number < self._num_played
            self._num_played = max(self._num_played, number + 1)
            if not (is_paid and isinstance(self._parts[number], TokenUsage)):
                yield self._parts[number]
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()  # for those who wait for the next part


class IdempotentAnswers:
    """The newest answers by idempotency key, each of the API key that it came with.

    What has failed is not kept: the same request may be tried again.
    """

    def __init__(self, most: int = MAX_ANSWERS) -> None:
        self._answers: PerKeyLRU[IdempotentAnswer] = PerKeyLRU(most)
        self._tasks: set[asyncio.Task[None]] = set()

    async def play(
        self, context: RequestContext, parts: AsyncGenerator[Part, None]
    ) -> AsyncGenerator[Part | ReplayedAnswer, None]:
        """Yield the answer that this request or an equal one before it gets: of ``parts`` if it is the first.

        Raises:
            RequestError: the key came with another body before.
            The error that has ended the episode.
        """
        assert context.idempotency is not None
        key = context.idempotency.key
        check_name("The idempotency key", key)
        answer = self._answers.kept(context.owner, key)
        if answer is None:
            answer = IdempotentAnswer(context)
            self._answers.keep(context.owner, key, answer)
            task = asyncio.create_task(self._record(answer, key, parts))
            self._tasks.add(task)  # asyncio itself keeps no reference to a running task
            task.add_done_callback(self._tasks.discard)
        elif answer.context.idempotency != context.idempotency:
            raise RequestError(
                f"Idempotency-Key {key!r} came with another body before: send a new key, or the same body.",
                status=422,
                code="idempotency_key_reused",
            )
        else:
            yield ReplayedAnswer(answer.context.answer_id, answer.context.created)
        async with aclosing(answer.play()) as answer_parts:
            async for part in answer_parts:
                yield part

    def forget_answer(self, owner: str, answer_id: str) -> None:
        """The client has deleted an answer: a request that repeats its own does not bring it back."""
        for answer in self._answers.all_kept(owner):
            answer.is_forgotten |= answer.context.answer_id == answer_id

    def is_forgotten(self, owner: str, answer_id: str) -> bool:
        """Return whether the client has deleted this answer."""
        answers = self._answers.all_kept(owner)
        return any(each.is_forgotten and each.context.answer_id == answer_id for each in answers)

    async def _record(self, answer: IdempotentAnswer, key: str, parts: AsyncGenerator[Part, None]) -> None:
        owner = answer.context.owner
        if not await answer.record(parts) and self._answers.kept(owner, key) is answer:
            self._answers.forget(owner, key)
