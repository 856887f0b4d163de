"""The body of ``POST /v1/responses``, for trained agents.

https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from policies.agent_api.question import Question
from policies.model_api.dialects.responses_request import InputMessage, ResponsesFields
from policies.model_api.limits import MAX_MESSAGES
from policies.model_api.messages import Body, Json, Text

ITEM_ID = re.compile(r"[a-z]+_([0-9a-f]{32})\d{3}")
"""An item's id, which has its response's."""


def _is_step(item: Any) -> bool:
    """Return whether an item of ``input`` is a step before an answer, or the name of one."""
    kind, name = (item.get("type"), item.get("id")) if isinstance(item, dict) else (None, None)
    return kind == "reasoning" or (kind == "item_reference" and str(name).startswith("rs_"))


def _as_message(item: Any) -> Any:
    if not isinstance(item, dict) or item.get("type") != "item_reference":
        return item
    return {"role": "assistant", "content": "", "id": item.get("id")}


class TextFormat(Body):
    type: Literal["text"]


class TextOptions(Body):
    """The form of the answer, which is the agent's own."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesRequest(ResponsesFields):
    """A request to an agent, which has tools and settings of its own.

    ``server.agents.instructions`` says what becomes of ``instructions``; ``max_output_tokens`` bounds all
    steps together, where the agent's own limit is not lower. The fields here choose what is the case anyway.
    """

    input: Text | Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    service_tier: Literal["auto", "default"] | None = None
    reasoning: Json | None = None
    text: TextOptions | None = None
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
            turns += [(each.role, each.text()) for each in self.input]
        return Question(model=self.model, turns=turns, sampling=sampling)
