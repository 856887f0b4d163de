"""Credit: what each sampled token is to be learnt from, by verl's registered advantage estimators."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from environments.columns import stored
from environments.errors import LearnerError
from environments.types import Trajectory, TrajectoryGroup
from policies.learning.correction import without_far_tokens
from policies.learning.credit_units import (
    CreditUnit,
    SampledTokens,
    at_the_end,
    credit_units,
    on_tokens,
    padded,
    with_advantages,
)
from policies.learning.kl import kl_estimate
from policies.learning.samples import ALIKE, TrainingSample, is_judged, turn_rewards

if TYPE_CHECKING:
    import torch

    from policies.learning.algorithm import Algorithm

EPSILON = 1e-8
"""Number that verl adds to a variance."""


def assign_credit(
    groups: Sequence[TrajectoryGroup],
    samples: Mapping[str, Sequence[TrainingSample]],
    algorithm: Algorithm,
    kl_coef: float,
) -> tuple[dict[str, list[TrainingSample]], dict[str, float]]:
    """The samples with advantages and returns (where a critic learns them) on their sampled tokens.

    ``samples`` holds, by rollout id, all samples of each trajectory that is trained on, in order and scored;
    where several policies play, those of one of them: the seats of the others count as not trained on.
    ``kl_coef`` is the present weight of a KL penalty in the reward; other algorithms do not look at it.

    ``broadcast``: one advantage per trajectory, over all that it sampled: where its history was rewritten,
    its samples share it. Estimators that take rewards where they were earned (gae, reinforce_plus_plus)
    get each turn's on the last token that the turn sampled. ``per_step``: each turn is compared, by its
    return (its own reward and the discounted ones of later turns), with the same turn of the other members.
    Estimators with ``turns_by`` compare each trajectory as with ``broadcast``, and each turn too, by that
    return: with all turns of its group that began in an equal state (gigpo; ``samples.turn_place`` says
    which), or with the same turn of the others (mt_grpo).

    Where a policy has played several seats, each is a trajectory of its own in all this: a seat's rewards are
    compared with those of the same seat in other members, if it has moved there.

    Where members fork from each other, ``credit_units`` says what is compared, and a token that they share is
    trained in one of them.

    What has nothing to be compared with has advantage 0, where verl's estimators would hand back the raw
    reward: a trajectory that is alone in its group, a turn that no other member reached, or that is alone in
    its state, and with ReMax one whose greedy rollout was spoilt;
    ``learn/uncompared_fraction`` says how many.
    Trajectories that sampled nothing, or are not trained on, count in the baseline of their group, but not in
    what an estimator that whitens takes as mean and deviation of the update; those that
    infrastructure has spoilt do not, for they say nothing about the policy. A group of which nothing is
    trained on counts nowhere. With a KL penalty in the reward, a token that is not trained on pays the mean
    of its group's trained tokens: else a failure that pays nothing could be worth more than a success.

    Every sample comes back; one whose tokens the correction has masked altogether has an empty mask.

    Source: GRPO is Shao et al. 2024 (DeepSeekMath), section 4.1; the others as cited in ``algorithms`` and
    in verl's ``core_algos``. ``per_step`` is rLLM v0.1's stepwise advantage. Turns by state are
    GiGPO's (Feng et al. 2025, eq. 5 to 8), by number MT-GRPO's (Zeng et al. 2025, arXiv 2505.11821).

    Raises:
        LearnerError: samples of no group or without their scores, a reward or an advantage that is not
            finite, or ReMax without a greedy rollout.
    """
    samples = {rollout_id: each for rollout_id, each in samples.items() if each}
    if not samples:
        return {}, {}
    _check(groups, samples, algorithm)
    sampled = [
        _sampled_tokens(group, trajectory, seat, samples.get(trajectory.rollout_id, ()))
        for group in groups
        if any(each.rollout_id in samples for each in group.trajectories)
        for trajectory in group.trajectories
        if is_judged(trajectory) and (algorithm.estimator.uses_untrained or trajectory.rollout_id in samples)
        for seat in trajectory.seat_rewards
    ]
    learning = {tokens.comparison_id for tokens in sampled if tokens.samples}
    sampled = [
        tokens
        for tokens in sampled
        if tokens.samples or (algorithm.estimator.uses_untrained and tokens.comparison_id in learning)
    ]
    metrics = _subtract_penalties(sampled, algorithm, kl_coef)
    units = credit_units(sampled, algorithm)
    metrics |= _estimate(units, algorithm)
    units_of: dict[SampledTokens, list[CreditUnit]] = defaultdict(list)
    for unit in units:
        units_of[unit.tokens].append(unit)
    credited = [
        sample for tokens in sampled for sample in with_advantages(tokens, units_of[tokens], algorithm)
    ]
    metrics |= _distribution(credited, algorithm)
    trained, masked = without_far_tokens(credited, algorithm)
    result: dict[str, list[TrainingSample]] = {}
    for sample in trained:
        result.setdefault(sample.rollout_id, []).append(sample)
    return result, metrics | masked | (explained_variance(trained) if algorithm.uses_critic else {})


def explained_variance(samples: Sequence[TrainingSample]) -> dict[str, float]:
    """``learn/explained_variance`` of a critic's values: 1 - Var(returns - values) / Var(returns); nothing
    where all returns are the same."""
    returns, values = (on_tokens(samples, name) for name in ("returns", "values"))
    if not returns.size or returns.min() == returns.max():
        return {}
    return {"learn/explained_variance": float(1 - (returns - values).var() / returns.var())}


def _check(
    groups: Sequence[TrajectoryGroup], samples: Mapping[str, Sequence[TrainingSample]], algorithm: Algorithm
) -> None:
    judged = {each.rollout_id for group in groups for each in group.trajectories if is_judged(each)}
    if strange := sorted(samples.keys() - judged):
        raise LearnerError(f"Rollout {strange[0]!r} has samples, but none of the groups has judged it.")
    if algorithm.uses_greedy_baseline:
        for group in groups:
            if group.baseline is None:
                raise LearnerError(
                    f"Group {group.group_id!r} has no greedy rollout, which {algorithm.name} needs."
                )
    in_reward = algorithm.kl_place == "reward"
    for sample in (each for rows in samples.values() for each in rows):
        num_tokens = stored(sample, "response_ids").size
        for name, needed in (
            ("old_logprobs", algorithm.needs_all_scores),
            ("reference_logprobs", in_reward),
            ("teacher_logprobs", algorithm.estimator.uses_teacher),
            ("values", algorithm.uses_critic),
        ):
            if needed and (count := len(stored(sample, name))) != num_tokens:
                raise LearnerError(
                    f"Sample {sample.sample_id!r} has {count} {name} for {num_tokens} "
                    "response tokens: the learner's score comes before assign_credit."
                )


def _sampled_tokens(
    group: TrajectoryGroup, trajectory: Trajectory, seat: str, samples: Sequence[TrainingSample]
) -> SampledTokens:
    steps = trajectory.turns
    earned = {turn: each for turn, each in turn_rewards(trajectory).items() if steps[turn].seat == seat}
    if not earned:
        reward = float(trajectory.seat_rewards[seat])
        return SampledTokens(trajectory, group, seat, (), np.array([-1]), np.array([reward]))
    if len(trajectory.seat_rewards) > 1:
        samples = [sample for sample in samples if steps[sample.turns[0]].seat == seat]
    completions = [trajectory.turns[turn].completion for turn in earned]
    counts = [each.num_completion_tokens for each in completions if each is not None]
    turns = np.repeat(list(earned), counts)
    rewards = np.zeros(len(turns))
    rewards[np.cumsum(counts) - 1] = list(earned.values())
    if samples and sum(sample.num_sampled_tokens for sample in samples) != len(turns):
        raise LearnerError(
            f"The samples of rollout {trajectory.rollout_id!r} have other tokens than its steps: all samples "
            "of a trajectory are credited together."
        )
    return SampledTokens(trajectory, group, seat, samples, turns, rewards)


# -- penalties -----------------------------------------------------------------------------------------


def _subtract_penalties(
    sampled: Sequence[SampledTokens], algorithm: Algorithm, kl_coef: float
) -> dict[str, float]:
    """Subtract the penalties from the rewards; return metrics of their size."""
    metrics: dict[str, float] = {}
    if algorithm.overlong_penalty:
        penalties = [_overlong_penalty(tokens.trajectory, algorithm) for tokens in sampled]
        for tokens, penalty in zip(sampled, penalties, strict=True):
            tokens.rewards[-1] -= penalty
        metrics |= {
            "learn/overlong_penalty_mean": float(np.mean(penalties)),
            "learn/overlong_fraction": float(np.mean([penalty > 0 for penalty in penalties])),
        }
    if algorithm.kl_place == "reward":
        trained = [tokens for tokens in sampled if tokens.samples]
        divergences = [_divergence(tokens, algorithm) for tokens in trained]
        by_group: dict[str, list[np.ndarray]] = defaultdict(list)
        for tokens, divergence in zip(trained, divergences, strict=True):
            tokens.rewards -= kl_coef * divergence
            by_group[tokens.group.group_id].append(divergence)
        for tokens in sampled:
            if not tokens.samples and tokens.turns[0] >= 0:
                tokens.rewards -= kl_coef * np.concatenate(by_group[tokens.group.group_id]).mean()
        metrics["learn/reward_kl"] = float(np.concatenate(divergences).mean())
    return metrics


def _overlong_penalty(trajectory: Trajectory, algorithm: Algorithm) -> float:
    """Return what is taken off a reward for coming near the token limit: from 0 to
    ``algorithm.overlong_penalty``.

    The length is what the rollout's own limit counts, also where the agent rewrites its history.

    Source: DAPO (Yu et al. 2025), eq. 13, times ``algorithm.overlong_penalty``.
    """
    if not algorithm.overlong_penalty:
        return 0.0
    buffer = algorithm.overlong_buffer_tokens
    inside = trajectory.num_response_tokens - (algorithm.max_response_tokens - buffer)
    return algorithm.overlong_penalty * min(max(inside / buffer, 0.0), 1.0)


def _divergence(tokens: SampledTokens, algorithm: Algorithm) -> np.ndarray:
    """[T] The estimate of the KL to the reference policy, for each sampled token."""
    import torch

    policy, reference = tokens.column("old_logprobs"), tokens.column("reference_logprobs")
    estimate = kl_estimate(torch.from_numpy(policy), torch.from_numpy(reference), algorithm.kl_estimator)
    return np.asarray(estimate)


# -- advantages ----------------------------------------------------------------------------------------


def _estimate(units: Sequence[CreditUnit], algorithm: Algorithm) -> dict[str, float]:
    """Fill in the advantages and returns of ``units``; return how many had nothing to compare with."""
    import torch

    sizes = Counter(unit.comparison_id for unit in units)
    for unit in units:
        unit.compared = not algorithm.estimator.compares or sizes[unit.comparison_id] > 1
        if algorithm.uses_greedy_baseline:
            greedy = unit.tokens.group.baseline
            unit.compared = (
                greedy is not None and is_judged(greedy) and unit.tokens.seat in greedy.seat_rewards
            )
    chosen = [unit for unit in units if unit.compared]
    trained = [bool(unit.tokens.samples) for unit in chosen]
    num_trained = sum(len(unit.rewards) for unit in chosen if unit.tokens.samples)
    if algorithm.estimator.whitens and num_trained < 2:
        chosen = []  # a single number has no variance to be divided by, and its return is its reward
    if chosen:
        arguments = _arguments(chosen, algorithm)
        advantages, returns = _call_estimator(arguments, algorithm)
        if algorithm.estimator.whitens and algorithm.estimator.function is None:
            raw = returns - arguments.get("values", 0.0)
            advantages = _over_trained_tokens(advantages, raw, arguments["response_mask"], trained)
        rows = (torch.as_tensor(each).double().numpy(force=True) for each in (advantages, returns))
        for unit, advantage, value in zip(chosen, *rows, strict=True):
            unit.advantages = advantage[: len(unit.rewards)] * unit.weight
            unit.returns = value[: len(unit.rewards)]
    uncompared = [not unit.compared for unit in units if unit.tokens.samples]
    return {"learn/uncompared_fraction": float(np.mean(uncompared))}


def _over_trained_tokens(
    advantages: torch.Tensor, raw: torch.Tensor, mask: torch.Tensor, trained: Sequence[bool]
) -> torch.Tensor:
    """The whitened ``advantages`` with mean 0 and variance 1 over the rows that are ``trained``.

    verl whitens over all rows that an estimator is given. Members that only count in the baseline of their
    group, such as long ones that are left out, would decide the scale of what is learned.

    Where all are trained, ``advantages`` are returned as they are. Where ``raw`` is the same at all trained
    tokens, there is nothing to learn, and they are 0: verl's float32 mean of ten times 1000.1 is another
    number, and the difference would be divided by a deviation of nearly nothing.

    Args:
        advantages: [N, T] of verl, whitened over all tokens.
        raw: [N, T] before the whitening, or whitened too.
        mask: [N, T] 1 where a row has a token.
        trained: [N], of which at least one is.
    """
    of_trained = mask.bool() & mask.new_tensor(trained).bool().unsqueeze(-1)
    values = raw[of_trained]
    if values.max() - values.min() <= ALIKE * values.abs().max().clamp(min=1):
        return advantages.new_zeros(advantages.shape)
    if all(trained):
        return advantages
    exact = advantages.double()
    values = exact[of_trained]
    return (exact - values.mean()) / (values.var() + EPSILON).sqrt() * mask


def _call_estimator(arguments: Mapping[str, Any], algorithm: Algorithm) -> tuple[torch.Tensor, torch.Tensor]:
    """Advantages and returns [N, T] of verl's estimator or the user's, given the arguments that it names."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    function = algorithm.estimator.function or get_adv_estimator_fn(
        algorithm.estimator.name_in_verl or algorithm.advantage
    )
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    advantages, returns = function(
        **{name: value for name, value in arguments.items() if takes_all or name in parameters}
    )
    return advantages, returns


def _arguments(units: Sequence[CreditUnit], algorithm: Algorithm) -> dict[str, Any]:
    """Return what an estimator may ask for: one row per unit, padded at the end, so that the masks have no
    gaps."""
    import torch
    from verl.trainer.config import AlgoConfig

    normalizes = algorithm.options.get("normalize_by_std", True)
    rewards = [unit.rewards for unit in units]
    if algorithm.estimator.compares and algorithm.estimator.function is None:
        rewards = _rewards_above_group_minimum(units)
    arguments: dict[str, Any] = {
        "token_level_rewards": padded(rewards),
        "response_mask": padded([np.ones(len(unit.rewards)) for unit in units]),
        "index": np.array([unit.comparison_id for unit in units], dtype=object),
        "gamma": algorithm.gamma,
        "config": AlgoConfig(gamma=algorithm.gamma, norm_adv_by_std_in_grpo=normalizes),
        "norm_adv_by_std_in_grpo": normalizes,
        "f_norm": _gpg_norm(units, rewards),
        **algorithm.options,
    }
    if algorithm.uses_critic:
        arguments["values"] = padded([unit.tokens.column("values") for unit in units])
    if algorithm.estimator.uses_teacher:
        for argument, column in (("old_log_prob", "old_logprobs"), ("teacher_log_prob", "teacher_logprobs")):
            arguments[argument] = padded([unit.tokens.column(column) for unit in units])
    if algorithm.uses_greedy_baseline:
        arguments["reward_baselines"] = torch.tensor([_greedy_reward(unit, algorithm) for unit in units])
    return arguments


def _rewards_above_group_minimum(units: Sequence[CreditUnit]) -> list[np.ndarray]:
    """Rewards of the units, less the smallest with which each is compared. This changes no advantage but by
    rounding.

    verl compares float32 numbers. The mean of ten times 1.1 is another number than 1.1 there, and the
    difference, divided by a standard deviation of nearly nothing, would be an advantage for all ten.
    """
    least: dict[str, float] = {}
    for unit in units:
        least[unit.comparison_id] = min(unit.rewards.sum(), least.get(unit.comparison_id, np.inf))
    return [at_the_end(unit.rewards.sum() - least[unit.comparison_id], len(unit.rewards)) for unit in units]


def _gpg_norm(units: Sequence[CreditUnit], rewards: Sequence[np.ndarray]) -> float:
    """The F_norm that turns verl's alpha, N / (rewards that are not 0), into the paper's N / (N - M).

    M counts units that were all rewarded alike in their comparison: the mean over the batch leaves them out.

    Source: GPG (Chu et al. 2025), "accurate gradient estimation".
    """
    sums: dict[str, list[float]] = defaultdict(list)
    for unit, row in zip(units, rewards, strict=True):
        sums[unit.comparison_id].append(float(row.sum()))
    num_useful = sum(len(each) for each in sums.values() if max(each) - min(each) > ALIKE)
    num_nonzero = sum(1 for each in sums.values() for reward in each if np.float32(reward) != 0)
    return max(1, num_useful) / max(1, num_nonzero)


def _greedy_reward(unit: CreditUnit, algorithm: Algorithm) -> float:
    baseline = unit.tokens.group.baseline
    assert baseline is not None  # else the unit would not be compared
    turn_rewards(baseline)  # raises where one is not finite
    return float(baseline.seat_rewards[unit.tokens.seat]) - _overlong_penalty(baseline, algorithm)


def _distribution(samples: Sequence[TrainingSample], algorithm: Algorithm) -> dict[str, float]:
    """Statistics over the tokens that are trained on."""
    advantages = on_tokens(samples, "advantages")
    if not np.isfinite(advantages).all():
        raise LearnerError(
            f"The estimator {algorithm.advantage} has returned advantages that are not finite."
        )
    metrics = {
        "learn/advantage_mean": float(advantages.mean()),
        "learn/advantage_std": float(advantages.std()),
        "learn/advantage_min": float(advantages.min()),
        "learn/advantage_max": float(advantages.max()),
        "learn/advantage_zero_fraction": float((advantages == 0).mean()),
    }
    if algorithm.uses_critic:
        metrics["learn/return_mean"] = float(on_tokens(samples, "returns").mean())
    if algorithm.estimator.uses_teacher:
        distances = on_tokens(samples, "old_logprobs") - on_tokens(samples, "teacher_logprobs")
        metrics["learn/teacher_kl"] = float(distances.mean())
    return metrics
