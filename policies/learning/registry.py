"""Advantage estimators and policy losses: a row for each holds all that the other modules have to know of it.

A row without a function is verl's, by its name in verl. A user's module adds rows with ``register_estimator``
and ``register_loss``; ``algorithm.module`` names the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from environments.bounds import check_choice, leaves, setting
from environments.errors import ConfigError
from environments.named_module import load_module

if TYPE_CHECKING:
    import numpy as np
    import torch


@dataclass
class NoOptions:
    """Options of an estimator or a loss that has none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """Needs of an advantage estimator, and which settings have an effect on it."""

    compares: bool = False
    """The estimator compares a trajectory with the other members of its group; one without others gets
    advantage 0."""
    uses_untrained: bool = False
    """Trajectories that are not trained on count in the baseline."""
    turns_by: str | None = None
    """Each turn is compared too, by its discounted return, in a row of its own: with all turns of its group
    that began in an equal ``state``, or with the same ``turn`` of the other members. What comes of it, times
    the option ``omega``, is added to the trajectory's advantage."""
    by_token: bool = False
    """Reads a reward at the token where it was earned. Otherwise it reads the sum of the rewards, at the
    last token."""
    discounts: bool = False
    """Discounts rewards by ``gamma``."""
    whitens: bool = False
    """Normalizes the advantages over all trained tokens of the update; a single one gets advantage 0."""
    uses_critic: bool = False
    """Is given ``values`` [N, T] of a value model that is trained beside the policy."""
    uses_greedy_baseline: bool = False
    """Is given ``reward_baselines`` [N], the rewards of a greedy rollout of each task."""
    uses_teacher: bool = False
    """Is given ``old_log_prob`` and ``teacher_log_prob`` [N, T] of a model that its option ``teacher`` names:
    the learner's ranks load it beside the policy, or a server has it."""
    options: type = NoOptions
    """Dataclass of its own settings, which are arguments of the function."""
    function: Callable[..., Any] | None = None
    """Ours or the user's; ``None`` for one that verl has."""
    name_in_verl: str | None = None
    """``None`` for one that verl has under this name, or does not have."""

    def __post_init__(self) -> None:
        check_choice("turns_by of an estimator", self.turns_by, ("state", "turn"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Settings that have an effect on a policy loss, with the values of its paper."""

    clips: bool = False
    """Reads ``clip_low`` and ``clip_high``."""
    clip: tuple[float, float] | None = None
    """The usual ``clip_low`` and ``clip_high``; ``None`` if there are none."""
    aggregation: str = "token-mean"
    """The usual ``loss_aggregation``."""
    aggregates: bool = True
    """Another aggregation may be chosen."""
    uses_ratio: bool = True
    """Uses the ratio of the probabilities to the old ones. ``correction.level=bypass`` replaces the old
    ones by the engine's."""
    uses_weights: bool = True
    """Multiplies each token's loss by the token's importance weight, if there are any."""
    one_advantage: bool = False
    """Takes one advantage for a whole sequence: those of turns or tokens it would average."""
    ratio_cap: float | None = None
    """The usual ``learner.verl.actor.clip_ratio_c``; ``None`` is verl's own, 3."""
    options: type = NoOptions
    """Dataclass of its own settings, which are arguments of the function."""
    function: Callable[..., Any] | None = None
    """The user's; ``None`` for one that verl has under this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Definition:
    """Parts of a named algorithm. ``None`` is left to its loss."""

    advantage: str
    loss: str = "vanilla"
    loss_aggregation: str | None = None
    clip_high: float | None = None
    gamma: float = 1.0
    """The usual ``gamma``."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Part of the algorithm's definition: they cannot be set."""
    zero_signal_groups: str = "keep"
    overlong_penalty: float = 0.0


# -- estimators ----------------------------------------------------------------------------------------


@dataclass
class GRPOOptions:
    """Options of GRPO's estimators."""

    normalize_by_std: bool = True
    """Divide advantages by the standard deviation of the group's rewards."""


@dataclass
class TurnOptions(GRPOOptions):
    """Options of estimators that compare trajectories and turns."""

    omega: float = setting(1.0, at_least=0)
    """Weight of what a turn has of its own; 0 leaves GRPO."""


@dataclass
class GAEOptions:
    """Options of generalized advantage estimation."""

    lam: float = setting(0.95, at_least=0, at_most=1)
    """Lambda: 1 trusts the rewards alone, 0 the critic's next value."""


@dataclass
class DistillationOptions:
    """Options of distillation from a teacher."""

    teacher: str = ""
    """Folder or hub name of the teacher, a run (its newest checkpoint), a checkpoint, or a run's file
    checkpoints/best; or the address of a server that gives log-probabilities of given tokens, such as
    http://localhost:8000/v1. Its tokenizer is the policy's."""
    teacher_model: str = ""
    """Name of the teacher at an address, such as policy@best."""
    teacher_key: str = ""
    """Name of the environment variable with the key of an address; empty for a server that needs none."""
    reward_coef: float = setting(0.0, at_least=0)
    """Weight of the environment's rewards, as their distance from the group's mean; 0 leaves them out."""


def reverse_kl(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    old_log_prob: torch.Tensor,
    teacher_log_prob: torch.Tensor,
    reward_coef: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages [N, T] in nats: log p_teacher - log p_policy of each token that the policy has sampled.

    The mean of log p_policy - log p_teacher over the policy's own tokens is the reverse KL, and the policy
    gradient with these advantages goes down it, each token for itself: what follows a token is not charged to
    it. Rewards enter as their distance from the mean of their group, the same for all tokens of a rollout.

    Source: Agarwal et al. 2024 (GKD), section 3; Gu et al. 2024 (MiniLLM), eq. 1; per token, with a discount
    of 0, in Lu et al. 2025 (Thinking Machines, On-Policy Distillation).
    """
    advantages = teacher_log_prob - old_log_prob
    if reward_coef:
        rewards = token_level_rewards.sum(-1, keepdim=True)
        for name in set(index):
            members = index == name
            advantages[members] += reward_coef * (rewards[members] - rewards[members].mean())
    advantages = advantages * response_mask
    return advantages, advantages


_GROUP = Estimator(compares=True, uses_untrained=True)
_GRPO = Estimator(compares=True, uses_untrained=True, options=GRPOOptions)
_TURNS = replace(_GRPO, discounts=True, options=TurnOptions, name_in_verl="grpo")
ESTIMATORS = {
    "grpo": _GRPO,
    "grpo_vectorized": _GRPO,
    "grpo_passk": _GRPO,
    "gigpo": replace(_TURNS, turns_by="state"),
    "mt_grpo": replace(_TURNS, turns_by="turn"),
    "rloo": _GROUP,
    "rloo_vectorized": _GROUP,
    "opo": _GROUP,
    "gpg": _GROUP,
    "reinforce_plus_plus_baseline": Estimator(compares=True, uses_untrained=True, whitens=True),
    "reinforce_plus_plus": Estimator(by_token=True, discounts=True, whitens=True),
    "gae": Estimator(by_token=True, discounts=True, whitens=True, uses_critic=True, options=GAEOptions),
    "remax": Estimator(uses_greedy_baseline=True),
    "reverse_kl": Estimator(uses_teacher=True, options=DistillationOptions, function=reverse_kl),
}
UNFIT_ESTIMATORS = {
    "gdpo": "it needs rewards in several dimensions, and a step has one",
    "optimal_token_baseline": "it needs the sum of squared probabilities, which the learner does not compute",
    "tir_optimal_token_baseline": "it needs the sum of squared probabilities, which the learner does not "
    "compute",
}

# -- losses --------------------------------------------------------------------------------------------

LOSSES = {
    "vanilla": Loss(clips=True, clip=(0.2, 0.2)),  # Schulman et al. 2017, eq. 7
    # Zheng et al. 2025, section 5.1
    "gspo": Loss(clips=True, clip=(3e-4, 4e-4), aggregation="seq-mean-token-mean"),
    # MiniMax 2025, section 3.1: no lower bound; the upper is unpublished
    "cispo": Loss(clips=True, clip=(1.0, 0.2)),
    # Williams 1992: -advantage * log-probability, summed over a sequence
    "reinforce": Loss(uses_ratio=False, aggregation="seq-mean-token-sum"),
    "gpg": Loss(uses_ratio=False),  # Chu et al. 2025: the same, as a mean over tokens
    "sapo": Loss(aggregation="seq-mean-token-mean", aggregates=False),
    # Zhao et al. 2025 (GMPO, arXiv 2507.20673): from e^-0.4 to e^0.4, and a mean over sequences
    "geo_mean": Loss(
        clips=True,
        clip=(0.4, 0.4),
        aggregation="seq-mean-token-mean",
        aggregates=False,
        one_advantage=True,
    ),
    # arXiv 2602.04879, section 5.4: only a large cap does no harm; verl's losses ask for 20
    "dppo_tv": Loss(clips=True, ratio_cap=20.0),
    "dppo_kl": Loss(clips=True, ratio_cap=20.0),
}
UNFIT_LOSSES = {
    "clip_cov": "it chooses tokens within each micro-batch, so the gradient would depend on "
    "learner.micro_batch_tokens",
    "kl_cov": "it chooses tokens within each micro-batch, so the gradient would depend on "
    "learner.micro_batch_tokens",
    "dro": "its penalty has no setting here",
    "bypass_mode": "it is a mode of the correction: set algorithm.correction.level=bypass and a loss",
}

# -- a user's own --------------------------------------------------------------------------------------

SHIPPED_ESTIMATORS = frozenset({*ESTIMATORS, *UNFIT_ESTIMATORS})
SHIPPED_LOSSES = frozenset({*LOSSES, *UNFIT_LOSSES})
"""Names that come with verl or Troupe, and that no module of a user's may take."""
ARGUMENTS = (
    *("token_level_rewards", "response_mask", "index", "gamma", "config", "values", "reward_baselines"),
    *("old_log_prob", "log_prob", "advantages", "loss_agg_mode", "rollout_is_weights", "teacher_log_prob"),
)
"""Arguments of estimators and losses besides their options."""
Function = TypeVar("Function", bound=Callable[..., Any])


def register_estimator(name: str, **row: Any) -> Callable[[Function], Function]:
    """Decorate an advantage estimator; ``row`` holds fields of ``Estimator``.

    The function is called once an update with those of these arguments that it names (all if it has
    ``**others``): ``token_level_rewards`` [N, T], ``response_mask`` [N, T], ``index`` [N] (the group of each
    row), ``gamma``, ``config`` (verl's ``AlgoConfig``), where the row says so ``values`` [N, T],
    ``reward_baselines`` [N], or ``old_log_prob`` and ``teacher_log_prob`` [N, T], and its own options by
    their names. It returns advantages and returns, both [N, T].

    Raises:
        ConfigError: the name is taken by an estimator that comes with Troupe or verl.
    """

    def register(function: Function) -> Function:
        made = Estimator(function=function, **row)
        _check_own("estimator", name, made, SHIPPED_ESTIMATORS)
        ESTIMATORS[name] = made
        return function

    return register


def register_loss(name: str, **row: Any) -> Callable[[Function], Function]:
    """Decorate a policy loss; ``row`` holds fields of ``Loss``.

    The function is called for every micro-batch as verl's losses are: with ``old_log_prob``, ``log_prob``,
    ``advantages``, ``response_mask`` [N, T], ``loss_agg_mode``, ``config`` (verl's ``ActorConfig``) and
    ``rollout_is_weights`` ([N, T] or ``None``), and with its own options by their names. It returns the loss,
    aggregated by verl's ``agg_loss``, and a dict of metrics. It has to be proportional to the advantages:
    with seq-mean-token-mean those of a sample are times its share of its trajectory's tokens. A loss that
    does not name ``old_log_prob`` has no ratio, and one that does not name ``rollout_is_weights`` no
    importance weights: settings about them are errors.

    Raises:
        ConfigError: the name is taken by a loss that comes with Troupe or verl.
    """

    def register(function: Function) -> Function:
        named = inspect.signature(function).parameters
        heeds = {"uses_ratio": "old_log_prob" in named, "uses_weights": "rollout_is_weights" in named}
        made = Loss(function=function, **(heeds | row))
        _check_own("loss", name, made, SHIPPED_LOSSES)
        LOSSES[name] = made
        return function

    return register


def import_own(module: str | None) -> None:
    """Import the module in which the user registers something, if there is one: on every learner rank too.

    Raises:
        ConfigError: there is no such module, or its code fails.
    """
    if module is not None:
        load_module(f"algorithm.module={module!r}", module)


def _check_own(kind: str, name: str, row: Estimator | Loss, taken: Collection[str]) -> None:
    assert row.function is not None
    if name in taken:
        raise ConfigError(
            f"The {kind} {name!r} comes with Troupe or verl: register yours under another name."
        )
    parameters = inspect.signature(row.function).parameters
    if isinstance(row, Estimator) and row.uses_teacher and not hasattr(row.options(), "teacher"):
        raise ConfigError(
            f'The estimator {name!r} uses a teacher, and no option names it: add a field teacher: str = "".'
        )
    for option in fields(row.options):
        if option.name in ARGUMENTS or option.name not in parameters:
            raise ConfigError(
                f"The option {option.name!r} of the {kind} {name!r} has to be a parameter of "
                f"{row.function.__name__}, and none of {', '.join(ARGUMENTS)}."
            )


def resolve_options(
    name: str, given: Mapping[str, Any], fixed: Mapping[str, Any], *declared: type
) -> dict[str, Any]:
    """The values of all options that the dataclasses ``declared`` have as fields.

    An option that two of them declare has one value for both.

    Args:
        name: the algorithm's.
        given: what the user has set.
        fixed: what is part of the algorithm's definition.

    Raises:
        ConfigError: an unknown option, one that cannot be set, or a value of the wrong type or out of bounds.
    """
    known = {leaf.name: leaf for each in declared for leaf in leaves(each())}
    for option, value in given.items():
        setting = f"algorithm.options.{option}"
        if not known:
            raise ConfigError(f"{setting}={value!r}: algorithm.name={name!r} has no options. Leave it out.")
        check_choice("algorithm.options", option, known, f" These are the options of {name}.")
        if option in fixed:
            raise ConfigError(
                f"{setting}={value!r} has no effect in algorithm.name={name!r}: it is {fixed[option]!r} by "
                "definition. Leave it out."
            )
        known[option].check(setting, value)
    return {option: leaf.value for option, leaf in known.items()} | dict(fixed) | dict(given)
