"""Samplers: the clients that turn chat messages into a ``Completion``.

Nothing heavy is imported here, because every rollout actor imports this module.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from environments.bounds import no_argument
from environments.errors import ConfigError, LogprobError, PromptTooLongError, SamplerError
from environments.types import Completion, Message


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Options that clients over HTTP may set beside ``SamplingParams``, by vLLM's names.

    Rollouts ask none of it. ``top_logprobs`` and ``prompt_logprobs`` are numbers of likely tokens beside each
    sampled one and each of the prompt; ``None`` leaves the prompt's log-probabilities out.
    """

    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    top_logprobs: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Settings of drawing tokens. The defaults sample from the model's own distribution.

    ``top_k=-1`` means no limit. ``max_tokens=None`` leaves the limit to the caller's token budget or to
    the server. ``seed=None`` draws a fresh seed for each request. ``policy`` is one of several that a run
    trains (``BaseAgent.policies``), or with @31 that one of ``server.versions`` in place of the present one.
    ``adapter`` is one of ``server.adapters``; ``None`` is the model itself. ``structure`` is the form that
    the answer has to have, as the JSON text of an xgrammar structural tag (``policies.model_api.structure``
    writes them); ``None`` leaves it free. ``options`` are for clients over HTTP.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    policy: str = ""
    adapter: str | None = None
    structure: str | None = None
    options: EngineOptions | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 2:
            raise ConfigError(
                f"temperature={self.temperature} is outside [0, 2]: use 0 for greedy, 1 for sampling."
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is outside (0, 1]: use 1 to keep every token.")
        if self.top_k != -1 and self.top_k < 1:
            raise ConfigError(
                f"top_k={self.top_k} is impossible: use -1 to keep every token, or 1 and above."
            )
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens} leaves no room for an answer: use 1 and above.")
        stops = self.stop if isinstance(self.stop, Collection) and not isinstance(self.stop, str) else [None]
        if not all(isinstance(each, str) and each for each in stops):
            raise ConfigError(
                f"stop={self.stop!r} has to be a list of non-empty strings, such as ['</answer>']."
            )
        if self.seed is not None and self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative: use 0 and above, or None.")
        # Configuration files and OpenAI bodies have lists; a frozen value needs something hashable.
        object.__setattr__(self, "stop", tuple(self.stop))

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, checked like any other."""
        return replace(self, **changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """An earlier call of the same conversation: its messages and tools, and the model's answer.

    ``messages`` has to be a list of its own, to which the agent does not append later.
    """

    messages: list[Message]
    completion: Completion
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """Everything that is needed to sample one completion.

    The request holds its own history, so samplers and servers keep no state and a request may be retried
    anywhere. ``previous`` lets the server extend the tokens of the turn before instead of rendering them
    again. ``session_id`` is the same for all calls of a conversation: servers use it to find the replica
    that holds the prefix. ``min_version`` is the oldest policy version that may answer. ``tools`` are
    OpenAI schemas for the chat template; agents that write their tools into a message leave it ``None``.
    """

    messages: list[Message]
    params: SamplingParams = SamplingParams()
    session_id: str = ""
    previous: Turn | None = None
    min_version: int = 0
    tools: list[dict[str, Any]] | None = None
    tool_parser: str | None = None
    """The parser by which the server reads tool calls, where it reads those of this agent; its ``text`` goes
    on holding them."""
    max_prompt_tokens: int | None = None
    """A longer prompt raises ``PromptTooLongError``, with our own servers before they sample."""
    max_total_tokens: int | None = None
    """Prompt and completion together: the completion is cut there; without room for one,
    ``PromptTooLongError`` is raised."""

    def params_within(self, num_prompt_tokens: int) -> SamplingParams:
        """The parameters, with no more tokens than there is room for after the prompt.

        Raises:
            PromptTooLongError: there is none, or the prompt is longer than it may be.
        """
        check_prompt_length(num_prompt_tokens, self)
        if self.max_total_tokens is None:
            return self.params
        room = self.max_total_tokens - num_prompt_tokens
        if room < 1:
            raise PromptTooLongError(
                f"The prompt has {num_prompt_tokens} tokens, and prompt and completion together may have "
                f"{self.max_total_tokens}."
            )
        return self.params.replace(max_tokens=min(room, self.params.max_tokens or room))


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A completion to sample: prompt ids [P], and the oldest policy version that may do it.

    ``session_id`` is the conversation's: requests of the same one go to the replica that holds the prefix.
    With a ``tool_parser`` the replica reads the calls of these ``tools`` from the answer. ``pictures`` are
    those that the prompt has tokens for, in order.
    """

    prompt_ids: Sequence[int]
    params: SamplingParams
    min_version: int = 0
    session_id: str = ""
    tool_parser: str | None = None
    tools: Sequence[dict[str, Any]] | None = None
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenOutput:
    """Tokens sampled for a request. ``finish_reason`` is set on the last output of a request.

    ``token_versions`` [C] are the policy versions that sampled each token, ``policy_version`` is the oldest
    of them; without a token, it is the version that was served.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str | None
    policy_version: int
    token_versions: tuple[int, ...] = ()
    top_logprobs: tuple[Mapping[int, float], ...] = ()
    """Log-probabilities by token id, for each sampled token [C], with ``EngineOptions.top_logprobs``."""
    prompt_logprobs: tuple[Mapping[int, float], ...] = ()
    """Log-probabilities by token id, for each token of the prompt [P] but the first. The token itself is
    among them, and those that are likely."""
    tool_calls: tuple[dict[str, Any], ...] = ()
    """Calls in OpenAI's shape, without ids, where the request has named a parser."""


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """Counters of an engine since its start. The difference of two is the share of a period."""

    seconds: float = 0.0
    busy_seconds: float = 0.0
    """Seconds of these in which it was sampling."""
    num_tokens: int = 0
    """Sampled; those of a request count when they leave the engine."""
    num_aborted_tokens: int = 0
    """Tokens of these that belong to requests that were aborted."""
    num_running: int = 0
    """Requests that have not ended yet."""
    num_prompt_tokens: int = 0
    """Prompt tokens of the requests that have left the engine."""
    num_cached_tokens: int = 0
    """Prompt tokens of these whose keys and values were there already."""


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica of a policy server, as a sampler sees it.

    ``engine`` counts the requests of all samplers and over HTTP. ``silent_seconds`` ago it last polled.
    """

    version: int
    is_live: bool
    num_running: int
    num_answered: int
    engine: EngineStats
    silent_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """Requests that no replica has fetched yet, and the replicas by name.

    ``num_late_tokens`` were sampled for requests that had been given to another replica meanwhile; aborted
    tokens are counted by the engines.
    """

    num_waiting: int
    num_late_tokens: int
    replicas: dict[str, ReplicaStatus]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerDefaults:
    """Arguments of ``AgentExecutionEngine`` beside ``rollout_engine_args`` that a sampler can use.

    ``tokenizer_path`` is a tokenizer's folder or name, if one is known; ``api_retries`` says how often a
    request to an outside server is repeated.
    """

    tokenizer_path: str | None = None
    api_retries: int = 3


class Sampler(ABC):
    """Answers ``SampleRequest``s: a way to reach a model. One lives in each sampling actor.

    Only ``sample`` is needed. The rest says what this sampler can do beyond that.
    """

    reads_tool_calls: ClassVar[bool] = False
    """True where completions have ``tool_calls``, because the server reads them from the text."""
    serves_parsers: ClassVar[bool] = False
    """True where ``SampleRequest.tool_parser`` chooses one."""
    serves_adapters: ClassVar[bool] = False
    """True where ``SamplingParams.adapter`` chooses one."""
    serves_policies: ClassVar[bool] = False
    """True where ``SamplingParams.policy`` chooses one."""
    lives_on_each_node: ClassVar[bool] = False
    """True where each node with rollout actors may have one of its own: it reaches its server from anywhere
    in the same way, and keeps nothing from request to request. Else all use the one beside the driver."""
    examples: ClassVar[Mapping[str, Any]] = {}
    """Examples of arguments that have to be given, for the message where they are not."""
    policy_arguments: ClassVar[Collection[str] | None] = None
    """The arguments that say which policy is sampled, and how it is prompted. A results file keeps them, and
    goes on only with the same ones: so no secret and no address is among them. ``None`` stands for all."""

    @classmethod
    def arguments(cls, given: Mapping[str, Any], defaults: SamplerDefaults) -> dict[str, Any]:
        """The keyword arguments of this class: those ``given``, and what it needs of the ``defaults``.

        Called where the program starts, before any process is.

        Raises:
            ConfigError: an argument is unknown, missing or impossible.
        """
        return check_arguments(cls, given)

    @classmethod
    async def default_model(cls, arguments: Mapping[str, Any]) -> str | None:
        """The model that a server chooses where ``arguments`` have no ``model``; ``None`` if it has one only.

        Raises ``SamplerError`` if the server does not say.
        """
        return None

    @property
    def source(self) -> str:
        """Return what is sampled, for messages."""
        return type(self).__name__

    async def open(self) -> None:  # noqa: B027
        """Connect, unless that is done already. Raises ``SamplerError`` if there is nothing to sample."""

    @abstractmethod
    async def sample(self, request: SampleRequest) -> Completion:
        """Sample one completion.

        Raises:
            AgentError, PromptTooLongError, ConfigError: the request cannot be answered.
            SamplerError: the model could not be sampled. An error's text is never a completion.
        """

    async def sample_tokens(self, request: TokenRequest) -> TokenOutput:
        """Token ids in, token ids out. Raises as ``sample`` does."""
        raise SamplerError(f"{self.source} takes messages, and no token ids.")

    async def poll(self, server: str, report: Any) -> Any:
        """Take the report of ``server``, which fetches its requests, and return what it is to do."""
        raise SamplerError(f"{self.source} has no replicas that fetch requests.")

    def status(self) -> QueueStatus | None:
        """Waiting requests and live replicas; ``None`` if only the server knows."""
        return None


class ScriptedSampler(Sampler):
    """Plays prepared replies, for tests and demonstrations; needs no model.

    ``replies`` is a function of the messages, or a sequence that every conversation plays from its start:
    the reply is chosen by the number of assistant messages so far. Tokens are UTF-8 bytes, 256 ends a
    message, all log-probabilities are 0. Replies are cut at ``max_tokens``, between characters.
    """

    EOS_ID = 256

    def __init__(self, replies: Sequence[str] | Callable[[list[Message]], str]) -> None:
        self._replies = replies

    async def sample(self, request: SampleRequest) -> Completion:
        prompt_ids = self._prompt_ids(request.messages)
        max_tokens = request.params_within(len(prompt_ids)).max_tokens
        reply = self._reply(request.messages)
        completion_ids = (*reply.encode(), self.EOS_ID)
        finish_reason = "stop"
        if max_tokens is not None and max_tokens < len(completion_ids):
            reply = bytes(completion_ids[:max_tokens]).decode(errors="ignore")
            completion_ids = tuple(reply.encode())
            finish_reason = "length"
        return Completion(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=(0.0,) * len(completion_ids),
            text=reply,
            finish_reason=finish_reason,
        )

    def _reply(self, messages: list[Message]) -> str:
        if callable(self._replies):
            return self._replies(messages)
        turn = sum(message["role"] == "assistant" for message in messages)
        if turn >= len(self._replies):
            raise SamplerError(
                f"The script has {len(self._replies)} replies and was asked for number {turn + 1}."
            )
        return self._replies[turn]

    def _prompt_ids(self, messages: list[Message]) -> tuple[int, ...]:
        """Append-only by construction: the next prompt starts with this prompt and its completion."""
        ids: list[int] = []
        for message in messages:
            ids += [*f"{message['role']}\n{message['content']}".encode(), self.EOS_ID]
        return (*ids, *b"assistant\n")


def check_arguments(sampler: type[Sampler], given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments ``given``, if the constructor takes them. Raises ``ConfigError``."""
    parameters = inspect.signature(sampler).parameters
    for name in given:
        if name not in parameters:
            raise ConfigError(f"rollout_engine_args: {no_argument(sampler.__name__, name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and not given.get(name):
            example = repr(sampler.examples[name]) if name in sampler.examples else "..."
            raise ConfigError(f"{sampler.__name__} needs rollout_engine_args={{{name!r}: {example}}}.")
    return dict(given)


def check_logprobs(logprobs: Sequence[float], source: str) -> None:
    """Raise ``LogprobError`` unless all are finite: training would go on with -inf, and fail late with NaN.

    Args:
        logprobs: of sampled tokens, in nats.
        source: the engine or server that they come from, for the message.
    """
    if math.isfinite(sum(logprobs)):  # NaN and infinities survive a sum
        return
    index, logprob = next((i, each) for i, each in enumerate(logprobs) if not math.isfinite(each))
    raise LogprobError(
        f"{source} returned the log-probability {logprob} for token {index} of {len(logprobs)}: no token is "
        "sampled with it, so the engine, or the weights that it serves, are broken."
    )


def check_prompt_length(num_tokens: int, request: SampleRequest) -> None:
    limit = request.max_prompt_tokens
    if limit is not None and num_tokens > limit:
        raise PromptTooLongError(
            f"The prompt has {num_tokens} tokens and max_prompt_tokens={limit}: raise it or shorten the task."
        )
