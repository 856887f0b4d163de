"""Group advantages, computed by verl's registered estimators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from environments.errors import ConfigError
from environments.types import Trajectory, TrajectoryGroup
from policies.learning.samples import TrainingSample, training_samples

GROUP_ESTIMATORS = ("grpo", "rloo", "rloo_vectorized", "opo", "reinforce_plus_plus_baseline")
"""verl's estimators that need only rewards and groups. The others need a critic or a second rollout."""


def samples_with_advantages(
    groups: Sequence[TrajectoryGroup], estimator: str, normalize_by_std: bool = True
) -> list[list[TrainingSample]]:
    """The training samples of each trajectory of ``groups``, in order, with advantages on sampled tokens.

    The advantage is computed once per trajectory, over all that it sampled, and laid onto its sequences:
    a trajectory whose history was rewritten has several, and they share it. A trajectory that is alone in
    its group has nothing to be compared with: its advantage is 0, where verl's estimators would hand back
    the raw reward. A trajectory that sampled nothing contributes its reward to the group's baseline; one
    that infrastructure has spoilt does not, for it says nothing about the policy.

    Source: GRPO is Shao et al. 2024 (DeepSeekMath), section 4.1; the others as cited in verl's
    ``core_algos``.
    """
    import numpy as np
    import torch
    from verl.trainer.config import AlgoConfig
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    if estimator not in GROUP_ESTIMATORS:
        raise ConfigError(f"algorithm.advantage={estimator!r} is not one of {', '.join(GROUP_ESTIMATORS)}.")
    everything = [(group.group_id, trajectory) for group in groups for trajectory in group.trajectories]
    judged = [index for index, (_, trajectory) in enumerate(everything) if not _spoilt(trajectory)]
    if not judged:
        return [[] for _ in everything]
    trajectories = [everything[index][1] for index in judged]
    samples = [training_samples(trajectory) for trajectory in trajectories]
    # One row a trajectory, one column a sampled token (at least one, to carry the reward of an empty row).
    lengths = [max(1, sum(sample.num_sampled_tokens for sample in rows)) for rows in samples]
    mask = torch.arange(max(lengths)).unsqueeze(0) < torch.tensor(lengths).unsqueeze(1)  # [N, T]
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(lengths)), torch.tensor(lengths) - 1] = torch.tensor(
        [float(trajectory.reward) for trajectory in trajectories]
    )
    group_of_row = np.array([everything[index][0] for index in judged], dtype=object)
    advantages, _ = get_adv_estimator_fn(estimator)(
        token_level_rewards=rewards,
        response_mask=mask.float(),
        index=group_of_row,
        config=AlgoConfig(),
        **({"norm_adv_by_std_in_grpo": normalize_by_std} if estimator == "grpo" else {}),
    )
    sizes = Counter(group_of_row)
    advantages[torch.tensor([sizes[group_id] < 2 for group_id in group_of_row])] = 0.0
    result: list[list[TrainingSample]] = [[] for _ in everything]
    for index, rows, row in zip(judged, samples, advantages, strict=True):
        result[index] = _laid_out(rows, row.tolist())
    return result


def _spoilt(trajectory: Trajectory) -> bool:
    reason = trajectory.termination_reason
    return reason is not None and reason.is_infrastructure


def _laid_out(rows: list[TrainingSample], advantages: list[float]) -> list[TrainingSample]:
    result, start = [], 0
    for sample in rows:
        end = start + sample.num_sampled_tokens
        result.append(sample.with_advantages(advantages[start:end]))
        start = end
    return result
