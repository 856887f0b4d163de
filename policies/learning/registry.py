"""What algorithms are made of: verl's advantage estimators and policy losses, and who combines them how."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimator:
    """What one of verl's advantage estimators needs and heeds."""

    compares: bool = False
    """With the other members of the group: one that is alone has advantage 0."""
    uses_untrained: bool = False
    """Trajectories that are not trained on count in the baseline."""
    by_token: bool = False
    """Rewards count where they were earned; else their sum does."""
    normalizes: bool = False
    """Heeds normalize_by_std."""
    discounts: bool = False
    """Heeds gamma."""
    smooths: bool = False
    """Heeds lam."""
    whitens: bool = False
    """Over all tokens of the update: a single one has advantage 0."""


_GROUP = Estimator(compares=True, uses_untrained=True)
_GRPO = Estimator(compares=True, uses_untrained=True, normalizes=True)
ESTIMATORS = {
    "grpo": _GRPO,
    "grpo_vectorized": _GRPO,
    "grpo_passk": _GRPO,
    "rloo": _GROUP,
    "rloo_vectorized": _GROUP,
    "opo": _GROUP,
    "gpg": _GROUP,
    "reinforce_plus_plus_baseline": Estimator(compares=True, uses_untrained=True, whitens=True),
    "reinforce_plus_plus": Estimator(by_token=True, discounts=True, whitens=True),
    "gae": Estimator(by_token=True, discounts=True, smooths=True, whitens=True),
    "remax": Estimator(),
}
OWN_ESTIMATOR = Estimator(uses_untrained=True, by_token=True, normalizes=True, discounts=True)
"""What a user has registered may heed anything; nothing is done for it."""

UNFIT_ESTIMATORS = {
    "gdpo": "it needs rewards in several dimensions, and a step has one",
    "optimal_token_baseline": "it needs the sum of squared probabilities, which the learner does not compute",
    "tir_optimal_token_baseline": "it needs the sum of squared probabilities, which the learner does not "
    "compute",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """What one of verl's policy losses heeds, with the values of its paper."""

    clips: bool = True
    clip: tuple[float, float] | None = (0.2, 0.2)
    """Low and high; ``None`` if there are no usual values."""
    aggregation: str = "token-mean"
    aggregates: bool = True
    """Whether another aggregation may be chosen."""


LOSSES = {
    "vanilla": Loss(),  # Schulman et al. 2017, eq. 7
    "gspo": Loss(clip=(3e-4, 4e-4), aggregation="seq-mean-token-mean"),  # Zheng et al. 2025, section 5.1
    "cispo": Loss(clip=(1.0, 0.2)),  # MiniMax 2025, section 3.1: no lower bound; the upper is unpublished
    "gpg": Loss(clips=False),
    "sapo": Loss(clips=False, aggregation="seq-mean-token-mean", aggregates=False),
    "geo_mean": Loss(aggregates=False),  # Zhao et al. 2025
    "dppo_tv": Loss(clip=None),
    "dppo_kl": Loss(clip=None),
}
OWN_LOSS = Loss()

UNFIT_LOSSES = {
    "clip_cov": "it chooses tokens within each micro-batch, so the gradient would depend on "
    "learner.micro_batch_tokens",
    "kl_cov": "it chooses tokens within each micro-batch, so the gradient would depend on "
    "learner.micro_batch_tokens",
    "dro": "its penalty has no setting here",
    "bypass_mode": "it is a mode of the correction: set algorithm.correction.mode=bypass and a loss",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a named algorithm is made of; ``None`` is left to its loss."""

    advantage: str
    loss: str = "vanilla"
    loss_aggregation: str | None = None
    normalize_by_std: bool | None = None
    """Part of the algorithm's definition, where it is not ``None``."""
    clip_high: float | None = None
    zero_signal_groups: str = "keep"
    overlong_penalty: float = 0.0


ALGORITHMS = {
    "grpo": Recipe(advantage="grpo"),  # Shao et al. 2024, eq. 3, with the token mean that verl and DAPO take
    "dr_grpo": Recipe(  # Liu et al. 2025 (Understanding R1-Zero-Like Training), section 3.2
        advantage="grpo", normalize_by_std=False, loss_aggregation="seq-mean-token-sum-norm"
    ),
    "dapo": Recipe(  # Yu et al. 2025, section 3
        advantage="grpo", clip_high=0.28, zero_signal_groups="refill", overlong_penalty=1.0
    ),
    "gspo": Recipe(advantage="grpo", loss="gspo"),  # Zheng et al. 2025
    "cispo": Recipe(advantage="grpo", loss="cispo"),  # MiniMax-M1, 2025
    "rloo": Recipe(advantage="rloo"),  # Ahmadian et al. 2024
    "reinforce_plus_plus": Recipe(advantage="reinforce_plus_plus"),  # Hu et al. 2025
    "reinforce_plus_plus_baseline": Recipe(advantage="reinforce_plus_plus_baseline"),  # Hu et al. 2025
    "remax": Recipe(advantage="remax"),  # Li et al. 2023
    "opo": Recipe(advantage="opo"),  # Hao et al. 2025
    "gpg": Recipe(advantage="gpg", loss="gpg"),  # Chu et al. 2025
    "ppo": Recipe(advantage="gae"),  # Schulman et al. 2017, with Schulman et al. 2016 for the advantage
}
