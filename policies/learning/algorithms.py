"""The algorithms by name: a row for each, and ``resolve``, which makes a configuration's ``Algorithm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from environments.bounds import check_bounds, check_choice
from environments.errors import ConfigError
from policies.learning.algorithm import Algorithm
from policies.learning.correction import resolve_correction
from policies.learning.kl import resolve_kl
from policies.learning.registry import (
    ESTIMATORS,
    LOSSES,
    SHIPPED_ESTIMATORS,
    SHIPPED_LOSSES,
    UNFIT_ESTIMATORS,
    UNFIT_LOSSES,
    Definition,
    Estimator,
    Loss,
    import_own,
    resolve_options,
)
from policies.learning.settings import AlgorithmConfig, OverlongConfig, check_keys

ALGORITHMS = {
    "grpo": Definition(advantage="grpo"),  # Shao et al. 2024 (DeepSeekMath), section 4.1
    # Liu et al. 2025 (Understanding R1-Zero-Like Training), section 3.2
    "dr_grpo": Definition(
        advantage="grpo",
        loss_aggregation="seq-mean-token-sum-norm",
        options={"normalize_by_std": False},
    ),
    # Yu et al. 2025, section 3
    "dapo": Definition(advantage="grpo", clip_high=0.28, zero_signal_groups="refill", overlong_penalty=1.0),
    "gspo": Definition(advantage="grpo", loss="gspo"),  # Zheng et al. 2025, section 4
    "cispo": Definition(advantage="grpo", loss="cispo"),  # MiniMax 2025 (MiniMax-M1), section 3.1
    "gigpo": Definition(advantage="gigpo", gamma=0.95),  # Feng et al. 2025 (GiGPO), section 4
    "mt_grpo": Definition(advantage="mt_grpo", gamma=0.0),  # Zeng et al. 2025, the additive estimator
    "rloo": Definition(advantage="rloo", loss="reinforce"),  # Ahmadian et al. 2024
    "reinforce_plus_plus": Definition(advantage="reinforce_plus_plus"),  # Hu et al. 2025
    "reinforce_plus_plus_baseline": Definition(advantage="reinforce_plus_plus_baseline"),
    "remax": Definition(advantage="remax", loss="reinforce"),  # Li et al. 2023
    "opo": Definition(advantage="opo", loss="reinforce"),  # Hao et al. 2025
    "gpg": Definition(advantage="gpg", loss="gpg"),  # Chu et al. 2025
    "ppo": Definition(advantage="gae"),  # Schulman et al. 2017
    "distillation": Definition(advantage="reverse_kl"),  # Agarwal et al. 2024 (GKD)
}
"""Rows of README's table, which says what each compares, and where its defaults are not the paper's."""
SHIPPED = frozenset(ALGORITHMS)
"""The algorithms that come with Troupe; a user's module may add others."""


def register_algorithm(name: str, definition: Definition) -> None:
    """Add an algorithm of one's own, from the module that ``algorithm.module`` names.

    Raises:
        ConfigError: the name is taken by an algorithm that comes with Troupe; the estimator, the loss or an
            option is unknown.
    """
    if name in (*SHIPPED, "custom"):
        raise ConfigError(f"The algorithm {name!r} comes with Troupe: register yours under another name.")
    first = " Register it first."
    check_choice(f"The estimator of the algorithm {name!r}", definition.advantage, ESTIMATORS, first)
    check_choice(f"The loss of the algorithm {name!r}", definition.loss, LOSSES, first)
    rows = (ESTIMATORS[definition.advantage], LOSSES[definition.loss])
    resolve_options(name, definition.options, {}, *(row.options for row in rows))
    ALGORITHMS[name] = definition


def resolve(
    config: AlgorithmConfig,
    max_response_tokens: int,
    max_staleness: int = 0,
    num_epochs: int = 1,
    is_exact: bool = True,
) -> Algorithm:
    """The algorithm that ``config`` names, with its settings.

    Args:
        max_response_tokens: what a response may have at most.
        max_staleness: by how many updates a token may be older than the policy that learns from it.
        num_epochs: how often an update takes each rollout.
        is_exact: engine and learner compute in float32, and agree to rounding.

    Raises:
        ConfigError: an unknown name, a combination that makes no sense, or a setting that has no effect in
            this algorithm.
    """
    check_bounds(config, "algorithm.")
    check_keys("algorithm.overlong", config.overlong, OverlongConfig())
    import_own(config.module)
    definition = _definition(config)
    estimator, loss = ESTIMATORS[definition.advantage], LOSSES[definition.loss]
    _check_effect(config, definition, estimator, loss)
    _check_thresholds(config, loss)
    _check_one_advantage(config, definition, estimator, loss)
    _check_epochs(config.name, definition.loss, num_epochs)
    overlong_penalty = config.overlong.get("penalty", definition.overlong_penalty)
    clip_low, clip_high = loss.clip or (0.0, 0.0)
    zero_signal_groups = _or(config.zero_signal_groups, definition.zero_signal_groups)
    _check_zero_signal(zero_signal_groups, config, overlong_penalty)
    options = resolve_options(
        config.name, config.options, definition.options, estimator.options, loss.options
    )
    _check_rewards_count(config, options, overlong_penalty)
    return Algorithm(
        name=config.name,
        advantage=definition.advantage,
        loss=definition.loss,
        options=options,
        loss_aggregation=_or(config.loss_aggregation, definition.loss_aggregation or loss.aggregation),
        clip_low=_or(config.clip_low, clip_low),
        clip_high=_or(config.clip_high, _or(definition.clip_high, clip_high)),
        entropy_coef=config.entropy_coef,
        credit=_or(config.credit, "broadcast"),
        gamma=_or(config.gamma, definition.gamma),
        zero_signal_groups=zero_signal_groups,
        overlong_penalty=overlong_penalty,
        overlong_buffer_tokens=_overlong_buffer(config, overlong_penalty, max_response_tokens),
        num_epochs=num_epochs,
        module=config.module,
        max_response_tokens=max_response_tokens,
        **resolve_kl(config.kl),
        **resolve_correction(config.correction, loss.uses_weights and (max_staleness > 0 or not is_exact)),
    )


def check_group_size(algorithm: Algorithm, group_size: int) -> None:
    """Check that groups are large enough to be compared within.

    Raises:
        ConfigError: something compares the members of a group, and groups are of one.
    """
    if algorithm.estimator.compares and group_size < 2:
        raise ConfigError(
            f"rollout.group_size={group_size} with algorithm.name={algorithm.name!r}: its estimator "
            f"{algorithm.advantage} compares at least 2 of a task. Set rollout.group_size=8, for example."
        )
    coefficient = algorithm.options.get("reward_coef")
    if algorithm.advantage == "reverse_kl" and coefficient and group_size < 2:
        raise ConfigError(
            f"algorithm.options.reward_coef={coefficient} has no effect with rollout.group_size={group_size}"
            ": rewards count by the distance from a group's mean. Set rollout.group_size=8, for example."
        )


# -- what a name stands for ----------------------------------------------------------------------------


_OWN = " For one of your own, name its module: algorithm.module=my_module."


def _definition(config: AlgorithmConfig) -> Definition:
    if config.name == "custom":
        definition = _custom(config)
    else:
        check_choice("algorithm.name", config.name, (*ALGORITHMS, "custom"), "" if config.module else _OWN)
        definition = ALGORITHMS[config.name]
    own = (
        config.name in ALGORITHMS.keys() - SHIPPED
        or definition.advantage not in SHIPPED_ESTIMATORS
        or definition.loss not in SHIPPED_LOSSES
    )
    if config.module is not None and not own:
        raise ConfigError(
            f"algorithm.module={config.module!r} has no effect in algorithm.name={config.name!r}: estimator "
            f"{definition.advantage!r} and loss {definition.loss!r} come with verl or Troupe. Leave it out, "
            "or name what the module registers."
        )
    return definition


def _custom(config: AlgorithmConfig) -> Definition:
    if config.advantage is None or config.loss is None:
        raise ConfigError(
            f"algorithm.name='custom' with algorithm.advantage={config.advantage!r} and algorithm.loss="
            f"{config.loss!r}: it needs both, such as grpo and vanilla."
        )
    for kind, value, known, unfit, decorator in (
        ("advantage", config.advantage, ESTIMATORS, UNFIT_ESTIMATORS, "register_estimator"),
        ("loss", config.loss, LOSSES, UNFIT_LOSSES, "register_loss"),
    ):
        if value in unfit:
            raise ConfigError(f"algorithm.{kind}={value!r} cannot be used: {unfit[value]}.")
        place = f"{decorator} of policies.learning.registry"
        register = f" algorithm.module={config.module!r} has to register it with {place}."
        check_choice(f"algorithm.{kind}", value, known, _OWN if config.module is None else register)
    return Definition(advantage=config.advantage, loss=config.loss)


# -- settings without effect ---------------------------------------------------------------------------


def _check_effect(config: AlgorithmConfig, definition: Definition, estimator: Estimator, loss: Loss) -> None:
    """No setting is set that has no effect in the algorithm of ``definition``."""
    effects = _effects(config, definition, estimator, loss)
    for setting, (effective, why) in effects.items():
        value = vars(config)[setting]
        if value is not None and not effective:
            named = (
                f" Or set algorithm.name={value}." if setting == "advantage" and value in ALGORITHMS else ""
            )
            raise ConfigError(
                f"algorithm.{setting}={value!r} has no effect in algorithm.name={config.name!r}: {why}. "
                f"Leave it out; where a recipe sets it, set algorithm.{setting}=null.{named}"
            )
    level = config.correction.level
    weights = (loss.uses_weights, "importance weights")
    ratio = (loss.uses_ratio, "ratio to old log-probabilities")
    has, means = ratio if level == "bypass" else weights
    if level not in (None, "none") and not has:
        raise ConfigError(
            f"algorithm.correction.level={level} has no effect in algorithm.name={config.name!r}: its loss "
            f"{definition.loss} has no {means}. Leave it out."
        )


def _effects(
    config: AlgorithmConfig, definition: Definition, estimator: Estimator, loss: Loss
) -> dict[str, tuple[bool, str]]:
    """Return by setting whether it has an effect, and why not."""
    custom = config.name == "custom"
    part = "that is part of the algorithm; algorithm.name=custom lets you choose"
    by_turn = "; it takes rewards at the turn that earned them as it is" if estimator.by_token else ""
    by_turn = " alone: it compares trajectories and turns as it is" if estimator.turns_by else by_turn
    return {
        "advantage": (custom, part),
        "loss": (custom, part),
        "clip_low": (loss.clips, f"its loss {definition.loss} does not clip"),
        "clip_high": (loss.clips, f"its loss {definition.loss} does not clip"),
        "loss_aggregation": (loss.aggregates, f"its loss {definition.loss} has its own"),
        "credit": (
            estimator.compares and estimator.turns_by is None,
            f"its estimator {definition.advantage} does not compare a turn with the same turn of other "
            f"rollouts{by_turn}",
        ),
        "gamma": (
            estimator.discounts or (estimator.compares and config.credit == "per_step"),
            "nothing is discounted" + (" unless algorithm.credit=per_step" if estimator.compares else ""),
        ),
        "zero_signal_groups": (
            estimator.compares,
            f"its estimator {definition.advantage} learns from groups whose members were all rewarded alike, "
            "too",
        ),
    }


# -- combinations that make no sense -------------------------------------------------------------------


def _check_thresholds(config: AlgorithmConfig, loss: Loss) -> None:
    if loss.clips and loss.clip is None and (config.clip_low is None or config.clip_high is None):
        raise ConfigError(
            f"algorithm.loss={config.loss!r} with algorithm.clip_low={config.clip_low} and "
            f"algorithm.clip_high={config.clip_high}: bounds of a divergence have no usual value. Set both."
        )


def _check_one_advantage(
    config: AlgorithmConfig, definition: Definition, estimator: Estimator, loss: Loss
) -> None:
    if not loss.one_advantage:
        return
    if config.credit == "per_step":
        given, remedy = "algorithm.credit=per_step", "algorithm.credit=broadcast"
    elif estimator.by_token or estimator.turns_by or estimator.uses_teacher:
        given, remedy = f"algorithm.advantage={definition.advantage}", "algorithm.advantage=grpo"
    else:
        return
    raise ConfigError(
        f"{given} with algorithm.loss={definition.loss}: it has one advantage for a whole sequence, in which "
        f"good and bad turns cancel out. Set {remedy}, or algorithm.loss=gspo, which keeps the advantages."
    )


def _check_epochs(name: str, loss: str, num_epochs: int) -> None:
    """Rollouts are taken again only where a ratio corrects that the policy has moved on since."""
    if num_epochs > 1 and not LOSSES[loss].uses_ratio:
        raise ConfigError(
            f"learner.num_epochs={num_epochs} with algorithm.name={name!r}: its loss {loss} has no ratio to "
            "the policy before the update, whose rollouts a second pass would take for the present one's. "
            "Set learner.num_epochs=1, or an algorithm with a ratio, such as algorithm.name=grpo."
        )


def _check_zero_signal(treatment: str, config: AlgorithmConfig, overlong_penalty: float) -> None:
    """Groups are left out only where nothing but the environment's rewards could teach by them."""
    terms = {
        "algorithm.kl.place=reward": config.kl.place == "reward" and treatment != "keep",
        "algorithm.kl.place=loss": config.kl.place == "loss" and treatment == "drop",
        f"algorithm.entropy_coef={config.entropy_coef}": config.entropy_coef > 0 and treatment == "drop",
        f"algorithm.overlong.penalty={overlong_penalty}": overlong_penalty > 0 and treatment == "drop",
    }
    if lost := [term for term, is_lost in terms.items() if is_lost]:
        raise ConfigError(
            f"algorithm.zero_signal_groups={treatment} in algorithm.name={config.name!r} leaves groups out, "
            f"and {lost[0]} has something to teach by them. Set algorithm.zero_signal_groups=keep."
        )


def _check_rewards_count(
    config: AlgorithmConfig, options: Mapping[str, Any], overlong_penalty: float
) -> None:
    """Nothing is subtracted from rewards that the algorithm leaves out."""
    penalties = {
        "algorithm.kl.place=reward": config.kl.place == "reward",
        f"algorithm.overlong.penalty={overlong_penalty}": overlong_penalty > 0,
    }
    lost = [penalty for penalty, is_set in penalties.items() if is_set]
    if options.get("reward_coef") == 0 and lost:
        raise ConfigError(
            f"{lost[0]} has no effect in algorithm.name={config.name!r} with "
            "algorithm.options.reward_coef=0, which leaves rewards out. Set it to 1, for example."
        )


def _overlong_buffer(config: AlgorithmConfig, penalty: float, limit: int) -> int:
    """DAPO's buffer is a fifth of the limit (section 4.1: 4096 of 20480); others have to say theirs."""
    buffer = config.overlong.get("buffer_tokens")
    if not penalty:
        if buffer is not None:
            raise ConfigError(
                f"algorithm.overlong.buffer_tokens={buffer} has no effect in algorithm.name={config.name!r}: "
                "there is no penalty without algorithm.overlong.penalty. Set that too, or leave it out."
            )
        return 0
    if buffer is None and config.name == "dapo":
        buffer = max(1, limit // 5)
    if buffer is None:
        raise ConfigError(
            f"algorithm.overlong.penalty={penalty} without algorithm.overlong.buffer_tokens, over which it "
            f"grows before the limit of {limit}: set {max(1, limit // 5)}, for example."
        )
    if not 1 <= buffer <= limit:
        raise ConfigError(
            f"algorithm.overlong.buffer_tokens={buffer} has to be from 1 to "
            f"rollout.max_response_tokens={limit}."
        )
    return buffer


def _or(value: Any, usual: Any) -> Any:
    return usual if value is None else value
