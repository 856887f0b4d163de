"""The algorithms by name: what each one is made of, and which settings mean something to it.

Whatever ``AlgorithmConfig`` leaves open is decided by the tables of ``ingredients``, which hold the papers'
own values.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from environments.bounds import check_bounds, check_choice
from environments.errors import ConfigError
from policies.learning.correction import resolve_correction
from policies.learning.kl import resolve_kl
from policies.learning.registry import (
    ALGORITHMS,
    ESTIMATORS,
    LOSSES,
    OWN_ESTIMATOR,
    OWN_LOSS,
    UNFIT_ESTIMATORS,
    UNFIT_LOSSES,
    Estimator,
    Loss,
    Recipe,
)
from policies.learning.settings import AlgorithmConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """An algorithm with every setting decided: nothing is null because somebody else will know."""

    name: str
    advantage: str
    loss: str
    loss_aggregation: str
    normalize_by_std: bool
    clip_low: float
    clip_high: float
    entropy_coef: float
    credit: str
    gamma: float
    lam: float
    zero_signal_groups: str
    overlong_penalty: float
    overlong_buffer_tokens: int
    kl_place: str
    kl_coef: float
    kl_estimator: str
    kl_target: float | None
    kl_horizon: int
    bypass: bool
    """The old log-probabilities are the engine's."""
    correction_level: str | None
    truncate_above: float | None
    mask_below: float | None
    mask_above: float | None
    module: str | None = None
    max_response_tokens: int | None = None
    """Where a response ends: what the overlong penalty is measured from and seq-mean-token-sum-norm divides
    by. Known wherever one of them is in use."""

    @property
    def uses_critic(self) -> bool:
        """Whether a value model is trained beside the policy."""
        return self.advantage == "gae"

    @property
    def uses_reference(self) -> bool:
        """Whether log-probabilities under the reference policy are needed."""
        return self.kl_place != "none"

    @property
    def uses_greedy_baseline(self) -> bool:
        """Whether each task is also rolled out greedily."""
        return self.advantage == "remax"

    @property
    def estimator(self) -> Estimator:
        """What the advantage estimator needs and heeds."""
        return ESTIMATORS.get(self.advantage, OWN_ESTIMATOR)


def resolve(
    config: AlgorithmConfig, max_response_tokens: int | None = None, max_staleness: int = 0
) -> Algorithm:
    """The algorithm that ``config`` names, with its settings.

    ``max_response_tokens`` is what a response may have at most. It is needed where the overlong penalty
    (dapo has it) or the aggregation seq-mean-token-sum-norm (dr_grpo) is in use. ``max_staleness`` is by how
    many updates a token may be older than the policy that learns from it.

    An estimator or loss of one's own: ``name=custom``, its name in ``advantage`` or ``loss``, and in
    ``module`` the module that registers it, when it is imported, with verl's ``register_adv_est`` or
    ``register_policy_loss``. The module is imported here and on every learner rank. An estimator gets
    ``token_level_rewards`` [N, T], ``response_mask`` [N, T], ``index`` [N] (the group of each row) and
    ``config`` (verl's ``AlgoConfig``), and returns advantages and returns, both [N, T].

    Raises:
        ConfigError: an unknown name, a combination that makes no sense, or a setting that has no effect in
            this algorithm.
    """
    check_bounds(config, "algorithm.")
    recipe = _recipe(config)
    estimator, loss = ESTIMATORS.get(recipe.advantage, OWN_ESTIMATOR), LOSSES.get(recipe.loss, OWN_LOSS)
    _check_effect(config, recipe, estimator, loss)
    _check_thresholds(config, loss)
    overlong_penalty = _or(config.overlong_penalty, recipe.overlong_penalty)
    aggregation = _or(config.loss_aggregation, recipe.loss_aggregation or loss.aggregation)
    clip_low, clip_high = loss.clip or (0.0, 0.0)
    _check_limit(overlong_penalty, aggregation, max_response_tokens)
    zero_signal_groups = _or(
        config.zero_signal_groups, recipe.zero_signal_groups if estimator.compares else "keep"
    )
    _check_zero_signal(zero_signal_groups, config, overlong_penalty)
    algorithm = Algorithm(
        name=config.name,
        advantage=recipe.advantage,
        loss=recipe.loss,
        loss_aggregation=aggregation,
        normalize_by_std=_or(
            config.normalize_by_std, estimator.normalizes and recipe.normalize_by_std is not False
        ),
        clip_low=_or(config.clip_low, clip_low),
        clip_high=_or(config.clip_high, _or(recipe.clip_high, clip_high)),
        entropy_coef=config.entropy_coef,
        credit=_or(config.credit, "broadcast"),
        gamma=_or(config.gamma, 1.0),
        lam=_or(config.lam, 0.95 if estimator.smooths else 1.0),
        zero_signal_groups=zero_signal_groups,
        overlong_penalty=overlong_penalty,
        overlong_buffer_tokens=_overlong_buffer(config, overlong_penalty, max_response_tokens),
        module=config.module,
        max_response_tokens=max_response_tokens,
        **resolve_kl(config.kl),
        **resolve_correction(config.correction, max_staleness),
    )
    register_own(algorithm)
    _check_registered(algorithm)
    return algorithm


def register_own(algorithm: Algorithm) -> None:
    """Import the module in which the user registers an estimator or a loss, if there is one.

    Raises:
        ConfigError: it cannot be imported.
    """
    if algorithm.module is None:
        return
    try:
        importlib.import_module(algorithm.module)
    except ImportError as error:
        raise ConfigError(
            f"algorithm.module={algorithm.module!r} cannot be imported: {error}. It has to be on PYTHONPATH "
            "or in the working directory, on every node."
        ) from error


def check_group_size(algorithm: Algorithm, group_size: int) -> None:
    """Refuse groups that are too small to be compared within.

    Raises:
        ConfigError: an estimator that compares the members of a group, and groups of one.
    """
    if algorithm.estimator.compares and group_size < 2:
        raise ConfigError(
            f"rollout.group_size={group_size} with algorithm.name={algorithm.name!r}: its estimator "
            f"{algorithm.advantage} compares the rollouts of a task with each other and needs at least 2. "
            "Set rollout.group_size=8, for example."
        )


# -- what a name stands for ----------------------------------------------------------------------------


def _recipe(config: AlgorithmConfig) -> Recipe:
    if config.name != "custom":
        check_choice("algorithm.name", config.name, (*ALGORITHMS, "custom"))
        return ALGORITHMS[config.name]
    if config.advantage is None or config.loss is None:
        raise ConfigError(
            f"algorithm.name='custom' with algorithm.advantage={config.advantage!r} and algorithm.loss="
            f"{config.loss!r}: it needs both. Set algorithm.advantage=grpo and algorithm.loss=vanilla, for "
            "example."
        )
    for setting, value, known, unfit in (
        ("algorithm.advantage", config.advantage, ESTIMATORS, UNFIT_ESTIMATORS),
        ("algorithm.loss", config.loss, LOSSES, UNFIT_LOSSES),
    ):
        if value in unfit:
            raise ConfigError(f"{setting}={value!r} cannot be used: {unfit[value]}.")
        if config.module is None:
            check_choice(
                setting, value, known, " For one of your own, name its module: algorithm.module=my_module."
            )
    if config.module is not None and config.advantage in ESTIMATORS and config.loss in LOSSES:
        raise ConfigError(
            f"algorithm.module={config.module!r} has no effect: advantage {config.advantage!r} and loss "
            f"{config.loss!r} are verl's own. Leave it out, or name what the module registers."
        )
    return Recipe(advantage=config.advantage, loss=config.loss)


def _check_registered(algorithm: Algorithm) -> None:
    """That what the user's module was to register is there: verl is imported for these names only."""
    if algorithm.module is None:
        return
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    for setting, value, registered in (
        ("algorithm.advantage", algorithm.advantage, ADV_ESTIMATOR_REGISTRY),
        ("algorithm.loss", algorithm.loss, POLICY_LOSS_REGISTRY),
    ):
        check_choice(
            setting,
            value,
            registered,
            f" algorithm.module={algorithm.module!r} was to register it with verl.",
        )


# -- what has no effect, and what makes no sense -------------------------------------------------------


def _check_effect(config: AlgorithmConfig, recipe: Recipe, estimator: Estimator, loss: Loss) -> None:
    custom = config.name == "custom"
    per_turn = estimator.compares or estimator is OWN_ESTIMATOR
    per_step = config.credit == "per_step"
    overlong = _or(config.overlong_penalty, recipe.overlong_penalty) > 0
    part = "that is part of the algorithm; algorithm.name=custom lets you choose"
    effects = (
        ("advantage", custom, part),
        ("loss", custom, part),
        ("module", custom, "only algorithm.name=custom uses what you register"),
        (
            "normalize_by_std",
            estimator.normalizes and recipe.normalize_by_std is None,
            "it is false by definition; grpo has the choice"
            if recipe.normalize_by_std is False
            else f"its estimator {recipe.advantage} divides by no group's standard deviation",
        ),
        ("clip_low", loss.clips, f"its loss {recipe.loss} does not clip"),
        ("clip_high", loss.clips, f"its loss {recipe.loss} does not clip"),
        ("loss_aggregation", loss.aggregates, f"its loss {recipe.loss} has its own"),
        (
            "credit",
            per_turn,
            f"its estimator {recipe.advantage} does not compare a turn with the same turn of other rollouts"
            + ("; it takes rewards at the turn that earned them as it is" if estimator.by_token else ""),
        ),
        (
            "gamma",
            estimator.discounts or (per_turn and per_step),
            "nothing is discounted" + (" unless algorithm.credit=per_step" if per_turn else ""),
        ),
        ("lam", estimator.smooths, "only GAE (algorithm.name=ppo) has it"),
        (
            "zero_signal_groups",
            per_turn,
            f"its estimator {recipe.advantage} learns from groups whose members were all rewarded alike, too",
        ),
        ("overlong_buffer_tokens", overlong, "there is no penalty without algorithm.overlong_penalty"),
    )
    for setting, effective, why in effects:
        value = vars(config)[setting]
        if value is not None and not effective:
            named = (
                f" Or set algorithm.name={value}." if setting == "advantage" and value in ALGORITHMS else ""
            )
            raise ConfigError(
                f"algorithm.{setting}={value!r} has no effect in algorithm.name={config.name!r}: {why}. "
                f"Leave it out.{named}"
            )


def _check_thresholds(config: AlgorithmConfig, loss: Loss) -> None:
    if loss.clips and loss.clip is None and (config.clip_low is None or config.clip_high is None):
        raise ConfigError(
            f"algorithm.loss={config.loss!r} with algorithm.clip_low={config.clip_low} and "
            f"algorithm.clip_high={config.clip_high}: they are thresholds of a divergence here and have no "
            "usual value. Set both."
        )


def _check_limit(overlong_penalty: float, aggregation: str, max_response_tokens: int | None) -> None:
    needs = "algorithm.overlong_penalty" if overlong_penalty else ""
    if aggregation == "seq-mean-token-sum-norm":
        needs = f"algorithm.loss_aggregation={aggregation}"
    if needs and max_response_tokens is None:
        raise ConfigError(
            f"{needs} needs to know how long a response may be: pass rollout.max_response_tokens to "
            "resolve()."
        )


def _check_zero_signal(treatment: str, config: AlgorithmConfig, overlong_penalty: float) -> None:
    """Groups are left out only where nothing but the environment's rewards could teach by them."""
    terms = {
        "algorithm.kl.place=reward": config.kl.place == "reward" and treatment != "keep",
        "algorithm.kl.place=loss": config.kl.place == "loss" and treatment == "drop",
        f"algorithm.entropy_coef={config.entropy_coef}": config.entropy_coef > 0 and treatment == "drop",
        f"algorithm.overlong_penalty={overlong_penalty}": overlong_penalty > 0 and treatment == "drop",
    }
    if lost := [term for term, is_lost in terms.items() if is_lost]:
        raise ConfigError(
            f"algorithm.zero_signal_groups={treatment} in algorithm.name={config.name!r} would leave out "
            f"groups that the environment has rewarded alike, and {lost[0]} has something to teach by them. "
            "Set algorithm.zero_signal_groups=keep."
        )


def _overlong_buffer(config: AlgorithmConfig, penalty: float, limit: int | None) -> int:
    """DAPO's buffer is a fifth of the limit (section 4.1: 4096 of 20480); others have to say theirs."""
    buffer = config.overlong_buffer_tokens
    if not penalty or limit is None:
        return 0
    if buffer is None and config.name == "dapo":
        buffer = max(1, limit // 5)
    if buffer is None:
        raise ConfigError(
            f"algorithm.overlong_penalty={penalty} without algorithm.overlong_buffer_tokens: say over how "
            f"many tokens before the limit of {limit} it grows, for example algorithm.overlong_buffer_tokens="
            f"{max(1, limit // 5)}."
        )
    if not 1 <= buffer <= limit:
        raise ConfigError(
            f"algorithm.overlong_buffer_tokens={buffer} has to be from 1 to "
            f"rollout.max_response_tokens={limit}."
        )
    return buffer


def _or(value: Any, usual: Any) -> Any:
    return usual if value is None else value
