from __future__ import annotations

import math
from typing import Any

import pytest

from environments.errors import ConfigError
from environments.pass_at_k import compute_pass_at_k
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.reporting.metrics import (
    evaluation_metrics,
    held_out_alarm,
    idle_share,
    mismatch_alarm,
    mismatch_metrics,
    rollout_metrics,
    staleness,
    staleness_metrics,
    time_metrics,
    token_metrics,
)
from policies.learning.samples import TrainingSample, training_samples


def completion(prompt: int = 10, sampled: int = 4, versions: tuple[int, ...] = ()) -> Completion:
    return Completion(
        prompt_ids=(1,) * prompt,
        completion_ids=(2,) * sampled,
        logprobs=(-1.0,) * sampled,
        text="x",
        finish_reason="stop",
        policy_version=min(versions, default=0),
        token_versions=versions,
    )


def trajectory(
    *completions: Completion | None,
    reward: float = 0.0,
    reason: TerminationReason = TerminationReason.ENV_DONE,
    **fields: Any,
) -> Trajectory:
    steps = [Step(completion=each) for each in completions]
    return Trajectory(task={"q": 1}, steps=steps, reward=reward, termination_reason=reason, **fields)


def group(*trajectories: Trajectory, name: str = "g", baseline: Trajectory | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(group_id=name, task={"q": name}, trajectories=trajectories, baseline=baseline)


def rewarded(*rewards: float, name: str = "g") -> TrajectoryGroup:
    members = [trajectory(completion(), reward=reward) for reward in rewards]
    for member in members:
        member.task = {"q": name}
    return group(*members, name=name)


def picked(metrics: dict[str, float], *names: str) -> tuple[float, ...]:
    return tuple(metrics[name] for name in names)


# -- rollouts ------------------------------------------------------------------------------------------


def test_rewards_lengths_and_turns_are_means_and_maxima() -> None:
    short = trajectory(completion(10, 4), reward=1.0, seconds=1.0)
    # The second prompt holds the first turn and 6 tokens of the environment: 20 - 10 + 5 after the first.
    long = trajectory(completion(12, 4), completion(20, 5), reward=0.5, seconds=4.0)
    metrics = rollout_metrics([group(short, long)])
    assert picked(metrics, "rollout/reward_mean", "rollout/reward_max") == (0.75, 1.0)
    assert picked(metrics, "rollout/steps_mean", "rollout/steps_max") == (1.5, 2)
    assert picked(metrics, "rollout/prompt_tokens_mean", "rollout/prompt_tokens_max") == (11.0, 12)
    assert picked(metrics, "rollout/response_tokens_mean", "rollout/response_tokens_max") == (8.5, 13)
    assert picked(metrics, "rollout/seconds_mean", "rollout/seconds_max") == (2.5, 4.0)
    assert picked(metrics, "rollout/sampled_tokens", "rollout/requests") == (13, 3)


def with_metrics(**metrics: float) -> Trajectory:
    return trajectory(completion(), metrics=metrics)


def test_metric_of_an_environment_is_a_mean_of_trajectories() -> None:
    played = [
        group(with_metrics(called=1.0, success_when_called=1.0), with_metrics(called=0.0)),
        group(
            with_metrics(called=1.0, success_when_called=0.0),
            with_metrics(called=1.0, success_when_called=1.0),
        ),
    ]
    metrics = rollout_metrics(played)
    assert metrics["rollout/called"] == 3 / 4
    assert metrics["rollout/success_when_called"] == pytest.approx(2 / 3)
    assert evaluation_metrics(played)["eval/success_when_called"] == pytest.approx(2 / 3)
    assert "rollout/called" not in rollout_metrics([group(trajectory(completion()))])


@pytest.mark.parametrize("name", ["reward_mean", "pass_at_7", "num_tasks", "ended_timeout"])
def test_environment_cannot_take_the_name_of_another_metric(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name!r}.*choose another name"):
        rollout_metrics([group(with_metrics(**{name: 1.0}))])


def test_every_ending_has_its_share() -> None:
    crashed = trajectory(None, reason=TerminationReason.CRASHED)
    metrics = rollout_metrics([group(trajectory(completion()), crashed, crashed, crashed)])
    assert picked(metrics, "rollout/ended_env_done", "rollout/ended_crashed") == (0.25, 0.75)
    assert sum(value for name, value in metrics.items() if "ended_" in name) == 1
    assert len([name for name in metrics if "ended_" in name]) == len(TerminationReason)
    assert metrics["rollout/prompt_tokens_mean"] == 10, "what never had a prompt does not count as 0"


def test_pass_at_k_is_the_estimate_of_the_evaluation(capsys: pytest.CaptureFixture[str]) -> None:
    groups = [rewarded(1, 0, 0, 0, -1, name="a"), rewarded(1, 1, 0, 0, 0.5, name="b")]
    metrics = rollout_metrics(groups)
    table = compute_pass_at_k([each for group in groups for each in group.trajectories], ks=[1, 2, 4, 5])
    assert {name: value for name, value in metrics.items() if "pass_at" in name} == {
        f"rollout/pass_at_{k}": table[k] for k in (1, 2, 4, 5)
    }
    assert metrics["rollout/pass_at_1"] == pytest.approx((1 / 5 + 3 / 5) / 2)
    assert metrics["rollout/pass_at_5"] == 1.0


def test_success_is_what_judge_says_and_each_judge_has_its_share() -> None:
    shaped = trajectory(completion(), reward=0.1, is_correct=False, by_reward_function=True)
    won = trajectory(completion(), reward=-1.0, is_correct=True)
    paid = trajectory(completion(), reward=0.1)
    metrics = rollout_metrics([group(shaped, won), group(paid, paid)])
    assert metrics["rollout/pass_at_1"] == 0.75
    names = ("reward_function", "environment", "reward")
    assert picked(metrics, *(f"rollout/judged_by_{name}" for name in names)) == (0.25, 0.25, 0.5)


def test_pass_at_k_goes_up_to_the_smallest_group() -> None:
    metrics = rollout_metrics([rewarded(1, 0, 0, 0), rewarded(0, 1)])
    assert [name for name in metrics if "pass_at" in name] == ["rollout/pass_at_1", "rollout/pass_at_2"]


def test_evaluation_has_the_same_metrics_under_its_own_area() -> None:
    groups = [rewarded(1.0, name="a"), rewarded(0.0, name="b")]
    metrics = evaluation_metrics(groups)
    assert picked(metrics, "eval/reward_mean", "eval/pass_at_1", "eval/num_tasks") == (0.5, 0.5, 2)
    assert all(name.startswith("eval/") for name in metrics)


def test_of_nothing_everything_is_zero() -> None:
    metrics = rollout_metrics([]) | staleness_metrics([], 3, 1) | token_metrics([], {})
    assert set(metrics.values()) == {0}


# -- the stream ----------------------------------------------------------------------------------------


def test_staleness_is_counted_from_the_oldest_token() -> None:
    groups = [
        group(
            trajectory(completion(versions=(5, 5, 5, 5))),
            trajectory(completion(versions=(4, 4, 4, 5)), completion(versions=(5, 5, 5, 5))),
        ),
        group(trajectory(completion(versions=(5, 5, 5, 5))), trajectory(completion(versions=(2, 3, 4, 5)))),
    ]
    assert staleness(groups, version=5) == [0, 1, 0, 3]
    metrics = staleness_metrics(groups, version=5, max_staleness=2)
    levels = [metrics[f"stream/staleness_{level}"] for level in range(4)]
    assert levels == [0.5, 0.25, 0, 0.25]
    assert picked(metrics, "stream/staleness_mean", "stream/staleness_max") == (1.0, 3)
    assert picked(metrics, "stream/version_span_mean", "stream/version_span_max") == (1.0, 3)


def test_every_level_of_staleness_that_is_allowed_has_a_share() -> None:
    metrics = staleness_metrics([rewarded(0, 1)], version=0, max_staleness=2)
    assert [metrics[f"stream/staleness_{level}"] for level in range(3)] == [1.0, 0, 0]
    assert "stream/staleness_3" not in metrics


def test_what_was_never_sampled_has_no_staleness() -> None:
    groups = [group(trajectory(), trajectory(None), trajectory(completion(sampled=0)))]
    assert staleness(groups, version=7) == []
    assert staleness_metrics(groups, version=7, max_staleness=0)["stream/staleness_max"] == 0


def test_server_that_names_one_version_is_believed() -> None:
    whole = Completion(text="x", finish_reason="stop", completion_ids=(1, 2), policy_version=3)
    assert staleness([group(trajectory(whole))], version=4) == [1]


def test_every_sampled_token_is_trained_on_or_wasted_for_reason() -> None:
    trained = group(
        trajectory(completion(sampled=7), reward=1.0),
        trajectory(completion(sampled=1), reason=TerminationReason.AGENT_ERROR),
        trajectory(completion(sampled=2), reason=TerminationReason.TIMEOUT),
        trajectory(completion(sampled=3), reason=TerminationReason.MAX_STEPS, masked=True),
        trajectory(completion(sampled=4), reason=TerminationReason.MAX_STEPS),
        baseline=trajectory(completion(sampled=5)),
    )
    stale = group(trajectory(completion(sampled=6)), trajectory(completion(sampled=12)))
    metrics = token_metrics([trained], {"stale": [stale], "too_easy": []})
    assert {name: value for name, value in metrics.items() if "tokens" in name} == {
        "stream/tokens_trained": 11,
        "stream/tokens_failed": 1,
        "stream/tokens_timeout": 2,
        "stream/tokens_unjudged": 0,
        "stream/tokens_masked": 3,
        "stream/tokens_not_imitated": 0,
        "stream/tokens_baseline": 5,
        "stream/tokens_stale": 18,
        "stream/tokens_too_easy": 0,
    }
    assert metrics["stream/wasted_fraction"] == pytest.approx(29 / 40)
    assert picked(metrics, "stream/groups_trained", "stream/groups_stale", "stream/groups_too_easy") == (
        1,
        1,
        0,
    )
    learnt = [sample for each in trained.trajectories for sample in training_samples(each)]
    assert sum(sample.num_sampled_tokens for sample in learnt) == metrics["stream/tokens_trained"]


def test_groups_that_agree_with_themselves_are_counted() -> None:
    metrics = token_metrics([rewarded(1, 1), rewarded(0, 1), rewarded(0, 0), rewarded(2, 3)], {})
    assert metrics["stream/zero_signal_fraction"] == 0.5


# -- time ----------------------------------------------------------------------------------------------


def test_learner_is_idle_while_it_waits_for_rollouts_and_driver() -> None:
    stages = {"time/wait": 1.0, "time/credit": 0.5, "time/learn": 2.0, "time/publish": 0.5}
    assert time_metrics(stages, 4.0) == {**stages, "time/step": 4.0, "time/learner_idle": 0.375}


@pytest.mark.parametrize(
    ("before", "after", "wall", "workers", "idle"),
    [
        (10.0, 13.0, 4.0, 1, 0.25),
        (10.0, 13.0, 4.0, 3, 0.75),
        (0.0, 5.0, 4.0, 1, 0.0),
        (9.0, 1.0, 4.0, 2, 1.0),
    ],
    ids=["one", "three", "the clocks differ a little", "all were replaced"],
)
def test_idle_share(before: float, after: float, wall: float, workers: int, idle: float) -> None:
    assert idle_share(after - before, wall * workers) == idle


@pytest.mark.parametrize(("wall", "workers"), [(0.0, 1), (1.0, 0)])
def test_without_time_or_workers_nothing_is_idle(wall: float, workers: int) -> None:
    assert idle_share(0.0, wall * workers) == 0.0


# -- engine and learner --------------------------------------------------------------------------------


def sample(ours: tuple[float, ...], theirs: tuple[float, ...], version: int = 5) -> TrainingSample:
    return TrainingSample(
        sample_id="a/0#0",
        prompt_ids=(1,),
        response_ids=(2, 3, 4),
        loss_mask=(1, 0, 1),
        rollout_logprobs=theirs,
        old_logprobs=ours,
        policy_version=version,
    )


def test_mismatch_is_measured_on_tokens_of_the_own_version() -> None:
    samples = [
        sample((-1.0, -9.0, -2.0), (-1.5, 0.0, -2.0)),
        sample((-1.0, -9.0, -2.0), (-1.0, 0.0, -1.0)),
        sample((-1.0, -9.0, -2.0), (-7.0, 0.0, -7.0), version=4),
    ]
    metrics = mismatch_metrics(samples, version=5)
    assert metrics == {"learn/fresh_logprob_diff_mean": 0.375, "learn/fresh_logprob_diff_max": 1.0}


def test_without_fresh_samples_there_is_no_mismatch_and_no_alarm() -> None:
    assert mismatch_metrics([sample((-1.0, 0.0, -2.0), (-9.0, 0.0, -2.0), version=4)], version=5) == {}
    assert mismatch_metrics([sample((), (-9.0, 0.0, -2.0))], version=5) == {}
    assert mismatch_alarm({}, 1e-3) is None


def test_alarm_says_how_much_and_what_it_may_be() -> None:
    assert mismatch_alarm({"learn/fresh_logprob_diff_mean": 1e-3}, 1e-3) is None
    said = mismatch_alarm({"learn/fresh_logprob_diff_mean": 0.0123}, 1e-3)
    assert said is not None
    assert "0.012 on average, more than learner.mismatch_alarm=0.001." in said
    assert "other weights" in said
    assert "dtype" in said


def curve(rewards: list[float], successes: dict[int, float], num_tasks: int = 100) -> list[dict[str, float]]:
    """Records of updates with these rewards, and of evaluations after some of them."""
    records: list[dict[str, float]] = []
    for step, reward in enumerate([math.nan, *rewards]):
        if step:
            records.append({"step": step, "rollout/reward_mean": reward})
        if step in successes:
            found = {"eval/pass_at_1": successes[step], "eval/num_tasks": num_tasks}
            records.append({"step": step, **found})
    return records


RISING = [0.1 + 0.02 * step for step in range(30)]
LEVEL = [0.4 + 0.05 * (-1) ** step for step in range(30)]


@pytest.mark.parametrize(
    ("rewards", "successes", "num_tasks", "is_alarm"),
    [
        (RISING, {0: 0.3, 10: 0.7, 30: 0.4}, 100, True),
        (RISING, {0: 0.7, 30: 0.4}, 100, True),
        (RISING, {0: 0.7, 10: 0.6, 20: 0.5, 30: 0.4}, 100, True),
        (RISING, {0: 0.3, 10: 0.7, 30: 0.65}, 100, False),
        (RISING, {0: 0.3, 10: 0.7, 30: 0.4}, 10, False),
        (RISING, {0: 0.3, 30: 0.7}, 100, False),
        (LEVEL, {0: 0.3, 10: 0.7, 30: 0.4}, 100, False),
        (RISING[::-1], {0: 0.3, 10: 0.7, 30: 0.4}, 100, False),
        (RISING[:9], {0: 0.7, 9: 0.1}, 100, False),
        (RISING, {30: 0.1}, 100, False),
        ([], {}, 100, False),
    ],
    ids=[
        *("falls from its best", "falls from the start", "falls slowly"),
        *("within chance", "few tasks", "rises too", "level reward", "both fall"),
        *("few updates", "one evaluation", "no record"),
    ],
)
def test_reward_that_rises_while_success_falls_is_an_alarm(
    rewards: list[float], successes: dict[int, float], num_tasks: int, is_alarm: bool
) -> None:
    text = held_out_alarm(curve(rewards, successes, num_tasks))
    assert (text is not None) == is_alarm
    assert text is None or "the training has risen from 0." in text


def test_best_of_many_evaluations_is_no_alarm_by_chance() -> None:
    """With success of 0.5 all the time, the best of 20 has 0.62 of 100 tasks, and the newest may have 0.4."""
    rewards, chance = [0.1 + 0.002 * step for step in range(200)], {10 * step: 0.5 for step in range(20)}
    assert held_out_alarm(curve(rewards, chance | {100: 0.62, 200: 0.4})) is None
    assert held_out_alarm(curve(rewards, chance | {100: 0.62, 200: 0.2})) is not None


@pytest.mark.parametrize(
    "change",
    [{"eval/ended_sampler_error": 0.4}, {"eval/judged_by_reward_function": 1.0}],
    ids=["failed", "another judge"],
)
def test_evaluation_of_other_tasks_or_judges_is_no_alarm(change: dict[str, float]) -> None:
    records = curve(RISING, {0: 0.7, 30: 0.4})
    earlier = {"eval/judged_by_reward": 1.0}
    assert held_out_alarm([*({**each, **earlier} for each in records)]) is not None
    assert held_out_alarm([*({**each, **earlier} for each in records[:-1]), records[-1] | change]) is None


def test_difference_that_is_no_number_is_an_alarm() -> None:
    metrics = mismatch_metrics([sample((-1.0, 0.0, math.nan), (-1.0, 0.0, -2.0))], version=5)
    assert all(map(math.isnan, metrics.values()))
    assert mismatch_alarm(metrics, 1e-3) is not None
