"""A short completion under each published version: do the engines sample from the weights that were put?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ray

from environments.types import TrajectoryGroup
from policies.learning.samples import TrainingSample
from policies.sampler import SamplingParams, TokenOutput, TokenRequest

NUM_TOKENS = 16
MAX_MISSED = 9
"""Versions in a row that may go without an answer in time; the next one is waited for."""
PROBE_ANSWER_SECONDS = 30.0


class LogprobProbe:
    """Has the newest version sample what the learner can score while it still has the same weights.

    Where rollouts run ahead of the updates hardly one of their tokens is like that, and how far engine and
    learner are apart on the others is what was learnt since.

    Args:
        sample: asks for a completion; the reference is to a ``TokenOutput``.
        temperature: of the rollouts.
    """

    def __init__(self, sample: Callable[[TokenRequest], ray.ObjectRef], temperature: float) -> None:
        self._sample, self._temperature = sample, temperature
        self._prompt_ids: tuple[int, ...] = ()
        self._answer: ray.ObjectRef | None = None
        self._num_missed = 0

    def begin(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Have ``version``, the newest, continue the first prompt in ``groups``, if there is any.

        What was asked for before and is not there yet is of no use any more.
        """
        if self._answer is not None:
            ray.cancel(self._answer)
            self._answer = None
        rollouts = (trajectory for group in groups for trajectory in group.trajectories)
        prompts = (completion.prompt_ids for rollout in rollouts for completion in rollout.completions)
        if prompt_ids := next(filter(None, prompts), None):
            params = SamplingParams(temperature=self._temperature, max_tokens=NUM_TOKENS, seed=version)
            self._answer = self._sample(TokenRequest(prompt_ids, params, min_version=version))
            self._prompt_ids = prompt_ids

    def take(self, version: int) -> list[TrainingSample]:
        """What was sampled, if it is there and all of it is by ``version``; once only.

        Where the learner finds its rollouts ready, nothing would ever be there: now and then this waits.

        Raises:
            RayError: the sampling actor was lost, or no engine answers in ``PROBE_ANSWER_SECONDS``.
        """
        if self._answer is None:
            return []
        self._num_missed += 1
        if self._num_missed <= MAX_MISSED and not ray.wait([self._answer], timeout=0)[0]:
            return []
        answer, self._answer, self._num_missed = self._answer, None, 0
        output: TokenOutput = ray.get(answer, timeout=PROBE_ANSWER_SECONDS)
        if set(output.token_versions) != {version}:
            return []
        return [
            TrainingSample(
                sample_id=f"probe/{version}#0",
                prompt_ids=self._prompt_ids,
                response_ids=output.token_ids,
                loss_mask=(1,) * len(output.token_ids),
                rollout_logprobs=output.logprobs,
                policy_version=version,
            )
        ]
