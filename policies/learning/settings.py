"""The learner's settings: plain dataclasses, importable without torch or verl."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from environments.bounds import setting
from policies.settings import NodesConfig

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


@dataclass
class KLConfig:
    """A penalty for leaving the reference policy: the policy as it was before the first update."""

    place: str = setting("none", one_of=("none", "loss", "reward"))
    """Place where the penalty enters. loss: a term beside the policy loss. reward: it is subtracted from the
    reward of every token."""
    coef: float | None = setting(None, above=0)
    """Weight of the penalty; with a target, the first weight of the controller. Null means 0.001."""
    estimator: str | None = None
    """Estimator of the KL: k1, abs, k2 or k3 in the reward (null is k1); abs, k2, k3, k1+, k2+ or k3+ in the
    loss (null is k3). The gradient of k3 on a token grows exponentially with its distance below the
    reference, that of k2 and of the plus ones linearly."""
    target: float | None = setting(None, above=0)
    """KL per token to which an adaptive controller steers; null keeps coef fixed. For place=reward only."""
    horizon: int | None = setting(None, at_least=1)
    """Trajectories over which the adaptive controller corrects; null means 10000."""


@dataclass
class CorrectionConfig:
    """Correction for tokens that were sampled by older weights or by other arithmetic than the learner's."""

    mode: str = setting("decoupled", one_of=("decoupled", "bypass"))
    """The old log-probabilities in the ratio of the loss. decoupled: the learner computes them before the
    update. bypass: those of the engine, which saves a forward pass."""
    level: str | None = setting(None, one_of=("token", "sequence", "none"))
    """Level of importance weights: one for every token or for the whole sequence; none corrects nothing. Null
    is token where rollout.max_staleness lets older policies sample, and otherwise none."""
    truncate_above: float | None = setting(None, at_least=1)
    """Larger importance weights are cut to this value (truncated importance sampling); null is 2 unless
    mask_above is set."""
    mask_below: float | None = setting(None, above=0, at_most=1)
    """Tokens or sequences with a smaller weight are left out (masked importance sampling)."""
    mask_above: float | None = setting(None, at_least=1)
    """Tokens or sequences with a larger weight are left out (masked importance sampling)."""


@dataclass
class AlgorithmConfig:
    """The objective that is optimized. For a setting that is null, the named algorithm has a value."""

    name: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax, opo,
    gpg, ppo, one that module registers, or custom, which combines advantage and loss."""
    advantage: str | None = None
    """Advantage estimator, for name=custom: grpo, rloo, grpo_passk, ... or one that module registers."""
    loss: str | None = None
    """Policy loss, for name=custom: vanilla (clipped PPO), reinforce, sapo, ... or one of module's."""
    module: str | None = None
    """Module that registers your own advantage, loss or algorithm; every learner rank imports it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings that the estimator or the loss has for itself: normalize_by_std (grpo's), lam (gae's), or
    those of your own. Unknown ones are errors."""
    loss_aggregation: str | None = setting(None, one_of=AGGREGATIONS)
    """Way in which the losses of an update's tokens become one number."""
    clip_low: float | None = setting(None, above=0)
    """Lower clip range: the ratio is kept above 1 - clip_low; with loss=geo_mean above e^-clip_low."""
    clip_high: float | None = setting(None, above=0)
    """Upper clip range: the ratio is kept below 1 + clip_high; with loss=geo_mean below e^clip_high."""
    entropy_coef: float = setting(0.0, at_least=0)
    """Weight of the entropy bonus."""
    credit: str | None = setting(None, one_of=("broadcast", "per_step"))
    """broadcast: one advantage for the whole trajectory. per_step: every turn has its own return."""
    gamma: float | None = setting(None, at_least=0, at_most=1)
    """Discount: from turn to turn with credit=per_step, from token to token in ppo, reinforce_plus_plus."""
    zero_signal_groups: str | None = setting(None, one_of=("keep", "drop", "refill"))
    """Groups whose members were all rewarded alike by the environment. keep: as in the papers' objectives.
    drop: fewer optimizer steps. refill: another task takes their place (DAPO's dynamic sampling)."""
    overlong_penalty: float | None = setting(None, at_least=0)
    """Most that is subtracted from the reward of a response that runs into its token limit (DAPO, eq. 13)."""
    overlong_buffer_tokens: int | None = setting(None, at_least=1)
    """Tokens before the limit over which that penalty grows from 0."""
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass
class OptimizerConfig:
    """AdamW and its schedule, for one phase of training."""

    lr: float = setting(1e-6, at_least=0)
    """Peak learning rate."""
    schedule: str = setting("constant", one_of=("constant", "cosine"))
    """The learning rate after the warm-up."""
    warmup_steps: int = setting(0, at_least=0)
    """Schedule steps over which the learning rate rises: step k of n has k/n of it, from k = 1."""
    min_lr_ratio: float = setting(0.0, at_least=0, at_most=1)
    """Learning rate of a cosine schedule's last step, as a fraction of lr."""
    weight_decay: float = setting(0.0, at_least=0)
    """Decoupled weight decay."""
    betas: list[float] = setting([0.9, 0.95], at_least=0, below=1, length=2)
    """AdamW's moment decay rates."""
    max_grad_norm: float = setting(1.0, above=0)
    """Gradients are scaled down to this norm."""


@dataclass
class LoRAConfig:
    """Low-rank adapters, trained instead of all weights. Engines get weights with the adapters merged in."""

    rank: int = setting(0, at_least=0)
    """Rank of the adapters; 0 trains all weights."""
    alpha: int = setting(16, at_least=1)
    """The adapters are scaled by alpha / rank."""
    target_modules: str = "all-linear"
    """Layers with an adapter: all-linear, or a regular expression that matches their whole names. The experts
    of a mixture of experts have none, since transformers keeps them as one tensor."""


@dataclass
class CriticConfig:
    """The value model of algorithms that have one (ppo): a second worker group that starts from the model."""

    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    clip_range: float = setting(0.5, above=0)
    """Values are kept within this distance of the old ones in the value loss."""


@dataclass
class LearnerConfig:
    """The verl worker group that holds weights and optimizer."""

    num_workers: int = setting(1, at_least=1, at_most=100_000)
    """Ranks of the FSDP2 group."""
    device: str = setting("cpu", one_of=("cpu", "cuda"))
    """cpu uses gloo; cuda uses NCCL and one GPU per rank."""
    nodes: NodesConfig = field(default_factory=NodesConfig)
    """Nodes that the ranks run on."""
    num_threads: int | None = setting(None, at_least=1)
    """CPU threads of a rank. Null is one for models of up to ten million parameters. Larger ones take the
    cores of the machine that the command runs on, divided by the ranks, and half of them where rollouts go
    on while the learner learns."""
    dtype: str = setting("float32", one_of=("float32", "bfloat16"))
    """Type of the computation. Master weights stay in float32."""
    mini_batch_size: int = setting(64, at_least=1)
    """Trajectories per optimizer step."""
    num_epochs: int = setting(1, at_least=1)
    """Passes over the rollouts of one update of the stage reinforce: each takes the same mini-batches, in an
    order of its own. More than one needs a loss with a ratio to the policy before the update."""
    micro_batch_tokens: int = setting(16384, at_least=1)
    """Most tokens in one forward pass of a rank, with those that rows are padded by: it bounds the memory."""
    max_call_seconds: float = setting(1800.0, above=0)
    """Most seconds that the ranks may take for a piece of work, such as an update: then they count as hung.
    Ray finds a rank that was stopped sooner, and torch ranks that wait for each other (NCCL: ten minutes)."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    verl: dict[str, Any] = field(default_factory=dict)
    """Further fields of verl's configuration classes, under the keys engine, model, actor and optimizer; verl
    checks them. All but actor also apply to the critic."""
    mismatch_alarm: float = setting(1e-3, at_least=0)
    """Mean difference of the log-probabilities of engine and learner, in nats, above which a run warns. The
    mean is over trajectories that were sampled by the newest version alone (a few of them with
    algorithm.correction.mode=bypass), or over a short completion of its own where there are none."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
