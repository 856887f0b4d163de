"""The algorithms by name: a row for each, and ``resolve``, which makes a configuration's ``Algorithm``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from environments.bounds import check_bounds, check_choice
from environments.errors import ConfigError
from policies.learning.algorithm import Algorithm
from policies.learning.correction import resolve_correction
from policies.learning.effects import check_effect
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
from policies.learning.settings import AlgorithmConfig

_ALL_GROUPS = "the objective is a mean over all groups"
_DUAL_CLIP = "dual clip at ratio 3 where the advantage is negative"
_ON_POLICY = "derived on-policy: several mini-batches an update have no ratio that corrects the later ones"
ALGORITHMS = {
    "grpo": Definition(
        advantage="grpo",
        summary="distance from the group's mean in standard deviations; clipped ratio",
        paper="Shao et al. 2024 (DeepSeekMath), section 4.1",
        zero_signal_source=f"eq. 3: {_ALL_GROUPS}",
        differences=f"mean over all tokens instead of each response's; no KL term; {_DUAL_CLIP}",
    ),
    "dr_grpo": Definition(
        advantage="grpo",
        loss_aggregation="seq-mean-token-sum-norm",
        options={"normalize_by_std": False},
        summary="GRPO without the division; a response's sum is divided by the longest length",
        paper="Liu et al. 2025 (Understanding R1-Zero-Like Training), section 3.2",
        zero_signal_source=f"section 3.2: {_ALL_GROUPS}",
        differences=_DUAL_CLIP,
    ),
    "dapo": Definition(
        advantage="grpo",
        clip_high=0.28,
        zero_signal_groups="refill",
        overlong_penalty=1.0,
        summary="GRPO with clip 0.2/0.28, refilled groups and a penalty for overlong responses",
        paper="Yu et al. 2025, section 3",
        zero_signal_source="eq. 11: dynamic sampling",
        differences=f"mean over the tokens of a mini-batch, not of each group; {_DUAL_CLIP}",
    ),
    "gspo": Definition(
        advantage="grpo",
        loss="gspo",
        summary="GRPO with one ratio per sequence",
        paper="Zheng et al. 2025, section 4",
        zero_signal_source=f"eq. 5: {_ALL_GROUPS}",
    ),
    "cispo": Definition(
        advantage="grpo",
        loss="cispo",
        summary="GRPO with clipped weights instead of clipped tokens",
        paper="MiniMax 2025 (MiniMax-M1), section 3.1",
        zero_signal_source=f"eq. 4: {_ALL_GROUPS}",
        differences="mean over the tokens of a mini-batch, not of each group; no dynamic sampling and length "
        "penalty, which the paper's runs take from DAPO; the upper clip is 0.2, and the paper gives none",
    ),
    "gigpo": Definition(
        advantage="gigpo",
        gamma=0.95,
        summary="GRPO, and omega times the distance of a turn's discounted return from those of the group's "
        "turns that began in an equal state",
        paper="Feng et al. 2025 (GiGPO), section 4",
        zero_signal_source=f"eq. 9: {_ALL_GROUPS}",
        differences=f"mean over all tokens instead of each response's; no KL term; {_DUAL_CLIP}",
    ),
    "mt_grpo": Definition(
        advantage="mt_grpo",
        gamma=0.0,
        summary="GRPO, and omega times the distance of a turn's own reward from those of the same turn of "
        "others",
        paper="Zeng et al. 2025 (MT-GRPO), the additive estimator",
        zero_signal_source=f"the objective is GRPO's: {_ALL_GROUPS}",
        differences="the paper has two turns; the trajectory's part compares the sum of all rewards, not the "
        f"outcome's alone, and the last turn has a part of its own too; no KL term; {_DUAL_CLIP}",
    ),
    "rloo": Definition(
        advantage="rloo",
        loss="reinforce",
        summary="distance from the mean of the others; policy gradient without a ratio",
        paper="Ahmadian et al. 2024",
        zero_signal_source=f"section 3: {_ALL_GROUPS}",
        differences=f"no KL in the reward; {_ON_POLICY}",
    ),
    "reinforce_plus_plus": Definition(
        advantage="reinforce_plus_plus",
        summary="discounted return per token, normalized over the batch; clipped ratio",
        paper="Hu et al. 2025 (REINFORCE++)",
        zero_signal_source="no groups",
        differences=f"no KL in the reward; {_DUAL_CLIP}",
    ),
    "reinforce_plus_plus_baseline": Definition(
        advantage="reinforce_plus_plus_baseline",
        summary="distance from the group's mean, normalized over the batch; clipped ratio",
        paper="Hu et al. 2025 (REINFORCE++ with baseline)",
        zero_signal_source="the batch's normalization is over all groups",
        differences=f"no KL term; {_DUAL_CLIP}",
    ),
    "remax": Definition(
        advantage="remax",
        loss="reinforce",
        summary="distance from the reward of a greedy rollout; policy gradient without a ratio",
        paper="Li et al. 2023",
        zero_signal_source="no groups",
        differences=f"no KL in the reward; {_ON_POLICY}",
    ),
    "opo": Definition(
        advantage="opo",
        loss="reinforce",
        summary="distance from a mean weighted by length; policy gradient without a ratio",
        paper="Hao et al. 2025",
        zero_signal_source="the expectation is over all tasks",
        differences=_ON_POLICY,
    ),
    "gpg": Definition(
        advantage="gpg",
        loss="gpg",
        summary="distance from the group's mean; policy gradient, corrected for groups without a signal",
        paper="Chu et al. 2025",
        zero_signal_source="they count in alpha = N / (N - M), which makes up for them",
        differences="no resampling where few groups have a signal",
    ),
    "ppo": Definition(
        advantage="gae",
        summary="generalized advantages of a critic; clipped ratio",
        paper="Schulman et al. 2017, and 2016 for the advantages",
        zero_signal_source="no groups",
        differences="advantages are normalized over the update; the value loss is clipped at 0.5 around the "
        "old values; an episode that a limit has ended is worth nothing more, as if it were finished; "
        f"{_DUAL_CLIP}",
    ),
    "distillation": Definition(
        advantage="reverse_kl",
        summary="log-probability of each sampled token under a teacher, less the policy's own; clipped ratio",
        paper="Agarwal et al. 2024 (GKD); Gu et al. 2024 (MiniLLM); Lu et al. 2025",
        zero_signal_source="no groups",
        differences="one sampled token instead of GKD's sum over the vocabulary; no token pays for what "
        f"follows it, as it does in MiniLLM; {_DUAL_CLIP}",
    ),
}
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
    config: AlgorithmConfig, max_response_tokens: int, max_staleness: int = 0, num_epochs: int = 1
) -> Algorithm:
    """The algorithm that ``config`` names, with its settings.

    Args:
        max_response_tokens: what a response may have at most.
        max_staleness: by how many updates a token may be older than the policy that learns from it.
        num_epochs: how often an update takes each rollout.

    Raises:
        ConfigError: an unknown name, a combination that makes no sense, or a setting that has no effect in
            this algorithm.
    """
    check_bounds(config, "algorithm.")
    import_own(config.module)
    definition = _definition(config)
    estimator, loss = ESTIMATORS[definition.advantage], LOSSES[definition.loss]
    check_effect(config, definition, estimator, loss, ALGORITHMS)
    _check_thresholds(config, loss)
    _check_one_advantage(config, definition, estimator, loss)
    _check_epochs(config.name, definition.loss, num_epochs)
    overlong_penalty = _or(config.overlong_penalty, definition.overlong_penalty)
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
        **resolve_correction(config.correction, max_staleness if loss.uses_weights else 0),
    )


def check_group_size(algorithm: Algorithm, group_size: int) -> None:
    """Check that groups are large enough to be compared within.

    Raises:
        ConfigError: something compares the members of a group, and groups are of one.
    """
    if algorithm.estimator.compares and group_size < 2:
        raise ConfigError(
            f"rollout.group_size={group_size} with algorithm.name={algorithm.name!r}: its estimator "
            f"{algorithm.advantage} compares the rollouts of a task with each other and needs at least 2. "
            "Set rollout.group_size=8, for example."
        )
    coefficient = algorithm.options.get("reward_coef")
    if algorithm.advantage == "reverse_kl" and coefficient and group_size < 2:
        raise ConfigError(
            f"algorithm.options.reward_coef={coefficient} has no effect with rollout.group_size={group_size}"
            ": it weighs the distance of a reward from its group's mean. Set rollout.group_size=8, for "
            "example, or leave algorithm.options.reward_coef out."
        )


# -- what a name stands for ----------------------------------------------------------------------------


_OWN = " For one of your own, name its module: algorithm.module=my_module."


def _definition(config: AlgorithmConfig) -> Definition:
    definition = _custom(config) if config.name == "custom" else _named(config)
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


def _named(config: AlgorithmConfig) -> Definition:
    check_choice("algorithm.name", config.name, (*ALGORITHMS, "custom"), "" if config.module else _OWN)
    return ALGORITHMS[config.name]


def _custom(config: AlgorithmConfig) -> Definition:
    if config.advantage is None or config.loss is None:
        raise ConfigError(
            f"algorithm.name='custom' with algorithm.advantage={config.advantage!r} and algorithm.loss="
            f"{config.loss!r}: it needs both. Set algorithm.advantage=grpo and algorithm.loss=vanilla, for "
            "example."
        )
    for kind, value, known, unfit in (
        ("advantage", config.advantage, ESTIMATORS, UNFIT_ESTIMATORS),
        ("loss", config.loss, LOSSES, UNFIT_LOSSES),
    ):
        if value in unfit:
            raise ConfigError(f"algorithm.{kind}={value!r} cannot be used: {unfit[value]}.")
        remedy = _OWN
        if config.module is not None:
            decorator = "register_estimator" if kind == "advantage" else "register_loss"
            remedy = (
                f" algorithm.module={config.module!r} has to register it with {decorator} of "
                "policies.learning.registry."
            )
        check_choice(f"algorithm.{kind}", value, known, remedy)
    return Definition(advantage=config.advantage, loss=config.loss)


# -- combinations that make no sense -------------------------------------------------------------------


def _check_thresholds(config: AlgorithmConfig, loss: Loss) -> None:
    if loss.clips and loss.clip is None and (config.clip_low is None or config.clip_high is None):
        raise ConfigError(
            f"algorithm.loss={config.loss!r} with algorithm.clip_low={config.clip_low} and "
            f"algorithm.clip_high={config.clip_high}: they are thresholds of a divergence here and have no "
            "usual value. Set both."
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
        f"{given} with algorithm.loss={definition.loss}: it has one ratio and one advantage for a whole "
        "sequence, and would take the mean of those of its turns or tokens, by which a good and a bad turn "
        f"cancel out. Set {remedy}, or algorithm.loss=gspo, which has one ratio and keeps the advantages."
    )


def _check_epochs(name: str, loss: str, num_epochs: int) -> None:
    """Rollouts are taken again only where a ratio corrects that the policy has moved on since."""
    if num_epochs > 1 and not LOSSES[loss].uses_ratio:
        raise ConfigError(
            f"learner.num_epochs={num_epochs} with algorithm.name={name!r}: its loss {loss} has no ratio to "
            "the policy before the update. It holds for rollouts of the present policy only, and in a second "
            "pass they are an older one's. Set learner.num_epochs=1, or choose an algorithm with a ratio, "
            "such as algorithm.name=grpo."
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


def _check_rewards_count(
    config: AlgorithmConfig, options: Mapping[str, Any], overlong_penalty: float
) -> None:
    """Nothing is subtracted from rewards that the algorithm leaves out."""
    penalties = {
        "algorithm.kl.place=reward": config.kl.place == "reward",
        f"algorithm.overlong_penalty={overlong_penalty}": overlong_penalty > 0,
    }
    lost = [penalty for penalty, is_set in penalties.items() if is_set]
    if options.get("reward_coef") == 0 and lost:
        raise ConfigError(
            f"{lost[0]} has no effect in algorithm.name={config.name!r} with "
            "algorithm.options.reward_coef=0: rewards are left out. Set it to 1, for example, or leave "
            f"{lost[0].partition('=')[0]} out."
        )


def _overlong_buffer(config: AlgorithmConfig, penalty: float, limit: int) -> int:
    """DAPO's buffer is a fifth of the limit (section 4.1: 4096 of 20480); others have to say theirs."""
    buffer = config.overlong_buffer_tokens
    if not penalty:
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
