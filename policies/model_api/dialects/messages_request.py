"""The body of ``POST /v1/messages``, of Anthropic's API.

https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from policies.model_api.dialects.base import Part, Picture, chat_content, readable, served
from policies.model_api.limits import MAX_MESSAGES
from policies.model_api.messages import PICTURE, TEXT, Json, Text, kind_of, pictures_by
from policies.model_api.protocol import Stop

CACHE = frozenset({"cache_control"})


class TextBlock(Part):
    harmless = CACHE | {"citations", "parsed_output"}
    type: Literal["text"]
    text: Text


class ImageSource(Part):
    """A picture itself, or its address, of which only a data: URL is taken."""

    type: Literal["base64", "url"]
    media_type: str = ""
    data: str = ""
    url: str = ""


class ImageBlock(Picture):
    harmless = CACHE
    type: Literal["image"]
    source: ImageSource

    @property
    def address(self) -> str:
        source = self.source
        return source.url if source.type == "url" else f"data:{source.media_type};base64,{source.data}"


class ThinkingBlock(Part):
    """Thoughts of an earlier answer."""

    harmless = CACHE | {"signature"}
    type: Literal["thinking"]
    thinking: Text


class ToolUse(Part):
    """A call that an earlier answer has made."""

    harmless = CACHE | {"caller"}
    type: Literal["tool_use"]
    id: str
    name: Text
    input: Json


ResultBlock = Annotated[
    Annotated[TextBlock, TEXT] | Annotated[ImageBlock, PICTURE],
    pictures_by(kind="image"),
    BeforeValidator(readable),
]


class ToolResult(Part):
    """The result of a call, which the client has run."""

    harmless = CACHE
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | list[ResultBlock] | None = None
    is_error: bool | None = None

    def for_chat(self) -> Json:
        """Return the message; an error reads as those of Troupe's own tools do."""
        content = chat_content(self.content or "")
        if self.is_error:
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            first = parts[0].get("text", "")
            if not first.startswith("Error"):
                rest = parts[1:] if "text" in parts[0] else parts
                content = [{"type": "text", "text": f"Error: {first}"}, *rest]
        return {"role": "tool", "tool_call_id": self.tool_use_id, "content": content}


BLOCKS = ("text", "image", "thinking", "tool_use", "tool_result")
# Tags are no fields: their spaces keep them out of the places that errors name.
Block = Annotated[
    Annotated[TextBlock, Tag("a text")]
    | Annotated[ImageBlock, Tag("a image")]
    | Annotated[ThinkingBlock, Tag("a thinking")]
    | Annotated[ToolUse, Tag("a tool_use")]
    | Annotated[ToolResult, Tag("a tool_result")],
    Discriminator(lambda block: f"a {kind_of(block)}"),
    served("a block", BLOCKS, f": send the blocks {', '.join(BLOCKS)}"),
    BeforeValidator(readable),
]


class Message(Part):
    """A turn: of the user with results of calls, or of the assistant with calls and thoughts."""

    role: Literal["user", "assistant", "system"]
    content: Text | list[Block]

    @model_validator(mode="after")
    def _check_blocks(self) -> Message:
        if not isinstance(self.content, str):
            own = {"assistant": ("text", "thinking", "tool_use"), "user": ("text", "image", "tool_result")}
            served = own.get(self.role, ("text",))
            for number, block in enumerate(self.content):
                if block.type not in served:
                    raise ValueError(
                        f"block {number} is of type {block.type!r}, and those of {self.role!r} are "
                        f"{' and '.join(served)}: move it to the message that it belongs to"
                    )
        return self

    def for_chat(self) -> Iterator[Json]:
        """Return the messages of a chat: each result of a call is one of its own."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
        elif self.role == "assistant":
            yield _answer(self.content)
        else:
            for _, run in groupby(self.content, key=lambda block: isinstance(block, ToolResult)):
                blocks = list(run)
                if shown := [each for each in blocks if isinstance(each, TextBlock | ImageBlock)]:
                    yield {"role": self.role, "content": chat_content(shown)}
                yield from (each.for_chat() for each in blocks if isinstance(each, ToolResult))


def _answer(blocks: Iterable[Block]) -> Json:
    message: Json = {"role": "assistant", "content": None}
    for block in blocks:
        match block:
            case TextBlock():
                message["content"] = (message["content"] or "") + block.text
            case ThinkingBlock():
                message["reasoning_content"] = message.get("reasoning_content", "") + block.thinking
            case ToolUse():
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                call = {"id": block.id, "type": "function", "function": function}
                message.setdefault("tool_calls", []).append(call)
    return message


class Tool(Part):
    """A tool that the client runs itself."""

    harmless = CACHE | {"eager_input_streaming", "strict"}
    type: Literal["custom"] | None = None
    name: Annotated[Text, Field(min_length=1)]
    description: Text | None = None
    input_schema: Json

    def for_chat(self) -> Json:
        """Return the tool as chats have it."""
        given = self.model_dump(include={"name", "description"}, exclude_none=True)
        return {"type": "function", "function": {**given, "parameters": self.input_schema}}


OWN_TOOLS = served(
    "a tool",
    (None, "custom"),
    ", as this server has no tools of its own: send a name and an input_schema",
)


class ToolChoice(Part):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> ToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("type='tool' and a name need each other: send both, or neither")
        return self

    def for_chat(self) -> Json:
        """Return the fields of a chat request that mean the same."""
        choice: Any = {"auto": "auto", "any": "required", "none": "none"}.get(self.type)
        if self.type == "tool":
            choice = {"type": "function", "function": {"name": self.name}}
        return {
            "tool_choice": choice,
            "parallel_tool_calls": False if self.disable_parallel_tool_use else None,
        }


class Thinking(Part):
    """Choice whether the model thinks before it answers. ``max_tokens`` bounds thoughts too, so that their
    budget, which Anthropic's models take for an aim, is left out.
    """

    harmless = frozenset({"budget_tokens", "display"})
    type: Literal["enabled", "disabled", "adaptive"]

    def for_chat(self) -> Json:
        """Return the option of the chat template; ``adaptive`` leaves it to the model."""
        if self.type == "adaptive":
            return {}
        return {"chat_template_kwargs": {"enable_thinking": self.type == "enabled"}}


class OutputFormat(Part):
    type: Literal["json_schema"]
    schema_: Annotated[Json, Field(alias="schema")]


class OutputConfig(Part):
    effort: str | None = None
    """``high`` is what Anthropic's models do without it, and changes nothing."""
    format: OutputFormat | None = None

    def for_chat(self) -> Json:
        """Return the fields of a chat request that mean the same."""
        effort = None if self.effort == "high" else self.effort
        form = self.format and {"type": "json_schema", "json_schema": {"schema": self.format.schema_}}
        return {"reasoning_effort": effort, "response_format": form}


class ContextEdit(Part):
    """A change of the conversation, of which only this one is none."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Part):
    edits: list[ContextEdit] | None = None


class MessagesRequest(Part):
    harmless = frozenset(
        {"betas", "cache_control", "diagnostics", "inference_geo", "metadata", "service_tier", "speed"}
        | {"user_profile_id", "workspace_id"}
    )
    model: str
    max_tokens: Annotated[int, Field(ge=1)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Text | list[Annotated[TextBlock, BeforeValidator(readable)]] | None = None
    tools: list[Annotated[Tool, OWN_TOOLS]] | None = None
    tool_choice: ToolChoice | None = None
    stop_sequences: Stop = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: int | None = None
    stream: bool | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    seed: int | None = None
    """vLLM's."""
    policy_version: int | None = None
    """The version that has to answer."""

    def chat_messages(self) -> list[Json]:
        """Return the messages of the chat."""
        orders = [{"role": "system", "content": chat_content(self.system)}] if self.system else []
        return orders + [each for message in self.messages for each in message.for_chat()]
