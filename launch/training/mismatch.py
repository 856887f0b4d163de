"""How far engine and learner are apart: the same tokens, the same weights, two implementations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ray.exceptions import RayError

from launch.reporting import metrics
from launch.training.components import Components
from policies.learning.samples import LearnerUpdate, TrainBatch, TrainingSample

NUM_COMPARED = 8
"""Samples that are compared where the learner scores them for nothing else."""


def mismatch(run: Components, version: int, batches: Sequence[TrainBatch]) -> dict[str, float]:
    """Metrics of the difference on tokens that ``version``, the newest, has sampled, if there are any.

    Args:
        batches: the mini-batches of an update, before the update. Where none of them is scored, and in bypass
            mode, a few samples are scored here.

    A recording has been sampled by the weights of another run, so there is nothing to compare in a replay.
    """
    if run.config.run.replay is not None:
        return {}
    fresh = [sample for batch in batches for sample in batch.samples if sample.policy_version == version]
    if run.algorithm.bypass or not any(sample.old_logprobs for sample in fresh):
        # In bypass mode the old log-probabilities are the engine's own.
        fresh = _scored(run, fresh[:NUM_COMPARED])
    return metrics.mismatch_metrics(fresh or _scored(run, _probed(run, version)), version)


def measured_mismatch(run: Components, update: LearnerUpdate) -> dict[str, float]:
    """The same metrics as ``update`` has found them, where the newest version has sampled all its tokens."""
    if run.config.run.replay is not None or not update.num_optimizer_steps:
        return {}
    return {
        metrics.FRESH_MISMATCH: update.metrics["learn/rollout_logprob_diff_mean"],
        metrics.FRESH_MISMATCH_MAX: update.metrics["learn/rollout_logprob_diff_max"],
    }


def _probed(run: Components, version: int) -> list[TrainingSample]:
    """The answer of the engines to the question that followed the last update, if it is there."""
    try:
        return run.probe.take(version)
    except RayError as error:  # the rollouts live without it
        last = str(error).strip().splitlines()[-1]
        run.tracker.announce(f"Engine and learner were not compared under version {version}: {last}")
        return []


def _scored(run: Components, samples: Sequence[TrainingSample]) -> list[TrainingSample]:
    """The samples with the learner's log-probabilities."""
    if not samples:
        return []
    temperature = run.config.rollout.temperature
    rows = run.learner.logprobs(TrainBatch(samples=tuple(samples), temperature=temperature))
    return [replace(sample, old_logprobs=tuple(row)) for sample, row in zip(samples, rows, strict=True)]
