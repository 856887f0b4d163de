"""The training loop with a learner that can be lost, and without Ray."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_rollouts import SimulatedPlan, SimulatedStream

from environments.errors import LearnerLostError
from launch.health.interrupt import Interrupts
from launch.health.restart_budget import RestartBudget
from launch.reporting.tracker import Goal
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig
from launch.training.activity import Activity, Clock
from launch.training.loop import TrainingLoop
from launch.training.milestones import Milestones
from launch.training.rollouts import Rollouts
from launch.training.run_state import RunState
from launch.training.stages.base import Stage, publish
from policies.learning.settings import OptimizerConfig

NUM_STEPS = 4


class FakeLearner:
    """Learns nothing; ``rebuild`` finds the newest published version."""

    policies = ("",)

    def __init__(self) -> None:
        self.version, self.num_rebuilt, self.num_phases = 0, 0, 0

    def begin_phase(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        self.num_phases += 1

    def publish(self, version: int) -> None:
        self.version = version

    def begin_save(self, folder: str) -> None: ...

    def check_ranks(self) -> None: ...

    def finish_publish(self) -> None: ...

    def rebuild(self, optimizer: OptimizerConfig, num_schedule_steps: int, folder: str) -> int:
        self.num_rebuilt += 1
        return self.version


class TakesGroups(Stage):
    """Takes the groups of an update; at ``lost_at`` the learner is lost with them, once."""

    name = "takes"
    rolls_out = True
    num_steps = NUM_STEPS
    optimizer = OptimizerConfig()

    def __init__(self, config: TrainConfig, lost_at: int) -> None:
        super().__init__(config)
        self.lost_at, self.taken = lost_at, list[list[str]]()

    def step(self, run: Any, state: RunState, clock: Clock) -> None:
        taken = [run.rollouts.take().group_id for _ in range(self.config.rollout.groups_per_step)]
        self.taken.append(taken)
        with run.interrupts.atomic_section():
            if self.num_done(state) == self.lost_at:
                self.lost_at = -1
                raise LearnerLostError("A learner rank has died.")
            publish(run, state)
            state.progress.step += 1
            self.count_steps(state)
            run.rollouts.commit()
        run.tracker.goal.note(
            {"step": state.progress.step, "rollout/reward_mean": state.progress.step / NUM_STEPS}
        )


def trained(
    folder: Path, lost_at: int, *settings: str, most_rebuilds: int = 1, last_step: int = NUM_STEPS
) -> tuple[TakesGroups, FakeLearner]:
    """A run of ``NUM_STEPS`` updates of two groups, with checkpoints after every other one."""
    config = compose(
        [f"run.directory={folder}", "rollout.groups_per_step=2", "run.checkpoints.every=2", *settings]
    )
    state, learner, interrupts = RunState(config, folder), FakeLearner(), Interrupts()
    tracker: Any = SimpleNamespace(
        announce=lambda text: None,
        begin_steps=lambda: None,
        summary=lambda: None,
        evaluated=set(),
        goal=Goal(config.run.stop_metric, config.run.stop_at),
    )
    stream: Any = SimulatedStream(2, lambda rollout_id: 1.0)
    plan: Any = SimulatedPlan(2)
    rollouts = Rollouts(stream, plan, config.rollout, state.progress, NUM_STEPS)
    parts: Any = SimpleNamespace(
        config=config,
        workload=SimpleNamespace(task_from_message=None),
        learner=learner,
        rollouts=rollouts,
        kl=SimpleNamespace(go_back=lambda coef: None),
        report=SimpleNamespace(begin=lambda: None),
        tracker=tracker,
        interrupts=interrupts,
    )
    faked: Any = learner
    milestones = Milestones(config, NUM_STEPS, state, None, faked, rollouts, tracker, interrupts)
    stage = TakesGroups(config, lost_at)
    loop = TrainingLoop(parts, state, milestones, plan, [], Activity())
    loop.train([stage], RestartBudget(most_rebuilds, 10.0))
    assert state.progress.step == state.saved_step == last_step
    return stage, learner


def test_undisturbed_run_takes_every_group_once(tmp_path: Path) -> None:
    stage, learner = trained(tmp_path, -1)
    assert stage.taken == [[f"{step * 2 + place:08d}" for place in (0, 1)] for step in range(NUM_STEPS)]
    assert (learner.version, learner.num_rebuilt, learner.num_phases) == (NUM_STEPS, 0, 1)


@pytest.mark.parametrize("colocated", [False, True])
def test_engines_that_take_turns_start_before_a_warm_start(colocated: bool) -> None:
    """What keeps them from starting is found before its steps, and other programs may start meanwhile."""
    events: list[str] = []
    service: Any = SimpleNamespace(
        wake=lambda: events.append("wake"),
        is_up=True,
        wait_until_up=lambda seconds: not events.append("up"),
        check_start=lambda: None,
    )
    stage: Any = SimpleNamespace(
        rolls_out=False,
        optimizer=None,
        num_schedule_steps=1,
        num_steps=1,
        num_done=lambda state: events.count("step"),
        step=lambda *_: events.append("step"),
    )
    parts: Any = SimpleNamespace(
        config=compose([f"server.colocated={colocated}"]),
        learner=SimpleNamespace(begin_phase=lambda *_: events.append("learner")),
        interrupts=Interrupts(),
        tracker=SimpleNamespace(goal=Goal(None, None)),
    )
    others: Any = SimpleNamespace(save_offline=lambda *_: None)
    TrainingLoop(parts, others, others, others, [service], Activity())._train_stage(stage)
    assert events == ["learner", *["wake", "up"] * colocated, "step"]


def test_run_ends_with_checkpoint_at_its_goal(tmp_path: Path) -> None:
    goal = ("run.stop_metric=rollout/reward_mean", "run.stop_at=0.75", "run.checkpoints.every=50")
    stage, learner = trained(tmp_path, -1, *goal, last_step=3)
    assert (len(stage.taken), learner.version) == (3, 3)


def test_lost_learner_is_rebuilt_and_the_step_done_again(tmp_path: Path) -> None:
    stage, learner = trained(tmp_path, 3, "rollout.max_staleness=1")
    assert stage.taken[3] == stage.taken[4], "the groups of the update that was not made"
    assert len(stage.taken) == NUM_STEPS + 1
    assert (learner.version, learner.num_rebuilt, learner.num_phases) == (NUM_STEPS, 1, 1)


@pytest.mark.parametrize(
    ("lost_at", "settings", "most_rebuilds"),
    [
        (3, ["rollout.max_staleness=0"], 1),
        (3, ["rollout.max_staleness=1", "learner.lora.rank=4"], 1),
        (1, ["rollout.max_staleness=1"], 1),
        (3, ["rollout.max_staleness=1"], 0),
    ],
    ids=["run that repeats", "adapters", "before the first checkpoint", "budget spent"],
)
def test_run_whose_learner_cannot_be_rebuilt_ends(
    tmp_path: Path, lost_at: int, settings: list[str], most_rebuilds: int
) -> None:
    with pytest.raises(LearnerLostError):
        trained(tmp_path, lost_at, *settings, most_rebuilds=most_rebuilds)
