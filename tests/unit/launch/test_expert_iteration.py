"""What expert iteration says that it has learned from, with a learner and engines that do nothing."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.health.interrupt import Interrupts
from launch.run_folder.trajectory_log import TRAIN, read_kept
from launch.settings.compose import compose
from launch.settings.tree import algorithm_of
from launch.training.activity import Activity, Clock
from launch.training.engine_comparison import EngineComparison
from launch.training.run_state import RunState
from launch.training.stages.expert_iteration import ExpertIteration
from launch.training.update_report import UpdateReport
from policies.learning.samples import LearnerUpdate, TrainBatch


def played(member: int, reward: float, reason: TerminationReason = TerminationReason.ENV_DONE) -> Trajectory:
    said = Completion(
        prompt_ids=(1,), completion_ids=(2,) * 10, logprobs=(-1.0,) * 10, text="", finish_reason="stop"
    )
    return Trajectory(
        rollout_id=f"00000000/{member:04d}",
        steps=[Step(completion=said, reward=reward)],
        reward=reward,
        termination_reason=reason,
    )


GROUP = TrajectoryGroup(
    group_id="00000000",
    task={},
    trajectories=(
        played(0, 1.0),
        played(1, 0.0),
        played(2, 0.5),
        played(3, 1.0, TerminationReason.TIMEOUT),
    ),
)


class FakeLearner:
    def __init__(self) -> None:
        self.fitted: list[str] = []

    def fit(self, batches: list[TrainBatch]) -> LearnerUpdate:
        self.fitted = [sample.rollout_id for batch in batches for sample in batch.samples]
        return LearnerUpdate(metrics={}, num_optimizer_steps=len(batches))

    def publish(self, version: int) -> None: ...


def test_only_what_was_imitated_counts_as_trained(tmp_path: Path) -> None:
    config = compose(
        ["rollout.groups_per_step=1", "rollout.group_size=4", f"run.directory={tmp_path}", "run.replay=a"]
    )
    learner, state, reported = FakeLearner(), RunState(config, tmp_path), {}
    algorithm = algorithm_of(config)
    tracker: Any = SimpleNamespace(
        announce=print,
        failures=lambda groups: None,
        step=lambda step, numbers, histograms, groups: reported.update(numbers),
    )
    run: Any = SimpleNamespace(
        algorithm=algorithm,
        learner=learner,
        interrupts=Interrupts(),
        rollouts=SimpleNamespace(take=lambda: GROUP, commit=dict),
        comparison=EngineComparison(config, algorithm, cast(Any, learner), None, print),
        report=UpdateReport(config, state, tracker, None),
        tracker=tracker,
    )
    ExpertIteration(config).step(run, state, Clock(Activity()))

    assert learner.fitted == ["00000000/0000"]
    assert reported["learn/num_imitated_trajectories"] == 1
    assert reported["stream/tokens_trained"] == 10
    assert reported["stream/tokens_not_imitated"] == 20
    assert reported["stream/tokens_timeout"] == 10
    assert reported["stream/wasted_fraction"] == 0.75
    state.finish_log()
    outcomes = [each.outcome for each in read_kept(tmp_path, TRAIN, 1)]
    assert outcomes == ["trained", "not_imitated", "not_imitated", "not_imitated"]
