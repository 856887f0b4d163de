"""Chat rendering: messages become prompt token ids, and tokens that were once sampled stay as they were."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from environments.errors import ConfigError
from environments.types import Completion, Message
from policies.sampler import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


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
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"No tokenizer can be loaded from {str(path)!r} ({error}): name a folder that "
            "tokenizer.save_pretrained wrote, or the id of a model that can be downloaded."
        ) from error
    return tokenizer


class ChatRenderer:
    """Renders conversations with the model's own chat template.

    The template is only ever used for what is new. What the model saw and said in the turn before is
    taken over as token ids, since encoding its text again may split it differently.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                f"The tokenizer {tokenizer.name_or_path!r} has no chat template: set tokenizer.chat_template "
                "(a Jinja text; the model's card shows it) and save it with tokenizer.save_pretrained."
            )
        self._tokenizer = tokenizer

    def prompt_ids(
        self, messages: list[Message], previous: Turn | None = None, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """The prompt [P] for the model's answer to ``messages``.

        Starts with the prompt and completion ids of ``previous`` where ``messages`` continue that turn
        and the template renders it as it was. Otherwise (the agent rewrote its history, or the template
        did) everything is encoded afresh, and training starts a new sequence here.
        """
        text = self._render(messages, tools)
        if previous is not None and previous.completion.completion_ids and _continues(messages, previous):
            seen = self._render(previous.messages, tools) + previous.completion.text
            if text.startswith(seen):
                return self._extend(previous.completion, text[len(seen) :])
        return self.encode(text)

    @property
    def eos_token_id(self) -> int:
        """The token that ends a completion."""
        return int(self._tokenizer.eos_token_id)

    def decode(self, completion_ids: Sequence[int]) -> str:
        """The text of sampled tokens [C], without the end-of-sequence token where they end with it."""
        ids = list(completion_ids)
        if ids and ids[-1] == self._tokenizer.eos_token_id:
            ids.pop()
        # Cleaning up spaces would change the text, and then no later prompt could be matched with it.
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _extend(self, completion: Completion, rest: str) -> list[int]:
        """Prompt, completion and the text ``rest``, whose leading EOS may be among the sampled tokens."""
        if completion.completion_ids[-1] == self._tokenizer.eos_token_id:
            rest = rest.removeprefix(str(self._tokenizer.eos_token))
        return [*completion.prompt_ids, *completion.completion_ids, *self.encode(rest)]

    def _render(self, messages: list[Message], tools: list[dict[str, Any]] | None) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        )

    def encode(self, text: str) -> list[int]:
        """The token ids of ``text`` as it stands, with no special tokens added."""
        return list(self._tokenizer.encode(text, add_special_tokens=False))


def _continues(messages: list[Message], previous: Turn) -> bool:
    """Whether the previous turn's answer stands in ``messages`` unchanged, where it belongs.

    The messages before it need no comparison: they have changed if their rendering has.
    """
    num_seen = len(previous.messages)
    if len(messages) <= num_seen:
        return False
    answer = messages[num_seen]
    return bool(answer["role"] == "assistant" and answer["content"] == previous.completion.text)
