"""Routes of feedback: clients judge answers that were recorded, and delete them. Each finds its own only.

Answers of agents are recorded by their pools, those of the policy by ``recorded_chat.py``.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from actors.served_agents.feedback import FeedbackRequest, keep_feedback, of_owner, recordings_for
from actors.serving.http import replica, request_context
from environments.data.recordings import Feedback
from policies.model_api.errors import NotFoundError

Json = dict[str, Any]

feedback_routes = APIRouter()


@feedback_routes.post("/v1/responses/{answer_id}/feedback")
async def give_feedback(answer_id: str, body: FeedbackRequest, request: Request) -> Json:
    """Keep the feedback on an answer: it is on disk before this is answered."""
    owner = request_context(request).owner
    given = await keep_feedback(replica().recordings, owner, answer_id, body)
    return _body(answer_id, given)


@feedback_routes.get("/v1/responses/{answer_id}/feedback")
async def feedback(answer_id: str, request: Request) -> Json:
    owner = request_context(request).owner
    found = await of_owner(replica().recordings, owner, answer_id, lambda own: own.feedback(owner, answer_id))
    if found is None:
        raise NotFoundError(f"{answer_id!r} is recorded, and has no feedback.", code="feedback_not_found")
    return _body(answer_id, found)


@feedback_routes.delete("/v1/responses/{answer_id}/recording")
async def delete_recording(answer_id: str, request: Request) -> Json:
    """Delete an answer and what follows it from the recordings, and name what this does not reach."""
    owner = request_context(request).owner
    deletion = await of_owner(
        replica().recordings, owner, answer_id, lambda own: own.delete(owner, answer_id)
    )
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


def _body(answer_id: str, given: Feedback) -> Json:
    recordings = recordings_for(answer_id, replica().recordings)
    return {
        "id": answer_id,
        "object": "feedback",
        **asdict(given),
        "keep_days": recordings.keep_days,
        "readers": list(recordings.readers),
    }
