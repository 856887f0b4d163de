"""The messages of a chat, as clients of OpenAI's protocol send them, and the tools that they offer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Tag, model_validator

from environments.types import Message
from policies.agents.parsers.base import call_for_template

Json = dict[str, Any]
"""A JSON object."""


class Body(BaseModel):
    """A part of a request. A field that it does not know is an error, unless it is null, and so is NaN."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_unknown_nulls(cls, given: Any) -> Any:
        """Leave out what newer clients write, with nothing in it, where they send an answer back."""
        if not isinstance(given, dict) or None not in given.values():
            return given
        known = {each.alias or name for name, each in cls.model_fields.items()}
        return {name: value for name, value in given.items() if value is not None or name in known}


def encodable(text: str) -> str:
    """``text``, which has an encoding in UTF-8. Raises ``ValueError`` for half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the text is no Unicode at position {error.start}: {error.reason}") from error
    return text


Text = Annotated[str, AfterValidator(encodable)]


def kind_of(part: Any) -> str | None:
    """The type of a part of a request, which is as it came or was read already."""
    kind: str | None = part.get("type") if isinstance(part, dict) else getattr(part, "type", None)
    return kind


# Tags are no fields: their spaces keep them out of the places that errors name.
TEXT, PICTURE = Tag("a text"), Tag("a picture")


def pictures_by(kind: str) -> Discriminator:
    """Reads a part of this type as ``PICTURE``, and any other as ``TEXT``."""
    return Discriminator(lambda part: (PICTURE if kind_of(part) == kind else TEXT).tag)


class TextPart(Body):
    type: Literal["text"]
    text: Text


class PictureAddress(Body):
    url: str
    detail: Literal["auto"] | None = None
    """A picture is read as the model's own processor does."""


class PicturePart(Body):
    type: Literal["image_url"]
    image_url: PictureAddress


ContentPart = Annotated[
    Annotated[TextPart, TEXT] | Annotated[PicturePart, PICTURE], pictures_by(kind="image_url")
]


class CalledFunction(Body):
    name: str
    arguments: str | None = None
    """JSON text of an object, as the model wrote it. Some clients write nothing where there are none."""
    parsed_arguments: Any = None
    """The same, from ``openai``'s ``parse``, as the message's ``parsed``."""


SHOWING = ("user", "tool")
"""Roles whose messages may show pictures."""


class ChatToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Field of a stream's calls, which ``openai``'s ``stream`` leaves in its final message."""

    @model_validator(mode="after")
    def _check_arguments(self) -> ChatToolCall:
        try:
            self.for_template  # noqa: B018
        except ValueError as error:
            raise ValueError(f"in the call {self.id!r} {error}") from error
        return self

    @cached_property
    def for_template(self) -> Message:
        """The call with an object for its arguments. Raises ``ValueError`` if they are none."""
        return call_for_template({"id": self.id, "type": self.type, "function": vars(self.function)})


class ChatMessage(Body):
    """Message of a chat. The last fields change nothing: clients that send an answer back have them."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    """``developer`` is OpenAI's newer name of ``system``."""
    content: Text | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ChatToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """An answer's thoughts, for templates that show them."""
    reasoning: str | None = None
    """Newer servers' name for ``reasoning_content``."""
    refusal: None = None
    parsed: Any = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    provider_specific_fields: dict[str, Any] | None = None
    """Field of ``litellm``, which puts there what it could not place in an answer."""

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError(f"content is missing: a {self.role} message needs a text")
        if self.role not in SHOWING and self.num_pictures:
            raise ValueError(f"a {self.role} message shows no pictures: put them into one of the user")
        return self

    @property
    def num_pictures(self) -> int:
        """Number of its parts that are pictures."""
        parts = self.content if isinstance(self.content, list) else ()
        return sum(isinstance(part, PicturePart) for part in parts)

    @cached_property
    def for_template(self) -> Message:
        """The message as chat templates want it: a text for content, or parts where pictures are among them,
        and an object for a call's arguments.
        """
        content: str | list[Message]
        if isinstance(self.content, str | None):
            content = self.content or ""
        elif self.num_pictures:
            content = [part.model_dump(exclude={"image_url": {"detail"}}) for part in self.content]
        else:
            content = "\n".join(part.text for part in self.content if isinstance(part, TextPart))
        given = {"name": self.name, "tool_call_id": self.tool_call_id}
        message: Message = {name: value for name, value in given.items() if value is not None}
        if thoughts := self.reasoning_content or self.reasoning:
            message["reasoning_content"] = thoughts
        message["role"] = "system" if self.role == "developer" else self.role
        if self.tool_calls:
            message["tool_calls"] = [call.for_template for call in self.tool_calls]
        return {**message, "content": content}


def _functions(tools: Sequence[Mapping[str, Any]] | None) -> Any:
    """Tools that a client runs itself, as they came: they go into the prompt."""
    for number, tool in enumerate(tools or ()):
        kind, function = tool.get("type"), tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if kind != "function":
            raise ValueError(
                f"tool {number} has the type {kind!r}, and this server has no tools of its own: send only "
                'functions, {"type": "function", "function": {"name": ...}}'
            )
        if not isinstance(function, dict) or not name or not isinstance(name, str):
            raise ValueError(f"tool {number} has no function with a name")
        if not isinstance(function.get("parameters") or {}, dict):
            raise ValueError(f"the parameters of the tool {name!r} are no JSON schema")
    return tools


Tools = Annotated[list[dict[str, Any]] | None, AfterValidator(_functions)]
