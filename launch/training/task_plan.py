"""The tasks of a training: which one each group plays, and which are set aside because they always fail."""

from __future__ import annotations

from actors.rollouts.rollout import RolloutRequest
from environments.types import TrajectoryGroup
from launch.reporting.tracker import Tracker
from launch.run_folder.checkpoint import StreamState
from launch.settings.tree import TrainConfig
from launch.training.failures import FailureBudget, fails_everywhere
from launch.training.rollout_requests import group_requests, task_index, tasks_digest
from launch.training.run_state import SET_ASIDE, RunState
from launch.workload import Workload


class TaskPlan:
    """Makes the requests of each group, and leaves out tasks that failed in all their rollouts.

    Args:
        greedy_baseline: whether each task is also rolled out greedily.
        tracker: for what a person should know.
    """

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        greedy_baseline: bool,
        state: RunState,
        tracker: Tracker,
    ) -> None:
        self._config, self._tasks, self._greedy_baseline = config, workload.train_dataset, greedy_baseline
        self._state, self._tracker = state, tracker
        self._set_aside = state.progress.set_aside
        self._budget = FailureBudget(workload.env_class.__name__)

    def requests(self, number: int, version: int) -> list[RolloutRequest]:
        """The requests of the group ``number``, to be sampled by ``version`` or newer."""
        return group_requests(
            self._config, self._tasks, self._greedy_baseline, number, version, self._set_aside
        )

    def still_wanted(self, saved: StreamState) -> StreamState:
        """The rollouts of a checkpoint, to be played again where the tasks are others now."""
        progress, digest = self._state.progress, tasks_digest(self._config, self._tasks)
        if digest == progress.tasks_digest:
            return saved
        progress.tasks_digest = digest
        if saved.ready:
            self._tracker.announce(
                f"The tasks, their order or the temperature have changed: {len(saved.ready)} finished "
                "rollouts of the old ones are not used."
            )
        if self._set_aside:
            self._tracker.announce(
                f"{len(self._set_aside)} of the old tasks were set aside. All of the new ones are played."
            )
            self._set_aside.clear()  # they are known by their place
        return saved.with_played_again(lambda _: True)

    def record_failures(self, group: TrajectoryGroup, num_requested: int) -> None:
        """Count the failed rollouts of ``group``, and set its task aside if all have failed.

        Args:
            num_requested: number of the next group: it is the first one that does not play the task.

        Raises:
            EnvironmentFailure: too many rollouts have failed.
        """
        self._budget.record(group.rollouts)
        if not fails_everywhere(group, self._config.fleet.retries + 1):
            return
        index = task_index(self._config, self._tasks, int(group.group_id), self._set_aside)
        if str(index) in self._set_aside:  # groups of the same task were under way
            return
        self._set_aside[str(index)] = num_requested
        error = group.trajectories[0].error
        self._state.record_set_aside(index, self._tasks[index], error)
        self._tracker.announce(f"Task {index} is set aside: it failed in all of its rollouts. {error}")

    def announce_set_aside(self) -> None:
        """Announce which tasks were set aside, if there are any."""
        if self._set_aside:
            self._tracker.announce(
                f"{len(self._set_aside)} of {len(self._tasks)} tasks failed everywhere and were set aside: "
                f"see {self._state.directory / SET_ASIDE}."
            )
