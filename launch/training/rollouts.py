"""The rollouts that a training learns from: requested ahead of the learner, taken group by group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from actors.rollouts.service import RolloutService
from environments.types import TrajectoryGroup
from launch.reporting.tracker import Tracker
from launch.run_folder.checkpoint import StreamState
from launch.settings.tree import TrainConfig
from launch.training.failures import FailureBudget, fails_everywhere
from launch.training.group_order import chosen_order
from launch.training.group_scheduler import GroupScheduler
from launch.training.recording import RecordedService
from launch.training.rollout_requests import group_requests, task_index, tasks_digest
from launch.training.run_state import SET_ASIDE, RunState
from launch.workload import Workload

SERVER_REMIND_SECONDS = 120.0
"""Between two lines that say what a run waits for."""


class Rollouts:
    """Keeps groups of rollouts on their way until the last update has its groups.

    Args:
        config, workload: of the run.
        greedy_baseline: whether each task is also rolled out greedily.
        service: plays the requests.
        state: says how far the run has come.
        tracker: for what a person should know meanwhile.
        num_updates: policy updates of the whole run.
    """

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        greedy_baseline: bool,
        service: RolloutService | RecordedService,
        state: RunState,
        tracker: Tracker,
        num_updates: int,
    ) -> None:
        self._config, self._tasks = config, workload.train_dataset
        self._service, self._state, self._tracker = service, state, tracker
        self._num_updates = num_updates
        self._set_aside = state.progress.set_aside
        self._budget = FailureBudget(workload.env_class.__name__, config.fleet.failure_budget)
        make_requests = partial(
            group_requests, config, self._tasks, greedy_baseline, set_aside=self._set_aside
        )
        num_slots = (config.rollout.max_staleness + 1) * config.rollout.groups_per_step
        self._scheduler = GroupScheduler(
            service.stream,
            make_requests,
            chosen_order(config.rollout),
            num_slots,
            first=state.progress.num_groups,
        )
        self.have_begun = False
        """Whether groups have been requested, so that their state is in the scheduler and not in a file."""

    def wait_until_up(self) -> None:
        """Return when rollouts can be requested.

        Raises:
            The error that has kept the policy server or the fleet from starting.
        """
        if not self._service.is_up:
            self._tracker.announce("Waiting for the policy server.")
        while not self._service.wait_until_up(SERVER_REMIND_SECONDS):
            self._tracker.announce(
                "Still waiting for it: its replicas load the model, or wait for room (`ray status` shows "
                "what is free, Serve's logs what keeps them)."
            )

    def begin(self, check_learner: Callable[[], None]) -> None:
        """Request the first groups, or those of the checkpoint. ``wait_until_up`` comes first.

        Args:
            check_learner: called while a group is waited for: its error ends the wait.
        """
        self._service.stream.watch(check_learner)
        self._restore()
        self.request()

    def _restore(self) -> None:
        progress, waiting = self._state.progress, self._state.saved_stream()
        digest = tasks_digest(self._config, self._tasks)
        if digest != progress.tasks_digest:
            if waiting.ready:
                self._tracker.announce(
                    f"The tasks, their order or the temperature have changed: {len(waiting.ready)} finished "
                    "rollouts of the old ones are not used."
                )
            waiting = waiting.with_played_again(lambda _: True)
            if self._set_aside:
                self._tracker.announce(
                    f"{len(self._set_aside)} of the old tasks were set aside. All of the new ones are played."
                )
                self._set_aside.clear()  # they are known by their place
        self._scheduler.restore(waiting, progress.version)
        progress.tasks_digest = digest
        self.have_begun = True

    def request(self, num_selected: int = 0) -> None:
        """Request groups for the free slots.

        Args:
            num_selected: groups that are there already for the update that is being made.
        """
        progress = self._state.progress
        wanted = (self._num_updates - progress.step) * self._config.rollout.groups_per_step
        self._scheduler.fill(progress.version, wanted - num_selected)

    def take(self) -> TrajectoryGroup:
        """The next group of ``rollout.group_order``, once complete; its task is set aside if it always fails.

        Raises:
            EnvironmentFailure: too many rollouts have failed.
            The errors of ``TrajectoryStream.take``.
        """
        group = self._scheduler.take(self._state.progress.version)
        self._budget.record(group.rollouts)
        if fails_everywhere(group, self._config.fleet.retries + 1):
            self._set_task_aside(group)
        return group

    def _set_task_aside(self, group: TrajectoryGroup) -> None:
        index = task_index(self._config, self._tasks, int(group.group_id), self._set_aside)
        if str(index) in self._set_aside:  # groups of the same task were under way
            return
        self._set_aside[str(index)] = self._scheduler.num_requested
        error = group.trajectories[0].error
        self._state.record_set_aside(index, self._tasks[index], error)
        self._tracker.announce(f"Task {index} is set aside: it failed in all of its rollouts. {error}")

    def announce_set_aside(self) -> None:
        """Say which tasks were set aside, if there are any."""
        if self._set_aside:
            self._tracker.announce(
                f"{len(self._set_aside)} of {len(self._tasks)} tasks failed everywhere and were set aside: "
                f"see {self._state.directory / SET_ASIDE}."
            )

    def put_back(self) -> None:
        """Have the groups taken again that were taken for an update which was not made."""
        self._scheduler.put_back()

    def replace(self, num_selected: int) -> None:
        """Request another group for the one that was taken last and is dropped."""
        self._scheduler.drop()
        self.request(num_selected)

    def commit(self) -> None:
        """The groups that were taken are used up, and the weights published: request those that come next."""
        self._scheduler.commit()
        self._state.progress.num_groups = self._scheduler.num_committed
        self.request()

    def resize(self, num_actors: int) -> None:
        """Play with ``num_actors`` rollout actors from now on; no rollout is lost."""
        self._service.resize(num_actors)

    def state(self) -> StreamState:
        """Finished and requested rollouts: until rollouts begin, those of the last checkpoint."""
        return self._scheduler.state() if self.have_begun else self._state.saved_stream()
