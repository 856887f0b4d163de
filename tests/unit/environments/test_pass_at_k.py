from __future__ import annotations

from datetime import date
from itertools import combinations

import numpy as np
import pytest

from environments import ConfigError, TerminationReason, Trajectory, compute_pass_at_k
from environments.errors import DatasetError
from environments.types import Step


def attempts(task, *rewards):
    return [Trajectory(task=task, reward=reward) for reward in rewards]


def brute_force(rewards, k):
    chosen = list(combinations(rewards, k))
    return sum(any(reward > 0 for reward in subset) for subset in chosen) / len(chosen)


@pytest.mark.parametrize("n", range(1, 8))
def test_estimate_is_share_of_subsets_with_correct_attempt(n):
    for correct in range(n + 1):
        rewards = [1.0] * correct + [0.0] * (n - correct)
        table = compute_pass_at_k(attempts({"q": 1}, *rewards), ks=range(1, n + 1))
        for k in range(1, n + 1):
            assert table[k] == pytest.approx(brute_force(rewards, k))


def test_problems_weigh_same_whatever_their_number_of_samples():
    results = attempts({"q": 1}, 1, 1) + attempts({"q": 2}, 0, 0, 0, 0, 0, 0)
    table = compute_pass_at_k(results, ks=[1])
    assert table[1] == 0.5
    assert (table.num_problems, table.num_samples) == (2, 8)


def test_equal_tasks_are_one_problem_in_any_order():
    results = [*attempts({"a": 1, "b": [2]}, 1), *attempts({"c": 1}, 0), *attempts({"b": [2], "a": 1}, 0)]
    assert compute_pass_at_k(results, ks=[1]).num_problems == 2


def test_correct_is_a_reward_above_zero_where_nobody_judges():
    assert compute_pass_at_k(attempts({}, 0.1, 0.0, -1.0, 0.0))[1] == 0.25


@pytest.mark.parametrize(
    ("reward", "is_correct", "estimate"),
    [(0.1, False, 0.0), (5.0, False, 0.0), (0.0, True, 1.0), (-1.0, True, 1.0), (0.1, None, 1.0)],
)
def test_judges_verdict_counts_and_not_the_reward(reward, is_correct, estimate):
    assert compute_pass_at_k([Trajectory(task={}, reward=reward, is_correct=is_correct)])[1] == estimate


def test_failed_rollout_is_never_a_success_whoever_says_so():
    crashed = Trajectory(task={}, termination_reason=TerminationReason.ENV_ERROR, is_correct=True, reward=1.0)
    assert compute_pass_at_k([crashed])[1] == 0.0


def test_table_names_each_judge_and_its_number_of_samples(capsys):
    judged = [Trajectory(task={}, is_correct=True, by_reward_function=True)] * 2
    said = [Trajectory(task={}, is_correct=False)]
    compute_pass_at_k([*attempts({}, 0.5), *said, *judged])
    assert "success by reward function (2), environment (1), reward above 0 (1)\n" in capsys.readouterr().out
    compute_pass_at_k(judged)
    assert "samples 2, success by reward function\n" in capsys.readouterr().out


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_failed_rollout_counts_as_attempt_that_was_not_correct(reward):
    failed = Trajectory(task={}, reward=reward, termination_reason=TerminationReason.ENV_ERROR, error="boom")
    assert compute_pass_at_k([failed, *attempts({}, 1.0)])[1] == 0.5


def test_failed_rollouts_are_told_from_wrong_answers(capsys):
    failed = Trajectory(task={}, termination_reason=TerminationReason.SAMPLER_ERROR, error="no server")
    table = compute_pass_at_k([failed, failed, *attempts({}, 0.0)], ks=[1])
    assert table.num_failed == 2
    assert "problems 1, samples 3, failed 2: see their error" in capsys.readouterr().out


def test_prompts_that_were_too_long_are_told_from_wrong_answers(capsys):
    ending = {"task": {}, "termination_reason": TerminationReason.PROMPT_TOO_LONG}
    table = compute_pass_at_k([Trajectory(**ending), Trajectory(**ending, steps=[Step()])], ks=[1])
    assert table.num_too_long == 1, "the other one was played until its prompt grew too long"
    assert "samples 2, prompt too long 1: raise max_prompt_length" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("n", "ks"),
    [
        (1, [1]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (16, list(range(1, 17))),
        (17, [1, 2, 4, 8, 16, 17]),
        (32, [1, 2, 4, 8, 16, 32]),
    ],
)
def test_ks_by_default(n, ks):
    results = attempts({"q": 1}, *[1] * n) + attempts({"q": 2}, *[1] * (n + 3))
    assert list(compute_pass_at_k(results).estimates) == ks


def test_k_above_the_number_of_samples_is_omitted_and_reported(capsys):
    results = attempts({"q": 1}, 1, 0, 0, 0) + attempts({"q": 2}, 0, 0)
    table = compute_pass_at_k(results, ks=[4, 1])
    assert (list(table.estimates), table.omitted) == ([1], (4,))
    assert "too few samples" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="fewer than 4"):
        table[4]
    with pytest.raises(ConfigError, match=r"ks=\[2\]"):
        table[2]


def test_table_is_printed(capsys):
    table = compute_pass_at_k(iter(attempts({}, 1, 0)))
    assert capsys.readouterr().out == f"{table}\n"
    assert str(table).splitlines() == [
        "problems 1, samples 2, success by reward above 0",
        "pass@1    0.5000",
        "pass@2    1.0000",
    ]


def test_no_results_and_impossible_ks_are_refused():
    with pytest.raises(ConfigError, match="no trajectories"):
        compute_pass_at_k([])
    with pytest.raises(ConfigError, match=r"\[0, 1\]"):
        compute_pass_at_k(attempts({}, 1), ks=[0, 1])


def test_values_of_numpy_and_dates_in_tasks_are_compared():
    made = [{"a": np.int64(1), "b": np.arange(n), "c": date(2024, 1, 1)} for n in (2, 2, 3)]
    results = [each for task in made for each in attempts(task, 1)]
    assert compute_pass_at_k(results, ks=[1]).num_problems == 2


def test_task_that_is_no_json_is_refused():
    with pytest.raises(DatasetError, match="no JSON"):
        compute_pass_at_k(attempts({"q": object()}, 1))
