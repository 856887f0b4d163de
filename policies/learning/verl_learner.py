"""The learner on one rank: verl's TrainingWorker with supervised and policy-gradient updates.

Every public method is called on all ranks at once with the same arguments; each rank takes its own share
of the samples, so callers need to know nothing about ranks, padding or micro-batches.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from environments.errors import ConfigError, LearnerError
from policies.learning.samples import LearnerUpdate, TrainBatch, TrainingSample, padding_sample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig

if os.environ.get("VERL_PLATFORM") == "cpu":  # before verl.workers fixes its device name
    from policies.learning import cpu_platform

    cpu_platform.install()

from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    PolicyLossConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss

PRECISION = {"float32": "fp32", "bfloat16": "bf16"}
VERL_SECTIONS = ("engine", "model", "actor", "optimizer")

on_all_ranks = register(dispatch_mode=Dispatch.ONE_TO_ALL)


class VerlLearner(TrainingWorker):
    """One rank of the learner.

    Args:
        model_path: folder in Hugging Face format with weights and tokenizer.
        learner: precision, batch sizes, optimizer.
        algorithm: the objective of ``update``.
        num_schedule_steps: calls of ``update`` over which a cosine schedule runs.
        seed: of torch's generator on this rank.

    Raises:
        ConfigError: verl refused one of its options.
    """

    def __init__(
        self,
        model_path: str,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        num_schedule_steps: int,
        seed: int,
    ) -> None:
        self._learner = learner
        if learner.device == "cpu":
            # One thread a rank: the ranks share the cores, and the same sums in the same order are
            # what makes a resumed run equal to an uninterrupted one.
            torch.set_num_threads(1)
            if not dist.is_initialized():  # verl's own backend string is one that torch rejects on a CPU
                dist.init_process_group(
                    "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
                )
        torch.manual_seed(seed)
        super().__init__(_worker_config(model_path, learner, num_schedule_steps))
        self._policy_loss = partial(ppo_loss, config=_actor_config(learner, algorithm))
        self._supervised_loss = partial(sft_loss, config=None)
        self._entropy = algorithm.entropy_coef > 0
        self.reset()

    # -- learning ------------------------------------------------------------------------------------

    @on_all_ranks
    def begin_phase(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """Start a phase of training: a fresh optimizer and schedule on the present weights."""
        engine = self.engine
        engine.optimizer_config = _optimizer_config(optimizer, self._learner, num_schedule_steps)
        engine.optimizer = engine._build_optimizer(engine.module)
        engine.lr_scheduler = engine._build_lr_scheduler(engine.optimizer)
        engine.checkpoint_manager.optimizer = engine.optimizer
        engine.checkpoint_manager.lr_scheduler = engine.lr_scheduler

    @on_all_ranks
    def fit(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """Supervised learning: one optimizer step and one schedule step per batch, in order."""
        self.loss_fn = self._supervised_loss
        steps = [self._optimizer_step(batch, None, advance_schedule=True) for batch in batches]
        return _mean_update(steps, {})

    @on_all_ranks
    def update(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """Policy gradient: one optimizer step per mini-batch, then one step of the schedule.

        The old log-probabilities are the learner's own, taken before the first step, so the ratio starts
        at exactly 1; how far they are from the engine's is reported as ``learn/rollout_logprob_diff_*``.
        """
        old = [self._logprobs(batch) for batch in batches]
        mismatch = _logprob_mismatch(batches, old)
        self.loss_fn = self._policy_loss
        last = len(batches) - 1
        steps = [
            self._optimizer_step(batch, logprobs, advance_schedule=index == last)
            for index, (batch, logprobs) in enumerate(zip(batches, old, strict=True))
        ]
        return _mean_update(steps, mismatch)

    @on_all_ranks
    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """Log-probability of every response token [R] of each sample, under the batch's temperature."""
        return [row.tolist() for row in self._logprobs(batch)]

    def _optimizer_step(
        self, batch: TrainBatch, old_logprobs: list[torch.Tensor] | None, advance_schedule: bool
    ) -> dict[str, Any]:
        if not any(sample.num_sampled_tokens for sample in batch.samples):
            raise LearnerError("A batch without a single sampled token cannot be trained on.")
        indices = self._own_rows(batch)
        data = _tensordict(batch, indices, old_logprobs)
        tu.assign_non_tensor(data, update_lr_scheduler=advance_schedule, calculate_entropy=self._entropy)
        output = self.train_batch(data)
        metrics: dict[str, Any] = tu.get(output, "metrics")
        if not torch.isfinite(torch.tensor(metrics["grad_norm"])):
            raise LearnerError(
                f"The gradient norm is {metrics['grad_norm']}: verl skipped the step. Lower the lr."
            )
        return metrics

    def _logprobs(self, batch: TrainBatch) -> list[torch.Tensor]:
        """All ranks' response log-probabilities, in the order of the batch."""
        indices = self._own_rows(batch)
        data = _tensordict(batch, indices, None)
        tu.assign_non_tensor(data, compute_loss=False)
        rows = tu.get(self.infer_batch(data), "log_probs").unbind()
        samples = _padded(batch, _num_ranks())
        # verl's row i holds log p(token i+1): the response's begin one before its first token.
        own = {
            index: row[len(samples[index].prompt_ids) - 1 : len(samples[index]) - 1].clone()
            for index, row in zip(indices, rows, strict=True)
        }
        gathered: list[dict[int, torch.Tensor]] = [{}] * _num_ranks()
        dist.all_gather_object(gathered, own)
        by_index = {index: row for part in gathered for index, row in part.items()}
        return [by_index[index] for index in range(len(batch.samples))]

    def _own_rows(self, batch: TrainBatch) -> list[int]:
        world_size = _num_ranks()
        return list(range(dist.get_rank(), len(_padded(batch, world_size)), world_size))

    # -- weights and checkpoints ---------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors by checkpoint name. Collective: every rank has to iterate to the end."""
        tied = bool(self.model_config.hf_config.tie_word_embeddings)
        parameters, _ = self.engine.get_per_tensor_param()
        for name, tensor in parameters:
            if not (tied and name == "lm_head.weight"):
                yield name, tensor

    @on_all_ranks
    def save(self, folder: str) -> None:
        """Write this rank's optimizer state, and from rank 0 the whole model in Hugging Face format."""
        self.save_checkpoint(folder)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in self.weights()}
        if dist.get_rank() == 0:
            from safetensors.torch import save_file

            # verl has put config and tokenizer there already; its own export would round to bfloat16.
            save_file(state, os.path.join(folder, "huggingface", "model.safetensors"), {"format": "pt"})
        dist.barrier()

    @on_all_ranks
    def load(self, folder: str) -> None:
        """Restore weights, optimizer, schedule and generators from ``save``.

        Raises:
            ConfigError: the checkpoint was written by another number of ranks.
        """
        world_size = _num_ranks()
        if not os.path.exists(os.path.join(folder, f"model_world_size_{world_size}_rank_0.pt")):
            raise ConfigError(
                f"The checkpoint {folder} was not written by {world_size} learner rank(s): resume with the "
                "learner.num_workers it was trained with, or start anew from its huggingface folder with "
                "model.path."
            )
        self.load_checkpoint(folder)


def _num_ranks() -> int:
    return int(dist.get_world_size())


# -- data ----------------------------------------------------------------------------------------------


def _padded(batch: TrainBatch, world_size: int) -> tuple[TrainingSample, ...]:
    """The samples, filled up so that each rank has equally many."""
    missing = -len(batch.samples) % world_size
    return batch.samples + (padding_sample(batch.samples[0].prompt_ids[0]),) * missing


def _tensordict(
    batch: TrainBatch, indices: Sequence[int], old_logprobs: list[torch.Tensor] | None
) -> TensorDict:
    """This rank's rows in verl's layout: jagged tensors, one row a sample.

    ``loss_mask`` covers prompt and response for the supervised loss and the response alone for the policy
    loss, because verl's two losses read it so; its sum over all ranks is what token means divide by.
    """
    samples = _padded(batch, _num_ranks())
    rows = [samples[index] for index in indices]
    policy = old_logprobs is not None
    nested = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    masks = [torch.tensor(row.loss_mask) for row in rows]
    columns = {
        "input_ids": nested([torch.tensor(row.prompt_ids + row.response_ids) for row in rows]),
        "position_ids": nested([torch.arange(len(row)) for row in rows]),
        "prompts": nested([torch.tensor(row.prompt_ids) for row in rows]),
        "responses": nested([torch.tensor(row.response_ids) for row in rows]),
        "response_mask": nested(masks),
        "loss_mask": nested(masks)
        if policy
        else nested([torch.tensor((0,) * len(row.prompt_ids) + row.loss_mask) for row in rows]),
    }
    if old_logprobs is not None:
        columns["advantages"] = nested([torch.tensor(row.advantages) for row in rows])
        columns["old_log_probs"] = nested(
            [
                old_logprobs[index] if index < len(old_logprobs) else torch.zeros(len(row.response_ids))
                for index, row in zip(indices, rows, strict=True)
            ]
        )
    real = sum(1 for sample in batch.samples if sample.num_sampled_tokens)
    return tu.get_tensordict(
        columns, non_tensor_dict={"temperature": batch.temperature, "global_batch_size": real}
    )


# -- metrics -------------------------------------------------------------------------------------------

METRIC_NAMES = {
    "loss": "learn/loss",
    "grad_norm": "learn/grad_norm",
    "lr": "learn/lr",
    "actor/pg_clipfrac": "learn/clip_fraction",
    "actor/ppo_kl": "learn/kl",
    "actor/entropy_loss": "learn/entropy",
}


def _number(value: Any) -> float:
    from verl.utils.metric import Metric

    if isinstance(value, list):
        if value and isinstance(value[0], Metric):
            return float(Metric.aggregate_dp(value))
        return sum(map(_number, value)) / max(1, len(value))
    if isinstance(value, Metric):
        return float(value.aggregate())
    return float(value)


def _mean_update(steps: list[dict[str, Any]], extra: dict[str, float]) -> LearnerUpdate:
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in steps:
        for name, ours in METRIC_NAMES.items():
            if name in metrics:
                values[ours].append(_number(metrics[name]))
    means = {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
    return LearnerUpdate(metrics=means | extra, num_optimizer_steps=len(steps))


def _logprob_mismatch(batches: Sequence[TrainBatch], learner: list[list[torch.Tensor]]) -> dict[str, float]:
    """How far the engine's log-probabilities of the sampled tokens are from the learner's."""
    differences = [
        (row - torch.tensor(sample.rollout_logprobs))[torch.tensor(sample.loss_mask, dtype=torch.bool)].abs()
        for batch, rows in zip(batches, learner, strict=True)
        for sample, row in zip(batch.samples, rows, strict=True)
    ]
    flat = torch.cat(differences)
    return {
        "learn/rollout_logprob_diff_max": float(flat.max()),
        "learn/rollout_logprob_diff_mean": float(flat.mean()),
    }


# -- verl's configuration ------------------------------------------------------------------------------


def _verl(cls: type, section: str, learner: LearnerConfig, **ours: Any) -> Any:
    """``cls`` with our settings, and over them the user's own from ``learner.verl.<section>``."""
    unknown = set(learner.verl) - set(VERL_SECTIONS)
    if unknown:
        raise ConfigError(f"learner.verl has {sorted(unknown)}: its keys are {', '.join(VERL_SECTIONS)}.")
    try:
        return cls(**(ours | dict(learner.verl.get(section, {}))))
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"verl refuses learner.verl.{section}: {error}") from error


def _optimizer_config(
    optimizer: OptimizerConfig, learner: LearnerConfig, num_schedule_steps: int
) -> FSDPOptimizerConfig:
    return _verl(
        FSDPOptimizerConfig,
        "optimizer",
        learner,
        lr=optimizer.lr,
        lr_scheduler_type=optimizer.schedule,
        lr_warmup_steps=optimizer.warmup_steps,
        min_lr_ratio=optimizer.min_lr_ratio,
        total_training_steps=num_schedule_steps,
        weight_decay=optimizer.weight_decay,
        betas=tuple(optimizer.betas),
        clip_grad=optimizer.max_grad_norm,
    )


def _worker_config(model_path: str, learner: LearnerConfig, num_schedule_steps: int) -> TrainingWorkerConfig:
    precision = PRECISION[learner.dtype]
    return TrainingWorkerConfig(
        model_type="language_model",
        model_config=_verl(
            HFModelConfig,
            "model",
            learner,
            path=model_path,
            use_remove_padding=False,  # packing needs flash attention
            enable_gradient_checkpointing=learner.device != "cpu",
            override_config={"attn_implementation": "sdpa"},
        ),
        engine_config=_verl(
            FSDPEngineConfig,
            "engine",
            learner,
            strategy="fsdp2",
            fsdp_size=-1,
            use_torch_compile=False,
            use_remove_padding=False,
            dtype=learner.dtype,
            model_dtype="fp32",
            mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            use_dynamic_bsz=True,
            max_token_len_per_gpu=learner.micro_batch_tokens,
            infer_max_token_len_per_gpu=learner.micro_batch_tokens,
        ),
        optimizer_config=_optimizer_config(learner.optimizer, learner, num_schedule_steps),
        checkpoint_config=CheckpointConfig(
            save_contents=["model", "optimizer", "extra"], load_contents=["model", "optimizer", "extra"]
        ),
    )


def _actor_config(learner: LearnerConfig, algorithm: AlgorithmConfig) -> FSDPActorConfig:
    return _verl(
        FSDPActorConfig,
        "actor",
        learner,
        strategy="fsdp2",
        rollout_n=1,  # verl asks for it, but only its own trainer reads it
        use_dynamic_bsz=True,
        use_torch_compile=False,
        clip_ratio=algorithm.clip_low,
        clip_ratio_low=algorithm.clip_low,
        clip_ratio_high=algorithm.clip_high,
        loss_agg_mode=algorithm.loss_aggregation,
        entropy_coeff=algorithm.entropy_coef,
        policy_loss=PolicyLossConfig(loss_mode=algorithm.loss),
    )
