"""The penalty for leaving the reference policy: what may be asked of it, and how its weight moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from environments.bounds import check_choice
from environments.errors import ConfigError, LearnerError
from policies.learning.settings import KLConfig

if TYPE_CHECKING:
    import torch

    from policies.learning.algorithm import Algorithm

KL_ESTIMATORS = {"reward": ("k1", "abs", "k2", "k3"), "loss": ("abs", "k2", "k3", "k1+", "k2+", "k3+")}
"""Estimators of the KL by place. Without the straight-through gradient of k1+, that of k1 is 0 in
expectation: it penalizes nothing."""
USUAL_KL_ESTIMATORS = {"none": "k3", "loss": "k3", "reward": "k1"}
KL_HORIZON = 10_000
"""Trajectories over which the adaptive controller corrects (Ziegler et al. 2019, section 2.2). An update that
has more counts as one horizon: else its correction, of a fifth at most, could turn the weight negative."""


def kl_estimate(policy: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """An estimate, in nats, of the KL divergence from the policy to the reference, for each sampled token.

    With a plus (k3+) the value is the estimator's and the gradient that of k2, whose expectation is the
    gradient of the divergence itself. Not verl's function, because its k3 stops at 10: a token that is more
    than 2.61 nats less likely than under the reference would have no gradient that brings it back.

    Source: Schulman 2020, Approximating KL divergence (joschu.net/blog/kl-approx.html).

    Args:
        policy: log-probabilities of the sampled tokens, of any shape.
        reference: the same under the reference policy.
    """
    gap = policy - reference
    if estimator.endswith("+"):
        moved_by = gap.square() / 2
        value = kl_estimate(policy, reference, estimator.removesuffix("+"))
        return moved_by - moved_by.detach() + value.detach()
    if estimator == "k1":
        return gap
    if estimator == "abs":
        return gap.abs()
    if estimator == "k2":
        return gap.square() / 2
    assert estimator == "k3", estimator  # ``resolve_kl`` lets no other through
    return (-gap).expm1() + gap


class KLController:
    """The weight of the KL penalty from update to update: fixed, or steered to a target.

    Source: Ziegler et al. 2019, section 2.2, by verl's ``AdaptiveKLController``.

    Args:
        algorithm: says where the weight begins and what it is steered to.
        coef: where it was, in a run that goes on.
    """

    def __init__(self, algorithm: Algorithm, coef: float | None = None) -> None:
        self._algorithm = algorithm
        self.go_back(coef)

    def go_back(self, coef: float | None) -> None:
        """Go on from an earlier weight, which is the controller's whole state; ``None`` is the first."""
        self.coef = self._algorithm.kl_coef if coef is None or self._algorithm.kl_target is None else coef

    def update(self, metrics: Mapping[str, float], num_trajectories: int) -> dict[str, float]:
        """Move the weight after an update; return the one that it was made with, as a metric.

        ``metrics`` are those of ``assign_credit``: ``learn/reward_kl`` is the mean KL per token.

        Raises:
            LearnerError: the KL is not finite.
        """
        from verl.trainer.ppo.core_algos import AdaptiveKLController

        algorithm, used = self._algorithm, self.coef
        if algorithm.kl_place == "none":
            return {}
        if algorithm.kl_target is not None:
            kl = metrics["learn/reward_kl"]
            if not math.isfinite(kl):
                raise LearnerError(f"The KL to the reference policy is {kl}: lower the learning rate.")
            controller = AdaptiveKLController(used, algorithm.kl_target, max(KL_HORIZON, num_trajectories))
            controller.update(kl, num_trajectories)
            self.coef = float(controller.value)
        return {"learn/kl_coef": used}


def resolve_kl(config: KLConfig) -> dict[str, Any]:
    """The fields of ``Algorithm`` that begin with ``kl``.

    Raises:
        ConfigError: an unknown name, a setting without effect, or a combination that makes no sense.
    """
    place = config.place
    for setting in ("coef", "estimator", "target"):
        if place == "none" and vars(config)[setting] is not None:
            raise ConfigError(
                f"algorithm.kl.{setting}={vars(config)[setting]!r} has no effect with "
                "algorithm.kl.place=none. Set algorithm.kl.place to loss or reward, or leave it out."
            )
    if config.target is not None and place != "reward":
        raise ConfigError(
            f"algorithm.kl.target={config.target} with algorithm.kl.place={place}: only a penalty in the "
            "reward has an adaptive controller. Set algorithm.kl.place=reward, or leave the target out."
        )
    check_choice("algorithm.kl.estimator", config.estimator, KL_ESTIMATORS.get(place, ()))
    return {
        "kl_place": place,
        "kl_coef": 0.0 if place == "none" else (1e-3 if config.coef is None else config.coef),
        "kl_estimator": config.estimator or USUAL_KL_ESTIMATORS[place],
        "kl_target": config.target,
    }
