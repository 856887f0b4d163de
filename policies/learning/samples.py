"""Trajectories become training samples: token ids, and a mask of exactly the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from environments.errors import LearnerError
from environments.types import Completion, TerminationReason, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """One token sequence to learn from.

    ``prompt_ids`` [P], P >= 1, is everything before the first sampled token. ``response_ids`` [R] runs
    from there to the last sampled token; ``loss_mask`` [R] is 1 on sampled tokens and 0 on what the
    environment said in between. ``rollout_logprobs`` and ``advantages`` [R] are 0 where the mask is 0.
    """

    sample_id: str
    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantages: tuple[float, ...] = ()
    policy_version: int = 0

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(self.loss_mask)

    def with_advantages(self, per_sampled_token: Sequence[float]) -> TrainingSample:
        """The same sample with advantages [num_sampled_tokens] laid onto its sampled tokens, in order."""
        values = iter(per_sampled_token)
        return replace(self, advantages=tuple(next(values) if bit else 0.0 for bit in self.loss_mask))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainBatch:
    """The samples of one optimizer step."""

    samples: tuple[TrainingSample, ...]
    temperature: float = 1.0
    """The temperature that the samples were drawn with: log-probabilities are taken under it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerUpdate:
    """What one learner call did: means over its optimizer steps, and how many of those there were."""

    metrics: dict[str, float]
    num_optimizer_steps: int


def training_samples(trajectory: Trajectory) -> list[TrainingSample]:
    """The token sequences of a trajectory, in order; empty if there is nothing in it to learn from.

    Nothing is learnt from a trajectory that is masked, has failed or was ended by its time limit: what it
    is worth was never judged.

    Steps whose prompt extends the previous prompt and completion are one sequence. Where the agent
    rewrote its history a new sequence starts there: nothing is discarded, and no token is trained in a
    context other than the one it was sampled in.

    Raises:
        LearnerError: the server kept the tokens of a completion to itself.
    """
    reason = trajectory.termination_reason
    if trajectory.masked or reason is TerminationReason.TIMEOUT or (reason is not None and reason.is_failure):
        return []
    runs: list[list[Completion]] = []
    for step in trajectory.steps:
        completion = step.completion
        if completion is None:
            continue
        if completion.retokenized or not completion.prompt_ids:
            raise LearnerError(
                f"Rollout {trajectory.rollout_id!r} has completions without the engine's token ids, which "
                "cannot be trained on: sample the policy server by its handle, or an OpenAI-compatible "
                "server that answers return_token_ids and logprobs (vLLM does)."
            )
        if not completion.completion_ids:
            continue
        if runs and _extends(completion, runs[-1][-1]):
            runs[-1].append(completion)
        else:
            runs.append([completion])
    return [_sample(f"{trajectory.rollout_id}#{index}", run) for index, run in enumerate(runs)]


def _extends(completion: Completion, previous: Completion) -> bool:
    seen = previous.prompt_ids + previous.completion_ids
    return completion.prompt_ids[: len(seen)] == seen


def _sample(sample_id: str, run: list[Completion]) -> TrainingSample:
    prompt_ids = run[0].prompt_ids
    response_ids: list[int] = []
    loss_mask: list[int] = []
    logprobs: list[float] = []
    for completion in run:
        between = completion.prompt_ids[len(prompt_ids) + len(response_ids) :]
        response_ids += [*between, *completion.completion_ids]
        loss_mask += [0] * len(between) + [1] * len(completion.completion_ids)
        logprobs += [0.0] * len(between) + list(completion.logprobs)
    return TrainingSample(
        sample_id=sample_id,
        prompt_ids=prompt_ids,
        response_ids=tuple(response_ids),
        loss_mask=tuple(loss_mask),
        rollout_logprobs=tuple(logprobs),
        policy_version=min(completion.policy_version for completion in run),
    )


def padding_sample(token_id: int) -> TrainingSample:
    """A row that fills up a batch and trains nothing: its mask is empty, so no mean counts it."""
    return TrainingSample(
        sample_id="padding",
        prompt_ids=(token_id,),
        response_ids=(token_id,),
        loss_mask=(0,),
        rollout_logprobs=(0.0,),
        advantages=(0.0,),
    )
