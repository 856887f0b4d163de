"""The engine seam: what a replica of the policy server needs of an engine, and which one a setting names."""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import fields
from typing import ClassVar

from environments.errors import ConfigError, SamplerError
from environments.named_module import load_class
from policies.engines.weights import WeightBucket
from policies.sampler import EngineStats, SamplingParams, TokenOutput, check_logprobs
from policies.settings import EngineConfig

ENGINES = {"vllm": "policies.engines.vllm:VLLMEngine"}
COMMON_SETTINGS = ("name", "num_gpus", "max_model_tokens")
"""Fields of ``EngineConfig`` that mean the same for every engine."""


class Engine(ABC):
    """Token ids in, token ids out, with log-probabilities and policy versions. One lives in each replica.

    It is made in a thread of the replica, because loading a model may take minutes, and used from one asyncio
    loop. Its module is also imported where a program starts, for ``check_config`` and ``environment``: heavy
    libraries belong into functions. Weights may come while requests are being sampled.

    Args:
        model_path: folder (or hub name) in Hugging Face format.
        config: ``server.engine``.
        adapters: folders in peft's format by name, served beside the model itself.

    Raises:
        ConfigError: the model, a setting or an adapter cannot be used.
    """

    settings: ClassVar[Collection[str]] = ()
    """Further fields of ``EngineConfig`` that this engine acts on: ``options``, if it has any, and
    ``num_threads``, which is then decided where nobody sets it. Others have to keep their defaults."""
    serves_adapters: ClassVar[bool] = False
    keeps_structure: ClassVar[bool] = False
    """True where answers have the form of ``SamplingParams.structure``. If not, asking for it is an error."""

    takes_options: ClassVar[bool] = False
    """True where it acts on ``SamplingParams.options``. If not, asking for one is an error."""
    takes_pictures: ClassVar[bool] = False
    """True where ``sample`` has the argument ``pictures``. If not, a prompt with any is an error."""

    version: int = 0
    """Version of the weights that sample now. A replica that starts from a checkpoint sets the
    checkpoint's."""
    max_model_tokens: int
    """Longest prompt plus completion."""
    tokens_in_flight: int = 0
    """Tokens of the requests that the replica has taken on: their prompts, and as many more as they may
    get."""
    requests_in_flight: int = 0
    """Requests that the replica has taken on, from all queues and over HTTP."""
    load_watchers: tuple[Callable[[], None], ...] = ()
    """Called after each change of ``requests_in_flight``."""

    @abstractmethod
    def __init__(self, model_path: str, config: EngineConfig, adapters: Mapping[str, str]) -> None: ...

    @classmethod
    def check_config(cls, config: EngineConfig, adapters: Collection[str] = ()) -> None:
        """Raise ``ConfigError`` for settings that this engine cannot act on, before any model is loaded.

        An engine with ``options`` checks them here, after calling this one.
        """
        defaults = EngineConfig()
        for field in fields(EngineConfig):
            value = getattr(config, field.name)
            known = field.name in (*COMMON_SETTINGS, *cls.settings)
            if not known and value != getattr(defaults, field.name):
                raise ConfigError(
                    f"server.engine.{field.name}={value} has no effect in server.engine.name="
                    f"{config.name!r}: leave it out."
                )
        if adapters and not cls.serves_adapters:
            raise ConfigError(
                f"server.adapters={list(adapters)} cannot be served by server.engine.name={config.name!r}: "
                "leave them out, or use another engine."
            )

    @classmethod
    def environment(cls, config: EngineConfig) -> Mapping[str, str]:
        """Variables that the replica's process has to have before it imports the engine's libraries."""
        return {}

    # -- sampling ------------------------------------------------------------------------------------

    @abstractmethod
    def sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        in_pieces: bool,
        pictures: Sequence[str] = (),
    ) -> AsyncGenerator[TokenOutput, None]:
        """Sample one completion: as one output, or ``in_pieces`` as its tokens are sampled.

        The last output has a ``finish_reason``. Sampling ends when the generator is closed or cancelled.

        Raises:
            PromptTooLongError: the prompt leaves no room for a token.
            ConfigError: this request is impossible.
            SamplerError: the engine has failed, and ``check_alive`` says so too.
        """

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, pictures: Sequence[str] = ()
    ) -> TokenOutput:
        """Sample one completion as one output. Raises as ``stream`` does."""
        async with aclosing(self.stream(prompt_ids, params, False, pictures)) as outputs:
            return await anext(outputs)

    async def stream(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        in_pieces: bool = True,
        pictures: Sequence[str] = (),
    ) -> AsyncGenerator[TokenOutput, None]:
        """Stream one completion as its tokens are sampled, or as one output.

        Args:
            pictures: those that the prompt has tokens for, in order.

        Raises:
            ConfigError: this request is impossible.
            PromptTooLongError: the prompt leaves no room for a token.
            SamplerError: the engine has failed, or has ended the request without an answer.
            LogprobError: a log-probability of the answer is not finite.
        """
        self._check_params(params)
        if pictures and not self.takes_pictures:
            raise ConfigError(f"{type(self).__name__} takes no pictures: leave them out of the messages.")
        output = None
        shown = {"pictures": pictures} if pictures else {}
        async with aclosing(self.sample(prompt_ids, params, in_pieces, **shown)) as outputs:
            async for output in outputs:
                yield self._checked(output)
        if output is None:
            raise SamplerError(f"{self._place()} ended a request without an answer.")

    @contextmanager
    def in_flight(self, prompt_ids: Sequence[int], params: SamplingParams) -> Iterator[None]:
        """Count a request and its tokens as in flight: sampled, or waiting in the replica until they are."""
        most = self.max_model_tokens
        num_tokens = min(most, len(prompt_ids) + (params.max_tokens or most))
        self._count(1, num_tokens)
        try:
            yield
        finally:
            self._count(-1, -num_tokens)

    def _count(self, num_requests: int, num_tokens: int) -> None:
        self.requests_in_flight += num_requests
        self.tokens_in_flight += num_tokens
        for watcher in self.load_watchers:
            watcher()

    def _check_params(self, params: SamplingParams) -> None:
        if params.options is not None and not self.takes_options:
            raise ConfigError(
                f"{type(self).__name__} has no penalties, no log-probabilities of other tokens and no "
                "further options of sampling: leave them out."
            )
        if params.structure is not None and not self.keeps_structure:
            raise ConfigError(
                f"{type(self).__name__} cannot give an answer a form: leave response_format out, and let "
                "tool_choice be auto or none."
            )

    def _checked(self, output: TokenOutput) -> TokenOutput:
        check_logprobs(output.logprobs, f"{self._place()}, version {output.policy_version},")
        return output

    def _place(self) -> str:
        return f"{type(self).__name__} (pid {os.getpid()} on {socket.gethostname()})"

    # -- weights and health --------------------------------------------------------------------------

    @abstractmethod
    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        """Sample with these weights from now on; ``version`` says which they are.

        A request that is being sampled goes on, and its ``token_versions`` say which of its tokens came
        before and after.
        """

    async def sleep(self) -> None:
        """Give memory back to a learner on the same devices, until ``wake``: the cache, and on a GPU the
        weights. Requests and weights that come meanwhile wait, and what was being sampled goes on afterwards.

        ``server.colocated`` needs an engine that has this and ``wake``.
        """
        raise NotImplementedError

    async def wake(self) -> None:
        """Sample again."""
        raise NotImplementedError

    @abstractmethod
    def stats(self) -> EngineStats:
        """Return what this engine has done so far."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise ``SamplerError`` with what ended the engine, if anything did: Serve replaces the replica."""


def engine_class(config: EngineConfig) -> type[Engine]:
    """The engine that ``server.engine.name`` names. Raises ``ConfigError`` if there is none."""
    return load_class("server.engine.name", config.name, ENGINES, Engine)
