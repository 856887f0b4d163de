"""The body of ``POST /v1/responses``: what agents and policies have in common, and the policy's.

https://platform.openai.com/docs/api-reference/responses/create
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)

from policies.model_api.dialects.base import Part, Picture, chat_content, readable, served
from policies.model_api.errors import InvalidRequestError
from policies.model_api.limits import MAX_MESSAGES
from policies.model_api.messages import PICTURE, TEXT, Body, Json, Text, kind_of, pictures_by
from policies.model_api.protocol import MAX_SEED


class InputText(Body):
    """A part of a message. The last fields change nothing: clients that send an answer back have them."""

    type: Literal["input_text", "output_text"]
    text: Text
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    parsed: Any = None
    """Field of ``openai``'s ``parse`` and ``stream``."""


class MessageFields(Body):
    """A message of ``input``; its type may be left out, as in OpenAI's simplest examples. The last fields are
    those of an answer that is sent back, and change nothing.
    """

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: str | None = None


class InputMessage(MessageFields):
    """A message for an agent."""

    content: Text | list[InputText]

    def text(self) -> str:
        """Return all of its text."""
        return text_of(self.content)


def text_of(content: str | Iterable[Any]) -> str:
    """Return all text of a message's content."""
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, InputText))


class ResponsesFields(Body):
    """Fields that mean the same for agents and policies. ``null`` always means the default."""

    model: str
    previous_response_id: str | None = None
    """The conversation goes on from the answer of this id."""
    instructions: Text | None = None
    """A system prompt."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
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
    truncation: Literal["auto", "disabled"] | None = None
    stream_options: Json | None = None
    top_logprobs: Literal[0] | None = None
    background: Literal[False] | None = None


# -- the policy's: items, tools, form of the answer ------------------------------------------------------


class InputImage(Picture):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto"] | None = "auto"
    """A picture is read as the model's own processor does."""
    file_id: None = None

    @property
    def address(self) -> str:
        return self.image_url


InputPart = Annotated[
    Annotated[InputText, TEXT] | Annotated[InputImage, PICTURE],
    pictures_by(kind="input_image"),
    BeforeValidator(readable),
]


class Message(MessageFields):
    content: Text | list[InputPart]

    @model_validator(mode="after")
    def _check_pictures(self) -> Message:
        if self.role == "assistant" and any(isinstance(part, InputImage) for part in self.content):
            raise ValueError("the assistant shows no pictures: put them into a message of the user")
        return self


class FunctionCall(Part):
    """A call that an earlier answer has made."""

    harmless = frozenset({"id", "status", "parsed_arguments"})
    type: Literal["function_call"]
    call_id: str
    name: Text
    arguments: Text


class FunctionCallOutput(Part):
    """The result of a call, which the client has run."""

    harmless = frozenset({"id", "status"})
    type: Literal["function_call_output"]
    call_id: str
    output: Text | list[InputPart]


class ThoughtPart(Body):
    type: Literal["summary_text", "reasoning_text"]
    text: Text


class Reasoning(Part):
    """Thoughts of an earlier answer, in its ``content`` or else, as ours, in its ``summary``."""

    harmless = frozenset({"id", "status", "encrypted_content"})
    type: Literal["reasoning"]
    summary: list[ThoughtPart] = Field(default_factory=list)
    content: list[ThoughtPart] | None = None

    def text(self) -> str:
        """Return the thoughts."""
        return "".join(part.text for part in self.content or self.summary)


class ItemReference(Body):
    """The name of an item of a stored response, which stands in this place."""

    type: Literal["item_reference"]
    id: str


SUMMARY = "Summary of the conversation so far:\n"
"""Beginning of all summaries, by which those of other servers are told from them."""


class Compaction(Part):
    """A summary of what was before it, which the policy has written: see ``Compact``."""

    harmless = frozenset({"id", "created_by"})
    type: Literal["compaction"]
    encrypted_content: Text

    @field_validator("encrypted_content")
    @classmethod
    def _check_origin(cls, value: str) -> str:
        if not value.startswith(SUMMARY):
            raise ValueError("another server has written it, and only that can read it: leave the item out")
        return value


ITEMS = ("message", "function_call", "function_call_output", "reasoning", "item_reference", "compaction")
# Tags are no fields: their spaces keep them out of the places that errors name.
Item = Annotated[
    Annotated[Message, Tag("a message")]
    | Annotated[FunctionCall, Tag("a function_call")]
    | Annotated[FunctionCallOutput, Tag("a function_call_output")]
    | Annotated[Reasoning, Tag("a reasoning")]
    | Annotated[ItemReference, Tag("a item_reference")]
    | Annotated[Compaction, Tag("a compaction")],
    Discriminator(lambda item: f"a {kind_of(item) or 'message'}"),
    served("an item", (None, "", *ITEMS), f": send the items {', '.join(ITEMS)}"),
]


class FunctionTool(Part):
    """A function that the client calls itself."""

    harmless = frozenset({"strict"})
    type: Literal["function"] = "function"
    name: Annotated[Text, Field(min_length=1)]
    description: Text | None = None
    parameters: Json | None = None

    def for_chat(self) -> Json:
        """Return the tool as chats have it."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


FUNCTIONS = served(
    "a tool",
    ("function",),
    ", as this server has no tools of its own: send functions, "
    '{"type": "function", "name": ..., "parameters": ...}',
)


class NamedChoice(Body):
    """The one function that has to be called."""

    type: Literal["function"]
    name: str


class TextFormat(Part):
    """The form of the answer's text. ``strict`` changes nothing: the schema always holds."""

    harmless = frozenset({"strict"})
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    description: str | None = None

    def for_chat(self) -> Json:
        """Return the form as chats have it."""
        if self.type != "json_schema":
            return {"type": self.type}
        form = {"name": self.name, "description": self.description, "schema": self.schema_ or {}}
        return {"type": self.type, "json_schema": form}


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None
    """OpenAI's default: a policy is as long or short as its instructions want it."""


class ReasoningOptions(Part):
    harmless: ClassVar = frozenset({"summary", "generate_summary"})
    effort: str | None = None


class PolicyResponses(ResponsesFields, Part):
    """A request to the policy, whose tools the client runs."""

    harmless = frozenset(
        {"client_metadata", "include", "max_tool_calls", "prompt_cache_options", "prompt_cache_retention"}
        | {"service_tier"}
    )
    generate: bool | None = None
    """False for a response without an answer, from which a later request goes on."""
    input: Annotated[
        Text | Annotated[list[Item], Field(max_length=MAX_MESSAGES)],
        Field(default_factory=list, validate_default=True),
    ]
    tools: list[Annotated[FunctionTool, FUNCTIONS]] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_k: int | None = None
    """vLLM's, as the last but one."""
    chat_template_kwargs: Json | None = None
    policy_version: int | None = None
    """The version that has to answer."""

    @field_validator("input")
    @classmethod
    def _check_input(cls, value: str | list[Item], info: ValidationInfo) -> str | list[Item]:
        goes_on = info.data.get("previous_response_id") or info.data.get("generate") is False
        if value == [] and not goes_on:
            raise ValueError("there is none: send a text, or items")
        return value

    def ignored(self) -> set[str]:
        """Return the fields that are set and change nothing."""
        names = ("background", "prompt_cache_key", "safety_identifier", "stream_options", "top_logprobs")
        return {name for name in (*names, "truncation", "user") if getattr(self, name) is not None}

    def items(self) -> list[Json]:
        """Return what ``input`` adds to the conversation."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(exclude_none=True) for item in self.input]


class CompactRequest(Part):
    """The body of ``POST /v1/responses/compact``; its fields are those of ``PolicyResponses``."""

    harmless = frozenset(
        {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier"}
    )
    model: str
    previous_response_id: str | None = None
    instructions: str | None = None
    input: Any = None


class Conversation(BaseModel):
    """Items of a conversation in their order, as ``messages_of`` reads them."""

    items: Annotated[list[Item], Field(max_length=MAX_MESSAGES)]


def messages_of(items: Iterable[Item]) -> list[Json]:
    """The messages of a chat: what an answer has said, thought and called in a row is one message of it.

    Raises:
        InvalidRequestError: a result is of no call before it.
    """
    messages: list[Json] = []
    calls: set[str] = set()
    has_text_last = False
    for item in items:
        match item:
            case FunctionCallOutput():
                if item.call_id not in calls:
                    raise InvalidRequestError(
                        f"The function_call_output of {item.call_id!r} has no function_call before it: send "
                        "that item of the answer too, or the previous_response_id of the answer.",
                        param="input",
                    )
                content = chat_content(item.output)
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
            case Message() if item.role != "assistant":
                messages.append({"role": item.role, "content": chat_content(item.content)})
            case Compaction():
                messages.append({"role": "assistant", "content": item.encrypted_content})
            case _:
                is_first = not messages or messages[-1]["role"] != "assistant"
                if is_first or (has_text_last and item.type == "message"):
                    messages.append({"role": "assistant", "content": None})
                _add_to_answer(messages[-1], item)
                if item.type == "function_call":
                    calls.add(item.call_id)
        has_text_last = item.type in ("message", "compaction")
    return messages


def _add_to_answer(answer: Json, item: Item) -> None:
    match item:
        case Reasoning():
            answer["reasoning_content"] = answer.get("reasoning_content", "") + item.text()
        case FunctionCall():
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            answer.setdefault("tool_calls", []).append(call)
        case Message():
            answer["content"] = (answer["content"] or "") + text_of(item.content)
