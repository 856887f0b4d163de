"""A lost learner is rebuilt in the middle of a run, while engines and fleet go on. The loop uses it."""

from __future__ import annotations

import time

from environments.errors import LearnerLostError
from launch.health.restart_budget import RestartBudget
from launch.run_folder.checkpoint import CheckpointFolder
from launch.training.clock import Clock
from launch.training.components import Components
from launch.training.run_state import RunState
from launch.training.stages.base import Stage


def rebuild_or_raise(
    error: LearnerLostError, stage: Stage, run: Components, state: RunState, budget: RestartBudget
) -> None:
    """Rebuild the learner from the published weights, so that no update is lost; the step is done again.

    Raises:
        error: the run has to go on from its checkpoint as a whole, or to end.
        LearnerLostError: the published weights make no learner, or a rank has died again. Then, too, the run
            has to go on from its checkpoint.
    """
    if not can_rebuild(stage, run, state):
        raise error
    if run.interrupts.is_pending or not budget.allow(time.monotonic()):
        raise error
    folder = state.checkpoints.latest()
    assert folder is not None, "can_rebuild has looked"
    run.tracker.announce(f"{error} The learner is being rebuilt; engines and rollout actors go on.")
    with run.interrupts.atomic_section(), Clock(run.activity).measure("time/rebuild"):
        try:
            version = run.learner.rebuild(stage.optimizer, stage.num_schedule_steps, str(folder))
        except LearnerLostError:
            budget.take_back()  # the run goes on from its checkpoint, and that is counted
            raise
        run.kl.go_back(state.progress.kl_coef)
        run.rollouts.put_back()
        run.interrupts.was_cut = False  # learner and rollouts are whole again
    behind = state.progress.step - state.saved_step
    weights = f"weights of {folder.name}" if version is None else f"published weights of version {version}"
    run.tracker.announce(
        f"The learner has the {weights}, and its optimizer's moments from {folder.name}, {behind} update(s) "
        "earlier. No update is lost."
    )


def can_rebuild(stage: Stage, run: Components, state: RunState) -> bool:
    """Whether the published weights and the newest checkpoint make a learner.

    Not where a run promises to repeat (``rollout.max_staleness=0``): moments that are older than the weights
    change what comes after. Not with adapters: they are published merged with the weights. And not before
    the stage has a checkpoint, which has the moments and the reference policy.
    """
    folder = state.checkpoints.latest()
    return (
        run.config.rollout.max_staleness > 0
        and stage.rolls_out
        and run.config.learner.lora.rank == 0
        and folder is not None
        and CheckpointFolder.progress(folder).stage_steps.get(stage.name, 0) > 0
    )
