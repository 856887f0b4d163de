"""A fast engine for tests: it plays what it is told to behind the real policy server, and needs no model.

``server.engine.name=scripted_engine:ScriptedEngine`` chooses it, as it would an engine of anybody's own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence

from environments.errors import ConfigError, PromptTooLongError, SamplerError
from policies.engines.base import Engine
from policies.engines.weights import WeightBucket
from policies.sampler import EngineStats, SamplingParams, TokenOutput
from policies.settings import EngineConfig

OPTIONS = ("replies", "logprob", "fails_at", "seconds_per_token", "keeps_structure")


class ScriptedEngine(Engine):
    """Plays replies in the order of the requests, from the first again after the last.

    Options:
        replies: texts; a reply ends with the tokenizer's end of a message.
        logprob: of each token.
        fails_at: index of the token of a reply at which the engine fails.
        seconds_per_token: how long one takes.
        keeps_structure: whether the replies have the form that requests ask for.
    """

    settings = ("options",)

    def __init__(self, model_path: str, config: EngineConfig, adapters: Mapping[str, str]) -> None:
        from policies.chat import load_tokenizer

        tokenizer = load_tokenizer(model_path)
        self.version = 0
        self.max_model_tokens = config.max_model_tokens
        self.replies = [
            (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)
            for text in config.options["replies"]
        ]
        self.logprob = float(config.options.get("logprob", -0.5))
        self.fails_at: int | None = config.options.get("fails_at")
        self.seconds_per_token = float(config.options.get("seconds_per_token", 0))
        self.keeps_structure = bool(config.options.get("keeps_structure"))  # type: ignore[misc]
        self.num_started = self.num_running = self.num_tokens = 0
        self._start = time.monotonic()
        self._failure: SamplerError | None = None

    @classmethod
    def check_config(cls, config: EngineConfig, adapters: Collection[str] = ()) -> None:
        super().check_config(config, adapters)
        for name in config.options:
            if name not in OPTIONS:
                raise ConfigError(f"server.engine.options.{name} is unknown: use {', '.join(OPTIONS)}.")

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, in_pieces: bool
    ) -> AsyncGenerator[TokenOutput, None]:
        room = self.max_model_tokens - len(prompt_ids)
        if room < 1:
            raise PromptTooLongError(f"{len(prompt_ids)} tokens leave no room in {self.max_model_tokens}.")
        reply = self.replies[self.num_started % len(self.replies)]
        self.num_started += 1
        token_ids = reply[: min(params.max_tokens or room, room)]
        finish_reason = "stop" if len(token_ids) == len(reply) else "length"
        versions: list[int] = []
        self.num_running += 1
        try:
            for index, token_id in enumerate(token_ids):
                await asyncio.sleep(self.seconds_per_token)
                if index == self.fails_at:
                    self._failure = SamplerError("The script has failed.")
                self.check_alive()
                versions.append(self.version)
                self.num_tokens += 1
                if in_pieces:
                    is_last = index == len(token_ids) - 1
                    yield self._output((token_id,), versions[-1:], finish_reason if is_last else None)
            if not in_pieces:
                yield self._output(token_ids, versions, finish_reason)
        finally:
            self.num_running -= 1

    def _output(
        self, token_ids: Sequence[int], versions: Sequence[int], finish_reason: str | None
    ) -> TokenOutput:
        return TokenOutput(
            token_ids=tuple(token_ids),
            logprobs=(self.logprob,) * len(token_ids),
            finish_reason=finish_reason,
            policy_version=min(versions),
            token_versions=tuple(versions),
        )

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        self.version = version

    def stats(self) -> EngineStats:
        return EngineStats(
            seconds=time.monotonic() - self._start, num_tokens=self.num_tokens, num_running=self.num_running
        )

    def check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
