"""Evaluations and checkpoints between two policy updates, and the checkpoint of an interrupted run."""

from __future__ import annotations

from dataclasses import dataclass

from actors.learning.learners import Learners
from actors.timing import CALL_ANSWER_SECONDS
from environments.errors import TroupeError
from environments.types import JudgedBy
from launch.health.interrupt import Interrupts
from launch.reporting.metrics import evaluation_metrics, has_failed, held_out_alarm
from launch.reporting.tracker import Tracker, read_metrics
from launch.run_folder.checkpoint import StreamState
from launch.settings.tree import TrainConfig
from launch.training.activity import Clock
from launch.training.evaluator import Evaluation, Evaluator
from launch.training.rollouts import Rollouts
from launch.training.run_state import RunState
from policies.learning.samples import is_judged


@dataclass(frozen=True)
class Milestones:
    """Evaluates and saves a run: as often as its settings say, and when it ends before its time.

    Args:
        num_updates: policy updates of all stages.
        evaluator: ``None`` where nothing is evaluated.
        learner, rollouts: their states make a checkpoint.
    """

    config: TrainConfig
    num_updates: int
    state: RunState
    evaluator: Evaluator | None
    learner: Learners
    rollouts: Rollouts
    tracker: Tracker
    interrupts: Interrupts

    def evaluate_and_save(self, clock: Clock) -> None:
        """Do what is due after as many updates as there were."""
        progress, evaluator = self.state.progress, self.evaluator
        evaluate, keeps_best = self._evaluation_due(), self.config.run.best_metric is not None
        save = self.checkpoint_due() or (evaluate and keeps_best)
        evaluation = None
        with clock.measure("time/evaluate"):
            if evaluator is not None:
                # A checkpoint has to know how the evaluations before it came out.
                self.record_evaluation(evaluator.collect(wait=evaluate or save))
                # It may have reached the goal of the run, which then ends here.
                evaluate = self._evaluation_due()
                save = save or self.checkpoint_due() or (evaluate and keeps_best)
                if evaluate:  # one of this step may have been under way
                    self.learner.finish_publish()
                    evaluator.begin(progress.step, progress.version)
                    is_last = progress.step >= self.num_updates or self._is_last(progress.step)
                    evaluation = evaluator.collect(wait=is_last)
        with clock.measure("time/checkpoint"):
            self.finish_save(seconds=0)
            if save:
                self._begin_save(self._stream())
        self.record_evaluation(evaluation)

    def save_offline(self, num_before: int, num_done: int) -> None:
        """Save a stage without rollouts, where that is due between these numbers of its steps."""
        self.finish_save(seconds=0)
        every = self.config.run.saving.every
        if num_done // every > num_before // every:
            self._begin_save(self._stream())

    def _evaluation_due(self) -> bool:
        """True if the policy is to be evaluated after this many updates, and was not yet."""
        step, every = self.state.progress.step, self.config.evaluation.every
        if self.evaluator is None or step in self.tracker.evaluated:
            return False
        return step == 0 or self._is_last(step) or (every > 0 and step % every == 0)

    def _is_last(self, step: int) -> bool:
        """True for the last update, and for the newest one of a run that has reached its goal."""
        has_reached = self.tracker.goal.reached is not None
        return step == self.num_updates or (has_reached and step == self.state.progress.step)

    def checkpoint_due(self) -> bool:
        """True if a checkpoint is to be written after this many updates, and was not yet."""
        progress = self.state.progress
        # Before the first update too, where a stage without rollouts has learned something.
        every = bool(progress.stage_steps) and progress.step % self.config.run.saving.every == 0
        return (every or self._is_last(progress.step)) and progress != self.state.saved

    def _stream(self) -> StreamState:
        """Finished and requested rollouts: until rollouts begin, those of the last checkpoint."""
        return self.rollouts.state() if self.rollouts.have_begun else self.state.saved_stream()

    def _begin_save(self, stream: StreamState) -> None:
        """Copy the learner's state, once the checkpoint before is whole; the copy is written meanwhile."""
        self.finish_save()
        step = None if self.evaluator is None else self.evaluator.running_step
        with self.interrupts.atomic_section():
            self.state.begin_save(stream, self.learner.begin_save, step)

    def finish_save(self, seconds: float | None = None) -> None:
        """Announce the checkpoint that has become whole. Raises the error of one that was not written.

        Args:
            seconds: longest wait for one that is being written; 0 to leave that for a later call.
        """
        if (path := self.state.finish_save(seconds)) is not None:
            self.tracker.announce(f"Checkpoint: {path}")
        self._copy()

    def _copy(self) -> None:
        """Have what is whole copied, beside the updates. A copy that has failed ends no run."""
        try:
            self.state.copy()
        except TroupeError as error:
            self.tracker.alarm(str(error))

    def finish_copy(self) -> None:
        """Wait until the newest checkpoint is copied, too. Raises ``TroupeError`` if that fails."""
        self._copy()
        if self.state.is_copying:
            self.tracker.announce("Waiting for the checkpoint's copy at run.checkpoints.to.")
        self.state.copy(wait=True)

    def save_interrupted(self) -> None:
        """Leave a checkpoint of an interrupted run behind: where the learner is between two states, only the
        one that is being written.
        """
        self._finish_or_leave_out()
        if not self.interrupts.was_cut:
            self._begin_save(self._stream())
            self.finish_save()
        if self.evaluator is not None and self.evaluator.running_step is not None:
            self.tracker.announce("Waiting for the evaluation that is under way; Ctrl-C leaves it out.")
            self.record_evaluation(self.evaluator.collect(wait=True))
        self.finish_copy_or_name()

    def save_failed(self) -> None:
        """Leave a checkpoint of a run that an error ends, if it has learned and learner and rollouts are
        whole. Failed rollouts, which may be why it ends, are played again by the run that goes on.
        """
        progress = self.state.progress
        self._finish_or_leave_out()
        if not self.interrupts.was_cut and progress.stage_steps and progress != self.state.saved:
            try:
                self._begin_save(self._stream().with_played_again(has_failed))
                self.finish_save()
            except Exception as error:  # noqa: BLE001  # the run ends with the error that was first
                self.tracker.announce(f"Step {progress.step} could not be saved: {error}")
        self.finish_copy_or_name()

    def finish_copy_or_name(self) -> None:
        """Wait for the copies of a run that an error ends, which one of theirs does not replace."""
        try:
            self.finish_copy()
        except TroupeError as error:  # the run ends because of another one
            self.tracker.announce(str(error))

    def finish_save_after_loss(self) -> None:
        """Let the checkpoint that is being written become whole, unless it needs a rank that is lost."""
        if not self.state.is_saving:
            return
        seconds = None
        try:
            self.learner.check_ranks()
        except Exception:  # noqa: BLE001  # a lost rank may have written its part before
            seconds = CALL_ANSWER_SECONDS
        self._finish_or_leave_out(seconds)

    def _finish_or_leave_out(self, seconds: float | None = None) -> None:
        try:
            self.finish_save(seconds)
        except Exception as error:  # noqa: BLE001  # the run ends, or goes on, because of another one
            self.tracker.announce(f"The checkpoint that was being written is left out. {error}")

    def record_evaluation(self, evaluation: Evaluation | None) -> None:
        """Write an evaluation down that is finished, and whether its policy is the best one so far."""
        if evaluation is None:
            return
        state, step, groups = self.state, evaluation.step, evaluation.groups
        self.tracker.failures(groups)
        state.trajectories.record_evaluation(step, groups)
        if not any(is_judged(each) for group in groups for each in group.trajectories):
            self.tracker.alarm(f"All rollouts of the evaluation after step {step} failed: no result.")
            return
        numbers = evaluation_metrics(groups, evaluation.sets) | {"time/evaluate": evaluation.seconds}
        metric = self.config.run.best_metric
        if change := state.note_judge("eval", groups):
            anew = " The best policy is looked for anew." if metric and "/pass_at_" in metric else ""
            self.tracker.announce(f"{change}{anew}")
        # First: a run that is killed here evaluates once more.
        if metric is not None and state.saved_step < step:
            self.finish_save()
        if metric is not None and metric not in numbers:
            self.tracker.alarm(f"The evaluation after step {step} has no {metric}: its rollouts failed.")
        elif metric is not None and state.checkpoints.mark_best(step, self._judged(metric), numbers[metric]):
            value = f"{metric}={numbers[metric]:.3f}"
            self.tracker.announce(f"The best policy so far: step {step}, {value}.")
        self.tracker.evaluation(step, numbers, groups)
        if alarm := held_out_alarm(read_metrics(state.directory)):
            self.tracker.alarm(alarm)
        if step == 0 or self._is_last(step):
            self.tracker.sample(groups[0].trajectories[0])

    def _judged(self, metric: str) -> str:
        """The name of ``metric`` in the file of the best checkpoint: by another judge it is another one."""
        judge = self.state.progress.judged_by.get("eval", JudgedBy.REWARD)
        return f"{metric} by {judge}" if "/pass_at_" in metric else metric
