"""Routes of feedback: clients judge answers that were recorded, and delete them. Each finds its own only.

Answers of agents are recorded by their pools, those of the policy by ``recorded_chat.py``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from actors.serving.http import replica, request_context
from environments.data.recordings import MAX_COMMENT, Feedback, Recordings
from policies.model_api.errors import ConflictError, NotFoundError

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
