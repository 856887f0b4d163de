"""Chat rendering: messages become prompt token ids, in which sampled tokens stay as they were sampled."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.errors import AgentError, ConfigError, PromptTooLongError
from environments.types import Message
from policies.sampler import SampleRequest, Turn, check_prompt_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
CONFIG_FILES = ("generation_config.json", "config.json")
WRITTEN_HERE = ("system", "developer", "assistant")
"""Roles whose messages are the program's or the model's own. The others bring texts of strangers."""
GUARD = "\ufdd0"
"""Stands in a rendered text where a control token's name must not become the token. Unicode keeps this
character out of all texts."""
RENDERER_ARGUMENTS = {"messages", "tools", "tokenize", "add_generation_prompt"}


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder in Hugging Face format or of a model id; ``ConfigError`` without one."""
    folder = Path(path)
    if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"The folder {folder} holds no tokenizer: write one with tokenizer.save_pretrained(folder)."
        )
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # a damaged file makes the libraries raise whatever they stumble over
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"No tokenizer can be loaded from {str(path)!r} ({reason}): name a folder that "
            "tokenizer.save_pretrained wrote, or the id of a model that can be downloaded."
        ) from error
    return tokenizer


class ChatRenderer:
    """Renders conversations with the model's own chat template.

    The template is used only for new messages. The prompt and the completion of the turn before are taken
    over as token ids, since encoding their text again may split it differently.

    Where a user's or a tool's text holds the name of a control token, such as ``<|im_end|>``, it stays text:
    nobody outside can end a turn, or begin one of the system's.

    Args:
        tokenizer: with a chat template. A completion ends with its EOS token or with one of those that
            the configuration beside it lists (Llama 3 has several).
        chat_template_kwargs: variables of the template beside messages and tools, such as
            ``{"enable_thinking": False}``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template: set tokenizer.chat_template "
                "(a Jinja text; the model's card shows it) and save it with tokenizer.save_pretrained."
            )
        self._tokenizer = tokenizer
        self._set_options(dict(chat_template_kwargs or {}))
        self._control_names = _control_names(tokenizer)
        self._end_ids = _configured_end_ids(tokenizer.name_or_path) | ({tokenizer.eos_token_id} - {None})

    def _set_options(self, chat_template_kwargs: dict[str, Any]) -> None:
        for name in chat_template_kwargs:
            if name in RENDERER_ARGUMENTS or not self._template_reads(name):
                raise ConfigError(
                    f"chat_template_kwargs has {name!r}, which is no option of the chat template of "
                    f"{self._tokenizer.name_or_path!r}: leave it out, or write it as the template does."
                )
        self._template_kwargs = chat_template_kwargs

    def request_ids(self, request: SampleRequest) -> tuple[int, ...]:
        """The prompt [P] of a request.

        Raises:
            AgentError: the chat template rejects the messages, or does not show the tools.
            PromptTooLongError: the prompt is longer than the request allows.
        """
        from jinja2 import TemplateError

        if unseen := self.unseen(request.messages, request.tools):
            raise AgentError(
                f"The chat template of {self._tokenizer.name_or_path!r} shows no {unseen}: let the agent's "
                "messages explain them, as ToolAgent(tools_in='system') does."
            )
        limits = [each for each in (request.max_prompt_tokens, request.max_total_tokens) if each is not None]
        most = min(limits, default=None)
        try:
            prompt_ids = tuple(self.prompt_ids(request.messages, request.previous, request.tools, most))
        except PromptTooLongError as error:
            raise PromptTooLongError(
                f"{error} Its limits are max_prompt_tokens={request.max_prompt_tokens} and "
                f"max_total_tokens={request.max_total_tokens}."
            ) from error
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise AgentError(
                f"The chat template of {self._tokenizer.name_or_path!r} rejects the agent's messages "
                f"({error}): change their roles, order or content as it expects."
            ) from error
        check_prompt_length(len(prompt_ids), request)
        return prompt_ids

    def prompt_ids(
        self,
        messages: list[Message],
        previous: Turn | None = None,
        tools: list[dict[str, Any]] | None = None,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The prompt [P] for the model's answer to ``messages``.

        Starts with the prompt and completion ids of ``previous`` where the template renders ``messages``
        as a continuation of that turn. Otherwise (the agent rewrote its history, or the template did)
        everything is encoded afresh, and training starts a new sequence here.

        Raises:
            PromptTooLongError: ``max_tokens`` cannot hold it. It may still have more than these.
        """
        text = self._render(messages, tools)
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        extended = None if previous is None else self._extend(previous, text)
        return self.encode(text) if extended is None else extended

    def unseen(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str | None:
        """What the chat template would leave out: "tools", or the "tool_calls" of messages."""
        calls = any(message.get("tool_calls") for message in messages)
        given = {"tools": bool(tools), "tool_calls": calls}
        return next((name for name, there in given.items() if there and not self._template_reads(name)), None)

    def with_options(self, chat_template_kwargs: Mapping[str, Any] | None) -> ChatRenderer:
        """A renderer whose template has these options besides its own. Raises ``ConfigError``."""
        if not chat_template_kwargs:
            return self
        renderer = copy.copy(self)  # not made anew: the model's files would be read again
        renderer._set_options({**self._template_kwargs, **chat_template_kwargs})
        return renderer

    def check_length(self, text: str, max_tokens: int) -> None:
        """Find out that a text is too long before its tokens are computed: that can take seconds.

        Raises:
            PromptTooLongError: it would be longer than ``max_tokens`` even if all of them were the longest.
        """
        most = max_tokens * _longest_token(self._tokenizer)
        if len(text) > most:
            raise PromptTooLongError(
                f"The prompt has {len(text)} characters, and the {max_tokens} tokens that it may have hold "
                f"{most} at most: shorten the prompt."
            )

    @property
    def chat_template(self) -> str:
        """The text of the template; of all of them where the tokenizer has several."""
        return str(self._tokenizer.chat_template)

    @property
    def eos_token_id(self) -> int:
        """The token that ends a completion."""
        return int(self._tokenizer.eos_token_id)

    def decode(self, completion_ids: Sequence[int]) -> str:
        """The text of sampled tokens [C], without the end-of-sequence token where they end with one."""
        ids = list(completion_ids)
        if ids and ids[-1] in self._end_ids:
            ids.pop()
        # Cleaning up spaces would change the text, and then no later prompt could be matched with it.
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text`` as it stands, with no special tokens added."""
        pieces = text.split(GUARD)
        return [each for piece in pieces for each in self._tokenizer.encode(piece, add_special_tokens=False)]

    def _extend(self, previous: Turn, text: str) -> list[int] | None:
        """The tokens of ``previous`` and of the rest of ``text``; ``None`` if ``text`` does not continue it.

        The texts are compared: ``text`` has to start with the prompt and the completion of ``previous``, and
        where the model ended its message, the template has to end it with the same token.
        """
        completion = previous.completion
        if not completion.completion_ids:
            return None
        known = self._render(previous.messages, previous.tools) + completion.text
        if not text.startswith(known):
            return None
        new_ids = self.encode(text[len(known) :])
        last_id = completion.completion_ids[-1]
        if last_id in self._end_ids:
            if new_ids[:1] != [last_id]:
                return None
            del new_ids[0]
        return [*completion.prompt_ids, *completion.completion_ids, *new_ids]

    def _template_reads(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.chat_template) is not None

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                [self._guarded(_for_template(message)) for message in messages],
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **self._template_kwargs,
            )
        )

    def _guarded(self, message: Message) -> Message:
        """The message, in which a stranger's text has a guard within every name of a control token."""
        content = message.get("content")
        if message.get("role") in WRITTEN_HERE or not isinstance(content, str):
            return message
        return {
            **message,
            "content": self._control_names.sub(lambda name: name[0][0] + GUARD + name[0][1:], content),
        }


@functools.lru_cache(maxsize=8)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The characters of its longest token. Kept, since all its renderers ask for it with each request."""
    return max(map(len, tokenizer.get_vocab()))


def _control_names(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """The texts that a tokenizer encodes as control tokens, the longest first."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    names = sorted(added.union(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(re.escape(name) for name in names if len(name) > 1) or r"(?!)")


def _configured_end_ids(model_path: str) -> set[int]:
    """The end-of-sequence tokens that a model's configuration lists, read in vLLM's order."""
    for name in CONFIG_FILES:
        path = _model_file(model_path, name)
        if path is not None:
            end_ids = json.loads(path.read_text()).get("eos_token_id")
            return set(end_ids) if isinstance(end_ids, list) else {end_ids} - {None}
    return set()


def _model_file(model_path: str, name: str) -> Path | None:
    """A file of a model, in a folder or on the hub; ``None`` where there is just a tokenizer."""
    from transformers.utils import cached_file

    try:
        found = cached_file(model_path, name) if model_path else None
    except OSError:
        return None
    return None if found is None else Path(found)


def _for_template(message: Message) -> Message:
    """The message with the arguments of its calls as objects: OpenAI has JSON text, templates write JSON."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _parsed(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments
