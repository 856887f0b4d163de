"""The data that flows through Troupe, from a task to a group of finished trajectories.

``Action``, ``Step`` and ``Trajectory`` keep the names and call shapes of rLLM v0.1, so agents written
against it run unchanged; they are mutable because agents fill them in as they play. The
products of the engine (``Completion``, ``TrajectoryGroup``) are frozen: sampled tokens must not be edited.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from operator import attrgetter
from typing import Any, ClassVar

from environments.columns import Floats, Runs, TokenIds, stored
from environments.messages import Conversation, Message, MessageTable
from environments.prefix_tree import Span


class TerminationReason(StrEnum):
    """Reason for which a trajectory ended. Every trajectory that the engine returns carries one."""

    ENV_DONE = "env_done"
    """The environment returned ``done``, for an answer that no limit of the trajectory had cut."""
    MAX_STEPS = "max_steps"
    """The step limit was reached before the environment was done."""
    PROMPT_TOO_LONG = "prompt_too_long"
    """The next prompt would not fit into the prompt budget or the model's context."""
    RESPONSE_BUDGET_SPENT = "response_budget_spent"
    """All tokens that the trajectory may hold after its first prompt are used up. The environment may have
    been done with the answer that this limit has cut: its reward stays."""
    TIMEOUT = "timeout"
    """The trajectory ran longer than its time limit; its actor was ended."""
    JUDGED_LATER = "judged_later"
    """The function or program has ended, and its reward will come later: this run does not learn from it."""
    AGENT_ERROR = "agent_error"
    """The agent raised or broke its contract; ``Trajectory.error`` says how, as for all that follow."""
    ENV_ERROR = "env_error"
    """The environment raised or broke its contract."""
    OUT_OF_MEMORY = "out_of_memory"
    """The environment wanted more memory than its limit; its actor was ended."""
    CRASHED = "crashed"
    """The process of the pair ended: it exited, was killed, or its node was lost."""
    SAMPLER_ERROR = "sampler_error"
    """The policy could not be sampled: the server was unreachable or rejected the request."""
    UNJUDGED = "unjudged"
    """The rollout came to its end, and its group could not be compared."""

    @property
    def is_failure(self) -> bool:
        """Return whether the agent, the environment or the machinery below them failed."""
        return self is TerminationReason.AGENT_ERROR or self.is_infrastructure

    @property
    def is_infrastructure(self) -> bool:
        """Return whether something other than the agent failed."""
        return self in _INFRASTRUCTURE

    @property
    def is_overlong(self) -> bool:
        """Return whether a limit ended the trajectory, or cut its last answer."""
        return self in _OVERLONG


_INFRASTRUCTURE = {
    TerminationReason.ENV_ERROR,
    TerminationReason.OUT_OF_MEMORY,
    TerminationReason.CRASHED,
    TerminationReason.SAMPLER_ERROR,
    TerminationReason.UNJUDGED,
}
_OVERLONG = {
    TerminationReason.MAX_STEPS,
    TerminationReason.PROMPT_TOO_LONG,
    TerminationReason.RESPONSE_BUDGET_SPENT,
    TerminationReason.TIMEOUT,
}


STATE_KEY = "state_key"
"""Key of an environment's info that names the state which the observation shows: equal values for equal
states. The step that answers the observation keeps it in its own info."""


class JudgedBy(StrEnum):
    """The judge of a trajectory's success: the first of these that says anything."""

    REWARD_FUNCTION = "reward function"
    """``RewardOutput.is_correct``."""
    ENVIRONMENT = "environment"
    """``BaseEnv.is_correct``."""
    REWARD = "reward above 0"
    """Nobody has said whether it is correct: its reward decides."""


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

    def __post_init__(self) -> None:
        prompt, answer = stored(self, "prompt_ids"), stored(self, "completion_ids")
        self._store(prompt.extended(answer.read()), prompt.size)

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
        return self.num_repeated(earlier) == earlier.tokens.size

    def without_beginning(self, num_ids: int) -> Completion:
        """The same completion, as if its prompt began after ``num_ids`` ids."""
        ids = self.tokens.part(num_ids, self.tokens.stop).read()
        return self._with_tokens(Span.of(ids), self.prompt_size - num_ids)

    def behind(self, beginning: Span) -> Completion:
        """The same completion, with ``beginning`` before its prompt: undoes ``without_beginning``."""
        return self._with_tokens(beginning.extended(self.tokens.read()), beginning.stop + self.prompt_size)

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


@dataclass
class Action:
    """An agent's decision; ``BaseEnv.step`` gets its ``action``, without this wrapper."""

    action: Any = None


PLAYED_SEAT = "played_seat"
"""Key of ``Step.info`` under which ``SeatsAgent`` names the seat that has moved."""


@dataclass
class Step:
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

    @property
    def is_left_out(self) -> bool:
        """Return whether nothing is to be learnt from its answer: nobody saw it, or its program says so."""
        return self.info.get("unseen") is True or self.info.get("left_out") is True

    @property
    def seat(self) -> str:
        """The seat that has moved, in a game of several that one policy plays; else empty."""
        return str(self.info.get(PLAYED_SEAT, ""))

    def __getattr__(self, name: str) -> Any:
        """Make the list ``chat_completions`` where the step came with a trajectory that stores it shared.

        From then on the step holds the list itself, as the one that an agent has given.
        """
        conversation = self.conversation if name == "chat_completions" else None
        if conversation is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.chat_completions = conversation.messages
        self.__dict__.pop("_conversation", None)  # another thread, which writes the log, may have done so
        return self.chat_completions

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


def share(steps: Iterable[Step]) -> list[Step]:
    """``steps``, with what several repeat stored once: as they are, or copies where they are not so yet."""
    steps = list(steps)
    if _are_shared(steps):
        return steps
    shared: list[Step] = []
    table: MessageTable | None = None
    first: Completion | None = None
    for step in steps:
        completion = step.completion and step.completion.sharing(first)
        first = first or completion
        conversation = step.conversation
        if table is None:
            table = MessageTable() if conversation is None else conversation.table
        if conversation is None or conversation.table is not table:
            conversation = table.add(step.chat_completions)
        is_shared = conversation is step.conversation and completion is step.completion
        shared.append(step if is_shared else step.storing(conversation, completion))
    return shared


def _are_shared(steps: list[Step]) -> bool:
    conversations = [*map(attrgetter("_conversation"), steps)]
    if None in conversations or len({id(table) for table, _ in conversations}) > 1:
        return False
    completions = filter(None, map(attrgetter("completion"), steps))
    return len({*map(id, map(attrgetter("_prompt_ids.tree"), completions))}) <= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEvent:
    """A step of an episode that goes on: what was sampled, and what the environment answered."""

    index: int
    text: str
    observation: str
    done: bool = False
    policy_version: int = 0
    num_tokens: int = 0
    """Tokens of the prompt and of the answer in this step."""


@dataclass
class Trajectory:
    """An agent's attempt at one task. ``reward`` is the sum of the step rewards."""

    task: Any = None
    steps: list[Step] = field(default_factory=list)
    reward: float = 0.0
    is_correct: bool | None = None
    """The verdict of the reward function, or else of the environment; ``None`` where neither gives one."""
    by_reward_function: bool = False
    """True where ``is_correct`` is the reward function's."""

    rollout_id: str = ""
    """``<group>/<member>``: unique within a run, the same when a run is resumed."""
    termination_reason: TerminationReason | None = None
    error: str | None = None
    """The failure, with the traceback of the user's code. Also set where only ``close`` has failed, and
    where the first prompt is too long already."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The metrics of ``BaseEnv.compute_metrics``."""
    masked: bool = False
    """Excluded from training: a limit has ended it, and ``overlong_filter`` is set."""
    seconds: float = 0.0
    """Wall time of the rollout."""
    forked_from: str = ""
    """The member of its group, such as 0001, whose first turns it begins with; empty for one that begins with
    the task."""
    num_shared_turns: int = 0
    """Number of those turns: they were sampled once, for the other member."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: a step holds what is new in it. Everything reads as before afterwards."""
        return {**self.__dict__, "steps": share(self.steps)}

    def to_dict(self) -> dict[str, Any]:
        """A copy as dicts and lists; unlike that of rLLM v0.1, with the task."""
        return asdict(self)

    @property
    def failed(self) -> bool:
        """Return whether the agent, the environment or the machinery below them failed: ``error`` says
        how."""
        return self.termination_reason is not None and self.termination_reason.is_failure

    @property
    def succeeded(self) -> bool:
        """Return whether it counts as correct: it did not fail, and so its judge says; see ``judged_by``."""
        is_correct = self.reward > 0 if self.is_correct is None else self.is_correct
        return is_correct and not self.failed

    @property
    def judged_by(self) -> JudgedBy:
        """The judge who decides whether it counts as correct."""
        if self.is_correct is None:
            return JudgedBy.REWARD
        return JudgedBy.REWARD_FUNCTION if self.by_reward_function else JudgedBy.ENVIRONMENT

    @property
    def seat_rewards(self) -> dict[str, float]:
        """The sum of the step rewards of each seat that has moved; all of it under ``""`` where none is
        named."""
        if not any(step.seat for step in self.steps):
            return {"": self.reward}
        rewards: dict[str, float] = {}
        for step in self.steps:
            rewards[step.seat] = rewards.get(step.seat, 0.0) + step.reward
        return rewards

    @property
    def has_answer(self) -> bool:
        """Return whether it has ended in an answer, good or bad, to which a client may reply."""
        reason = self.termination_reason
        has_ended_well = reason is not None and not reason.is_failure
        return bool(self.steps) and has_ended_well and reason is not TerminationReason.TIMEOUT

    @property
    def completions(self) -> list[Completion]:
        """The completions, turn by turn; a turn that the agent's own code decided has none."""
        return [step.completion for step in self.steps if step.completion is not None]

    @property
    def own_completions(self) -> list[Completion]:
        """The completions that were sampled for it, and not for the member that it forks from."""
        own = self.steps[self.num_shared_turns :]
        return [step.completion for step in own if step.completion is not None]

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that were sampled in all of its own turns."""
        return sum(completion.num_completion_tokens for completion in self.own_completions)

    @property
    def num_response_tokens(self) -> int:
        """Tokens of its budget that it has used: all sampled tokens, and those that a later prompt has more
        than the turn that it goes on from, mostly the one before. An agent that rewrites its history gets
        nothing back.
        """
        used, earlier = 0, list[Completion]()
        for completion in self.completions:
            extended = (each for each in reversed(earlier) if completion.extends(each))
            if (before := next(extended, earlier[-1] if earlier else None)) is not None:
                used += max(0, completion.num_prompt_tokens - before.num_tokens)
            used += completion.num_completion_tokens
            earlier.append(completion)
        return used


@dataclass(frozen=True, kw_only=True, slots=True)
class TrajectoryGroup:
    """All trajectories of one task that are compared with each other, in member order."""

    group_id: str
    task: Any
    trajectories: tuple[Trajectory, ...]
    baseline: Trajectory | None = None
    """A greedy rollout of the same task, for ReMax; never trained on."""

    @property
    def rollouts(self) -> tuple[Trajectory, ...]:
        """Everything that was rolled out for the group, the baseline included."""
        return self.trajectories if self.baseline is None else (*self.trajectories, self.baseline)
