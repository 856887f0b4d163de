"""The distance of engine and learner: the same tokens, the same weights, two implementations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from actors.learning.learners import Learners
from environments.types import TrajectoryGroup
from launch.reporting import metrics
from launch.settings.tree import TrainConfig
from policies.learning.algorithm import Algorithm
from policies.learning.samples import LearnerUpdate, TrainBatch, TrainingSample
from policies.sampler import SamplingParams, TokenOutput, TokenRequest

NUM_COMPARED = 8
"""Samples that are compared where the learner scores them for nothing else."""
NUM_TOKENS = 16
MAX_MISSED = 9
"""Versions in a row that may go without an answer in time; the next one is waited for."""
PROBE_ANSWER_SECONDS = 30.0


class LogprobProbe:
    """Samples by the newest version what the learner can score while it still has the same weights.

    Where rollouts run ahead of the updates hardly one of their tokens is like that, and how far engine and
    learner are apart on the others is what was learnt since.

    Args:
        sample: requests a completion; the reference is to a ``TokenOutput``.
        temperature: of the rollouts.
    """

    def __init__(self, sample: Callable[[TokenRequest], ray.ObjectRef], temperature: float) -> None:
        self._sample, self._temperature = sample, temperature
        self._prompt_ids: tuple[int, ...] = ()
        self._pictures: tuple[str, ...] = ()
        self.policy = ""
        """Name of the policy whose continuation was requested."""
        self._answer: ray.ObjectRef | None = None
        self._num_missed = 0

    def begin(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Request a continuation of the first prompt in ``groups`` by ``version``, the newest, of its policy.

        A continuation that was requested before and is not there yet is of no use any more.
        """
        if self._answer is not None:
            ray.cancel(self._answer)
            self._answer = None
        rollouts = (trajectory for group in groups for trajectory in group.trajectories)
        turns = (turn for rollout in rollouts for turn in rollout.completions if turn.prompt_size)
        if (first := next(turns, None)) is not None:
            self._prompt_ids, self._pictures = first.prompt_ids, first.pictures
            self.policy = first.policy
            params = SamplingParams(
                temperature=self._temperature, max_tokens=NUM_TOKENS, seed=version, policy=first.policy
            )
            self._answer = self._sample(
                TokenRequest(self._prompt_ids, params, min_version=version, pictures=self._pictures)
            )

    def take(self, version: int) -> list[TrainingSample]:
        """The sample, if it is there and all of it is by ``version``; once only.

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
        sample = TrainingSample(
            sample_id=f"probe/{version}#0",
            prompt_ids=self._prompt_ids,
            response_ids=output.token_ids,
            loss_mask=(1,) * len(output.token_ids),
            rollout_logprobs=output.logprobs,
            policy_version=version,
            pictures=self._pictures,
        )
        return [sample]


@dataclass(frozen=True)
class EngineComparison:
    """Compares log-probabilities of engine and learner on tokens that the newest version has sampled.

    In a replay it finds nothing: a recording was sampled by the weights of another run.

    Args:
        learner: scores samples that nothing else has scored.
        probe: samples where no rollout is by the newest version; ``None`` where no engine is there.
        announce: called with a sentence on a probe that fails.
    """

    config: TrainConfig
    algorithm: Algorithm
    learner: Learners
    probe: LogprobProbe | None
    announce: Callable[[str], None]

    def before_update(self, version: int, batches: Sequence[TrainBatch]) -> dict[str, float]:
        """Metrics of the difference under ``version``, the newest, if there are any tokens by it.

        Args:
            batches: the mini-batches of an update, before the update. Where none of them is scored, and in
                bypass mode, a few samples are scored here.
        """
        if self.config.run.replay is not None:
            return {}
        by_policy: dict[str, list[TrainingSample]] = defaultdict(list)
        for batch in batches:
            by_policy[batch.policy] += [each for each in batch.samples if each.policy_version == version]
        fresh = [sample for samples in by_policy.values() for sample in samples]
        if self.algorithm.bypass or not any(sample.old_logprobs for sample in fresh):
            # In bypass mode the old log-probabilities are the engine's own.
            scored = [self._scored(samples[:NUM_COMPARED], policy) for policy, samples in by_policy.items()]
            fresh = [sample for samples in scored for sample in samples]
        return metrics.mismatch_metrics(fresh or self._probed(version), version)

    def after_update(self, update: LearnerUpdate) -> dict[str, float]:
        """The same metrics as ``update`` has found them, where the newest version has sampled all tokens."""
        if self.config.run.replay is not None or not update.num_optimizer_steps:
            return {}
        return {
            metrics.FRESH_MISMATCH: update.metrics["learn/rollout_logprob_diff_mean"],
            metrics.FRESH_MISMATCH_MAX: update.metrics["learn/rollout_logprob_diff_max"],
        }

    def begin_probe(self, groups: Sequence[TrajectoryGroup], version: int) -> None:
        """Have ``version``, which was just published, sample for the next ``before_update``."""
        if self.probe is not None:
            self.probe.begin(groups, version)

    def _probed(self, version: int) -> list[TrainingSample]:
        if self.probe is None:
            return []
        try:
            samples = self.probe.take(version)
        except RayError as error:  # the rollouts live without it
            last = str(error).strip().splitlines()[-1]
            self.announce(f"Engine and learner were not compared under version {version}: {last}")
            return []
        return self._scored(samples, self.probe.policy)

    def _scored(self, samples: Sequence[TrainingSample], policy: str) -> list[TrainingSample]:
        """The samples with the log-probabilities of the policy's learner."""
        if not samples:
            return []
        temperature = self.config.rollout.temperature
        batch = TrainBatch(samples=tuple(samples), temperature=temperature, policy=policy)
        rows = self.learner.logprobs(batch)
        return [sample.replaced(old_logprobs=tuple(row)) for sample, row in zip(samples, rows, strict=True)]
