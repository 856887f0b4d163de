"""Routes of the policy in every dialect: chat and text completions, Responses, Anthropic's messages.

One request to the engine is behind each. Agents answer chats and Responses too, by names of their own.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from actors.serving.errors import COMPACT_PATH, MESSAGES_PATH, RESPONSES_PATH
from actors.serving.http import replica, request_context, respond
from actors.serving.recorded_chat import AnswerPlace, recorded_chat, unrecorded
from actors.serving.responses_socket import AFTER
from environments.data.canary import conversation_name
from policies.agent_api.frontend import PREFIX
from policies.agent_api.responses_request import ResponsesRequest
from policies.model_api.dialects.base import CHAT_PREFIX, Dialect, Json, read
from policies.model_api.dialects.messages import Messages, count_request
from policies.model_api.dialects.messages_request import MessagesRequest
from policies.model_api.dialects.responses import Compact, Responses
from policies.model_api.dialects.responses_draft import ENDS
from policies.model_api.dialects.responses_request import CompactRequest, PolicyResponses
from policies.model_api.errors import InvalidRequestError
from policies.model_api.frontend import Charge
from policies.model_api.protocol import ChatRequest, CompletionRequest

Parts = AsyncGenerator[Json, None]


policy_routes = APIRouter()


class DescribedBy:
    """Annotation of a body that its route reads by itself, as one of these models: their description."""

    def __init__(self, *models: type[BaseModel]) -> None:
        self._models = models

    def __get_pydantic_json_schema__(self, _: CoreSchema, handler: GetJsonSchemaHandler) -> Json:
        return {"anyOf": [handler(model.__pydantic_core_schema__) for model in self._models]}


@policy_routes.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    if not body.model.startswith(PREFIX):
        return await respond(_chat(_routed(body, request), request, CHAT_PREFIX), body.stream)
    answers = replica().agents.chat
    return await respond(
        answers.chat(body, _charge(body.model, request), request_context(request)), body.stream
    )


@policy_routes.post("/v1/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    return await respond(_sample(body, request), body.stream)


@policy_routes.post(RESPONSES_PATH)
async def responses(
    body: Annotated[Json, DescribedBy(PolicyResponses, ResponsesRequest)], request: Request
) -> Response:
    """OpenAI's Responses, of the policy or of an agent."""
    if str(body.get("model")).startswith(PREFIX):
        question, _ = read(ResponsesRequest, body)
        answers, charge = replica().agents.responses, _charge(question.model, request)
        return await respond(answers.respond(question, charge, request_context(request)), question.stream)
    return await _response(Responses(body), request)


@policy_routes.post(COMPACT_PATH)
async def compact(body: Annotated[Json, DescribedBy(CompactRequest)], request: Request) -> Response:
    """OpenAI's compaction of a conversation, by the policy."""
    return await _response(Compact(body), request)


async def _response(dialect: Responses, request: Request) -> Response:
    """The response of the policy, which is kept where the request wants that."""
    owner, earlier = request_context(request).owner, dialect.body.previous_response_id
    while name := dialect.follows:
        kept = await replica().responses.kept(owner, name)
        dialect.follow(kept and kept[1])
    if dialect.body.generate is False:
        parts = _prepared(dialect)
    else:
        chat = _routed(dialect.chat_request(), request)
        after = request.scope["state"].get(AFTER) or earlier
        parts = _answer(dialect, _chat(chat, request, dialect.id_prefix, after), chat.stream)
    if dialect.is_stored:
        parts = _store(dialect, parts, owner)
    return await respond(parts, dialect.body.stream, dialect)


@policy_routes.post(MESSAGES_PATH)
async def messages(body: Annotated[Json, DescribedBy(MessagesRequest)], request: Request) -> Response:
    """Anthropic's messages."""
    dialect = Messages(body)
    if "anthropic-beta" in request.headers:
        dialect.dropped += ("anthropic-beta",)
    chat = _routed(dialect.chat_request(), request)
    parts = _answer(dialect, _chat(chat, request, dialect.id_prefix), chat.stream)
    return await respond(parts, chat.stream, dialect)


@policy_routes.post(f"{MESSAGES_PATH}/count_tokens")
async def count_tokens(body: Annotated[Json, DescribedBy(MessagesRequest)]) -> dict[str, int]:
    """Tokens that a prompt of Anthropic's messages has."""
    return {"input_tokens": replica().openai.num_prompt_tokens(count_request(body))}


async def _answer(dialect: Dialect, chunks: Parts, stream: bool | None) -> Parts:
    """The answer in its dialect, or the events of its stream."""
    async with aclosing(chunks):
        if not stream:
            yield dialect.answer(await anext(chunks))
            return
        async for _, event in dialect.events(chunks):
            yield event


async def _prepared(dialect: Responses) -> Parts:
    """The parts of a response without an answer."""
    for part in dialect.prepared(replica().openai.model(dialect.body.model)["policy_version"]):
        yield part


async def _store(dialect: Responses, parts: Parts, owner: str) -> Parts:
    """The parts of a response, which is kept before the last one is sent."""
    async with aclosing(parts):
        async for part in parts:
            response = part.get("response") if part.get("type") in ENDS else part
            if response is not None and response.get("object") == "response":
                await replica().responses.keep(owner, response, dialect.conversation())
            yield part


def _chat(body: ChatRequest, request: Request, prefix: str, after: str | None = None) -> Parts:
    """Parts of the policy's answer to a chat, which is recorded where its one answer can be.

    Args:
        prefix: of its id in the dialect of the request.
        after: the response that it goes on from.
    """
    present, context = replica(), request_context(request)
    if present.recordings is None:
        return _sample(body, request)
    is_one = body.num_choices == 1 and not body.continue_final_message
    if not (context.may_be_recorded and context.idempotency is None and is_one):
        return unrecorded(_sample(body, request))
    charge, place = _charge(body.model, request), AnswerPlace(context.owner, prefix, after)
    if body.model in present.pinned:
        return present.pinned[body.model].answer(body, charge, place)
    return recorded_chat(present.recordings, present.openai, body, charge, place)


def _routed(body: ChatRequest, request: Request) -> ChatRequest:
    """The chat, for the version on trial if that answers it: see ``environments.data.canary``."""
    present = replica()
    if present.recordings is None or body.policy_version is not None:
        return body
    conversation = conversation_name([each.for_template for each in body.messages])
    owner, canary = request_context(request).owner, present.recordings.canary
    version = canary.drawn(owner, conversation, present.pinned)
    is_of_it = version is not None and version.startswith(f"{body.model}@")
    return body.model_copy(update={"model": version}) if is_of_it else body


def _sample(body: ChatRequest | CompletionRequest, request: Request) -> Parts:
    """Parts of the answer by the engine of this replica, or by that of a pinned version."""
    if request_context(request).idempotency is not None:
        raise InvalidRequestError(
            "The header Idempotency-Key is for agents, whose answers are kept, and a model's are not: "
            "leave it out. A seed makes an answer repeatable.",
        )
    charge, pinned, openai = _charge(body.model, request), replica().pinned, replica().openai
    if body.model in pinned:
        return pinned[body.model].answer(body, charge)
    if isinstance(body, ChatRequest):
        return openai.chat(body, charge)
    return openai.complete(body, charge)


def _charge(model: str, request: Request) -> Charge:
    """Return the counter of a request's tokens; names of models that are not served are not kept."""
    known = model in replica().openai.names or model in replica().agents.pools
    return request.state.caller.charge_for(model if known else "none")
