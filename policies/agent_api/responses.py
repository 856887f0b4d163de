"""OpenAI's Responses API for trained agents: today's SDKs speak it first.

https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Protocol

from environments.thoughts import is_unfinished, without_opening
from environments.types import StepEvent, TerminationReason, Trajectory
from policies.agent_api.context import MAX_STORED, RecordingNotice, ReplayedAnswer, RequestContext
from policies.agent_api.frontend import ALONE, AgentFrontend, digest, tokens_of, version_of
from policies.agent_api.responses_request import ResponsesRequest
from policies.model_api.errors import InvalidRequestError, NotFoundError, RequestError

Json = dict[str, Any]

ENDS = ("response.completed", "response.incomplete")
"""The last event of a stream."""


class ResponseStore(Protocol):
    """Store of responses for clients that fetch them again; all replicas share it."""

    async def keep(self, owner: str, response: Json) -> None:
        """Keep ``response`` by its id, for the key ``owner``, unless it was forgotten by its client's wish.

        A repeated request keeps it too: the client of the first one may have gone.
        """
        ...

    async def kept(self, owner: str, response_id: str) -> Json | None:
        """The response of this id, if it is kept and belongs to ``owner``."""
        ...

    async def forget(self, owner: str, response_id: str) -> bool:
        """Forget the response, and what waits for a message after it; return whether it was kept."""
        ...

    async def withdraw(self, owner: str, key: str) -> bool:
        """End the episode of the message with this ``withdraw_key``; return whether it had not ended."""
        ...

    async def end_session(self, owner: str, session: str) -> None:
        """End a conversation. Raises ``NotFoundError`` if there is none of this name."""
        ...


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
            raise NotFoundError(
                f"{body.model!r} does not answer at /v1/responses. Agents that do: {served}; models answer "
                "at /v1/chat/completions.",
                param="model",
                code="model_not_found",
            )
        draft = _Draft(body)
        placed = replace(
            context,
            after=body.after if context.session is None else body.previous_response_id,
            answer_id=draft.response["id"],
            created=draft.response["created_at"],
            can_be_followed=body.store is not False,
            withdraw_key=draft.response["id"],
            body=digest(body, context),
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
        numbers = itertools.count()
        async with aclosing(self._agents.episode(draft.body.question(), charge, context)) as parts:
            try:
                async for part in parts:
                    if isinstance(part, ReplayedAnswer):
                        draft.repeat(part)
                        continue
                    if isinstance(part, RecordingNotice):
                        draft.response["recorded"] = part.is_recorded
                        continue
                    for event in draft.add(part):
                        if event["type"] in ENDS and context.can_be_followed:
                            await self._stores[draft.body.model].keep(context.owner, draft.response)
                        yield {**event, "sequence_number": next(numbers), "policy_version": draft.version}
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
        raise InvalidRequestError(
            f"The response {response_id} has ended: only one under way can be cancelled."
        )


def _not_kept(response_id: str) -> NotFoundError:
    return NotFoundError(
        f"There is no response {response_id!r}: it was never made, made with store=false, deleted, or "
        f"forgotten after {MAX_STORED} newer ones.",
        code="response_not_found",
    )


class _Draft:
    """A response that is being made. ``num_steps`` and ``policy_version`` are Troupe's."""

    def __init__(self, body: ResponsesRequest) -> None:
        self.body, self.version = body, 0
        self._has_begun = False
        self._output: list[Json] = []
        self.response: Json = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": body.model,
            "output": self._output,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": body.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": body.previous_response_id,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "tool_choice": "auto",
            "tools": [],
            "usage": None,
        }

    def repeat(self, earlier: ReplayedAnswer) -> None:
        """Become the response that an earlier request has got, or gets."""
        self.response |= {"id": earlier.answer_id, "created_at": earlier.created}

    def _item_id(self, kind: str) -> str:
        """The id of the next item: the same where the response is the same."""
        return f"{kind}_{self.response['id'].removeprefix('resp_')}{len(self._output):03d}"

    def add(self, part: StepEvent | Trajectory) -> Iterator[Json]:
        """The events of the next part of the episode, in the order of the API."""
        if not self._has_begun:
            self._has_begun = True
            self.version = part.policy_version if isinstance(part, StepEvent) else version_of(part)
            begun = {**self.response, "output": []}
            yield {"type": "response.created", "response": begun}
            yield {"type": "response.in_progress", "response": begun}
        if isinstance(part, Trajectory):
            yield from self._answer(part)
        elif not part.done:
            yield from self._reasoning(f"{part.text}\n{part.observation}")

    def _reasoning(self, text: str) -> Iterator[Json]:
        """A step before the answer, or a thought that the answer does not finish."""
        item = {"id": self._item_id("rs"), "type": "reasoning", "summary": []}
        index = {"output_index": len(self._output)}
        part = {"item_id": item["id"], **index, "summary_index": 0}
        summary = {"type": "summary_text", "text": text}
        whole = {**item, "summary": [summary]}
        yield {"type": "response.output_item.added", **index, "item": item}
        yield {"type": "response.reasoning_summary_part.added", **part, "part": {**summary, "text": ""}}
        yield {"type": "response.reasoning_summary_text.delta", **part, "delta": text}
        yield {"type": "response.reasoning_summary_text.done", **part, "text": text}
        yield {"type": "response.reasoning_summary_part.done", **part, "part": summary}
        yield {"type": "response.output_item.done", **index, "item": whole}
        self._output.append(whole)

    def _answer(self, trajectory: Trajectory) -> Iterator[Json]:
        """The last step, which is the answer, and the end."""
        answer = trajectory.steps[-1].model_response
        is_thought = is_unfinished(answer)
        is_whole = trajectory.termination_reason is TerminationReason.ENV_DONE and not is_thought
        status = "completed" if is_whole else "incomplete"
        if is_thought:
            yield from self._reasoning(without_opening(answer))
            answer = ""
        text: Json = {"type": "output_text", "text": answer, "annotations": [], "logprobs": []}
        message = {"id": self._item_id("msg"), "type": "message", "role": "assistant"}
        whole = {**message, "status": status, "content": [text]}
        index = {"output_index": len(self._output)}
        part = {"item_id": message["id"], **index, "content_index": 0}
        begun = {**message, "status": "in_progress", "content": []}
        yield {"type": "response.output_item.added", **index, "item": begun}
        yield {"type": "response.content_part.added", **part, "part": {**text, "text": ""}}
        yield {"type": "response.output_text.delta", **part, "delta": answer, "logprobs": []}
        yield {"type": "response.output_text.done", **part, "text": answer, "logprobs": []}
        yield {"type": "response.content_part.done", **part, "part": text}
        yield {"type": "response.output_item.done", **index, "item": whole}
        self._output.append(whole)
        self.response |= {
            "status": status,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "usage": _usage(trajectory),
            "policy_version": version_of(trajectory),
            "num_steps": len(trajectory.steps),
        }
        yield {"type": f"response.{status}", "response": self.response}


def _usage(trajectory: Trajectory) -> Json:
    num_read, num_sampled = tokens_of(trajectory)
    return {
        "input_tokens": num_read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": num_sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_read + num_sampled,
    }
