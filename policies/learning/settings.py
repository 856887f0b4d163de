"""The learner's settings: plain dataclasses, importable without torch or verl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from environments.bounds import Bound, check_choice, leaves, setting

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)


SEQUENCE_RANKS = "learner.verl.engine.ulysses_sequence_parallel_size"
CLIP_RANGE = "clip_range"
"""Key of ``learner.critic`` that is none of its optimizer."""


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


@dataclass
class CorrectionConfig:
    """Correction for tokens that were sampled by older weights or by other arithmetic than the learner's."""

    level: str | None = setting(None, one_of=("token", "sequence", "none", "bypass"))
    """Level of importance weights: one for every token or for the whole sequence; none corrects nothing;
    bypass takes the ratio of the loss to the engine's log-probabilities, instead of the learner's own before
    the update, which saves a forward pass. Null is token where rollout.max_staleness lets older policies
    sample, or engine or learner computes in another dtype than float32, and otherwise none."""
    truncate_above: float | None = setting(None, at_least=1)
    """Larger importance weights are cut to this value (truncated importance sampling); null is 2 unless
    mask_outside has an upper bound."""
    mask_outside: list[float | None] | None = setting(None, above=0, length=2)
    """Tokens or sequences with a weight outside of these two bounds are left out (masked importance
    sampling): [0.5,5], or [null,5] without a lower one."""


@dataclass
class AlgorithmConfig:
    """The objective that is optimized. For a setting that is null, the named algorithm has a value."""

    name: str = "grpo"
    """grpo, dr_grpo, dapo, gspo, cispo, gigpo, mt_grpo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, remax, opo, gpg, ppo, distillation, one that module registers, or custom,
    which combines advantage and loss."""
    advantage: str | None = None
    """Advantage estimator, for name=custom: grpo, rloo, grpo_passk, ... or one that module registers."""
    loss: str | None = None
    """Policy loss, for name=custom: vanilla (clipped PPO), reinforce, sapo, ... or one of module's."""
    module: str | None = None
    """Module that registers your own advantage, loss or algorithm; every learner rank imports it."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings that the estimator or the loss has for itself: normalize_by_std (grpo's), omega (gigpo's), lam
    (gae's), teacher, teacher_model, teacher_key and reward_coef (distillation's), or those of your own.
    Unknown ones are errors."""
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
    """Discount: from turn to turn with credit=per_step and in gigpo (null is 0.95) and
    mt_grpo (null is 0), from token to token in ppo, reinforce_plus_plus."""
    zero_signal_groups: str | None = setting(None, one_of=("keep", "drop", "refill"))
    """Groups whose members were all rewarded alike by the environment. keep: as in the papers' objectives.
    drop: fewer optimizer steps. refill: another task takes their place (DAPO's dynamic sampling)."""
    overlong: dict[str, Any] = field(default_factory=dict)
    """Penalty of a response that runs into its token limit (DAPO, eq. 13): {penalty: 1, buffer_tokens: 100}
    subtracts at most 1 from its reward, growing from 0 over the last 100 tokens before the limit."""
    kl: KLConfig = field(default_factory=KLConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass
class OverlongConfig:
    """Keys of ``algorithm.overlong``; for one that is left out, the named algorithm has a value."""

    penalty: float = setting(0.0, at_least=0)
    buffer_tokens: int = setting(1, at_least=1)


@dataclass
class OptimizerConfig:
    """AdamW and its schedule."""

    lr: float = setting(1e-6, at_least=0)
    """Peak learning rate."""
    warmup_steps: int = setting(0, at_least=0)
    """Schedule steps over which the learning rate rises: step k of n has k/n of it, from k = 1."""
    min_lr_ratio: float = setting(1.0, at_least=0, at_most=1)
    """Learning rate of the last step, as a fraction of lr, to which it falls along a cosine. 1 keeps it
    constant after the warm-up."""
    weight_decay: float = setting(0.0, at_least=0)
    """Decoupled weight decay."""
    max_grad_norm: float = setting(1.0, above=0)
    """Gradients are scaled down to this norm."""


def phase_optimizer(setting: str, given: Mapping[str, Any]) -> OptimizerConfig:
    """Make the optimizer of a stage, or of the critic, from the settings of its own.

    What is not ``given`` has its default, and not the value of ``learner.optimizer``: a schedule of one phase
    does not fit another, and a run of before gives the same numbers.

    Args:
        setting: the name, such as ``warm_start.optimizer``, for messages.

    Raises:
        ConfigError: an unknown name, or a value of the wrong type or out of bounds.
    """
    check_keys(setting, given, OptimizerConfig())
    return OptimizerConfig(**given)


def check_keys(setting: str, given: Mapping[str, Any], declared: object) -> None:
    """Raise ``ConfigError`` for a key of ``given`` that is not ``declared``, or a value that is wrong."""
    known = {leaf.name: leaf for leaf in leaves(declared)}
    for name, value in given.items():
        check_choice(setting, name, known)
        known[name].check(f"{setting}.{name}", value)


@dataclass
class LoRAConfig:
    """Low-rank adapters, trained instead of all weights. Engines get weights with the adapters merged in."""

    rank: int = setting(0, at_least=0)
    """Rank of the adapters; 0 trains all weights. learner.verl.model has the rest: they are scaled by
    lora_alpha / rank, and the layers of target_modules have one."""


@dataclass
class LearnerConfig:
    """The verl worker group that holds weights and optimizer."""

    num_workers: int = setting(1, at_least=1, at_most=100_000)
    """Ranks of the FSDP2 group."""
    device: str = setting("cpu", one_of=("cpu", "cuda"))
    """cpu uses gloo; cuda uses NCCL and one GPU per rank."""
    nodes: dict[str, Any] = field(default_factory=dict)
    """Needs of a rank on its node, beside one CPU and, with device=cuda, one GPU: see fleet.nodes."""
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
    checks them. All but actor also apply to the critic. {optimizer: {betas: [0.9, 0.95]}} and {model:
    {lora_alpha: 16, target_modules: all-linear}} are the defaults. A regular expression in target_modules
    matches whole names; the experts of a mixture of experts have no adapters, since transformers keeps them
    as one tensor."""
    mismatch_alarm: float = setting(1e-3, at_least=0)
    """Mean difference of the log-probabilities of engine and learner, in nats, above which a run warns: by
    default 0.001, and 0.05 where either computes in another dtype than float32. The mean is over trajectories
    that were sampled by the newest version alone (a few of them with algorithm.correction.level=bypass), or
    over a short completion of its own where there are none."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    critic: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-5})
    """The value model of algorithms that have one (ppo), a second worker group that starts from the model:
    its own settings as of learner.optimizer, of which those left out have their defaults, and clip_range,
    the distance from the old values within which the value loss keeps the new ones; 0.5 if left out."""

    @property
    def ranks_of_row(self) -> int:
        """Number of ranks that compute a row together: ``SEQUENCE_RANKS``."""
        return int(self.verl.get("engine", {}).get(SEQUENCE_RANKS.rpartition(".")[2], 1))

    @property
    def row_tokens(self) -> int:
        """Most tokens of a row."""
        return self.micro_batch_tokens * self.ranks_of_row


def critic_optimizer(learner: LearnerConfig) -> OptimizerConfig:
    """Make the critic's optimizer. Raises ``ConfigError`` as ``phase_optimizer`` does."""
    Bound(above=0).check_value("learner.critic.clip_range", critic_clip_range(learner))
    own = {name: value for name, value in learner.critic.items() if name != CLIP_RANGE}
    return phase_optimizer("learner.critic", own)


def critic_clip_range(learner: LearnerConfig) -> float:
    """Return the clip range of the value loss."""
    return float(learner.critic.get(CLIP_RANGE, 0.5))
