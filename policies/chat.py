"""Chat rendering: messages become prompt token ids, in which sampled tokens stay as they were sampled."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.errors import AgentError, ConfigError, PromptTooLongError
from environments.thoughts import open_mark, with_opening
from environments.types import Message
from policies.chat_template import PROBE, ChatTemplate
from policies.encoding import PieceEncoder, SizedCache
from policies.guard import GUARD, Guard
from policies.pictures import picture_reader, split_pictures
from policies.sampler import SampleRequest, Turn, check_prompt_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")
CONFIG_FILES = ("generation_config.json", "config.json")
OPENING_TOKENS = 32
"""Number of a prompt's last tokens that hold the mark of a thought that it opens."""
ANSWERS_BYTES = 16 * 2**20
"""Bytes of the answers whose texts are held: 3,000 of 500 tokens."""


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
    nobody outside can end a turn, or begin one of the system's. A conversation of which the template drops
    something is an error. Pictures are read where the tokenizer's folder has a model that does.

    Attributes:
        pictures: the model's reader of pictures; ``None`` where it reads text alone.

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
        self.pictures = picture_reader(tokenizer.name_or_path)
        self.template = ChatTemplate(
            tokenizer,
            Guard(tokenizer),
            chat_template_kwargs or {},
            picture_token="" if self.pictures is None else self.pictures.token,
        )
        self._encoder = PieceEncoder(tokenizer)
        self._answers: SizedCache[bytes, str] = SizedCache(ANSWERS_BYTES)
        self._end_ids = _configured_end_ids(tokenizer.name_or_path) | ({tokenizer.eos_token_id} - {None})

    def request_ids(self, request: SampleRequest) -> array[int]:
        """The prompt [P] of a request, as ``prompt_ids`` makes it; ``tuple`` of it has a hash.

        Raises:
            AgentError: the chat template rejects the messages, or does not show all of them, or the tools.
            PromptTooLongError: the prompt is longer than the request allows.
        """
        from jinja2 import TemplateError

        try:
            messages, pictures = self._split(request.messages)
        except ValueError as error:
            raise AgentError(f"A message of the agent is refused: {error}.") from error
        if unseen := self.template.unseen(messages, request.tools):
            raise AgentError(
                f"The chat template of {self.template.name!r} shows no {unseen}: let messages of a role "
                "that it shows hold their texts, as ToolAgent(tools_in='system') does for tools."
            )
        names = ("max_prompt_tokens", "max_total_tokens")
        limits = {name: getattr(request, name) for name in names if getattr(request, name) is not None}
        most = min(limits.values(), default=None)
        try:
            prompt_ids = self._prompt(messages, pictures, request.previous, request.tools, most)
        except PromptTooLongError as error:
            named = " and ".join(f"{name}={limit}" for name, limit in limits.items())
            raise PromptTooLongError(f"{error} The limit is {named}.") from error
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise AgentError(
                f"The chat template of {self.template.name!r} rejects the agent's messages "
                f"({self.template.rejected(messages, request.tools)}: {error}): change their roles, "
                "order or content as it expects."
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
        return self._prompt(*self._split(messages), previous, tools, max_tokens).tolist()

    def _split(self, messages: Sequence[Message]) -> tuple[Sequence[Message], tuple[str, ...]]:
        return (messages, ()) if self.pictures is None else split_pictures(messages)

    def _prompt(
        self,
        messages: Sequence[Message],
        pictures: Sequence[str],
        previous: Turn | None,
        tools: list[dict[str, Any]] | None,
        max_tokens: int | None,
    ) -> array[int]:
        text = self.template.render(messages, tools)
        if max_tokens is not None:
            self.check_length(text, max_tokens)
        extended = None if previous is None else self._extend(previous, text, pictures)
        return self._encoded(text, pictures) if extended is None else extended

    def _encoded(self, text: str, pictures: Sequence[str]) -> array[int]:
        """The token ids of a text with these pictures."""
        if self.pictures is None:
            return self._encoder.encode(text)
        first, *others = text.split(self.pictures.token)
        if len(others) != len(pictures):
            raise ValueError(
                f"{len(pictures)} pictures are shown as {len(others)} {self.pictures.token}: the template "
                "has to write one for each part of the type 'image'"
            )
        ids = self._encoder.encode(first)
        for picture, part in zip(pictures, others, strict=True):
            ids += self.pictures.ids(picture) + self._encoder.encode(part)
        return ids

    def continuation_ids(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, max_tokens: int
    ) -> tuple[list[int], str]:
        """The prompt [P] that ends with the text of the last message, as it stands, and the mark of the
        thought that this text leaves open. Raises as ``prompt_ids`` does.
        """
        begun, text = self.template.render_open(messages, tools)
        self.check_length(begun + text, max_tokens)
        return self.encode(begun + text), open_mark(with_opening(begun, text))

    def for_client(self, chat_template_kwargs: Mapping[str, Any]) -> ChatRenderer:
        """A renderer of a client's conversations, whose texts name no control token in any role.

        Args:
            chat_template_kwargs: the client's options of the template, besides our own.

        Raises:
            ConfigError: the template has no such option.
        """
        if not chat_template_kwargs:
            return self._of_clients
        renderer = copy.copy(self)  # not made anew: the model's files would be read again
        renderer.template = self.template.for_client(chat_template_kwargs)
        return renderer

    @functools.cached_property
    def _of_clients(self) -> ChatRenderer:
        renderer = copy.copy(self)  # kept, with what it knows of its template
        renderer.template = self.template.for_client({})
        return renderer

    def check_length(self, text: str, max_tokens: int) -> None:
        """Find out that a text is too long before its tokens are computed: that can take seconds.

        Raises:
            PromptTooLongError: it would be longer than ``max_tokens`` even if all of them were the longest.
        """
        most = max_tokens * _longest_token(self._tokenizer)
        if len(text) > most:
            raise PromptTooLongError(
                f"The prompt has {len(text)} characters, and its {max_tokens} tokens hold {most}: shorten it."
            )
        if (num_names := text.count(GUARD)) >= max_tokens:  # each begins a token, and is encoded for itself
            raise PromptTooLongError(
                f"The prompt has {num_names} names of control tokens, and may have {max_tokens} tokens: "
                "shorten the prompt."
            )

    @property
    def eos_token_id(self) -> int:
        """The token that ends a completion."""
        return int(self._tokenizer.eos_token_id)

    def is_end(self, token_id: int) -> bool:
        """Return whether sampling ends at this token."""
        return token_id in self._end_ids

    def end_of_turn(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The tokens with which the chat template ends the first answer of a conversation.

        The last of them is a token at which sampling ends, else the last one that the tokenizer has added.
        Empty where the template ends answers with ordinary text.
        """
        before = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
        answer = {"role": "assistant", "content": PROBE}
        text = self.template.render([*before, answer], None, for_an_answer=False)
        ids = self.encode(text.rpartition(PROBE)[2])
        added = self._tokenizer.added_tokens_decoder
        names = [index for index, each in enumerate(ids) if each in added and added[each].content.strip()]
        ends = [index for index, each in enumerate(ids) if self.is_end(each)] or names[-1:]
        return tuple(ids[: ends[0] + 1]) if ends else ()

    def completion_text(self, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> str:
        """The text of a completion. Where its prompt has opened a thought that goes on to the end, it begins
        with that opening: so who sees the text alone knows that nothing in it is an answer.
        """
        return with_opening(self.end_of_prompt(prompt_ids), self._answer(completion_ids))

    def end_of_prompt(self, prompt_ids: Sequence[int]) -> str:
        """The last characters of a prompt, where it may open a thought."""
        return self.text_of(prompt_ids[-OPENING_TOKENS:])

    def decode(self, completion_ids: Sequence[int]) -> str:
        """The text of sampled tokens [C], without the end-of-sequence token where they end with one."""
        ids = list(completion_ids)
        if ids and ids[-1] in self._end_ids:
            ids.pop()
        return self.text_of(ids)

    def text_of(self, ids: Sequence[int]) -> str:
        """The text of any tokens, as it stands."""
        # Cleaning up spaces would change the text, and then no later prompt could be matched with it.
        return str(
            self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        )

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text`` as it stands, with no special tokens added."""
        return self._encoder.encode(text).tolist()

    def _answer(self, completion_ids: Sequence[int]) -> str:
        """The text of a whole completion, which is wanted when it is sampled, and for the next prompt."""
        key = array("i", completion_ids).tobytes()
        text = self._answers.get(key)
        if text is None:
            text = self.decode(completion_ids)
            self._answers.put(key, text, sys.getsizeof(key) + sys.getsizeof(text))
        return text

    def _extend(self, previous: Turn, text: str, pictures: Sequence[str]) -> array[int] | None:
        """The tokens of ``previous`` and of the rest of ``text``; ``None`` if ``text`` does not continue it.

        The texts are compared: ``text`` has to start with the prompt and the completion of ``previous``, and
        where the model ended its message, the template has to end it with the same token. So are pictures,
        which no text shows.
        """
        completion = previous.completion
        if not completion.answer_size:
            return None
        ids = completion.tokens.read()
        answer = self._answer(ids[completion.prompt_size :])
        if text.rfind(answer) < 0:  # stripped: to find the text before would take longer
            return None
        messages, earlier = self._split(previous.messages)
        known = self.template.render(messages, previous.tools) + answer
        if not text.startswith(known) or pictures[: len(earlier)] != earlier:
            return None
        new_ids = self._encoded(text[len(known) :], pictures[len(earlier) :])
        if ids[-1] in self._end_ids:
            if new_ids[:1] != ids[-1:]:
                return None
            del new_ids[0]
        return ids + new_ids


@functools.lru_cache(maxsize=8)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The characters of its longest token. Kept, since all its renderers ask for it with each request."""
    return max(map(len, tokenizer.get_vocab()))


def _configured_end_ids(model_path: str) -> set[int]:
    """The end-of-sequence tokens that a model's configuration lists, read in vLLM's order; none where there
    is just a tokenizer."""
    from transformers.utils import cached_file

    for name in CONFIG_FILES if model_path else ():
        try:
            found = cached_file(model_path, name)
        except OSError:
            continue
        if found is not None:
            end_ids = json.loads(Path(found).read_text()).get("eos_token_id")
            return set(end_ids) if isinstance(end_ids, list) else {end_ids} - {None}
    return set()
