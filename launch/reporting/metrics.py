"""The metrics of a run, by name: pure functions of its rollouts and of its learner's results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from statistics import NormalDist, fmean, variance

from environments.data.canary import QUANTILE, difference
from environments.errors import ConfigError
from environments.pass_at_k import pass_at_k, powers_of_two
from environments.types import Completion, JudgedBy, TerminationReason, Trajectory, TrajectoryGroup
from launch.run_folder.trajectory_log import NOT_IMITATED
from policies.learning.samples import TrainingSample, is_judged

FRESH_MISMATCH = "learn/fresh_logprob_diff_mean"
FRESH_MISMATCH_MAX = "learn/fresh_logprob_diff_max"
RECENT_UPDATES = 5
"""Updates whose rewards are compared by ``held_out_alarm``."""
LEARNER_STAGES = ("time/score", "time/learn", "time/publish", "time/checkpoint")
"""The stages in which the learner works."""
UNTRAINED = ("failed", "timeout", "unjudged", "masked", NOT_IMITATED)
"""Reasons why a member of a group is left out when the group is trained on."""


# -- rollouts ------------------------------------------------------------------------------------------


def rollout_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """``rollout/``: rewards, pass@k, lengths and endings of the trajectories, and the environment's metrics.

    ``judged_by_<judge>`` is the share of the trajectories whose success that judge has decided.
    ``prompt_tokens`` is the length of a trajectory's first prompt, ``response_tokens`` the most tokens that
    it held after it, as in ``rollout.max_prompt_tokens`` and ``rollout.max_response_tokens``.
    Rewards are those of the trajectories that infrastructure has not spoilt; pass@k counts all.

    Raises:
        ConfigError: an environment has given one of its metrics the name of a metric that every run has.
    """
    trajectories = _members(groups)
    metrics = _standard_metrics(groups)
    named = environment_metrics(trajectories)
    if taken := sorted(name for name in named if is_standard(f"rollout/{name}")):
        raise ConfigError(f"compute_metrics() names {taken[0]!r}, which each run has: choose another name.")
    return metrics | {f"rollout/{name}": value for name, value in named.items()}


def environment_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """The mean of each metric that the environments have named, over the trajectories that have it."""
    values: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: _mean(values[name]) for name in sorted(values)}


def is_standard(name: str) -> bool:
    """Return whether a metric ``rollout/...`` is one of every run, and no environment's own."""
    taken = {*_standard_metrics([]), "rollout/num_tasks"}
    return name.startswith("rollout/pass_at_") or name in taken


def _standard_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    trajectories = _members(groups)
    played = [completions for each in trajectories if (completions := each.completions)]
    reasons = Counter(each.termination_reason for each in trajectories)
    judges = Counter(each.judged_by for each in trajectories)
    return {
        **_spread("rollout/reward", [each.reward for each in trajectories if is_judged(each)]),
        **_pass_at_k(groups),
        **{
            f"rollout/judged_by_{judge.name.lower()}": judges[judge] / max(1, len(trajectories))
            for judge in JudgedBy
        },
        **_spread("rollout/steps", [len(each.turns) for each in trajectories]),
        **_spread("rollout/prompt_tokens", [each[0].num_prompt_tokens for each in played]),
        **_spread("rollout/response_tokens", [_response_tokens(each) for each in played]),
        **_spread("rollout/seconds", [each.seconds for each in trajectories]),
        "rollout/sampled_tokens": _num_tokens(trajectories),
        "rollout/requests": sum(map(len, played)),
        **{
            f"rollout/ended_{reason}": reasons[reason] / max(1, len(trajectories))
            for reason in TerminationReason
        },
    }


def evaluation_metrics(
    groups: Sequence[TrajectoryGroup], sets: Mapping[str, Sequence[TrajectoryGroup]] | None = None
) -> dict[str, float]:
    """``eval/``: the same for held-out tasks, and the number of tasks.

    Args:
        sets: parts of ``groups`` by their names; those of the set ``code`` are ``eval/code/``. A set of which
            all rollouts have failed has none.
    """
    metrics = {
        f"eval/{name.removeprefix('rollout/')}": value for name, value in rollout_metrics(groups).items()
    }
    metrics["eval/num_tasks"] = len(groups)
    for own, part in (sets or {}).items():
        if own and any(map(is_judged, _members(part))):
            named = evaluation_metrics(part).items()
            metrics |= {f"eval/{own}/{name.removeprefix('eval/')}": value for name, value in named}
    return metrics


def named_metric(metric: str) -> tuple[str, str]:
    """The set of held-out tasks that a metric of evaluations names, and the metric of all sets that is like
    it: ``eval/code/reward_mean`` -> ``code``, ``eval/reward_mean``. Any other metric has no set.
    """
    section, own, name = f"{metric}//".split("/")[:3]
    if section != "eval" or not (is_standard(f"rollout/{name}") and name):
        return "", metric
    return own, f"eval/{name}"


def success_judge(groups: Sequence[TrajectoryGroup]) -> JudgedBy | None:
    """The judge of success in ``groups``, the first of ``JudgedBy`` where they are several.

    ``None`` where nobody has said anything and no reward is above 0: by any judge there is no success.
    """
    judged = (each for each in _members(groups) if each.is_correct is not None or each.reward > 0)
    present = {each.judged_by for each in judged if not each.failed}
    return next((judge for judge in JudgedBy if judge in present), None)


def _pass_at_k(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and for the smallest group's size: each over all groups, to be comparable.

    As in ``compute_pass_at_k``, success is ``Trajectory.succeeded``: a failed rollout is an attempt without.
    """
    smallest = min((len(group.trajectories) for group in groups), default=0)
    counts = [
        (len(group.trajectories), sum(each.succeeded for each in group.trajectories)) for group in groups
    ]
    return {
        f"rollout/pass_at_{k}": _mean([pass_at_k(n, correct, k) for n, correct in counts])
        for k in powers_of_two(smallest)
    }


def _response_tokens(completions: Sequence[Completion]) -> int:
    longest = max(each.num_prompt_tokens + each.num_completion_tokens for each in completions)
    return longest - completions[0].num_prompt_tokens


# -- the stream ----------------------------------------------------------------------------------------


def staleness(groups: Sequence[TrajectoryGroup], version: int) -> list[int]:
    """The staleness of each trajectory: by how many versions its oldest token is behind ``version``.

    Trajectories without a sampled token have none and are left out.
    """
    return [version - min(versions) for versions in _versions(groups)]


def staleness_metrics(
    groups: Sequence[TrajectoryGroup], version: int, max_staleness: int
) -> dict[str, float]:
    """``stream/``: how old ``groups`` are when a learner that has ``version`` consumes them.

    ``staleness_<n>`` is the share of the trajectories that are n versions old; the shares add up to 1. A
    ``version_span`` is the newest minus the oldest version of a trajectory's tokens.

    Args:
        max_staleness: shares are reported up to this one at least, so that their curves have no gaps.
    """
    values = staleness(groups, version)
    shares = Counter(values)
    levels = range(max([max_staleness, *values]) + 1)
    return {
        **_spread("stream/staleness", values),
        **{f"stream/staleness_{level}": shares[level] / max(1, len(values)) for level in levels},
        **_spread("stream/version_span", [max(each) - min(each) for each in _versions(groups)]),
    }


def token_metrics(
    trained: Sequence[TrajectoryGroup],
    dropped: Mapping[str, Sequence[TrajectoryGroup]],
    not_imitated: Collection[str] = (),
) -> dict[str, float]:
    """``stream/``: how many groups and sampled tokens were trained on, and how many were wasted.

    Wasted tokens are those that no gradient comes from: tokens of dropped groups, of members of trained
    groups that have failed, timed out, are masked or were not worth imitating, and of greedy baselines.

    Args:
        trained: the groups that are trained on.
        dropped: the other groups, by reason. A reason without groups is reported as 0, so that its curve has
            no gaps.
        not_imitated: ids of rollouts in ``trained``.
    """
    tokens: Counter[str] = Counter()
    for trajectory in _members(trained):
        tokens[_use(trajectory, not_imitated)] += _num_tokens([trajectory])
    for reason, groups in dropped.items():
        tokens[reason] += _num_tokens(_members(groups))
    tokens["baseline"] = _num_tokens(
        group.baseline for groups in (trained, *dropped.values()) for group in groups if group.baseline
    )
    wasted = tokens.total() - tokens["trained"]
    num_zero_signal = len(dropped.get("zero_signal", ()))
    alike = [group for group in trained if len({str(each.seat_rewards) for each in group.trajectories}) <= 1]
    return {
        "stream/groups_trained": len(trained),
        **{f"stream/groups_{reason}": len(groups) for reason, groups in dropped.items()},
        "stream/zero_signal_fraction": (len(alike) + num_zero_signal)
        / max(1, len(trained) + num_zero_signal),
        "stream/tokens_trained": tokens["trained"],
        **{f"stream/tokens_{cause}": tokens[cause] for cause in (*UNTRAINED, "baseline", *dropped)},
        "stream/wasted_fraction": wasted / max(1, tokens.total()),
    }


def has_failed(trajectory: Trajectory) -> bool:
    """Return whether a rollout failed or ran out of time: ``error`` has the cause."""
    return trajectory.failed or trajectory.termination_reason is TerminationReason.TIMEOUT


def _use(trajectory: Trajectory, not_imitated: Collection[str]) -> str:
    """``trained``, or the reason of ``UNTRAINED`` for which nothing is learned from it."""
    if trajectory.failed:
        return "failed"
    if trajectory.termination_reason is TerminationReason.TIMEOUT:
        return "timeout"
    if not is_judged(trajectory):
        return "unjudged"
    if trajectory.masked:
        return "masked"
    return NOT_IMITATED if trajectory.rollout_id in not_imitated else "trained"


def _versions(groups: Sequence[TrajectoryGroup]) -> list[set[int]]:
    """The policy versions that sampled each trajectory, where there are sampled tokens."""
    versions = [
        {
            version
            for each in trajectory.completions
            if each.completion_ids
            for version in each.token_versions or (each.policy_version,)
        }
        for trajectory in _members(groups)
    ]
    return [each for each in versions if each]


# -- time ----------------------------------------------------------------------------------------------


def time_metrics(stages: Mapping[str, float], step_seconds: float) -> dict[str, float]:
    """``time/``: the seconds of each stage and of the whole step, and the share of them in which the learner
    was idle: it waited for rollouts, an evaluation or the driver.

    Args:
        stages: seconds by name, such as ``time/learn``.
        step_seconds: wall time of the step, above 0.
    """
    idle = idle_share(sum(stages.get(stage, 0.0) for stage in LEARNER_STAGES), step_seconds)
    return {**stages, "time/step": step_seconds, "time/learner_idle": idle}


def idle_share(busy_seconds: float, seconds: float) -> float:
    """The share of the workers' ``seconds``, added up, in which they were not busy.

    A worker that was replaced meanwhile has begun to count at 0 again: the share is kept within 0 and 1.
    """
    return min(1.0, max(0.0, 1 - busy_seconds / seconds)) if seconds > 0 else 0.0


# -- engine and learner --------------------------------------------------------------------------------


def mismatch_metrics(samples: Iterable[TrainingSample], version: int) -> dict[str, float]:
    """``learn/fresh_logprob_diff_*``: how far engine and learner are apart on the same weights.

    Tokens that older weights have sampled are left out: there the difference is what was learned since, and
    no fault. Without any token left nothing is reported, and with few tokens the mean varies.

    Args:
        samples: with the learner's own ``old_logprobs``, taken under ``version``; others are left out.
    """
    differences = [
        abs(ours - theirs)
        for sample in samples
        if sample.policy_version == version and sample.old_logprobs
        for bit, ours, theirs in zip(
            sample.loss_mask, sample.old_logprobs, sample.rollout_logprobs, strict=True
        )
        if bit
    ]
    if not differences:
        return {}
    worst = math.nan if any(map(math.isnan, differences)) else max(differences)
    return {FRESH_MISMATCH: _mean(differences), FRESH_MISMATCH_MAX: worst}


def mismatch_alarm(metrics: Mapping[str, float], threshold: float) -> str | None:
    """The text of an alarm if engine and learner disagree by more than ``threshold`` on the sampled tokens.

    Args:
        metrics: with those of ``mismatch_metrics``; without them there is no alarm.
        threshold: mean difference of log-probabilities, in nats per token.
    """
    difference = metrics.get(FRESH_MISMATCH, 0.0)
    if difference <= threshold:
        return None
    return (
        f"Engine and learner disagree: the log-probabilities of the sampled tokens differ by "
        f"{difference:.2g} on average, more than learner.mismatch_alarm={threshold:g}. Does the engine have "
        "other weights than were published, or another dtype than the learner, or does something (top_p, "
        "top_k, a logits processor) change what it samples from? If it is the dtype, raise "
        "learner.mismatch_alarm and correct for the difference with algorithm.correction."
    )


def held_out_alarm(records: Sequence[Mapping[str, float]]) -> str | None:
    """The text of an alarm if held-out success has fallen while the reward of the training has risen.

    The newest evaluation is compared with the best one before it of the same judge, by success on the
    held-out tasks that were played, and the rewards of the last ``RECENT_UPDATES`` updates with those at
    that evaluation. Both have to differ by more than chance explains in 99 of 100 cases: success by more
    than any two of as many evaluations differ by chance (Bonferroni), since the best one is chosen.

    Args:
        records: of updates and evaluations, in their order.
    """
    found = [each for each in records if "eval/pass_at_1" in each and _outcomes(each)]
    evaluations = [each for each in found if _main_judge(each) == _main_judge(found[-1])]
    updates = [each for each in records if "rollout/reward_mean" in each]
    if len(evaluations) < 2 or len(updates) < 2 * RECENT_UPDATES:
        return None
    *earlier, newest = evaluations
    best = max(earlier, key=lambda each: fmean(_outcomes(each)))
    quantile = NormalDist().inv_cdf(1 - 0.005 / math.comb(len(evaluations), 2))
    success = difference(_outcomes(newest), _outcomes(best), quantile=quantile)
    num_before = max(RECENT_UPDATES, sum(each["step"] <= best["step"] for each in updates))
    before, now = (
        [each["rollout/reward_mean"] for each in some[-RECENT_UPDATES:]]
        for some in (updates[:num_before], updates)
    )
    rise = fmean(now) - fmean(before)
    noise = QUANTILE * math.sqrt((variance(now) + variance(before)) / RECENT_UPDATES)
    if success.high >= 0 or rise <= noise:
        return None
    return (
        f"Held-out success has changed by {success} since step {best['step']:.0f}, and the reward of the "
        f"training has risen from {fmean(before):.3f} to {fmean(now):.3f}: it rewards something else than "
        "the held-out tasks do. Look at the rollouts with the highest rewards."
    )


def _outcomes(evaluation: Mapping[str, float]) -> list[float]:
    """Success of each held-out task that infrastructure has not spoilt, in no order."""
    shares = (
        evaluation.get(f"eval/ended_{each}", 0.0) for each in TerminationReason if each.is_infrastructure
    )
    num_tasks = evaluation["eval/num_tasks"]
    number, num_solved = round(num_tasks * (1 - sum(shares))), round(evaluation["eval/pass_at_1"] * num_tasks)
    return [1.0] * num_solved + [0.0] * (number - num_solved)


def _main_judge(evaluation: Mapping[str, float]) -> JudgedBy:
    return max(JudgedBy, key=lambda each: evaluation.get(f"eval/judged_by_{each.name.lower()}", 0.0))


# -- arithmetic ----------------------------------------------------------------------------------------


def _members(groups: Iterable[TrajectoryGroup]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _num_tokens(trajectories: Iterable[Trajectory]) -> int:
    return sum(each.num_sampled_tokens for each in trajectories)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, minimum and maximum; 0 of nothing."""
    edges = {f"{name}_min": min(values, default=0.0), f"{name}_max": max(values, default=0.0)}
    return {f"{name}_mean": _mean(values)} | edges
