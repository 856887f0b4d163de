"""Relay of a talk on the page to a policy server, and of the answers back.

The page itself may ask no address but its own.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import httpx
from fastapi import HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

from environments.command_name import command_name

KEY_VARIABLE = "TROUPE_API_KEY"
"""The key of the server that is talked to, if it asks for one."""
MAX_CHARACTERS = 200_000
MAX_TALK_MESSAGES = 1000
CONNECT_SECONDS = 5.0
AGENT_STEP_SECONDS = 600.0
"""Seconds of the longest step of an agent that is waited for."""


class ChatMessage(BaseModel, extra="forbid"):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: Annotated[str, Field(max_length=MAX_CHARACTERS)]


class TalkRequest(BaseModel, extra="forbid"):
    """Body of ``POST /api/talk``: the model, and the conversation so far."""

    model: str
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_TALK_MESSAGES)]


class ThumbRequest(BaseModel, extra="forbid"):
    """Body of ``POST /api/feedback``: a thumb on an answer that the server has recorded."""

    answer_id: Annotated[str, Field(pattern=r"^[\w-]{1,100}$")]
    thumb: Literal["up", "down"]


class Talk:
    """A policy server as the page reaches it.

    Args:
        url: such as http://127.0.0.1:8000/v1.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        key = os.environ.get(KEY_VARIABLE)
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        timeout = httpx.Timeout(AGENT_STEP_SECONDS, connect=CONNECT_SECONDS)
        # trust_env=False: a proxy of the shell's is not meant for a server of one's own.
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=False)

    async def models(self) -> list[str]:
        """The names of the models and agents that answer."""
        answer = await self._send("GET", "/models")
        names = [each["id"] for each in (await _body(answer))["data"]]
        return sorted(names, key=lambda name: not name.startswith("agent/"))

    async def talk(self, request: TalkRequest) -> StreamingResponse:
        """The server's answer, as server-sent events, while it comes. A page that is left ends it."""
        body = {**request.model_dump(), "stream": True}
        answer = await self._send("POST", "/chat/completions", json=body)
        return StreamingResponse(_parts(answer), media_type="text/event-stream")

    async def give_feedback(self, request: ThumbRequest) -> dict[str, Any]:
        """Hand a thumb on, and return the feedback as the server keeps it."""
        path = f"/responses/{request.answer_id}/feedback"
        return dict(await _body(await self._send("POST", path, json={"thumb": request.thumb})))

    async def _send(self, method: str, path: str, **content: Any) -> httpx.Response:
        request = self._client.build_request(method, self._url + path, **content)
        try:
            answer = await self._client.send(request, stream=True)
        except httpx.HTTPError as error:
            raise HTTPException(
                502,
                f"No policy server answers at {self._url} ({error or type(error).__name__}). Start one by "
                f"`{command_name('serve')} model.path=RUN recipe=RECIPE`, or name another by --server.",
            ) from error
        if answer.is_error:
            body = await _body(answer)
            raise HTTPException(answer.status_code, f"{self._url}: {body['error']['message']}")
        return answer


async def _body(answer: httpx.Response) -> Any:
    try:
        await answer.aread()
    finally:
        await answer.aclose()
    try:
        return answer.json()
    except ValueError:
        return {"error": {"message": f"status {answer.status_code}, and no JSON: is this a policy server?"}}


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()
