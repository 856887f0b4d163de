"""How a run ends and goes on: what it saves, and what it does not write over. No Ray, no learner."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
from trained_run import save_whole

from environments.background import end_background_work
from environments.errors import ConfigError, EnvironmentFailure, LearnerError, LearnerLostError
from environments.types import TerminationReason, Trajectory
from launch.health.interrupt import Interrupts
from launch.health.restart_budget import RestartBudget
from launch.reporting.tracker import Tracker, read_metrics
from launch.run_folder.checkpoint import Progress, StreamState
from launch.run_folder.lock import RunLock
from launch.run_folder.trajectory_log import TrajectoryLog
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig
from launch.training import start, trainer
from launch.training.milestones import Milestones
from launch.training.run_state import RunState
from launch.training.stages.chosen import check_earlier_stages, chosen_stages

FOUR_BITS = [
    "learner.lora.rank=4",
    "learner.verl.model.override_config.quantization_config.load_in_4bit=true",
]


def config_of(directory: Path, *settings: str) -> TrainConfig:
    return compose([f"run.directory={directory}", *settings])


def saved(directory: Path, progress: Progress) -> None:
    """A run's folder with one checkpoint."""
    state = RunState(config_of(directory, "run.resume=true"), directory)
    state.progress = progress
    save_whole(state, StreamState(), lambda folder: None)


# -- what a run must not write over --------------------------------------------------------------------


@pytest.mark.slow
def test_checkpoints_whose_link_a_copy_has_left_out_are_an_error(tmp_path: Path) -> None:
    for step in (50, 100):
        saved(tmp_path, Progress(step=step))
    (tmp_path / "checkpoints" / "latest").unlink()
    for resume in ("true", "false"):
        with pytest.raises(ConfigError, match=r"step_000050, step_000100, and no .* `ln -sfn step_000100 /"):
            RunState(config_of(tmp_path, f"run.resume={resume}"), tmp_path)


def test_link_that_a_copy_has_followed_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, Progress(step=50))
    copy = shutil.copytree(tmp_path, tmp_path / "copy")  # it follows links
    with pytest.raises(ConfigError, match=r"latest is a folder, .*delete it, and link it"):
        RunState(config_of(copy, "run.resume=true"), copy)


def test_metrics_without_checkpoint_are_kept_unless_resumed(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, num_steps=9)
    tracker.evaluation(0, {"eval/reward_mean": 0.0, "eval/num_tasks": 1, "time/evaluate": 1.0})
    tracker.close()
    with pytest.raises(ConfigError, match="holds the metrics of a run without a checkpoint: name another"):
        RunState(config_of(tmp_path), tmp_path)
    assert len(read_metrics(tmp_path)) == 1
    RunState(config_of(tmp_path, "run.resume=true"), tmp_path)


# -- stages of a run that goes on ----------------------------------------------------------------------


def state_at(directory: Path, **progress: Any) -> RunState:
    saved(directory, Progress(**progress))
    return RunState(config_of(directory, "run.resume=true"), directory)


@pytest.mark.slow
def test_stage_made_longer_after_the_next_has_begun_is_an_error(tmp_path: Path) -> None:
    state = state_at(tmp_path, step=30, version=31, stage_steps={"warm_start": 250, "reinforce": 30})
    for num_steps, is_error in ((250, False), (350, True)):
        stages = chosen_stages(config_of(tmp_path, "recipe=calculator", f"warm_start.num_steps={num_steps}"))
        if is_error:
            with pytest.raises(ConfigError, match=r"'warm_start' would go on from 250 to 350 .* to 250, or"):
                check_earlier_stages(stages, state)
        else:
            check_earlier_stages(stages, state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_steps", "published"), [(50, [1]), (250, [])], ids=["it ends here", "it goes on"]
)
def test_what_a_stage_has_learned_that_is_cut_short_is_published(
    tmp_path: Path, num_steps: int, published: list[int]
) -> None:
    state = state_at(tmp_path, stage_steps={"warm_start": 50})
    versions: list[int] = []
    learner: Any = SimpleNamespace(load=lambda folder: "", publish=versions.append)
    tracker: Any = SimpleNamespace(announce=lambda text: None)
    config = config_of(tmp_path, "recipe=calculator", f"warm_start.num_steps={num_steps}")
    start.restore(learner, state, chosen_stages(config), tracker)
    assert versions == published
    assert state.progress.version == len(published)


@pytest.mark.parametrize(("num_done", "published"), [(50, []), (250, [1])], ids=["in a stage", "after it"])
@pytest.mark.parametrize("name", ["warm_start", "preferences"])
def test_version_before_a_stage_is_not_what_that_has_learned(
    tmp_path: Path, name: str, num_done: int, published: list[int]
) -> None:
    state = state_at(tmp_path, version=1, stage_steps={name: num_done})
    versions: list[int] = []
    learner: Any = SimpleNamespace(load=lambda folder: "", publish=versions.append)
    tracker: Any = SimpleNamespace(announce=lambda text: None)
    config = config_of(tmp_path, *FOUR_BITS, f"stages=[{name},reinforce]", f"{name}.num_steps=250")
    start.restore(learner, state, chosen_stages(config), tracker)
    assert versions == published and state.progress.version == 1


@pytest.mark.parametrize(("given", "published"), [(FOUR_BITS, [1]), ([], [])])
def test_weights_in_four_bits_are_a_version_of_their_own(
    tmp_path: Path, given: list[str], published: list[int]
) -> None:
    config = config_of(tmp_path, *given)
    versions: list[int] = []
    learner: Any = SimpleNamespace(publish=versions.append)
    state: Any = SimpleNamespace(checkpoint=None, progress=Progress.first(config.learner))
    start.restore(learner, state, chosen_stages(config), cast(Any, None))
    assert versions == published and state.progress.version == len(published)


@pytest.mark.parametrize(("num_steps", "has_ended"), [(60, True), (90, False)])
def test_resumed_run_that_has_no_step_left_is_announced(
    tmp_path: Path, num_steps: int, has_ended: bool
) -> None:
    state = state_at(tmp_path, step=60, version=61, stage_steps={"reinforce": 60})
    learner: Any = SimpleNamespace(load=lambda folder: "", publish=lambda version: None)
    lines: list[str] = []
    tracker: Any = SimpleNamespace(announce=lines.append)
    config = config_of(tmp_path, f"run.num_steps={num_steps}", "stages=[reinforce]")
    start.restore(learner, state, chosen_stages(config), tracker)
    assert ("raise run.num_steps" in lines[-1]) is has_ended


# -- how a run ends ------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "in_whole_work", "step"),
    [
        (EnvironmentFailure("The dice are gone."), False, 3),
        (LearnerError("The loss is NaN."), True, 0),
        (KeyboardInterrupt(), False, 3),
    ],
    ids=["between two updates", "in an update", "Ctrl-C"],
)
def test_run_that_ends_early_saves_updates_if_learner_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, in_whole_work: bool, step: int
) -> None:
    """Also where nobody reads what it prints any more, as when Ctrl-C has ended `tee` first."""
    saved(tmp_path, Progress(step=0))
    solved = Trajectory(rollout_id="0/0000", reward=1.0)
    crashed = Trajectory(rollout_id="1/0000", termination_reason=TerminationReason.CRASHED)

    stream = StreamState(ready=(solved, crashed), in_flight=("2/0000",))

    def start(*arguments: Any) -> Any:
        tracker, interrupts = arguments[5:7]
        state = arguments[4]
        rollouts: Any = SimpleNamespace(state=lambda: stream, have_begun=True)
        learner: Any = SimpleNamespace(begin_save=lambda folder: None)

        def train(stages: Any, budget: Any) -> None:
            state.progress.step, state.progress.stage_steps = 3, {"reinforce": 3}
            if in_whole_work:
                with interrupts.atomic_section():
                    raise error
            raise error

        milestones = Milestones(arguments[0], 9, state, None, learner, rollouts, tracker, interrupts)
        return SimpleNamespace(train=train, milestones=milestones)

    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

        def isatty(self) -> bool:
            return False

    monkeypatch.setattr("launch.training.start.start", start)
    monkeypatch.setattr("launch.health.inspection.ray_lives", lambda: True)
    monkeypatch.setattr(sys, "stdout", Closed())
    config = config_of(tmp_path, "run.resume=true")
    with RunLock(tmp_path) as lock, pytest.raises(type(error)):
        trainer._train(config, SimpleNamespace(held_out={}, policies=()), lock, RestartBudget(0, 1.0))  # type: ignore[arg-type]
    state = RunState(config, tmp_path)
    assert state.saved_step == step
    if step and isinstance(error, Exception):  # the rollouts that have failed are played again
        assert state.saved_stream() == StreamState(ready=(solved,), in_flight=("1/0000", "2/0000"))


def test_run_that_ends_with_a_lost_part_leaves_its_copy_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, nothing = tmp_path / "run", Mock()
    directory.mkdir()
    saved(directory, Progress(step=1))

    def begin(*arguments: Any) -> Any:
        milestones = Milestones(arguments[0], 9, arguments[4], None, nothing, nothing, arguments[5], nothing)
        return Mock(milestones=milestones, train=Mock(side_effect=LearnerLostError("Rank 0 is lost.")))

    monkeypatch.setattr(start, "start", begin)
    monkeypatch.setattr("launch.health.inspection.ray_lives", lambda: True)
    config = config_of(directory, "run.resume=true", f"run.checkpoints.to={tmp_path / 'far'}")
    workload: Any = SimpleNamespace(held_out={}, policies=())
    with RunLock(directory) as lock, pytest.raises(LearnerLostError):
        trainer._train(config, workload, lock, RestartBudget(0, 1.0))
    assert list((tmp_path / "far").glob("step_000001-*/state.json"))


def test_checkpoint_begins_when_the_log_before_it_is_whole(tmp_path: Path) -> None:
    state, events = RunState(config_of(tmp_path), tmp_path), list[str]()
    has_begun, may_end = threading.Event(), threading.Event()

    def record(log: TrajectoryLog) -> None:
        has_begun.set()
        assert may_end.wait(20)
        events.append("logged")

    state.log_beside(record)
    assert has_begun.wait(20) and not events, "the run goes on meanwhile"
    threading.Timer(0.1, may_end.set).start()
    save_whole(state, StreamState(), lambda folder: events.append("saved"))
    assert events == ["logged", "saved"]
    state.log_beside(lambda log: fail("no space left"))
    with pytest.raises(RuntimeError, match="no space left"):
        save_whole(state, StreamState(), lambda folder: None)


@pytest.mark.slow
def test_log_becomes_whole_before_the_cluster_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are at work then are ended, and the run would end with their SystemExit."""
    state, events, nothing = RunState(config_of(tmp_path), tmp_path), list[str](), Mock()

    def join(*arguments: Any) -> Any:
        arguments[-1].callback(end_background_work)
        state.log_beside(record)
        return nothing, None

    def record(log: TrajectoryLog) -> None:
        for _ in range(20):
            time.sleep(0.01)
        events.append("logged")

    monkeypatch.setattr(start, "join_cluster", join)
    monkeypatch.setattr(start, "model_in_background", lambda *_: lambda: fail("no model"))
    workload: Any = SimpleNamespace(policies=("",))
    with pytest.raises(RuntimeError, match="no model"), ExitStack() as ending:
        start.start(config_of(tmp_path), workload, [], nothing, state, nothing, nothing, ending)
    assert events == ["logged"]


def fail(reason: str) -> None:
    raise RuntimeError(reason)


def test_run_that_has_learned_nothing_leaves_no_checkpoint(tmp_path: Path) -> None:
    state = RunState(config_of(tmp_path), tmp_path)
    nothing: Any = None
    Milestones(nothing, 9, state, None, nothing, nothing, nothing, Interrupts()).save_failed()
    assert state.checkpoints.latest() is None
