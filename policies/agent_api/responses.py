"""OpenAI's Responses API for trained agents: today's SDKs speak it first.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from environments.thoughts import is_unfinished, without_opening
from environments.types import StepEvent, Trajectory
from policies.agent_api.context import RecordingNotice, ReplayedAnswer, RequestContext
from policies.agent_api.frontend import ALONE, WHOLE, AgentFrontend, key_with_body, tokens_of, version_of
from policies.agent_api.responses_request import ResponsesRequest
from policies.model_api.dialects.base import TEXT, THOUGHT, Json
from policies.model_api.dialects.responses_draft import ENDS, ResponseDraft, usage_of
from policies.model_api.errors import (
    InvalidRequestError,
    NotFoundError,
    RequestError,
    unknown_model,
    why_not_kept,
)
from policies.model_api.limits import MAX_STORED


class ResponseStore(Protocol):
    """Store of responses for clients that fetch them again; all replicas share it."""

    async def keep(self, owner: str, response: Json) -> None:
        """Keep ``response`` by its id, for the key ``owner``, unless it was forgotten by its client's wish.

        A repeated request keeps it too: the client of the first one may have gone.
        """

    async def kept(self, owner: str, response_id: str) -> Json | None:
        """The response of this id, if it is kept and belongs to ``owner``."""

    async def forget(self, owner: str, response_id: str) -> bool:
        """Forget the response, and what waits for a message after it; return whether it was kept."""

    async def withdraw(self, owner: str, key: str) -> bool:
        """End the episode of the message with this ``withdraw_key``; return whether it had not ended."""

    async def end_session(self, owner: str, session: str) -> None:
        """End a conversation. Raises ``NotFoundError`` if there is none of this name."""


class ResponsesFrontend:
    """The Responses API in front of an ``AgentFrontend``.

    Args:
        agents: plays the episodes.
        stores: of the agents, by name; a response is kept by the store of its agent.
    """

    def __init__(self, agents: AgentFrontend, stores: Mapping[str, ResponseStore]) -> None:
        self._agents, self._stores = agents, stores

    async def respond(
        self,
        body: ResponsesRequest,
        charge: Callable[[int], None] = lambda number: None,
        context: RequestContext = ALONE,
    ) -> AsyncGenerator[Json, None]:
        """Yield one ``response``, or with ``stream`` its events; steps before the answer are reasoning items.

        Raises:
            RequestError: the request cannot be served, or the episode has failed.
            ConfigError: the sampling parameters are impossible.
        """
        if body.model not in self._stores:
            served = ", ".join(map(repr, self._stores)) or "none"
            raise unknown_model(
                f"There is no agent {body.model!r} that answers at /v1/responses. Agents that do: {served}."
            )
        draft = _Draft(body, self._agents.temperature)
        placed = replace(
            context,
            after=body.after if context.session is None else body.previous_response_id,
            answer_id=draft.response["id"],
            created=draft.response["created_at"],
            can_be_followed=body.store is not False,
            withdraw_key=draft.response["id"],
            idempotency=key_with_body(body, context),
        )
        async with aclosing(self._events(draft, charge, placed)) as events:
            async for event in events:
                if body.stream:
                    yield event
        if not body.stream:
            yield draft.response

    async def _events(
        self, draft: _Draft, charge: Callable[[int], None], context: RequestContext
    ) -> AsyncGenerator[Json, None]:
        """The events of a response while its episode is played; it is kept before the last one."""
        async with aclosing(self._agents.episode(draft.body.question(), charge, context)) as parts:
            try:
                async for part in parts:
                    if isinstance(part, ReplayedAnswer):
                        draft.repeat(part)
                        continue
                    if isinstance(part, RecordingNotice):
                        draft.response["recorded"] = part.is_recorded
                        continue
                    for event in draft.add_step(part):
                        if event["type"] in ENDS and context.can_be_followed:
                            await self._stores[draft.body.model].keep(context.owner, draft.response)
                        yield event
            except RequestError as error:
                if error.param == "messages":  # which the client has sent under another name
                    error.param = "input"
                raise

    async def retrieve(self, response_id: str, owner: str = "") -> Json:
        """The body of ``GET /v1/responses/{id}``. Raises ``NotFoundError``."""
        for store in self._stores.values():
            if (response := await store.kept(owner, response_id)) is not None:
                return response
        raise _not_kept(response_id)

    async def delete(self, response_id: str, owner: str = "") -> Json:
        """The body of ``DELETE /v1/responses/{id}``. Raises as ``retrieve`` does."""
        for store in self._stores.values():
            if await store.forget(owner, response_id):
                return {"id": response_id, "object": "response.deleted", "deleted": True}
        raise _not_kept(response_id)

    async def end_session(self, session: str, owner: str = "") -> Json:
        """The body of ``DELETE /v1/sessions/{session}``.

        Raises:
            RequestError: no agent has a session of this name, or a message of it is under way.
        """
        error = NotFoundError("No agent is served here, so there are no sessions.")
        for store in self._stores.values():
            try:
                await store.end_session(owner, session)
            except NotFoundError as missing:
                error = missing
            else:
                return {"id": session, "object": "session.deleted", "deleted": True}
        raise error

    async def cancel(self, response_id: str, owner: str = "") -> Json:
        """The body of ``POST /v1/responses/{id}/cancel``: the request that waits for it gets an error.

        Raises:
            InvalidRequestError: it has ended.
            NotFoundError: ``owner`` has none of this id.
        """
        for store in self._stores.values():
            if await store.withdraw(owner, response_id):
                return {"id": response_id, "object": "response", "status": "cancelled", "output": []}
        await self.retrieve(response_id, owner)
        raise has_ended(response_id)


def has_ended(response_id: str) -> InvalidRequestError:
    """The error of cancelling a response that has ended."""
    return InvalidRequestError(f"The response {response_id} has ended: only one under way can be cancelled.")


def _not_kept(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"There is no response {response_id!r}: {why_not_kept(MAX_STORED)}",
        code="response_not_found",
    )


class _Draft(ResponseDraft):
    """The response of an agent. ``num_steps`` is Troupe's."""

    def __init__(self, body: ResponsesRequest, temperature: float) -> None:
        names = {"max_output_tokens", "metadata", "previous_response_id", "store", "temperature", "top_p"}
        given = body.model_dump(include=names, exclude_none=True)
        super().__init__(body.model, {"temperature": temperature, **given})
        self.body = body

    def repeat(self, earlier: ReplayedAnswer) -> None:
        """Become the response that an earlier request has got, or gets."""
        self.response |= {"id": earlier.answer_id, "created_at": earlier.created}

    def add_step(self, part: StepEvent | Trajectory) -> Iterator[Json]:
        """The events of the next part of the episode, in the order of the API."""
        if not self._has_begun:
            self._has_begun = True
            self.version = part.policy_version if isinstance(part, StepEvent) else version_of(part)
            yield from self.begin({})
        if isinstance(part, Trajectory):
            yield from self._answer(part)
        elif not part.done:
            yield from self.grow(THOUGHT, f"{part.text}\n{part.observation}")
            yield from self.close()

    def _answer(self, trajectory: Trajectory) -> Iterator[Json]:
        """The last step, which is the answer, and the end."""
        answer = trajectory.steps[-1].model_response
        is_thought = is_unfinished(answer)
        is_whole = trajectory.termination_reason in WHOLE and not is_thought
        if is_thought:
            yield from self.grow(THOUGHT, without_opening(answer))
            answer = ""
        yield from self.grow(TEXT, answer)
        yield from self.close(is_whole)
        ended = self.response["created_at"] + round(trajectory.seconds)  # the same in a repeated answer
        yield self.finish(
            is_whole,
            completed_at=ended if is_whole else None,
            usage=usage_of(*tokens_of(trajectory)),
            policy_version=version_of(trajectory),
            num_steps=len(trajectory.steps),
        )
