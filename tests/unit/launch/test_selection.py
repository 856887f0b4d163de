"""A group is trained on, or dropped for a reason that is counted."""

from __future__ import annotations

import pytest

from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.settings.tree import SelectionConfig, TrainConfig
from launch.training.rollouts import oldest_version
from launch.training.selection import mask, reason_to_drop
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig

GRPO = resolve(AlgorithmConfig(name="grpo"), 64)
DAPO = resolve(AlgorithmConfig(name="dapo"), 64)


def member(
    reward: float, reason: TerminationReason = TerminationReason.ENV_DONE, versions: tuple[int, ...] = (7,)
) -> Trajectory:
    steps = [
        Step(
            completion=Completion(
                prompt_ids=(1,),
                completion_ids=(2,),
                logprobs=(0.0,),
                text="",
                finish_reason="stop",
                policy_version=version,
            )
        )
        for version in versions
    ]
    for step in steps[-1:]:
        step.reward = reward
    return Trajectory(reward=reward, termination_reason=reason, steps=steps, rollout_id=f"0/{reward}")


def group(*members: Trajectory, baseline: Trajectory | None = None) -> TrajectoryGroup:
    return TrajectoryGroup(group_id="0", task={}, trajectories=members, baseline=baseline)


def config(max_staleness: int = 0, **selection: object) -> TrainConfig:
    config = TrainConfig(selection=SelectionConfig(**selection))
    config.rollout.max_staleness = max_staleness
    return config


MIXED = group(member(0.0), member(1.0), member(0.25))
CRASHED = TerminationReason.CRASHED


def test_whole_group_with_a_signal_is_trained_on() -> None:
    assert reason_to_drop(MIXED, 7, config(), GRPO) is None
    assert reason_to_drop(MIXED, 7, config(), DAPO) is None


def test_group_is_never_silently_smaller() -> None:
    shrunk = group(member(0.0), member(1.0), member(0.0, CRASHED))
    assert reason_to_drop(shrunk, 7, config(), GRPO) == "too_few_members"
    assert reason_to_drop(shrunk, 7, config(min_members=3), GRPO) == "too_few_members"
    assert reason_to_drop(shrunk, 7, config(min_members=2), GRPO) is None
    assert reason_to_drop(group(member(0.0, CRASHED, ())), 7, config(), GRPO) == "too_few_members"


def test_agents_own_error_is_a_result() -> None:
    own_fault = group(member(0.0, TerminationReason.AGENT_ERROR), member(1.0), member(0.0))
    assert reason_to_drop(own_fault, 7, config(), GRPO) is None


def test_group_with_spoilt_greedy_rollout_has_no_baseline() -> None:
    spoilt = group(member(0.0), member(1.0), baseline=member(0.0, CRASHED))
    assert reason_to_drop(spoilt, 7, config(), GRPO) == "too_few_members"


@pytest.mark.parametrize(
    ("version", "max_staleness", "reason"), [(7, 0, None), (8, 0, "stale"), (9, 2, None)]
)
def test_oldest_token_of_a_group_counts(version: int, max_staleness: int, reason: str | None) -> None:
    later = group(member(0.0, versions=(9, 9)), member(1.0, versions=(9, 7, 8)), member(0.5, versions=(9,)))
    assert reason_to_drop(later, version, config(max_staleness), GRPO) == reason


def test_no_group_of_a_recording_is_stale() -> None:
    """A run of ``rollout.max_staleness=2`` was recorded, and a replay has no staleness of its own."""
    replay = config()
    replay.run.replay = "runs/a"
    assert reason_to_drop(MIXED, 9, replay, GRPO) is None


def test_rollout_that_sampled_nothing_is_of_no_age() -> None:
    assert oldest_version(member(0.0, versions=())) == float("inf")
    silent = group(member(0.0, TerminationReason.PROMPT_TOO_LONG, ()), member(1.0))
    assert reason_to_drop(silent, 7, config(), GRPO) is None


@pytest.mark.parametrize(
    ("selection", "reason"),
    [
        ({"reward_range": [0.5, None]}, "too_hard"),
        ({"reward_range": [None, 0.4]}, "too_easy"),
        ({"reward_range": [0.4, 0.5]}, None),
    ],
)
def test_tasks_that_are_too_hard_or_too_easy_are_dropped(selection: dict, reason: str | None) -> None:
    assert reason_to_drop(MIXED, 7, config(**selection), GRPO) == reason  # the mean is 0.4167


def test_dynamic_sampling_drops_what_has_no_signal() -> None:
    alike = group(member(1.0), member(1.0))
    assert reason_to_drop(alike, 7, config(), DAPO) == "zero_signal"
    assert reason_to_drop(alike, 7, config(), GRPO) is None


def test_masked_endings_stay_in_the_comparison() -> None:
    limited = member(0.0, TerminationReason.MAX_STEPS)
    mixed = group(limited, member(1.0))
    mask(mixed, ["max_steps"])
    assert [each.masked for each in mixed.trajectories] == [True, False]
    assert reason_to_drop(mixed, 7, config(), GRPO) is None
