"""Preferences: pairs of continuations, read from a file, as samples, and the objective that learns from them.

DPO (Rafailov et al. 2023, Direct Preference Optimization, eq. 7) compares the two continuations of a pair:

    loss = mean over pairs of -log sigmoid(beta * margin)
    margin = log p(chosen) - log p_reference(chosen) - log p(rejected) + log p_reference(rejected)

Its derivative by log p(chosen) is -beta * sigmoid(-beta * margin) / pairs, and by log p(rejected) the same
with the other sign. So a step scores its pairs, works out these numbers here, and has the learner take each
token's log-probability times its number as the loss: at the weights that were scored, which are those of the
step, that is the gradient of DPO. A pair's two rows need not meet in a micro-batch or on a rank.
"""

from __future__ import annotations

import hashlib
import math
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from environments.data.dataset_files import read_rows
from environments.errors import DatasetError
from environments.types import Message, Trajectory
from policies.learning.demonstrations import as_played, end_of_turn
from policies.learning.samples import TrainBatch, TrainingSample, training_samples

if TYPE_CHECKING:
    from policies.chat import ChatRenderer

Continuation = list[Message] | Trajectory
"""Messages, of which the assistant's texts are learned; or a recorded episode, whose tokens are."""


@dataclass(frozen=True, kw_only=True)
class Preference:
    """A conversation and two ways in which it went on, of which one is preferred."""

    messages: Sequence[Message] = ()
    """The beginning that both have in common; a recorded episode holds its own."""
    chosen: Continuation
    rejected: Continuation

    @property
    def sides(self) -> dict[str, Continuation]:
        """The two continuations by name."""
        return {"chosen": self.chosen, "rejected": self.rejected}

    def check(self, name: str) -> None:
        """Find what cannot be learned from.

        Args:
            name: of the preference, for messages: "preference 3".

        Raises:
            DatasetError: names it, and the remedy.
        """
        if self.chosen == self.rejected:
            raise DatasetError(
                f"The chosen and the rejected of {name} are the same, so none is preferred: leave it out."
            )
        for side, continuation in self.sides.items():
            if isinstance(continuation, Trajectory):
                if not training_samples(continuation):
                    raise DatasetError(
                        f"The {side} of {name} is an episode with nothing to learn from: it failed, is "
                        "masked, ran out of time, or sampled no token. Leave the preference out."
                    )
                continue
            _check_messages(f"The {side} of {name}", continuation)
            _check_messages(f"The beginning of {name}", self.messages)
            for message in continuation:
                if message["role"] == "assistant" and not isinstance(message.get("content"), str):
                    raise DatasetError(
                        f"The {side} of {name} has an answer without a text: {message!r:.100}. Write its "
                        "calls into the content, as the model would say them."
                    )
            if not any(message["role"] == "assistant" for message in continuation):
                raise DatasetError(
                    f"The {side} of {name} has no message with role 'assistant': add one, or leave it out."
                )


def check_preferences(preferences: Sequence[Preference]) -> None:
    """Find a preference that cannot be learned from. Raises ``DatasetError``."""
    for index, preference in enumerate(preferences):
        if not isinstance(preference, Preference):
            raise DatasetError(
                f"Preference {index} is a {type(preference).__name__}: write Preference(chosen=..., ...)."
            )
        preference.check(f"preference {index}")


# -- files ---------------------------------------------------------------------------------------------


def read_preferences(path: str | os.PathLike[str]) -> list[Preference]:
    """Read the preferences of a file of pairs, such as the hub has: JSON lines, JSON or parquet.

    A row is ``{"messages": [...], "chosen": ..., "rejected": ...}``. A continuation is a list of messages, or
    the text of an answer. The beginning may be called ``prompt``, and be a text, which is a user's message.
    It may be left out: then it is what both conversations have in common. Other keys are not read.

    Raises:
        DatasetError: there is no such file, it is empty, or a row is no preference: names the row.
    """
    preferences = []
    for number, row in enumerate(read_rows(Path(path)), start=1):
        name = f"row {number} of {path}"
        preference = _preference(row, name)
        preference.check(name)
        preferences.append(preference)
    if not preferences:
        raise DatasetError(f"{path} is empty: write a preference as a row of messages, chosen and rejected.")
    return preferences


def _preference(row: Mapping[str, Any], name: str) -> Preference:
    if missing := [key for key in ("chosen", "rejected") if not row.get(key)]:
        raise DatasetError(
            f"No {' and no '.join(missing)} in {name}, which has {', '.join(row) or 'nothing'}: a preference "
            "is messages (or a prompt), chosen and rejected."
        )
    chosen, rejected = (_as_messages(row[key], "assistant") for key in ("chosen", "rejected"))
    given = row.get("prompt") or row.get("messages")
    beginning = _common_beginning(chosen, rejected) if given is None else _as_messages(given, "user")
    if beginning and chosen != rejected:
        size = len(beginning)
        if chosen[:size] == rejected[:size] == beginning:  # whole conversations
            chosen, rejected = chosen[size:], rejected[size:]
        elif beginning[:1] in (chosen[:1], rejected[:1]):
            raise DatasetError(
                f"A continuation in {name} begins as its messages do, and goes on otherwise: let messages be "
                "what both have in common, or leave it out."
            )
    return Preference(messages=beginning, chosen=chosen, rejected=rejected)


def _as_messages(given: Any, role: str) -> list[Message]:
    """The messages that a row gives; a text is one message, and so is whatever ``check`` will reject."""
    return given if isinstance(given, list) else [{"role": role, "content": given}]


def _common_beginning(chosen: Sequence[Message], rejected: Sequence[Message]) -> list[Message]:
    pairs = zip(chosen, rejected, strict=False)
    return [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _check_messages(name: str, messages: Any) -> None:
    """Raise ``DatasetError`` unless ``messages`` is a list of at least one message."""
    if not isinstance(messages, list | tuple) or not messages:
        raise DatasetError(
            f'{name} is {messages!r:.100}: write a list such as [{{"role": "user", "content": "Hello"}}].'
        )
    for position, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DatasetError(
                f"{name} has as message {position} {message!r:.100}: write a dict with role and content."
            )


# -- samples -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pair:
    """The samples of a preference."""

    chosen: tuple[TrainingSample, ...]
    rejected: tuple[TrainingSample, ...]

    @property
    def samples(self) -> tuple[TrainingSample, ...]:
        """The samples of both sides; as they have a prompt in common, it may be computed once."""
        return (*self.chosen, *self.rejected)

    @cached_property
    def key(self) -> str:
        """A name that pairs of the same tokens share, in whatever order a workload has them."""
        return f"{_digest(self.chosen)} {_digest(self.rejected)}"


def _digest(side: Sequence[TrainingSample]) -> str:
    digest = hashlib.sha256()
    for sample in side:
        for column in (sample.prompt_ids, sample.response_ids, sample.loss_mask):
            digest.update(array("q", (len(column), *column)).tobytes())
    return digest.hexdigest()[:16]


def make_pairs(
    renderer: ChatRenderer, preferences: Sequence[Preference], announce: Callable[[str], None]
) -> list[Pair]:
    """The preferences as token sequences; those of a recorded episode are the ones that were sampled.

    Raises:
        DatasetError: a preference cannot be learned from, or both of its sides are the same tokens.
    """
    pairs = []
    end_ids: tuple[int, ...] = ()
    for index, preference in enumerate(preferences):
        sides = {}
        for side, continuation in preference.sides.items():
            if isinstance(continuation, Trajectory):
                played = continuation
            else:
                messages, name = [*preference.messages, *continuation], f"the {side} of preference {index}"
                end_ids = end_ids or end_of_turn(renderer, messages, announce)
                played = as_played(renderer, messages, name, end_ids, len(preference.messages))
            sides[side] = tuple(training_samples(played))
        pair = Pair(**sides)
        if _digest(pair.chosen) == _digest(pair.rejected):
            raise DatasetError(
                f"The chosen and the rejected of preference {index} are the same tokens: leave it out."
            )
        pairs.append(pair)
    return pairs


# -- objective -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PairScore:
    """Log-probabilities of the two sides of a pair: sums over the tokens that are learned."""

    chosen: float
    rejected: float


def batch_of(pairs: Sequence[Pair]) -> TrainBatch:
    """The samples of all pairs, as the learner takes them."""
    return TrainBatch(samples=tuple(sample for pair in pairs for sample in pair.samples))


def pair_scores(pairs: Sequence[Pair], logprobs: Sequence[Sequence[float]]) -> list[PairScore]:
    """The score of each pair by the learner's ``logprobs`` of ``batch_of(pairs)``."""
    rows = iter(logprobs)

    def total(samples: Sequence[TrainingSample]) -> float:
        return math.fsum(
            value
            for sample in samples
            for value, bit in zip(next(rows), sample.loss_mask, strict=True)
            if bit
        )

    return [PairScore(chosen=total(pair.chosen), rejected=total(pair.rejected)) for pair in pairs]


@dataclass(frozen=True, kw_only=True)
class PreferenceObjective:
    """The objective of DPO, and beside it the likelihood of the chosen (Pang et al. 2024, eq. 1).

    Args:
        beta: factor of the margin.
        sft_coef: weight of the mean over pairs of -log p of the chosen's tokens, each pair's by its number.
    """

    beta: float
    sft_coef: float = 0.0

    def margins(self, policy: Sequence[PairScore], reference: Sequence[PairScore]) -> list[float]:
        """The margin of each pair, in nats."""
        return [
            (now.chosen - before.chosen) - (now.rejected - before.rejected)
            for now, before in zip(policy, reference, strict=True)
        ]

    def weighted(
        self, pairs: Sequence[Pair], policy: Sequence[PairScore], reference: Sequence[PairScore]
    ) -> TrainBatch:
        """The batch whose ``advantages`` are minus the derivatives of the loss by the log-probabilities."""
        weights = []
        for pair, margin in zip(pairs, self.margins(policy, reference), strict=True):
            push = self.beta * math.exp(_log_sigmoid(-self.beta * margin)) / len(pairs)
            imitation = self.sft_coef / _num_tokens(pair.chosen) / len(pairs)
            weights += [push + imitation] * len(pair.chosen) + [-push] * len(pair.rejected)
        batch = batch_of(pairs)
        rows = zip(weights, batch.samples, strict=True)
        return batch.with_column(
            "advantages", [tuple(weight * bit for bit in sample.loss_mask) for weight, sample in rows]
        )

    def metrics(
        self, pairs: Sequence[Pair], policy: Sequence[PairScore], reference: Sequence[PairScore]
    ) -> dict[str, float]:
        """The loss at the scored weights, and means over the pairs."""
        margins = self.margins(policy, reference)
        loss = fmean(-_log_sigmoid(self.beta * margin) for margin in margins)
        if self.sft_coef:
            likelihoods = (
                score.chosen / _num_tokens(pair.chosen) for pair, score in zip(pairs, policy, strict=True)
            )
            loss -= self.sft_coef * fmean(likelihoods)
        return {
            "loss": loss,
            "margin": fmean(margins),
            "accuracy": fmean(float(margin > 0) for margin in margins),
            "chosen_logprob": fmean(score.chosen for score in policy),
            "rejected_logprob": fmean(score.rejected for score in policy),
        }


def _num_tokens(samples: Sequence[TrainingSample]) -> int:
    return sum(sample.num_sampled_tokens for sample in samples)


def _log_sigmoid(value: float) -> float:
    return min(value, 0.0) - math.log1p(math.exp(-abs(value)))
