"""Feedback of clients on recorded answers, by whatever protocol it comes. Each finds its own answers only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from environments.data.recordings import MAX_COMMENT, Feedback, Recordings
from policies.model_api.errors import ConflictError, NotFoundError

T = TypeVar("T")


class FeedbackRequest(BaseModel):
    """The body of ``POST /v1/responses/{id}/feedback``: a score or a thumb, and a comment."""

    model_config = ConfigDict(extra="forbid")

    score: Annotated[float, Field(strict=True, ge=-1, le=1)] | None = None
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


class FeedbackOnAnswer(FeedbackRequest):
    """Feedback that comes with a message of A2A, in its metadata."""

    answer_id: str


async def keep_feedback(
    recordings: Recordings | None, owner: str, answer_id: str, body: FeedbackRequest
) -> Feedback:
    """Keep the feedback on an answer of ``owner``: it is on disk at the return. The same may come again.

    Raises:
        ConflictError: there is other feedback on it.
        NotFoundError: as ``of_owner`` does.
    """
    given = body.feedback()
    try:
        await of_owner(recordings, owner, answer_id, lambda own: own.add_feedback(owner, answer_id, given))
    except FileExistsError:
        kept = await of_owner(recordings, owner, answer_id, lambda own: own.feedback(owner, answer_id))
        if kept is None or (kept.score, kept.comment) != (given.score, given.comment):
            raise ConflictError(
                f"There is feedback on {answer_id!r} already, which stays: GET shows it.",
                code="feedback_exists",
            ) from None
        return kept
    return given


async def of_owner(
    recordings: Recordings | None, owner: str, answer_id: str, work: Callable[[Recordings], T]
) -> T:
    """The result of ``work`` on the recordings, in a thread.

    Raises:
        NotFoundError: nothing is recorded here, or ``owner`` has no recorded answer of this id.
    """
    own = recordings_for(answer_id, recordings)
    try:
        return await asyncio.to_thread(work, own)
    except FileNotFoundError:
        raise NotFoundError(
            f"This key has no recorded answer {answer_id[:100]!r}: it came with X-Troupe-Recorded: no, was "
            f"deleted, or is older than {own.keep_days:g} days.",
            code="recording_not_found",
        ) from None


def recordings_for(answer_id: str, recordings: Recordings | None) -> Recordings:
    """``recordings``, where there are any. Raises ``NotFoundError``."""
    if recordings is None:
        raise NotFoundError(
            f"{answer_id[:100]!r} is not recorded: this server keeps no answers. Who serves sets "
            "server.recording.folder.",
            code="recording_off",
        )
    return recordings
