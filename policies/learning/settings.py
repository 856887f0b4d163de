"""The learner's settings: plain dataclasses, importable without torch or verl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class AlgorithmConfig:
    """Which objective is optimized. Names are those of verl's registries."""

    advantage: str = "grpo"
    """Group advantage estimator: grpo, rloo, rloo_vectorized, opo, reinforce_plus_plus_baseline."""
    normalize_by_std: bool = True
    """Divide GRPO advantages by the group's standard deviation; false is Dr. GRPO."""
    loss: str = "vanilla"
    """Policy loss: vanilla (clipped PPO), gspo, cispo, gpg, geo_mean, ..."""
    loss_aggregation: str = "token-mean"
    """token-mean, seq-mean-token-sum or seq-mean-token-mean."""
    clip_low: float = 0.2
    """Lower clip range: the ratio is kept above 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip range: the ratio is kept below 1 + clip_high."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    drop_zero_advantage: bool = True
    """Leave trajectories without a learning signal out of the batch, so they do not dilute its mean."""


@dataclass
class OptimizerConfig:
    """AdamW and its schedule, for one phase of training."""

    lr: float = 1e-6
    """Peak learning rate."""
    schedule: str = "constant"
    """constant or cosine, after the warm-up."""
    warmup_steps: int = 0
    """Schedule steps over which the learning rate rises from 0."""
    min_lr_ratio: float = 0.0
    """Where a cosine schedule ends, as a fraction of lr."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's moment decay rates."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""


@dataclass
class LearnerConfig:
    """The verl worker group that holds weights and optimizer."""

    num_workers: int = 1
    """Ranks of the FSDP2 group."""
    device: str = "cpu"
    """cpu (gloo) or cuda (NCCL, one GPU per rank)."""
    dtype: str = "float32"
    """Compute type: float32 or bfloat16. Master weights stay in float32."""
    mini_batch_size: int = 64
    """Trajectories per optimizer step."""
    micro_batch_tokens: int = 16384
    """Most tokens that one rank puts through the model at once."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    verl: dict[str, Any] = field(default_factory=dict)
    """Passed to verl unread: keys engine, model, actor, optimizer hold fields of its config classes."""
