"""The steps of a trajectory, and the completions that were sampled in them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

from environments.columns import Floats, Runs, TokenIds, stored
from environments.messages import Conversation, Message, MessageTable
from environments.prefix_tree import Span


@dataclass(frozen=True, kw_only=True)
class Completion:
    """A sampled answer to a prompt. Its token ids are the engine's, never recomputed from the text.

    ``prompt_ids`` [P] and ``completion_ids`` [C] are the model's input and output; ``logprobs`` [C] are
    natural logs under the distribution that was sampled from (after temperature). ``completion_ids``
    includes the end-of-sequence token where one was sampled, ``text`` does not.

    These are tuples, made by each access from one sequence of ids, ``tokens``, which the turns of a
    trajectory share as far as they repeat each other.
    """

    prompt_ids: TokenIds = TokenIds()
    completion_ids: TokenIds = TokenIds()
    logprobs: Floats = Floats()
    text: str
    finish_reason: str
    policy: str = ""
    """Name of the policy that sampled it, where a run trains several."""
    policy_version: int = 0
    """The oldest version that sampled any of its tokens."""
    token_versions: Runs = Runs()
    """[C] The version that sampled each token; empty where the server does not say."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Tool calls that the server parsed from the output, in the OpenAI shape. ``text`` is without them,
    unless the request named the parser."""
    retokenized: bool = False
    """The ids are not the engine's: an outside server did not return them, so they were made from the text,
    or are empty. Such a completion can be scored but not trained on."""
    usage: tuple[int, int] | None = None
    """Prompt and completion tokens as the server counted them, where it did not return their ids."""
    pictures: tuple[str, ...] = ()
    """Pictures of the prompt, as the messages have them, in order: their tokens' ids do not show them."""

    def __post_init__(self) -> None:
        prompt, answer = stored(self, "prompt_ids"), stored(self, "completion_ids")
        self._store(prompt.extended(answer.read()), prompt.size)

    @classmethod
    def of(
        cls, tokens: Span, prompt_size: int, logprobs: Any, token_versions: Any, values: dict[str, Any]
    ) -> Completion:
        """The completion whose ids, arrays and other values are stored already."""
        made, (tree, node, _, stop) = cls.__new__(cls), tokens
        vars(made).update(
            values,
            _prompt_ids=Span(tree, node, 0, prompt_size),
            _completion_ids=Span(tree, node, prompt_size, stop),
            _logprobs=logprobs,
            _token_versions=token_versions,
        )
        return made

    @property
    def tokens(self) -> Span:
        """Ids of the prompt and of the answer behind it."""
        answer: Span = stored(self, "completion_ids")
        return answer.part(0, answer.stop)

    @property
    def prompt_size(self) -> int:
        """Number of the prompt's ids, without making them a tuple."""
        prompt: Span = stored(self, "prompt_ids")
        return prompt.size

    @property
    def answer_size(self) -> int:
        """Number of the answer's ids, without making them a tuple."""
        answer: Span = stored(self, "completion_ids")
        return answer.size

    def sharing(self, earlier: Completion | None) -> Completion:
        """The same completion; what it repeats of the turns stored with ``earlier`` it shares with them."""
        if earlier is None or stored(earlier, "prompt_ids").tree is stored(self, "prompt_ids").tree:
            return self
        return self._with_tokens(earlier.tokens.tree.root.extended(self.tokens.read()), self.prompt_size)

    def num_repeated(self, earlier: Completion) -> int:
        """Number of ids with which the prompt repeats ``earlier``: its prompt, and its answer behind that."""
        return self.tokens.part(0, self.prompt_size).num_shared(earlier.tokens)

    def extends(self, earlier: Completion) -> bool:
        """Return whether the prompt goes on where ``earlier`` has ended, token by token."""
        shown = self.pictures[: len(earlier.pictures)] == earlier.pictures
        return shown and self.num_repeated(earlier) == earlier.tokens.size

    def without_beginning(self, num_ids: int, num_pictures: int = 0) -> Completion:
        """The same completion, as if its prompt began after so many ids and pictures."""
        ids = self.tokens.part(num_ids, self.tokens.stop).read()
        cut = self._with_tokens(Span.of(ids), self.prompt_size - num_ids)
        vars(cut)["pictures"] = self.pictures[num_pictures:]
        return cut

    def behind(self, beginning: Span, pictures: tuple[str, ...] = ()) -> Completion:
        """The same completion, with these before its prompt: undoes ``without_beginning``."""
        whole = self._with_tokens(beginning.extended(self.tokens.read()), beginning.stop + self.prompt_size)
        vars(whole)["pictures"] = (*pictures, *self.pictures)
        return whole

    def _with_tokens(self, tokens: Span, prompt_size: int) -> Completion:
        copied = copy.copy(self)
        copied._store(tokens, prompt_size)
        return copied

    def _store(self, tokens: Span, prompt_size: int) -> None:
        vars(self).update(
            _prompt_ids=tokens.part(0, prompt_size), _completion_ids=tokens.part(prompt_size, tokens.stop)
        )

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt in tokens, whether its ids are known or not."""
        return self.usage[0] if self.usage else self.prompt_size

    @property
    def num_completion_tokens(self) -> int:
        """Number of tokens that were sampled, whether their ids are known or not."""
        return self.usage[1] if self.usage else self.answer_size

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the answer together."""
        return self.num_prompt_tokens + self.num_completion_tokens


PLAYED_SEAT = "played_seat"
"""Key of ``Step.info`` under which ``SeatsAgent`` names the seat that has moved."""


class Played:
    """A turn whose ``info`` names who has played it, and who has seen it."""

    info: dict[str, Any]

    @property
    def is_left_out(self) -> bool:
        """Return whether nothing is to be learnt from its answer: nobody saw it, or its program says so."""
        return self.info.get("unseen") is True or self.info.get("left_out") is True

    @property
    def seat(self) -> str:
        """The seat that has moved, in a game of several that one policy plays; else empty."""
        return str(self.info.get(PLAYED_SEAT, ""))


@dataclass
class Step(Played):
    """A turn. The agent fills the first group of fields, the engine the second."""

    chat_completions: list[Message] = field(default_factory=list)
    thought: str = ""
    action: Any = None
    observation: Any = None
    model_response: str = ""

    info: dict[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    done: bool = False
    mc_return: float = 0.0
    """Discounted sum of this and all later rewards of the trajectory."""
    completion: Completion | None = None

    _conversation: ClassVar[Conversation | None] = None
    """Set in a step itself where its messages are stored shared, in place of a list."""

    def __getattr__(self, name: str) -> Any:
        """Make the list ``chat_completions`` where the step came with a trajectory that stores it shared.

        From then on the step holds the list itself, as the one that an agent has given.
        """
        if name == "chat_completions" and (conversation := self.conversation) is not None:
            self.__dict__.setdefault(name, conversation.messages)
            self.__dict__.pop("_conversation", None)
        if name not in self.__dict__:  # else made here, or by another thread meanwhile
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return self.__dict__[name]

    @property
    def conversation(self) -> Conversation | None:
        """The messages as they are stored, where they are shared and no list was made of them."""
        return self._conversation

    def storing(self, conversation: Conversation, completion: Completion | None) -> Step:
        """A copy that holds these, which are equal to its own."""
        twin = copy.copy(self)
        twin.__dict__.pop("chat_completions", None)
        twin.__dict__["_conversation"] = conversation
        twin.completion = completion
        return twin


def shared_parts(steps: Iterable[Step]) -> Iterator[tuple[Step, Conversation, Completion | None]]:
    """The steps, and their messages and completions with what several repeat stored once."""
    table: MessageTable | None = None
    first: Completion | None = None
    for step in steps:
        completion = step.completion and step.completion.sharing(first)
        first = first or completion
        conversation = step.conversation
        if table is None:
            table = MessageTable() if conversation is None else conversation.table
        if conversation is None or conversation.table is not table:
            conversation = table.add(step.chat_completions if conversation is None else conversation.messages)
        yield step, conversation, completion


def share(steps: Iterable[Step]) -> list[Step]:
    """``steps``, with what several repeat stored once: as they are, or copies where they are not so yet."""
    return [
        step
        if conversation is step.conversation and completion is step.completion
        else step.storing(conversation, completion)
        for step, conversation, completion in shared_parts(steps)
    ]
