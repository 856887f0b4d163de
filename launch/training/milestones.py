"""Between two policy updates: evaluations and checkpoints, and the checkpoint of an interrupted run."""

from __future__ import annotations

from environments.types import JudgedBy
from launch.reporting.metrics import evaluation_metrics, has_failed
from launch.run_folder.checkpoint import StreamState
from launch.training.clock import Clock
from launch.training.components import Components
from launch.training.evaluator import Evaluation
from launch.training.run_state import RunState
from policies.learning.samples import is_judged


def evaluate_and_save(run: Components, state: RunState, clock: Clock) -> None:
    """Do what is due after as many updates as there were."""
    step, last = state.progress.step, state.progress.step >= run.num_updates
    evaluate = evaluation_due(run, state)
    save = checkpoint_due(run, state) or (evaluate and run.config.run.best_metric is not None)
    evaluation = None
    with clock.measure("time/evaluate"):
        # A checkpoint has to know how the evaluations before it came out.
        record_evaluation(run, state, run.evaluator.collect(wait=evaluate or save))
        if evaluation_due(run, state):  # one of this step may have been under way
            run.evaluator.begin(step, state.progress.version)
            evaluation = run.evaluator.collect(wait=last)
    with clock.measure("time/checkpoint"):
        if save:
            save_checkpoint(run, state)
    record_evaluation(run, state, evaluation)


def evaluation_due(run: Components, state: RunState) -> bool:
    """Whether the policy is to be evaluated after this many updates, and was not yet."""
    step, every = state.progress.step, run.config.evaluation.every
    if run.workload.val_dataset is None or step in run.tracker.evaluated:
        return False
    return step in (0, run.num_updates) or (every > 0 and step % every == 0)


def checkpoint_due(run: Components, state: RunState) -> bool:
    """Whether a checkpoint is to be written after this many updates, and was not yet."""
    progress = state.progress
    # Before the first update too, where a stage without rollouts has learned something.
    every = bool(progress.stage_steps) and progress.step % run.config.run.checkpoint_every == 0
    return (every or progress.step == run.num_updates) and progress != state.saved


def save_checkpoint(run: Components, state: RunState) -> None:
    """Write a checkpoint of the present state."""
    _save(run, state, run.rollouts.state())


def _save(run: Components, state: RunState, stream: StreamState) -> None:
    with run.interrupts.atomic_section():
        path = state.save(stream, run.learner.save, run.evaluator.running_step)
    run.tracker.announce(f"Checkpoint: {path}")


def save_interrupted(run: Components, state: RunState) -> None:
    """Leave a checkpoint of an interrupted run behind, unless the learner is between two states."""
    if not run.interrupts.was_cut:
        save_checkpoint(run, state)
    if run.evaluator.running_step is not None:
        run.tracker.announce("Waiting for the evaluation that is under way; Ctrl-C leaves it out.")
        record_evaluation(run, state, run.evaluator.collect(wait=True))


def save_failed(run: Components, state: RunState) -> None:
    """Leave a checkpoint of a run that an error ends, if it has learned and learner and rollouts are whole.

    Failed rollouts, which may be why it ends, are played again by the run that goes on.
    """
    progress = state.progress
    if run.interrupts.was_cut or not progress.stage_steps or progress == state.saved:
        return
    try:
        _save(run, state, run.rollouts.state().with_played_again(has_failed))
    except Exception as error:  # noqa: BLE001  # the run ends with the error that was first
        run.tracker.announce(f"Step {state.progress.step} could not be saved: {error}")


def record_evaluation(run: Components, state: RunState, evaluation: Evaluation | None) -> None:
    """Write an evaluation down that is finished, and whether its policy is the best one so far."""
    if evaluation is None:
        return
    run.tracker.failures(evaluation.groups)
    state.trajectories.record_evaluation(evaluation.step, evaluation.groups)
    if not any(is_judged(each) for group in evaluation.groups for each in group.trajectories):
        run.tracker.alarm(f"All rollouts of the evaluation after step {evaluation.step} failed: no result.")
        return
    numbers = evaluation_metrics(evaluation.groups) | {"time/evaluate": evaluation.seconds}
    metric = run.config.run.best_metric
    if change := state.note_judge("eval", evaluation.groups):
        anew = " The best policy is looked for anew." if metric and "/pass_at_" in metric else ""
        run.tracker.announce(f"{change}{anew}")
    # First: a run that is killed here evaluates once more.
    if metric is not None and state.checkpoints.mark_best(
        evaluation.step, _judged(metric, state), numbers[metric]
    ):
        value = f"{metric}={numbers[metric]:.3f}"
        run.tracker.announce(f"The best policy so far: step {evaluation.step}, {value}.")
    run.tracker.evaluation(evaluation.step, numbers)
    if evaluation.step in (0, run.num_updates):
        run.tracker.sample(evaluation.groups[0].trajectories[0])


def _judged(metric: str, state: RunState) -> str:
    """The name of ``metric`` in the file of the best checkpoint: values by another judge are not compared.

    That of a reward above 0 is not named, as in the files of versions that knew no other.
    """
    judge = state.progress.judged_by.get("eval", JudgedBy.REWARD)
    return metric if "/pass_at_" not in metric or judge == JudgedBy.REWARD else f"{metric} by {judge}"
