"""The training loop: it takes the stages of a run through their steps."""

from __future__ import annotations

from collections.abc import Sequence

from environments.command_name import command_name
from environments.errors import LearnerLostError
from launch.health.restart_budget import RestartBudget
from launch.training.clock import Clock
from launch.training.components import Components
from launch.training.milestones import evaluate_and_save
from launch.training.rebuild import rebuild_or_raise
from launch.training.run_state import RunState
from launch.training.stages.base import Stage
from launch.training.start import begin_rollouts


def train(stages: Sequence[Stage], run: Components, state: RunState, budget: RestartBudget) -> None:
    """Train the policy through ``stages``, from where ``state.progress`` says to their last step.

    Args:
        budget: how often a lost learner may be rebuilt.

    Raises:
        LearnerLostError: it was lost, and could not be rebuilt, or too often.
    """
    for stage in stages:
        while stage.num_done(state) < stage.num_steps:
            run.interrupts.raise_if_interrupted()
            try:
                train_stage(stage, run, state)
            except LearnerLostError as error:
                rebuild_or_raise(error, stage, run, state, budget)
    begin_rollouts(run)  # not begun yet where no stage rolls out: its policy is evaluated all the same
    run.interrupts.raise_if_interrupted()
    evaluate_and_save(run, state, Clock(run.activity))
    run.rollouts.announce_set_aside()
    run.tracker.summary()
    run.tracker.announce(f"Serve it: {serve_command(run, state)}")


def serve_command(run: Components, state: RunState) -> str:
    """The command that serves what was trained to clients: the agent with its tools too, if it can answer."""
    agent = "" if run.workload.task_from_message is None else f"workload={run.config.workload} "
    return f"{command_name('serve')} {agent}model.path={state.directory}"


def train_stage(stage: Stage, run: Components, state: RunState) -> None:
    """Do the steps of ``stage`` that are left."""
    if stage.num_done(state) == 0:  # else the checkpoint has brought optimizer, schedule and reference
        with run.interrupts.atomic_section():
            run.learner.begin_phase(stage.optimizer, stage.num_schedule_steps)
    if stage.rolls_out:
        begin_rollouts(run)
    while stage.num_done(state) < stage.num_steps:
        run.interrupts.raise_if_interrupted()
        clock = Clock(run.activity)
        if stage.rolls_out:
            evaluate_and_save(run, state, clock)
        stage.step(run, state, clock)
