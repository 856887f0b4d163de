"""``Algorithm``: the objective of a run with every setting decided. ``algorithms.resolve`` makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from policies.learning.registry import ESTIMATORS, LOSSES, Estimator, Loss

ADDRESSES = ("http://", "https://")
"""Beginnings of a teacher's address."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """An algorithm with every setting decided. Rows are kept by name: processes share no memory."""

    name: str
    advantage: str
    loss: str
    options: Mapping[str, Any]
    """Settings of the estimator's and the loss's own, by name."""
    loss_aggregation: str
    clip_low: float
    clip_high: float
    entropy_coef: float
    credit: str
    gamma: float
    zero_signal_groups: str
    overlong_penalty: float
    overlong_buffer_tokens: int
    kl_place: str
    kl_coef: float
    kl_estimator: str
    kl_target: float | None
    bypass: bool
    """The old log-probabilities are the engine's."""
    correction_level: str | None
    truncate_above: float | None
    mask_below: float | None
    mask_above: float | None
    num_epochs: int
    """Passes over the rollouts of one update."""
    max_response_tokens: int
    """Limit of a response, from which the overlong penalty is measured, and seq-mean-token-sum-norm divides
    by."""
    module: str | None = None
    """The user's module that registers estimator, loss or algorithm."""

    @property
    def estimator(self) -> Estimator:
        """Return what the advantage estimator needs, and which settings have an effect on it."""
        return ESTIMATORS[self.advantage]

    @property
    def policy_loss(self) -> Loss:
        """Return which settings have an effect on the policy loss."""
        return LOSSES[self.loss]

    @property
    def turn_weight(self) -> float:
        """Return the weight of an advantage that a turn has of its own, beside its trajectory's; 0 if none
        has."""
        return float(self.options.get("omega", 1.0)) if self.estimator.turns_by else 0.0

    @property
    def uses_critic(self) -> bool:
        """Return whether a value model is trained beside the policy."""
        return self.estimator.uses_critic

    @property
    def uses_reference(self) -> bool:
        """Return whether log-probabilities under the reference policy are needed."""
        return self.kl_place != "none"

    @property
    def teacher(self) -> str | None:
        """Return the model that the policy learns from, where there is one: a folder, or an address."""
        return str(self.options.get("teacher", "")) if self.estimator.uses_teacher else None

    @property
    def loaded_teacher(self) -> str | None:
        """Return the teacher that the learner's ranks load: none that answers at an address."""
        return None if self.teacher is None or self.teacher.startswith(ADDRESSES) else self.teacher

    @property
    def compares_returns(self) -> bool:
        """Return whether each trajectory is compared with other members of its group by its whole return."""
        return self.estimator.compares and self.credit == "broadcast" and not self.policy_loss.one_advantage

    @property
    def masks_far_tokens(self) -> bool:
        """Return whether tokens are left out for their importance weight."""
        return self.mask_below is not None or self.mask_above is not None

    @property
    def needs_all_scores(self) -> bool:
        """Return whether the learner has to score every mini-batch before the update: for masks, for rewards,
        or because it takes each of them again.

        Otherwise the first one's old log-probabilities are those of its own step: nothing has changed before.
        """
        in_reward = self.kl_place == "reward" or self.estimator.uses_teacher
        return self.masks_far_tokens or in_reward or self.num_epochs > 1

    @property
    def uses_greedy_baseline(self) -> bool:
        """Return whether each task is also rolled out greedily."""
        return self.estimator.uses_greedy_baseline
