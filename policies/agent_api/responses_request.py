"""The body of ``POST /v1/responses``, for trained agents.

https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from policies.agent_api.history import Turn
from policies.agent_api.question import Question
from policies.model_api.limits import MAX_MESSAGES
from policies.model_api.messages import Text
from policies.model_api.protocol import MAX_SEED

Json = dict[str, Any]

ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})\d{3}")
"""An item's id, which has its response's."""


class _Item(BaseModel):
    model_config = ConfigDict(extra="forbid")


class InputText(_Item):
    """A part of a message. The last fields change nothing: clients that send an answer back have them."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class InputMessage(_Item):
    """A message of ``input``; its type may be left out, as in OpenAI's simplest examples. The last fields are
    those of an answer that is sent back, and change nothing.
    """

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[InputText]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def turn(self) -> Turn:
        """Return its role and its text."""
        if isinstance(self.content, str):
            return self.role, self.content
        return self.role, "".join(part.text for part in self.content)


def _is_step(item: Any) -> bool:
    """Return whether an item of ``input`` is a step before an answer, or the name of one."""
    kind, name = (item.get("type"), item.get("id")) if isinstance(item, dict) else (None, None)
    return kind == "reasoning" or (kind == "item_reference" and str(name).startswith("rs_"))


def _as_message(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type") != "item_reference":
        return item
    return {"role": "assistant", "content": "", "id": item.get("id")}


class TextFormat(_Item):
    type: Literal["text"]


class TextOptions(_Item):
    """The form of the answer, which is the agent's own."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(_Item):
    """The body of ``POST /v1/responses``. ``null`` always means the default."""

    model: str
    previous_response_id: str | None = None
    """The conversation goes on from the answer of this id: the agent and its environment remember it."""
    input: Text | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: Text | None = None
    """A system prompt: ``server.agents.instructions`` says what becomes of it."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens of all steps together, where the agent's own limit is not lower."""
    stream: bool | None = None
    store: bool | None = None
    """Default: the response can be fetched again by its id."""
    metadata: Annotated[dict[Text, Text], Field(max_length=16)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    user: str | None = None
    """Accepted and ignored, as all that follow: they are about OpenAI's customer and cache, or choose what is
    the case here anyway."""
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    reasoning: Json | None = None
    text: TextOptions | None = None
    stream_options: Json | None = None
    top_logprobs: Literal[0] | None = None
    background: Literal[False] | None = None
    parallel_tool_calls: bool | None = None
    tool_choice: Literal["auto"] | None = None
    tools: Annotated[list[Json], Field(max_length=0)] | None = None
    include: list[str] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _as_messages(cls, given: Any) -> Any:
        """An answer may be sent back by its name alone, and without the steps before it: the agent remembers
        them itself.
        """
        if not isinstance(given, list):
            return given
        return [_as_message(each) for each in given if not _is_step(each)]

    @property
    def after(self) -> str | None:
        """The id of the response that the conversation goes on from, if the request says it somewhere."""
        if self.previous_response_id is not None or isinstance(self.input, str):
            return self.previous_response_id
        ids = [ITEM_ID.fullmatch(each.id or "") for each in self.input if each.role == "assistant"]
        return next((f"resp_{found[1]}" for found in reversed(ids) if found), None)

    def question(self) -> Question:
        """Return what the request asks of its agent."""
        sampling = self.model_dump(include={"temperature", "top_p", "seed"}, exclude_none=True)
        if self.max_output_tokens is not None:
            sampling["max_tokens"] = self.max_output_tokens
        turns = [("system", self.instructions)] if self.instructions else []
        if isinstance(self.input, str):
            turns.append(("user", self.input))
        else:
            turns += [each.turn() for each in self.input]
        return Question(model=self.model, turns=turns, sampling=sampling)
