"""When a checkpoint is written, without a learner."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_metrics import RISING, curve
from trained_run import save_whole

from environments.disk import FileDigest
from environments.errors import ConfigError, LearnerLostError, TroupeError
from environments.types import TerminationReason, Trajectory, TrajectoryGroup
from launch.health.interrupt import Interrupts
from launch.reporting.tracker import METRICS, Goal
from launch.run_folder.checkpoint import Progress, StreamState
from launch.settings.tree import RunConfig, TrainConfig
from launch.training.activity import Activity, Clock
from launch.training.evaluator import Evaluation
from launch.training.milestones import Milestones
from launch.training.run_state import RunState


def state_of(directory: Path, resume: bool = False, checkpoints_kept: int = 2) -> RunState:
    run = RunConfig(directory=str(directory), resume=resume, checkpoints={"kept": checkpoints_kept})
    return RunState(TrainConfig(run=run), directory)


def saving(state: RunState, num_updates: int = 5, checkpoint_every: int = 2) -> Milestones:
    config: Any = SimpleNamespace(run=RunConfig(checkpoints={"every": checkpoint_every}))
    nothing: Any = None
    tracker: Any = SimpleNamespace(goal=Goal())
    return Milestones(config, num_updates, state, None, nothing, nothing, tracker, nothing)


@pytest.mark.parametrize(
    ("progress", "due"),
    [
        (Progress(), False),
        (Progress(stage_steps={"warm_start": 30}), True),
        (Progress(stage_steps={"reinforce": 1}, step=1), False),
        (Progress(stage_steps={"reinforce": 2}, step=2), True),
        (Progress(stage_steps={"reinforce": 5}, step=5), True),
    ],
    ids=["nothing learned", "after a warm start", "between", "as often as chosen", "the end"],
)
def test_checkpoint_is_due(tmp_path: Path, progress: Progress, due: bool) -> None:
    state = state_of(tmp_path)
    state.progress = progress
    assert saving(state).checkpoint_due() == due


def test_interrupted_warm_start_is_saved_again_when_done(tmp_path: Path) -> None:
    interrupted = state_of(tmp_path)
    interrupted.progress = Progress(stage_steps={"warm_start": 10})
    save_whole(interrupted, StreamState(), lambda folder: None)

    state = state_of(tmp_path, resume=True)
    milestones = saving(state)
    assert not milestones.checkpoint_due(), "nothing is new"
    state.progress.stage_steps["warm_start"] = 30
    assert milestones.checkpoint_due()
    save_whole(state, StreamState(), lambda folder: None)
    assert not milestones.checkpoint_due()
    assert state.saved_step == 0


def test_stage_without_rollouts_is_saved_as_often_as_chosen(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    config: Any = SimpleNamespace(run=RunConfig(checkpoints={"every": 6}))
    parts: Any = SimpleNamespace(
        begin_save=lambda folder: None, have_begun=False, announce=lambda text: None, running_step=None
    )
    milestones = Milestones(config, 9, state, None, parts, parts, parts, Interrupts())
    saved = []
    for before, done in ((0, 5), (5, 10), (10, 11), (11, 12)):
        state.progress.stage_steps["preferences"] = done
        milestones.save_offline(before, done)
        saved.append(state.saved is not None and state.saved.stage_steps["preferences"])
    assert saved == [False, 10, 10, 12]


class SlowDisk:
    """The learner, whose state is copied at once, and written when a test lets it be."""

    def __init__(self) -> None:
        self.is_free, self.num_copies, self.error = threading.Event(), 0, ""

    def check_ranks(self) -> None: ...

    def finish_publish(self) -> None: ...

    def begin_save(self, folder: str) -> Callable[[], dict[str, FileDigest]]:
        self.num_copies += 1

        def write() -> dict[str, FileDigest]:
            assert self.is_free.wait(20)
            path = Path(folder, "state_00000_of_00001.safetensors")
            if self.error:
                raise OSError(f"{path} could not be written: {self.error}")
            path.write_text("weights")
            return {str(path): FileDigest.of(path)}

        return write


def save_beside(state: RunState, learner: Any) -> tuple[Milestones, list[str]]:
    """The milestones of a run that saves each update, and what it announces."""
    milestones, announced = under_way(state)
    run = RunConfig(checkpoints={"every": 1})
    config: Any = SimpleNamespace(run=run, evaluation=SimpleNamespace(every=0))
    return replace(milestones, config=config, learner=learner), announced


def make_update(milestones: Milestones) -> None:
    progress = milestones.state.progress
    progress.step += 1
    progress.stage_steps["reinforce"] = progress.step
    milestones.evaluate_and_save(Clock(Activity()))


def test_checkpoint_is_written_beside_the_next_update(tmp_path: Path) -> None:
    state, learner = state_of(tmp_path), SlowDisk()
    milestones, announced = save_beside(state, learner)
    make_update(milestones)
    assert (learner.num_copies, announced, state.saved_step) == (1, [], -1)
    assert state.checkpoints.latest() is None, "it is not whole"
    assert not milestones.checkpoint_due(), "it is under way"
    state.progress.step = 7
    learner.is_free.set()
    milestones.finish_save()
    assert announced == [f"Checkpoint: {tmp_path / 'checkpoints' / 'step_000001'}"]
    assert state.saved_step == 1, "progress when the copy was made"
    assert "state_00000_of_00001" in (tmp_path / "checkpoints/step_000001/state.json").read_text()


def test_next_checkpoint_waits_for_the_one_being_written(tmp_path: Path) -> None:
    state, learner = state_of(tmp_path), SlowDisk()
    milestones, announced = save_beside(state, learner)
    make_update(milestones)
    threading.Timer(0.2, learner.is_free.set).start()
    make_update(milestones)
    assert len(announced) == 1 and learner.num_copies == 2
    milestones.finish_save()
    assert state.saved_step == 2


def test_failed_write_is_named_at_the_next_update(tmp_path: Path) -> None:
    state, learner = state_of(tmp_path), SlowDisk()
    learner.is_free.set()
    milestones, _ = save_beside(state, learner)
    make_update(milestones)
    milestones.finish_save()
    learner.error = "Input/output error"
    make_update(milestones)
    named = r"step 2 was not written, and step_000001 before it is whole: .*state_00000.*: Input/output error"
    with pytest.raises(TroupeError, match=named):
        make_update(milestones)
    latest = state.checkpoints.latest()
    assert latest is not None and latest.name == "step_000001"
    assert state.saved_step == 1 and learner.num_copies == 2
    learner.error = ""
    milestones.save_failed()
    assert state.saved_step == 3, "the run that ends saves its last update"


@pytest.mark.parametrize("is_in_time", [True, False])
@pytest.mark.parametrize("error", [LearnerLostError, ConfigError])
def test_lost_learner_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_time: bool, error: type[Exception]
) -> None:
    """And so does one whose publish has failed, where another part is lost."""

    def lose() -> None:
        raise error("A learner rank has died.")

    monkeypatch.setattr("launch.training.milestones.CALL_ANSWER_SECONDS", 0.2)
    state, learner = state_of(tmp_path), SlowDisk()
    milestones, announced = save_beside(state, learner)
    make_update(milestones)
    monkeypatch.setattr(learner, "check_ranks", lose)
    if is_in_time:
        learner.is_free.set()
    milestones.finish_save_after_loss()
    assert state.saved_step == (1 if is_in_time else -1)
    assert ("left out" in announced[0]) != is_in_time
    assert ("there is none before it: it was not whole after 0.2 s." in announced[0]) != is_in_time
    learner.is_free.set()
    make_update(milestones)
    milestones.finish_save()
    folders = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    assert folders == ({"step_000001", "step_000002"} if is_in_time else {"step_000002"})


@pytest.mark.parametrize("end", [Milestones.save_failed, Milestones.save_interrupted])
def test_run_that_ends_after_failed_write_saves_its_state(
    tmp_path: Path, end: Callable[[Milestones], None]
) -> None:
    state, learner = state_of(tmp_path), SlowDisk()
    milestones, announced = save_beside(state, learner)
    learner.error = "Stale file handle"
    learner.is_free.set()
    make_update(milestones)
    while not state._write.done():  # type: ignore[union-attr]
        time.sleep(0.01)
    learner.error, state.progress.step = "", 2
    end(milestones)
    assert state.saved_step == 2 and "Stale file handle" in announced[0]


@pytest.mark.slow
def test_checkpoint_is_read_while_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_whole(state_of(tmp_path), StreamState(in_flight=("a/0",)), lambda folder: None)
    state, is_gone, rename = state_of(tmp_path, resume=True), threading.Event(), Path.rename

    def rename_slowly(path: Path, target: Path) -> Path:
        renamed = rename(path, target)
        if target.name.endswith(".old"):
            is_gone.set()
            time.sleep(0.3)
        return renamed

    monkeypatch.setattr(Path, "rename", rename_slowly)
    state.begin_save(state.saved_stream(), lambda folder: None)
    assert is_gone.wait(20)
    assert state.saved_stream() == StreamState(in_flight=("a/0",))
    state.finish_save()


def test_cut_update_leaves_the_checkpoint_under_way(tmp_path: Path) -> None:
    state, learner = state_of(tmp_path), SlowDisk()
    milestones, announced = save_beside(state, learner)
    make_update(milestones)
    state.progress.step = 2
    milestones.interrupts.was_cut = True
    threading.Timer(0.2, learner.is_free.set).start()
    milestones.save_interrupted()
    assert state.saved_step == 1 and len(announced) == 1 and learner.num_copies == 1


class FakeEvaluator:
    """Evaluates the policy of a step, on engines of its own."""

    def __init__(self, step: int) -> None:
        self.running_step: int | None = step

    def collect(self, wait: bool) -> Evaluation:
        assert wait
        step, self.running_step = self.running_step, None
        assert step is not None
        solved = Trajectory(rollout_id=f"eval-{step}/0000", reward=1.0)
        group = TrajectoryGroup(group_id=f"eval-{step}", task={}, trajectories=(solved,))
        return Evaluation(step, [group], seconds=1.0)


def under_way(
    state: RunState, best_metric: str = "eval/reward_mean", evaluator: Any = None
) -> tuple[Milestones, list[str]]:
    """The milestones of a run under way, and what it says."""
    said: list[str] = []
    config: Any = SimpleNamespace(run=SimpleNamespace(best_metric=best_metric))
    tracker: Any = SimpleNamespace(
        announce=said.append,
        alarm=said.append,
        failures=lambda groups: None,
        evaluation=lambda step, numbers, groups: None,
        goal=Goal(),
    )
    learner: Any = SimpleNamespace(begin_save=lambda folder: None)
    rollouts: Any = SimpleNamespace(state=StreamState, have_begun=True)
    return Milestones(config, 9, state, evaluator, learner, rollouts, tracker, Interrupts()), said


def test_evaluation_of_failed_rollouts_only_has_no_result(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    milestones, said = under_way(state)
    state.progress = Progress(step=4)
    save_whole(state, StreamState(), lambda folder: None)
    crashed = Trajectory(rollout_id="eval-4/0000", termination_reason=TerminationReason.CRASHED)
    group = TrajectoryGroup(group_id="eval-4", task={}, trajectories=(crashed,))
    milestones.record_evaluation(Evaluation(4, [group], seconds=1.0))
    assert said == ["All rollouts of the evaluation after step 4 failed: no result."]
    assert state.checkpoints.best() is None


def test_interrupted_run_keeps_best_policy_under_evaluation(
    tmp_path: Path,
) -> None:
    state = state_of(tmp_path, checkpoints_kept=1)
    state.progress = Progress(step=4)
    save_whole(state, StreamState(), lambda folder: None)
    state.progress = Progress(step=5)
    milestones, _ = under_way(state, evaluator=FakeEvaluator(step=4))
    milestones.save_interrupted()
    best = state.checkpoints.best()
    assert best is not None
    assert best.name == "step_000004"
    assert state.saved_step == 5


def test_success_that_falls_while_rewards_rise_is_an_alarm(tmp_path: Path) -> None:
    milestones, said = under_way(state_of(tmp_path))
    records = curve(RISING, {0: 0.7, 30: 0.4})
    (tmp_path / METRICS).write_text("".join(f"{json.dumps(each)}\n" for each in records))
    milestones.record_evaluation(evaluated(30, False))
    assert "has risen from 0.140 to 0.640: it rewards something else" in said[-1]


def evaluated(step: int, *verdicts: bool | None, reward: float = 1.0) -> Evaluation:
    """An evaluation of one task for each verdict; with ``None``, no reward function has said anything."""
    judged = [
        Trajectory(
            rollout_id=f"{number}/0", reward=reward, is_correct=each, by_reward_function=each is not None
        )
        for number, each in enumerate(verdicts)
    ]
    groups = [
        TrajectoryGroup(group_id=str(number), task={}, trajectories=(each,))
        for number, each in enumerate(judged)
    ]
    return Evaluation(step, groups, seconds=1.0)


@pytest.mark.parametrize("metric", ["eval/pass_at_1", "eval/reward_mean"])
def test_best_of_before_is_not_compared_by_another_judge(tmp_path: Path, metric: str) -> None:
    """The run was begun with an environment whose success was a reward above 0; its best policy had 1.0."""
    begun = state_of(tmp_path)
    begun.progress = Progress(step=1, judged_by={"eval": "reward above 0"})
    save_whole(begun, StreamState(), lambda folder: None)
    judge = " by reward above 0" if "pass_at" in metric else ""
    (tmp_path / "checkpoints" / "best").write_text(f"step_000001 {metric}{judge} 1.0\n")

    state = state_of(tmp_path, resume=True)
    milestones, said = under_way(state, metric)
    state.progress.step = 2
    save_whole(state, StreamState(), lambda folder: None)
    milestones.record_evaluation(evaluated(2, True, False, reward=0.5))
    best = state.checkpoints.best()
    assert best is not None
    assert best.name == ("step_000002" if metric == "eval/pass_at_1" else "step_000001"), "rewards stay"
    change = "success was judged by reward above 0 up to here, and from step 2 on by reward function"
    assert change in said[0]
    assert ("anew" in said[0]) == (metric == "eval/pass_at_1")
    state.progress.step = 3
    save_whole(state, StreamState(), lambda folder: None)
    said.clear()
    milestones.record_evaluation(evaluated(3, False, False))
    assert said == [], "it is said once, and by the same judge values are compared"
    assert state.checkpoints.best() == best


def test_evaluation_without_judge_is_compared_with_all(tmp_path: Path) -> None:
    state = state_of(tmp_path)
    milestones, said = under_way(state, "eval/pass_at_1")
    for step, evaluation in enumerate(
        [evaluated(1, None, reward=0.0), evaluated(2, True), evaluated(3, None, reward=0.0)], 1
    ):
        state.progress.step = step
        save_whole(state, StreamState(), lambda folder: None)
        milestones.record_evaluation(evaluation)
    best = state.checkpoints.best()
    assert best is not None
    assert best.name == "step_000002"
    assert not any("judged" in line for line in said)
