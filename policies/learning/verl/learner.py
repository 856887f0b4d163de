"""The policy on one rank: supervised and policy-gradient updates, and what they have to know beforehand."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft.utils.error import PeftError

from environments.disk import FileDigest
from environments.errors import ConfigError, LearnerError
from policies.learning.algorithm import Algorithm
from policies.learning.division import ADVANTAGES, OLD_LOGPROBS, Columns, RankShard, policy_columns
from policies.learning.registry import import_own
from policies.learning.samples import LearnerUpdate
from policies.learning.settings import LearnerConfig, OptimizerConfig
from policies.learning.verl import weights as verl_weights
from policies.learning.verl.config import actor_config, worker_config
from policies.learning.verl.data import scored, supervised
from policies.learning.verl.fields import QUANTIZATION, check_fields, in_four_bits
from policies.learning.verl.losses import policy_loss, weighted_loss
from policies.learning.verl.shards import REFERENCE, ShardFiles, StateCopy, write_tensors
from policies.learning.verl.token_trees import obstacle
from policies.learning.verl.weights import Reference
from policies.learning.verl.worker import VerlWorker, mean_metrics, on_all_ranks
from policies.settings import ADAPTER, json_object

# isort: split
from verl.workers.utils.losses import sft_loss

logger = logging.getLogger(__name__)

ADAPTERS = os.path.join(ADAPTER, "adapter_model.safetensors")
LORA_RECORD = "lora_train_meta.json"
"""File to which verl writes rank and alpha of a checkpoint's adapters."""

OWN_NAMES = (
    *("loss", "grad_norm", "lr", "clip_fraction", "clip_fraction_low", "clip_fraction_high"),
    *("clip_fraction_dual", "kl", "ratio_mean", "weight_mean", "weight_truncated_fraction"),
    *("weight_effective_fraction", "kl_loss"),
)
METRIC_NAMES = {name: f"learn/{name}" for name in OWN_NAMES} | {
    "surprise": "learn/entropy",
    "actor/entropy_loss": "learn/entropy_bonus",
}
FIRST_STEP_NAMES = {
    "rollout_kl": "learn/rollout_kl",
    "rollout_k3_kl": "learn/rollout_k3_kl",
    "rollout_diff_mean": "learn/rollout_logprob_diff_mean",
    "rollout_diff_max": "learn/rollout_logprob_diff_max",
    "corrected_diff_mean": "learn/corrected_logprob_diff_mean",
}
"""Metrics that later steps would mix with what the update has changed."""


class Teacher(VerlWorker):
    """A rank of a language model of any shape that scores the policy's tokens, and learns nothing.

    Its optimizer is never used, and so holds nothing. verl has workers without one (``forward_only``), whose
    weights lie in pinned memory: a machine without a GPU has none.
    """

    def __init__(self, model_path: str, learner: LearnerConfig, seed: int) -> None:
        config = worker_config("language_model", model_path, learner, OptimizerConfig(), 1)
        super().__init__(config, learner, seed)


class VerlLearner(VerlWorker):
    """A rank of the policy.

    Args:
        model_path: folder in Hugging Face format with weights and tokenizer.
        learner: precision, batch sizes, optimizer, adapters.
        algorithm: the objective of ``update``.
        num_schedule_steps: calls of ``update`` over which a cosine schedule runs.
        seed: of torch's generator on this rank.

    Raises:
        ConfigError: verl rejected one of its options, or adapters where they cannot be merged.
    """

    loss_fn: Callable[..., Any]
    """The loss of the next step."""

    def __init__(
        self,
        model_path: str,
        learner: LearnerConfig,
        algorithm: Algorithm,
        num_schedule_steps: int,
        seed: int,
    ) -> None:
        import_own(algorithm.module)
        check_fields(learner, algorithm)
        self._algorithm = algorithm
        self._policy_loss = partial(policy_loss, algorithm, actor_config(learner, algorithm))
        self._supervised_loss = partial(sft_loss, None)
        # Before the policy, which sets torch's generator once more: its numbers are those without a teacher.
        teacher = algorithm.loaded_teacher
        self._teacher = None if teacher is None else Teacher(teacher, learner, seed)
        rank, steps = learner.lora.rank, num_schedule_steps
        adapters = {"lora_rank": rank, "lora_alpha": 16, "target_modules": "all-linear"} if rank else {}
        if in_four_bits(learner):
            adapters["lora"] = {QUANTIZATION: True}
        config = worker_config("language_model", model_path, learner, learner.optimizer, steps, adapters)
        try:
            super().__init__(config, learner, seed)
        except PeftError as error:
            layers = learner.verl.get("model", {}).get("target_modules")
            raise ConfigError(f"learner.verl.model.target_modules={layers!r}: {error}") from error
        if self._has_adapters:
            verl_weights.check_adapters(self.engine.module, self.model_config.hf_config.tie_word_embeddings)
        self._reference = Reference(self.engine.module) if algorithm.uses_reference else None
        reason = obstacle(self.engine.module, self.model_config.hf_config)
        if self._teacher is not None:  # it scores the same rows
            self.pairs_per_token = min(self.pairs_per_token, self._teacher.pairs_per_token)
            reason = reason or obstacle(self._teacher.engine.module, self._teacher.model_config.hf_config)
        if reason and dist.get_rank() == 0:
            logger.warning("What samples have in common is computed for each of them: %s.", reason)

    @property
    def _has_adapters(self) -> bool:
        return bool(self.model_config.lora_rank)

    # -- learning ------------------------------------------------------------------------------------

    @on_all_ranks
    def begin_phase(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """Start a phase of training: a fresh optimizer and schedule on the present weights, which are the
        reference policy from here on.
        """
        super().begin_phase(optimizer, num_schedule_steps)
        if self._reference is not None:
            self._reference = Reference(self.engine.module)

    @on_all_ranks
    def fit(self, shards: Sequence[RankShard]) -> LearnerUpdate:
        """Supervised learning: one optimizer step and one schedule step per batch, in order."""
        self.loss_fn = self._supervised_loss
        if not all(shard.num_trajectories for shard in shards):
            raise LearnerError("A batch without a single sampled token cannot be learned from.")
        steps = [self._step(supervised(shard), advance_schedule=True) for shard in shards]
        return LearnerUpdate(metrics=mean_metrics(steps, METRIC_NAMES), num_optimizer_steps=len(steps))

    @on_all_ranks
    def fit_weighted(self, shards: Sequence[RankShard]) -> LearnerUpdate:
        """Supervised learning of tokens that are weighted by their advantages: one optimizer step and one
        schedule step per batch down the sum of -advantage * log-probability. ``learn/loss`` is that sum.
        """
        self.loss_fn = weighted_loss
        steps = [self._step(scored(shard, ADVANTAGES), advance_schedule=True) for shard in shards]
        return LearnerUpdate(metrics=mean_metrics(steps, METRIC_NAMES), num_optimizer_steps=len(steps))

    def score(self, shards: Sequence[RankShard]) -> list[Columns]:
        """The columns ``old_logprobs``, and where the algorithm needs them those of a teacher that is loaded
        and of the reference.

        The first mini-batch is left without ``old_logprobs`` unless the algorithm needs all scores: they
        would be those of the first step of ``update``, which has the same weights, and takes its own. In
        bypass mode all are: the old log-probabilities are the engine's.
        """
        found: list[Columns] = [{} for _ in shards]
        if not self._algorithm.bypass:
            first = 0 if self._algorithm.needs_all_scores else 1
            for columns, shard in zip(found[first:], shards[first:], strict=True):
                columns |= self.column(shard, "old_logprobs")
        if self._teacher is not None:
            for columns, shard in zip(found, shards, strict=True):
                columns |= self._teacher.column(shard, "teacher_logprobs")
        if self._reference is not None:
            with self._reference.in_place():
                for columns, shard in zip(found, shards, strict=True):
                    columns |= self.column(shard, "reference_logprobs")
        return found

    @on_all_ranks
    def update(self, shards: Sequence[RankShard]) -> LearnerUpdate:
        """Policy gradient on scored samples with advantages: one optimizer step per mini-batch, then one of
        the schedule. A mini-batch of which a correction has masked everything takes no step. One that comes
        several times, in as many epochs, takes a step each time.

        ``learn/rollout_*`` is how far engine and learner are apart on the first mini-batch, before its step;
        ``learn/corrected_logprob_diff_mean`` is what importance weights leave of it, since they are cut.
        ``learn/entropy`` is estimated by the sampled tokens, as the mean of -log p over the steps;
        ``learn/entropy_bonus`` is exact, and as the loss aggregates it.

        Args:
            shards: only the first may be without ``old_logprobs``, and only if it comes once.
        """
        shards = [shard for shard in shards if shard.num_trajectories]
        if not shards:
            return LearnerUpdate(metrics={}, num_optimizer_steps=0)
        self.loss_fn = self._policy_loss
        columns = policy_columns(self._algorithm)
        steps = []
        for index, shard in enumerate(shards):
            is_scored = index > 0 or shard.is_scored
            data = scored(shard, columns | OLD_LOGPROBS if is_scored else columns)
            step = self._step(data, index == len(shards) - 1, entropy=self._algorithm.entropy_coef > 0)
            steps.append(step)
            if "weight_used_square" in step:  # Kish's effective sample size, as a share of the tokens
                step["weight_effective_fraction"] = step["weight_used_mean"] ** 2 / step["weight_used_square"]
        metrics = mean_metrics(steps, METRIC_NAMES) | mean_metrics(steps[:1], FIRST_STEP_NAMES)
        for name in ("ratio_max", "weight_max"):
            if name in steps[0]:
                metrics[f"learn/{name}"] = max(step[name] for step in steps)
        return LearnerUpdate(metrics=metrics, num_optimizer_steps=len(steps))

    def logprobs(self, shards: Sequence[RankShard]) -> list[Columns]:
        """The column ``old_logprobs`` under each mini-batch's temperature, whatever ``score`` leaves out."""
        return [self.column(shard, "old_logprobs") for shard in shards]

    # -- weights and checkpoints ---------------------------------------------------------------------

    def begin_save(self, folder: str) -> Callable[[], dict[str, FileDigest]]:
        """Copy this rank's state, and on rank 0 the adapters in peft's form too; write what is small."""
        write = super().begin_save(folder)
        if not self._has_adapters:
            return write
        adapters, path = verl_weights.gathered(self._adapters().items()), os.path.join(folder, ADAPTERS)
        if dist.get_rank() != 0:
            return write
        self.engine.module.peft_config[verl_weights.ADAPTER].save_pretrained(os.path.dirname(path))
        return lambda: write() | write_tensors(adapters, path, {"format": "pt"})

    def _add_to(self, copy: StateCopy) -> None:
        if self._reference is not None:
            with self._reference.in_place() as tensors:
                copy.add({REFERENCE + name: tensor for name, tensor in tensors.items()})

    def _restore_from(self, saved: ShardFiles, folder: str) -> None:
        if self._reference is None:
            return
        with self._reference.in_place() as tensors:
            for name, tensor in tensors.items():
                if REFERENCE + name not in saved.shapes:
                    raise ConfigError(
                        f"{folder} holds no reference policy with {name!r}: the checkpoint was written by a "
                        "run with other settings."
                    )
                saved.fill(REFERENCE + name, tensor)

    @on_all_ranks
    def load(self, folder: str) -> str | None:
        """Restore what was saved; return a sentence on what could not be restored, if there is any.

        Raises:
            ConfigError: the checkpoint has other adapters, or no reference policy where one is needed.
        """
        saved = _adapters_of(folder)
        present = (self.model_config.lora_rank, self.model_config.lora_alpha if self._has_adapters else 0)
        if saved != present:
            raise ConfigError(
                f"The checkpoint {folder} has adapters of rank {saved[0]} and alpha {saved[1]}, and this run "
                f"of learner.lora.rank={present[0]} and alpha {present[1]}: resume with what it was trained "
                "with (rank 0 is without adapters), or start a new run from its huggingface folder with "
                "model.path."
            )
        return super().load(folder)

    def _adapters(self) -> dict[str, torch.Tensor]:
        tensors = verl_weights.trainable(self.engine.module)
        return {name.replace(f".{verl_weights.ADAPTER}.", "."): each for name, each in tensors.items()}


def _adapters_of(folder: str) -> tuple[int, int]:
    """Rank and alpha of a checkpoint's adapters; zeros if it has none. Raises ``ConfigError``."""
    path = Path(folder, LORA_RECORD)
    if not path.exists():
        return 0, 0
    record = json_object(path)
    try:
        return int(record["r"]), int(record["lora_alpha"])
    except (LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} does not say which adapters the checkpoint has: {error!r}") from error
