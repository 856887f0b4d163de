"""Rewards that came after their rollouts: groups of a past run, to learn from again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from actors.rollouts.rollout import RolloutRequest
from environments.data.late_rewards import LateRewards
from environments.errors import TroupeError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.evaluate import report
from launch.recipes.late_rewards import late_groups, main
from launch.run_folder.trajectory_log import TrajectoryLog
from launch.settings.tree import TrainConfig, algorithm_of
from launch.training.recording import RecordedRollouts, recorded_groups
from launch.training.selection import TOO_FEW_MEMBERS, reason_to_drop
from policies.learning.credit import assign_credit
from policies.learning.samples import training_samples

LATER = TerminationReason.JUDGED_LATER


def played(
    member: str, reward: float = 0.0, reason: TerminationReason = TerminationReason.ENV_DONE
) -> Trajectory:
    """A rollout of two calls; its session has the name of the member."""
    number = int(member[-1])
    steps, prompt = [], (1,)
    for call in range(2):
        completion = Completion(
            text="2",
            prompt_ids=prompt,
            completion_ids=(10 * number + call,),
            logprobs=(-0.5,),
            finish_reason="stop",
            policy_version=3,
        )
        prompt = (*prompt, *completion.completion_ids, 7)
        info = {"session": f"session-{member.replace('/', '-')}"}
        steps.append(Step(chat_completions=[], completion=completion, info=info))
    steps[-1].reward = reward
    return Trajectory(
        task={"question": member[:8]},
        steps=steps,
        reward=reward,
        rollout_id=member,
        termination_reason=reason,
    )


def group(*members: Trajectory) -> TrajectoryGroup:
    name = members[0].rollout_id.rpartition("/")[0]
    return TrajectoryGroup(group_id=name, task=members[0].task, trajectories=members)


def past_run(folder: Path) -> Path:
    """A run that was to learn from four groups, of which two waited for rewards."""
    folder.mkdir()
    pending = group(
        played("00000000/0", reason=LATER), played("00000000/1", 1.0), played("00000000/2", reason=LATER)
    )
    partly = group(played("00000001/3", 0.5), played("00000001/4", reason=LATER))
    whole = group(played("00000002/5", 1.0), played("00000002/6"))
    nobody = group(played("00000003/7", reason=LATER), played("00000003/8", reason=LATER))
    log = TrajectoryLog(folder, 4)
    log.record_update(1, [partly, whole], {TOO_FEW_MEMBERS: [pending, nobody]}, {})
    return folder


def given(folder: Path) -> LateRewards:
    late = LateRewards(folder)
    for member, result in (
        ("00000000-0", {"reward": 0.25, "is_correct": False}),
        ("00000001-4", {"rewards": [1, -0.5]}),
        ("00000003-7", {"rewards": [1.0]}),  # of two calls
    ):
        late.expect(f"session-{member}")
        late.give(f"session-{member}", result)
    return late


def test_groups_are_whole_with_rewards_that_came_later(tmp_path: Path) -> None:
    first, second = late_groups(past_run(tmp_path / "a"), given(tmp_path / "late").read())
    assert [each.reward for each in first.trajectories] == [0.25, 1.0], "nobody has judged the third"
    assert [each.reward for each in second.trajectories] == [0.5, 0.5]
    assert [[step.reward for step in each.steps] for each in second.trajectories] == [[0.0, 0.5], [1.0, -0.5]]
    assert first.trajectories[0].is_correct is False
    assert [each.termination_reason for each in first.trajectories] == [TerminationReason.ENV_DONE] * 2
    assert [len(training_samples(each)) for each in first.trajectories] == [1, 1]
    trained, late = second.trajectories
    assert training_samples(trained) == [], "the past run has learned from it"
    (sample,) = training_samples(late)
    assert sample.num_sampled_tokens == 2
    assert late.completions[0].policy_version == 3


def test_late_reward_leaves_an_answer_out(tmp_path: Path) -> None:
    rewards = given(tmp_path / "late").read() | {"session-00000001-4": {"rewards": [None, -0.5]}}
    late = late_groups(past_run(tmp_path / "a"), rewards)[1].trajectories[1]
    assert [step.reward for step in late.steps] == [0.0, -0.5] and late.reward == -0.5
    (sample,) = training_samples(late)
    assert set(sample.turns) == {1}


def test_baseline_that_was_judged_later_stays_the_baseline(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    baseline = played("00000004/2", reason=LATER)
    waiting = replace(group(played("00000004/0", 1.0), played("00000004/1", reason=LATER)), baseline=baseline)
    TrajectoryLog(tmp_path / "a", 4).record_update(1, [], {TOO_FEW_MEMBERS: [waiting]}, {})
    rewards = {f"session-00000004-{each}": {"reward": 0.25} for each in (1, 2)}
    (found,) = late_groups(tmp_path / "a", rewards)
    assert [each.reward for each in found.trajectories] == [1.0, 0.25]
    assert found.baseline is not None and found.baseline.reward == 0.25
    assert {each.rollout_id.partition("/")[0] for each in found.rollouts} == {found.group_id}
    (alone,) = late_groups(tmp_path / "a", {"session-00000004-1": {"reward": 0.25}})
    assert alone.baseline is not None and reason_to_drop(alone, 3, TrainConfig(), algorithm_of(TrainConfig()))


def test_late_member_is_compared_with_those_learned_from_before(tmp_path: Path) -> None:
    rewards = given(tmp_path / "late").read() | {"session-00000001-4": {"reward": 2.5}}
    _, second = late_groups(past_run(tmp_path / "a"), rewards)
    trained, late = second.trajectories
    config = TrainConfig()
    config.algorithm.name = "rloo"
    samples = {each.rollout_id: training_samples(each) for each in second.trajectories}
    credited, _ = assign_credit([second], samples, algorithm_of(config), 0.0)
    ((sample,),) = credited.values()
    assert sample.rollout_id == late.rollout_id
    assert {value for value in sample.advantages if value} == {2.5 - trained.reward}


def test_replay_takes_groups_that_were_judged_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    past = past_run(tmp_path / "a")
    given(tmp_path / "late")
    arguments = [str(past), str(tmp_path / "late"), str(tmp_path / "new")]
    assert main(arguments) == 2
    assert "to 2 prompts, and an update learns from 8" in capsys.readouterr().err
    assert main([*arguments, "--groups-per-step", "2"]) == 0
    output = capsys.readouterr().out
    assert "1 rewards fit no rollout" in output and "run.num_steps=1 rollout.groups_per_step=2" in output
    source = RecordedRollouts(tmp_path / "new")
    names = ["00000000", "00000001"]
    source.request([RolloutRequest(rollout_id=f"{each}/0", group_id=each, task={}) for each in names])
    assert [[each.reward for each in source.take(name).trajectories] for name in names] == [
        [0.25, 1.0],
        [0.5, 0.5],
    ]


def test_member_without_a_call_is_one_of_a_late_group(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    silent = Trajectory(rollout_id="00000001/9", termination_reason=TerminationReason.AGENT_ERROR)
    log = TrajectoryLog(tmp_path / "a", 4)
    log.record_update(1, [], {TOO_FEW_MEMBERS: [group(played("00000001/4", reason=LATER), silent)]}, {})
    given(tmp_path / "late")
    arguments = [str(tmp_path / name) for name in ("a", "late", "new")]
    assert main([*arguments, "--groups-per-step", "1"]) == 0
    (found,) = recorded_groups(tmp_path / "new", 1)
    assert [each.reward for each in found.trajectories] == [0.5, 0.0]


def test_late_reward_that_is_no_finite_number_is_refused(tmp_path: Path) -> None:
    late = LateRewards(tmp_path)
    late.expect("session-1")
    for wrong in (
        {"reward": math.nan},
        {"reward": "good"},
        {"score": 1.0},
        {"rewards": [None]},
        {"rewards": []},
    ):
        with pytest.raises(ValueError, match="has no reward"):
            late.give("session-1", wrong)
    with pytest.raises(ValueError, match="JSON"):
        late.give("session-1", {"error": "lost", "seconds": math.nan})
    late.give("session-1", {"reward": 1.0})
    assert late.read() == {"session-1": {"reward": 1.0}}


def test_group_that_waits_for_a_reward_is_not_learned_from() -> None:
    config = TrainConfig()
    waiting = group(played("00000000/0", reason=LATER), played("00000000/1", 1.0))
    assert reason_to_drop(waiting, 3, config, algorithm_of(config)) == TOO_FEW_MEMBERS
    config.selection.min_members = 1
    assert reason_to_drop(waiting, 3, config, algorithm_of(config)) is None


def test_evaluation_without_a_single_reward_is_refused() -> None:
    with pytest.raises(TroupeError, match=r"All 1 rollouts failed.*comes later"):
        report([played("00000000/0", reason=LATER)])
