"""Chat templates: a conversation as one text, of which nothing is lost."""

from __future__ import annotations

import functools
import json
import marshal
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from environments.errors import ConfigError
from environments.thoughts import MARKS, opened_thought, split_thought
from environments.types import Message
from policies.encoding import SizedCache
from policies.guard import GUARD, Guard
from policies.pictures import PLACE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OWN_ROLES = ("system", "developer", "assistant")
"""Roles of the program's or the model's own messages in a rollout: they mean the control tokens they name.
The others bring texts of strangers, as all roles do over HTTP."""
TEXTS_BYTES = 128 * 2**20
"""Bytes of the conversations whose texts are held: 400 of 32k tokens."""
MARSHAL_VERSION = 0
"""The format in which equal values have equal bytes, whether or not they share objects."""
CLOCK = re.compile(r"strftime_now(?!\s+is\s)")
DATE = re.compile(r"""strftime_now\s*\(\s*(?:"([^"]*)"|'([^']*)')\s*\)""")
ARGUMENTS = {"messages", "tools", "tokenize", "add_generation_prompt"}
"""Variables of a template that are no options."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """Form in which a template wants a message with tool calls: DeepSeek V3's takes JSON text, and no empty
    content."""

    arguments_as_text: bool = False
    empty_content: str | None = ""


CALLS = "tool_calls"
PROBE = "probe000000"
"""A word that stands for a text: the template shows where it writes that."""
CALL_FORMS = [CallForm(text, empty) for text in (False, True) for empty in ("", None)]


class ChatTemplate:
    """The chat template of a tokenizer.

    Args:
        tokenizer: with a chat template.
        guard: of its tokens.
        options: variables of the template beside messages and tools, such as ``{"enable_thinking": False}``.
        own_roles: the roles whose texts name control tokens on purpose; in all others they stay text.
        picture_token: what is written for each ``PLACE`` in messages, and stays text in all their texts.
            Empty where the model reads text alone; else its template may write texts only where they are
            parts of a content.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        guard: Guard,
        options: Mapping[str, Any],
        own_roles: Collection[str] = OWN_ROLES,
        picture_token: str = "",
    ) -> None:
        self.name = tokenizer.name_or_path
        self._tokenizer = tokenizer
        self._guard = guard
        for name in options:
            if name in ARGUMENTS or re.search(rf"\b{re.escape(name)}\b", self.text) is None:
                raise ConfigError(
                    f"chat_template_kwargs has {name!r}, which is no option of the chat template of "
                    f"{self.name!r}: leave it out, or write it as the template does."
                )
        self._options = dict(options)
        self._own_roles = own_roles
        self._call_form: CallForm | None = None
        self._shown: set[Any] = set()
        """Kinds of messages that it was seen to show."""
        self._dates = _date_formats(self.text)
        self._texts: SizedCache[bytes, str] = SizedCache(TEXTS_BYTES)
        """Texts of conversations: the next prompt is compared with that of the turn before."""
        self._picture_token, self._in_parts = picture_token, False
        if picture_token:
            shown = self._attempt([{"role": "user", "content": PROBE}], None, CALL_FORMS[0])
            self._in_parts = PROBE not in (shown or "")

    def for_client(self, options: Mapping[str, Any]) -> ChatTemplate:
        """The template for a client's messages, of which no role is ours, with options besides its own.

        Raises:
            ConfigError: it has no such option.
        """
        own = {**self._options, **{name: self._guard.guarded(each) for name, each in options.items()}}
        if own == self._options and not self._own_roles:
            return self
        return ChatTemplate(self._tokenizer, self._guard, own, (), self._picture_token)

    @property
    def text(self) -> str:
        """The text of the template; of all of them where the tokenizer has several."""
        return str(self._tokenizer.chat_template)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, for_an_answer: bool = True
    ) -> str:
        """The conversation as text, up to the beginning of the model's answer.

        Args:
            messages: the conversation, in OpenAI's shape.
            tools: what the model may call, as OpenAI's schemas.
            for_an_answer: whether it goes on with the beginning of an answer.
        """
        if self._call_form is None and any(message.get("tool_calls") for message in messages):
            self.unseen(messages, tools)
        key = self._key(messages, tools, for_an_answer)
        if key is None:
            return self.render_anew(messages, tools, for_an_answer)
        text = self._texts.get(key)
        if text is None:
            text = self.render_anew(messages, tools, for_an_answer)
            self._texts.put(key, text, sys.getsizeof(key) + sys.getsizeof(text))
        return text

    def render_anew(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, for_an_answer: bool = True
    ) -> str:
        """The same text, made by the template itself."""
        plain = [self._guarded(_plain(message)) for message in messages]
        shown_tools = None if tools is None else self._guard.guarded(list(tools))
        return self._apply(plain, shown_tools, self._call_form or CALL_FORMS[0], for_an_answer)

    def _key(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, for_an_answer: bool
    ) -> bytes | None:
        """The conversation as bytes: conversations with the same bytes have the same text.

        ``None`` where the text is not held: the conversation is a client's, who never sends the turn before,
        it has other values than JSON's, or the template computes the form in which it writes the time.
        """
        if not self._own_roles or self._dates is None:
            return None
        form = self._call_form or CALL_FORMS[0]
        dates = [datetime.now().strftime(each) for each in self._dates]
        shown: Any = (list(messages), tools, CALL_FORMS.index(form), for_an_answer, dates)
        try:
            return marshal.dumps(shown, MARSHAL_VERSION)
        except ValueError:
            return None

    def render_open(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> tuple[str, str]:
        """The conversation as text, up to the text of its last message, and that text as it stands.

        A message that has thoughts and no other text is one that ends within its thought.

        Raises:
            ValueError: the template does not show that text.
        """
        last = _plain(messages[-1])
        content, thought = last.get("content") or "", last.get("reasoning_content") or ""
        if split_thought(content)[1] != content:  # an answer with its thought, as it was sampled
            prompt = self.render(messages[:-1], tools)
            if (mark := opened_thought(prompt)) and content.lstrip().startswith(mark):
                prompt = prompt[: prompt.rindex(mark)]  # the text has it too
            return prompt, self._guard.guarded(content, {*MARKS, *MARKS.values()})
        is_thought = bool(thought and not content)
        name = "reasoning_content" if is_thought else "content"
        shown = self._guarded(last)
        probe = {**shown, name: PROBE}
        begun, found, _ = self.render([*messages[:-1], probe], tools, for_an_answer=False).rpartition(PROBE)
        if not found and is_thought:  # a template may begin answers with a thought, and show none of before
            begun = self.render(messages[:-1], tools)
            found = opened_thought(begun)
        if not found:
            raise ValueError("the template does not show the text that the answer has to go on with")
        return begun, shown[name]

    def unseen(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        """Return what the template would leave out of a conversation: tools, tool calls, or the messages of a
        role.

        Each kind of message is tried once, by words that stand for its texts. A kind is a role at its place
        between two others, with or without calls.
        """
        kinds = set(_kinds(messages, tools))
        if kinds <= self._shown:
            return None
        try:
            probe = _Probe([_plain(message) for message in messages], tools)
        except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
            return None  # it cannot be rendered either, and that says why
        missing: str | None = None
        for form in CALL_FORMS if self._call_form is None else [self._call_form]:
            text = self._attempt(probe.messages, probe.tools, form)
            if text is None:
                continue
            lost = probe.lost(text)
            missing = missing or next(iter(lost), None)
            if not any(what.startswith(CALLS) for what in lost):
                self._call_form = form if probe.has_calls else self._call_form
                self._shown |= set() if lost else kinds
                return next(iter(lost), None)
        return missing

    def rejected(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        """Return which message it does not take, for the error of a conversation that it rejects."""
        if not messages:
            return "there is none"

        def is_refused(size: int) -> bool:
            return self._attempt(messages[:size], tools, self._call_form or CALL_FORMS[0]) is None

        index = bisect_left(range(1, len(messages)), True, key=is_refused)
        return f"message {index}, of the role {messages[index].get('role')!r}"

    def _attempt(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, form: CallForm
    ) -> str | None:
        """The text of a conversation; ``None`` where the template raises."""
        from jinja2 import TemplateError

        try:
            return self._apply([_plain(message) for message in messages], tools, form)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError):
            return None

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        form: CallForm,
        for_an_answer: bool = True,
    ) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [_in_form(message, form, self._in_parts) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=for_an_answer,
                **self._options,
            )
        )

    def _guarded(self, message: Message) -> Message:
        role = message.get("role")
        if role in self._own_roles:
            name = self._picture_token
            return _with_guard(message, name, name[:1] + GUARD + name[1:]) if name else message
        but: Collection[str] = ()
        if role == "assistant" and isinstance(content := message.get("content"), str):
            # An answer that its client sends back: the marks of its thought are the model's.
            thought, answer = split_thought(content)
            if thought and self.shows_thoughts:
                message = {"reasoning_content": thought, **message, "content": answer.lstrip("\n")}
            elif thought:
                but = {*MARKS, *MARKS.values()}
        return {name: self._guarded_field(name, each, but) for name, each in message.items()}

    def _guarded_field(self, name: str, value: Any, but: Collection[str]) -> Any:
        if name == "role":
            return value
        if name == "content" and isinstance(value, list):  # the types of its parts are no texts of strangers
            return [
                each if each is PLACE else _text_part(self._guard.guarded(each["text"])) for each in value
            ]
        return self._guard.guarded(value, but)

    @functools.cached_property
    def shows_thoughts(self) -> bool:
        """Return whether it writes the ``reasoning_content`` of an answer."""
        answer = {"role": "assistant", "content": "probeanswer", "reasoning_content": "probethought"}
        text = self._attempt([{"role": "user", "content": "probe"}, answer], None, CALL_FORMS[0])
        return "probethought" in (text or "")


class _Probe:
    """A conversation with words that stand for its texts, and what is lost where a word does not come out."""

    def __init__(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        self._words: list[tuple[str, str]] = []
        self.messages = [self._stand_in(message) for message in messages]
        self.tools = None if tools is None else [self._named(tool) for tool in tools]
        self.has_calls = any(message.get("tool_calls") for message in messages)

    def lost(self, text: str) -> list[str]:
        """Return what of the conversation ``text`` does not show."""
        return [what for word, what in self._words if word not in text]

    def _word(self, what: str) -> str:
        self._words.append((f"probe{len(self._words):06d}", what))
        return self._words[-1][0]

    def _stand_in(self, message: Message) -> Message:
        what, content = f"messages of the role {message.get('role')!r}", message.get("content")
        if calls := message.get("tool_calls"):
            beside = " beside a text" if content else ""
            calls = [self._called(call, f"{CALLS}{beside}") for call in calls]
            message = {**message, "tool_calls": calls}
        if isinstance(content, str) and content.strip():
            message = {**message, "content": self._word(what)}
        elif isinstance(content, list):
            parts = [each if each is PLACE else _text_part(self._word(what)) for each in content]
            message = {**message, "content": parts}
        return message

    def _called(self, call: Any, what: str) -> Any:
        function = {
            **call.get("function", {}),
            "name": self._word(what),
            "arguments": {"of": self._word(what)},
        }
        return {**call, "function": function}

    def _named(self, tool: Any) -> Any:
        if "function" not in tool and "name" in tool:
            return {**tool, "name": self._word("tools")}
        return {**tool, "function": {**tool.get("function", {}), "name": self._word("tools")}}


def _kinds(messages: Sequence[Message], tools: Sequence[Any] | None) -> Iterator[Any]:
    """Return what of a conversation its template may treat each in a way of its own."""
    roles = [None, *(str(message.get("role")) for message in messages), None]
    for index, message in enumerate(messages):
        content, has_calls = message.get("content"), bool(message.get("tool_calls"))
        yield (*roles[index : index + 3], bool(content), isinstance(content, list), has_calls)
    if tools:
        yield ("tools", *roles[1:3])


def _plain(message: Message) -> Message:
    """The message with its parts of text as one text, unless pictures stand between them, and the arguments
    of its calls as objects.

    OpenAI has JSON text there; templates write JSON.

    Raises:
        ValueError: a part is an image that the model does not read, for example. Some templates would leave
            it out, others write its JSON.
    """
    content = message.get("content")
    if isinstance(content, list):
        if others := [part for part in content if not (_is_text(part) or part is PLACE)]:
            raise ValueError(
                f"a part of its content is {others[0]!r:.90}, and is no text that this model reads: "
                'write it as {"type": "text", "text": ...}, or leave it out'
            )
        if not any(part is PLACE for part in content):
            message = {**message, "content": "\n".join(part["text"] for part in content)}
    return _with_arguments(message, _parsed) if message.get("tool_calls") else message


def _text_part(text: str) -> Message:
    return {"type": "text", "text": text}


def _with_guard(value: Any, name: str, guarded: str) -> Any:
    """A value of JSON, with a name guarded in all of its texts."""
    if isinstance(value, str):
        return value.replace(name, guarded)
    if isinstance(value, dict) and value is not PLACE:
        return {key: _with_guard(each, name, guarded) for key, each in value.items()}
    return [_with_guard(each, name, guarded) for each in value] if isinstance(value, list) else value


def _in_form(message: Message, form: CallForm, in_parts: bool) -> Message:
    if in_parts and isinstance(content := message.get("content"), str):
        message = {**message, "content": [_text_part(content)]}
    if not message.get("tool_calls"):
        return message
    if form.arguments_as_text:
        message = _with_arguments(message, functools.partial(json.dumps, ensure_ascii=False))
    return {**message, "content": message.get("content") or form.empty_content}


def _with_arguments(message: Message, form: Callable[[Any], Any]) -> Message:
    """The message with the arguments of its calls in another form."""
    calls = [
        {**call, "function": {**call["function"], "arguments": form(call["function"]["arguments"])}}
        if "function" in call
        else call
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _date_formats(template: str) -> list[str] | None:
    """The forms in which a template writes the time, or ``None`` where it computes them."""
    found = [double or single for double, single in DATE.findall(template)]
    return found if len(found) == len(CLOCK.findall(template)) else None


def _is_text(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments
