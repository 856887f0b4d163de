"""A teacher behind an OpenAI-compatible address: it scores the tokens that the policy has sampled.

    POST {address}/completions   {"prompt": ids, "echo": true, "logprobs": 0, "max_tokens": 0}
    -> choices[0].logprobs       {"tokens": a text of each, "token_logprobs": null, then a number of each}

So vLLM's server answers, and Troupe's own: about the ids that it is given, and at temperature 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

from environments.background import concurrently
from environments.chat_endpoint import ChatEndpoint
from environments.columns import stored
from environments.errors import ConfigError, EnvironmentFailure
from policies.learning.algorithm import Algorithm
from policies.learning.samples import TrainBatch, TrainingSample

CONCURRENCY = 16
"""Requests at once: engines compute several together."""
SCORING_SECONDS = 600.0
"""Longest silence of the server in one try."""
FIRST_SECONDS = 60.0
"""The same for the one try at the first request of a run, which has two tokens."""
NEWEST_TOKENS, SPREAD_TOKENS = 1024, 3072
"""Tokens whose texts are compared with the student's: the last ones, where special ones stand, and others."""
NO_TEXT = "\N{REPLACEMENT CHARACTER}"
"""Text of bytes that are a part of a character: servers write such tokens in different ways."""


class Echo(NamedTuple):
    """Texts and log-probabilities of the tokens of a prompt, of which the first has none."""

    texts: list[str]
    logprobs: list[float]


@dataclass(frozen=True)
class ServedTeacher:
    """A teacher at an address."""

    endpoint: ChatEndpoint

    @classmethod
    def of(cls, algorithm: Algorithm) -> ServedTeacher | None:
        """The teacher that an algorithm's options name, if it has an address.

        Raises:
            ConfigError: the address is none, no model there is named, or one is and the teacher is a folder.
        """
        address, options = algorithm.teacher, algorithm.options
        model, key = options.get("teacher_model"), options.get("teacher_key")
        if address is None:
            return None
        if algorithm.loaded_teacher is not None:
            if model or key:
                raise ConfigError(
                    f"algorithm.options.teacher={address!r} is no address, so that teacher_model and "
                    "teacher_key have no effect: leave them out, or write it like http://localhost:8000/v1."
                )
            return None
        if not model:
            raise ConfigError(
                f"algorithm.options.teacher={address!r} is an address, and algorithm.options.teacher_model "
                f"is not set: name a model that GET {address.rstrip('/')}/models lists."
            )
        try:
            return cls(ChatEndpoint(address, model, key or None, timeout_seconds=SCORING_SECONDS))
        except ConfigError as error:
            raise ConfigError(f"algorithm.options.teacher: {error}") from error

    def scored(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """The mini-batches with ``teacher_logprobs``.

        Raises:
            EnvironmentFailure: the server does not answer, or by no such scores.
        """
        rows = iter(concurrently(self._row, chain(*(batch.samples for batch in batches)), CONCURRENCY))
        return [
            batch.with_column("teacher_logprobs", [next(rows) for _ in batch.samples]) for batch in batches
        ]

    def check(self, text_of: Callable[[int], str], num_rows: int, num_tokens: int) -> None:
        """Check that the server scores what it is given, of the longest length, and reads tokens alike.

        Args:
            text_of: text of one of the student's tokens.
            num_rows: tokens that the student can sample.
            num_tokens: of the longest rollout.

        Raises:
            ConfigError: names what it lacks, or the first token that differs.
        """
        setting = f"algorithm.options.teacher={self.endpoint.base_url!r}"
        step = max(1, num_rows // SPREAD_TOKENS)
        compared = sorted({*range(0, num_rows, step), *range(max(0, num_rows - NEWEST_TOKENS), num_rows)})
        prompts = [
            [compared[(start + place) % len(compared)] for place in range(num_tokens)]
            for start in range(0, len(compared), num_tokens)
        ]
        first = replace(self.endpoint, timeout_seconds=FIRST_SECONDS, retries=0)
        try:
            ServedTeacher(first)._echo(compared[:2])  # a silent server is found before a long wait for it
            echoes = concurrently(self._echo, prompts, CONCURRENCY)
        except EnvironmentFailure as error:
            raise ConfigError(
                f"{setting} cannot teach. {error} It has to be a server that gives log-probabilities of "
                f"{num_tokens} given tokens, the longest rollout (/completions with echo and logprobs), as "
                "vLLM's and launch.serve are."
            ) from error
        for number, theirs in zip(chain(*prompts), chain(*(echo.texts for echo in echoes)), strict=True):
            if _differ(ours := text_of(number), theirs):
                raise ConfigError(
                    f"{setting} has token {number} as {theirs!r}, and the student has it as {ours!r}: name a "
                    "teacher of the student's family, such as a larger model or a checkpoint of one."
                )

    def _row(self, sample: TrainingSample) -> Any:
        """The column ``teacher_logprobs`` of a sample."""
        if sample.pictures:
            raise EnvironmentFailure(
                f"Sample {sample.sample_id!r} has pictures, which no server takes: name a folder."
            )
        prompt, response = (stored(sample, name).read() for name in ("prompt_ids", "response_ids"))
        logprobs = self._echo([*prompt, *response]).logprobs[len(prompt) - 1 :]
        mask = stored(sample, "loss_mask")
        return sample.on_sampled_tokens([each for each, bit in zip(logprobs, mask, strict=True) if bit])

    def _echo(self, ids: list[int]) -> Echo:
        body = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0, "temperature": 1.0}
        return self.endpoint.post("/completions", body, partial(_read_echo, len(ids)))


def _differ(first: str, second: str) -> bool:
    """True for two texts of a token that no two servers write for the same one: some leave out spaces at its
    ends, and the text of an end-of-sequence token.
    """
    first, second = first.strip(), second.strip()
    return bool(first and second) and first != second and NO_TEXT not in first + second


def _read_echo(num_tokens: int, response: Any) -> Echo:
    found = response["choices"][0].get("logprobs") or {}
    texts, logprobs = found.get("tokens") or [], found.get("token_logprobs") or []
    scores = [math.nan if each is None else float(each) for each in logprobs[1:]]
    if len(texts) != num_tokens or len(logprobs) != num_tokens or not all(map(math.isfinite, scores)):
        raise ValueError(f"it has no log-probability of each of {num_tokens} given tokens")
    return Echo(list(map(str, texts)), scores)
