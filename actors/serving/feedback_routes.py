"""Routes of feedback: clients judge answers that were recorded, and delete them. Each finds its own only.

Answers of agents are recorded by their pools, those of the policy to chats here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from itertools import chain
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.served_agents.recorder import write_recording
from actors.serving.http import replica, request_context
from environments.data.recordings import MAX_COMMENT, Feedback, RecordedAnswer, Recordings
from environments.types import Completion, Step, TerminationReason, Trajectory
from policies.model_api.errors import ConflictError, NotFoundError
from policies.model_api.frontend import Charge, OpenAIFrontend
from policies.model_api.protocol import ChatRequest
from policies.model_api.reply import Piece

T = TypeVar("T")
Json = dict[str, Any]

feedback_routes = APIRouter()


class FeedbackRequest(BaseModel):
    """The body of ``POST /v1/responses/{id}/feedback``: a score or a thumb, and a comment."""

    model_config = ConfigDict(extra="forbid")

    score: Annotated[float, Field(ge=-1, le=1)] | None = None
    thumb: Literal["up", "down"] | None = None
    """Stands for the score 1 or -1."""
    comment: Annotated[str, Field(max_length=MAX_COMMENT)] = ""

    @model_validator(mode="after")
    def _check_one(self) -> FeedbackRequest:
        if (self.score is None) == (self.thumb is None):
            raise ValueError("send either a score from -1 to 1 or a thumb, up or down")
        return self

    def feedback(self) -> Feedback:
        """Return it as it is kept."""
        score = self.score if self.score is not None else {"up": 1.0, "down": -1.0}[str(self.thumb)]
        return Feedback(score=score, comment=self.comment, created=int(time.time()))


@feedback_routes.post("/v1/responses/{answer_id}/feedback")
async def give_feedback(answer_id: str, body: FeedbackRequest, request: Request) -> Json:
    """Keep the feedback on an answer: it is on disk before this is answered."""
    given = body.feedback()
    try:
        await _of_owner(request, answer_id, lambda own, owner: own.add_feedback(owner, answer_id, given))
    except FileExistsError:
        raise ConflictError(
            f"There is feedback on {answer_id!r} already, which stays: GET shows it.", code="feedback_exists"
        ) from None
    return _body(answer_id, given, _recordings(answer_id))


@feedback_routes.get("/v1/responses/{answer_id}/feedback")
async def feedback(answer_id: str, request: Request) -> Json:
    found = await _of_owner(request, answer_id, lambda own, owner: own.feedback(owner, answer_id))
    if found is None:
        raise NotFoundError(f"{answer_id!r} is recorded, and has no feedback.", code="feedback_not_found")
    return _body(answer_id, found, _recordings(answer_id))


@feedback_routes.delete("/v1/responses/{answer_id}/recording")
async def delete_recording(answer_id: str, request: Request) -> Json:
    """Delete an answer and what follows it from the recordings, and name what this does not reach."""
    deletion = await _of_owner(request, answer_id, lambda own, owner: own.delete(owner, answer_id))
    return {
        "id": answer_id,
        "object": "recording.deleted",
        "deleted": deletion.answers,
        "read_before_by": [
            {
                "reader": each.reader,
                "time": each.time,
                "answers": len(set(each.answers) & set(deletion.answers)),
            }
            for each in deletion.readings
        ],
        "scope": "Deleted are the recordings and the feedback of these answers: the one named, and those "
        "after it in its conversation, whose prompts have its text. Not deleted are what the trainings in "
        "read_before_by have read, the weights that they have trained, copies that somebody has made of the "
        "folder, and the conversation itself, which goes on unrecorded.",
    }


async def recorded_chat(
    recordings: Recordings, openai: OpenAIFrontend, body: ChatRequest, charge: Charge, owner: str
) -> AsyncGenerator[Json, None]:
    """The parts of a policy's answer to a chat, which is recorded before the last of them."""
    is_recorded = True
    messages = [each.for_template() for each in body.messages]
    created = int(time.time())

    async def record(answer_id: str, pieces: Sequence[Piece]) -> None:
        nonlocal is_recorded
        answer = RecordedAnswer(answer_id=answer_id, owner=owner, model=body.model, created=created)
        trajectory = _answer_trajectory(messages, body.tools or [], pieces)
        is_recorded = await write_recording(recordings, answer, trajectory)

    async with aclosing(openai.chat(body, charge, record)) as parts:
        async for part in parts:
            yield {**part, "recorded": is_recorded}


async def unrecorded(parts: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
    """The parts of an answer that is not recorded by a server that records."""
    async with aclosing(parts):
        async for part in parts:
            yield {**part, "recorded": False}


def _answer_trajectory(messages: list[Json], tools: Sequence[Any], pieces: Sequence[Piece]) -> Trajectory:
    """A policy's answer as a trajectory of one step. Its text has the calls as the model wrote them."""
    outputs = [each.output for each in pieces]
    text = "".join(each.text for each in pieces)
    completion = Completion(
        text=text,
        prompt_ids=pieces[0].request.prompt_ids,
        completion_ids=tuple(chain.from_iterable(each.token_ids for each in outputs)),
        logprobs=tuple(chain.from_iterable(each.logprobs for each in outputs)),
        finish_reason=str(outputs[-1].finish_reason),
        policy_version=min(each.policy_version for each in outputs),
        token_versions=tuple(chain.from_iterable(each.token_versions for each in outputs)),
    )
    whole = [*messages, {"role": "assistant", "content": text}]
    step = Step(chat_completions=whole, model_response=text, action=text, completion=completion, done=True)
    return Trajectory(
        task={"messages": messages, "tools": list(tools)},
        steps=[step],
        termination_reason=TerminationReason.ENV_DONE,
    )


async def _of_owner(request: Request, answer_id: str, work: Callable[[Recordings, str], T]) -> T:
    """The result of ``work`` on the recordings, in a thread, for the key of the request.

    Raises:
        NotFoundError: this key has no recorded answer of the id that ``work`` names.
    """
    recordings, owner = _recordings(answer_id), request_context(request).owner
    try:
        return await asyncio.to_thread(work, recordings, owner)
    except FileNotFoundError:
        raise NotFoundError(
            f"This key has no recorded answer {answer_id[:100]!r}: it came with X-Troupe-Recorded: no, was "
            f"deleted, or is older than {recordings.keep_days:g} days.",
            code="recording_not_found",
        ) from None


def _recordings(answer_id: str) -> Recordings:
    recordings = replica().recordings
    if recordings is None:
        raise NotFoundError(
            f"{answer_id[:100]!r} is not recorded: this server keeps no answers. Who serves sets "
            "server.recording.folder.",
            code="recording_off",
        )
    return recordings


def _body(answer_id: str, given: Feedback, recordings: Recordings) -> Json:
    return {
        "id": answer_id,
        "object": "feedback",
        **asdict(given),
        "keep_days": recordings.keep_days,
        "readers": list(recordings.readers),
    }
