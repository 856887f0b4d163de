"""Routes of served agents: kept responses, sessions, A2A and MCP, and of feedback on what was recorded.

``AccessControl`` stands before all. Clients judge answers that were recorded, and delete them; each finds its
own only. Answers of agents are recorded by their pools, those of the policy by ``recorded_chat.py``.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from actors.served_agents.feedback import FeedbackRequest, keep_feedback, of_owner, recordings_for
from actors.served_agents.protocols import CARD_PATH, agent_path
from actors.serving.http import replica, request_context
from environments.data.recordings import Feedback
from policies.agent_api.responses import has_ended
from policies.model_api.errors import InvalidRequestError, NotFoundError

Json = dict[str, Any]

JSON_RPC = {
    "type": "object",
    "properties": {
        "jsonrpc": {"const": "2.0"},
        "id": {"type": ["string", "integer", "null"]},
        "method": {"type": "string"},
        "params": {"type": "object"},
    },
    "required": ["jsonrpc", "method"],
}
"""Schema of a JSON-RPC 2.0 body, as A2A and MCP have it."""
JSON_RPC_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": JSON_RPC}}}}
"""The body in the description of the endpoint."""

agent_routes = APIRouter()


@agent_routes.get("/v1/responses/{response_id}")
async def response(response_id: str, request: Request, stream: bool | None = None) -> Json:
    if stream:
        raise InvalidRequestError(
            "A response is streamed while it is made, by POST /v1/responses: leave stream out.",
            param="stream",
        )
    owner = request_context(request).owner
    kept = await replica().responses.kept(owner, response_id)
    return await replica().agents.responses.retrieve(response_id, owner) if kept is None else kept[0]


@agent_routes.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request) -> Json:
    owner = request_context(request).owner
    if await replica().responses.forget(owner, response_id):
        return {"id": response_id, "object": "response.deleted", "deleted": True}
    return await replica().agents.responses.delete(response_id, owner)


@agent_routes.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, request: Request) -> Json:
    owner = request_context(request).owner
    if await replica().responses.kept(owner, response_id) is not None:
        raise has_ended(response_id)
    return await replica().agents.responses.cancel(response_id, owner)


@agent_routes.delete("/v1/sessions/{session:path}")
async def delete_session(session: str, request: Request) -> Json:
    return await replica().agents.responses.end_session(session, request_context(request).owner)


@agent_routes.get(CARD_PATH)
async def only_card(request: Request) -> Response:
    """The A2A card of the agent, where one is served."""
    return await card(replica().agents.only_agent(), request)


@agent_routes.get(f"{agent_path('{name}')}{CARD_PATH}")
async def card(name: str, request: Request) -> Response:
    """The A2A card of an agent, with the address by which clients reach it."""
    agents = replica().agents
    agent = agents.agent(name)
    url = replica().access.address_for(request) + agent_path(name)
    return await agents.a2a.card(agent, url, request)


@agent_routes.post(agent_path("{name}"), openapi_extra=JSON_RPC_BODY)
async def a2a(name: str, request: Request) -> Response:
    """A2A over JSON-RPC."""
    agents = replica().agents
    return await agents.a2a.answer(agents.agent(name), "/", request)


@agent_routes.get(agent_path("{name}") + "/{path:path}")
@agent_routes.post(agent_path("{name}") + "/{path:path}")
@agent_routes.delete(agent_path("{name}") + "/{path:path}")
async def a2a_rest(name: str, path: str, request: Request) -> Response:
    """A2A over HTTP and JSON: ``message:send``, ``message:stream``, ``tasks`` and ``tasks/{id}:cancel``."""
    agents = replica().agents
    try:  # the SDK takes this for a fault of its own
        (await request.body()).decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"The body is no UTF-8 at position {error.start}: {error.reason}."
        ) from error
    return await agents.a2a.answer(agents.agent(name), f"/{path}", request)


@agent_routes.post("/mcp", openapi_extra=JSON_RPC_BODY)
async def mcp() -> Response:
    """MCP over streamable HTTP: a tool for each agent."""
    return replica().agents.tools.answer()


@agent_routes.post("/v1/responses/{answer_id}/feedback")
async def give_feedback(answer_id: str, body: FeedbackRequest, request: Request) -> Json:
    """Keep the feedback on an answer: it is on disk before this is answered."""
    owner = request_context(request).owner
    given = await keep_feedback(replica().recordings, owner, answer_id, body)
    return _body(answer_id, given)


@agent_routes.get("/v1/responses/{answer_id}/feedback")
async def feedback(answer_id: str, request: Request) -> Json:
    owner = request_context(request).owner
    found = await of_owner(replica().recordings, owner, answer_id, lambda own: own.feedback(owner, answer_id))
    if found is None:
        raise NotFoundError(f"{answer_id!r} is recorded, and has no feedback.", code="feedback_not_found")
    return _body(answer_id, found)


@agent_routes.delete("/v1/responses/{answer_id}/recording")
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
