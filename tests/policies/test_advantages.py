"""Advantages against the papers' formulas, written out again in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from environments.errors import ConfigError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from policies.learning.advantages import samples_with_advantages

EPSILON = 1e-6  # verl's, in the denominator


def completion(prompt: str, text: str) -> Completion:
    ids = tuple(text.encode())
    return Completion(
        prompt_ids=tuple(prompt.encode()),
        completion_ids=ids,
        logprobs=(-1.0,) * len(ids),
        text=text,
        finish_reason="stop",
    )


def trajectory(rollout_id: str, reward: float, *turns: tuple[str, str]) -> Trajectory:
    steps = [Step(completion=completion(*turn)) for turn in turns]
    return Trajectory(rollout_id=rollout_id, reward=reward, steps=steps)


def group(name: str, rewards: list[float]) -> TrajectoryGroup:
    """Trajectories of different lengths, with one turn or two."""
    trajectories = []
    for index, reward in enumerate(rewards):
        said = "x" * (1 + index)
        turns = [("ask", said)] if index % 2 else [("ask", said), (f"ask{said}go on", "yz")]
        trajectories.append(trajectory(f"{name}/{index}", reward, *turns))
    return TrajectoryGroup(group_id=name, task={}, trajectories=tuple(trajectories))


RAGGED = {"a": [1.0, 0.0, 0.0], "b": [0.25, 1.0], "c": [0.0, 0.5, 1.0, 1.0, 0.1], "d": [1.0, 1.0, 1.0]}


def advantages(estimator: str, normalize_by_std: bool = True) -> dict[str, list[float]]:
    """The advantage of each trajectory of ``RAGGED``; it has to be the same on all of its tokens."""
    groups = [group(name, rewards) for name, rewards in RAGGED.items()]
    rows = iter(samples_with_advantages(groups, estimator, normalize_by_std))
    result = {}
    for name, rewards in RAGGED.items():
        result[name] = []
        for _ in rewards:
            (sample,) = next(rows)
            on_tokens = np.array(sample.advantages)[np.array(sample.loss_mask) == 1]
            assert np.ptp(on_tokens) == 0
            assert not np.array(sample.advantages)[np.array(sample.loss_mask) == 0].any()
            result[name].append(on_tokens[0])
    return result


def assert_equal(found: dict[str, list[float]], expected: dict[str, np.ndarray]) -> None:
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_grpo_is_the_distance_from_the_groups_mean_in_standard_deviations() -> None:
    def formula(rewards: list[float]) -> np.ndarray:
        values = np.array(rewards)
        return (values - values.mean()) / (values.std(ddof=1) + EPSILON)

    assert_equal(advantages("grpo"), {name: formula(rewards) for name, rewards in RAGGED.items()})


def test_grpo_without_the_division_is_the_distance_from_the_mean() -> None:
    expected = {name: np.array(rewards) - np.mean(rewards) for name, rewards in RAGGED.items()}
    assert_equal(advantages("grpo", normalize_by_std=False), expected)


@pytest.mark.parametrize("estimator", ["rloo", "rloo_vectorized"])
def test_rloo_is_the_distance_from_the_mean_of_the_others(estimator: str) -> None:
    def formula(rewards: list[float]) -> np.ndarray:
        others = [np.mean(rewards[:index] + rewards[index + 1 :]) for index in range(len(rewards))]
        return np.array(rewards) - np.array(others)

    assert_equal(advantages(estimator), {name: formula(rewards) for name, rewards in RAGGED.items()})


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "rloo_vectorized", "opo"])
def test_a_rollout_that_is_alone_in_its_group_has_advantage_zero(estimator: str) -> None:
    groups = [group("alone", [5.0]), group("pair", [1.0, 0.0])]
    (alone,), *pair = samples_with_advantages(groups, estimator)
    assert set(alone.advantages) == {0.0}
    assert all(any(sample.advantages) for (sample,) in pair)


def test_the_sequences_of_a_rewritten_history_share_their_trajectorys_advantage() -> None:
    rewritten = trajectory("g/0", 1.0, ("long question", "abc"), ("short", "de"))
    other = trajectory("g/1", 0.0, ("long question", "f"))
    groups = [TrajectoryGroup(group_id="g", task={}, trajectories=(rewritten, other))]
    (first, second), (third,) = samples_with_advantages(groups, "grpo")
    assert (len(first.advantages), len(second.advantages)) == (3, 2)
    assert len({*first.advantages, *second.advantages}) == 1
    # Two sequences are still one rollout: the mean is 1/2, not 2/3.
    assert first.advantages[0] == pytest.approx(0.5 / (0.5**0.5 + EPSILON))
    assert third.advantages[0] == pytest.approx(-0.5 / (0.5**0.5 + EPSILON))


def test_a_rollout_that_sampled_nothing_counts_in_the_baseline_and_trains_nothing() -> None:
    groups = [
        TrajectoryGroup(
            group_id="g",
            task={},
            trajectories=(trajectory("g/0", 1.0, ("ask", "a")), trajectory("g/1", 0.0)),
        )
    ]
    (sample,), nothing = samples_with_advantages(groups, "grpo", normalize_by_std=False)
    assert sample.advantages == (0.5,)
    assert nothing == []


def test_no_groups_give_no_samples() -> None:
    assert samples_with_advantages([], "grpo") == []


def test_an_estimator_that_needs_a_critic_is_refused_with_those_that_do_not() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.advantage='gae' is not one of grpo, rloo"):
        samples_with_advantages([group("g", [1.0, 0.0])], "gae")


def test_a_rollout_that_infrastructure_has_spoilt_neither_trains_nor_shifts_the_others() -> None:
    whole = group("a", [1.0, 0.0, 0.5])
    spoilt = trajectory("a/9", 0.0, ("ask", "xx"))
    spoilt.termination_reason = TerminationReason.CRASHED
    with_it = TrajectoryGroup(group_id="a", task={}, trajectories=(spoilt, *whole.trajectories))
    first, *others = samples_with_advantages([with_it], "grpo")
    assert first == []
    assert others == samples_with_advantages([whole], "grpo")
    alone = TrajectoryGroup(group_id="b", task={}, trajectories=(spoilt,))
    assert samples_with_advantages([alone], "grpo") == [[]]
