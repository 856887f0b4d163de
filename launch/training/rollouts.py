"""The rollouts that a training learns from: requested ahead of the learner, taken group by group."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from actors.rollouts.service import RolloutService
from environments.types import TrajectoryGroup
from launch.config import TrainConfig
from launch.reporting.tracker import Tracker
from launch.run_folder.checkpoint import StreamState
from launch.training.group_scheduler import GroupScheduler
from launch.training.recovery import Recovery
from launch.training.rollout_requests import group_requests, tasks_digest
from launch.workload import Workload

REMIND_SECONDS = 120.0
"""Between two lines that say what a run waits for."""


class Rollouts:
    """Keeps groups of rollouts on their way until the last update has its groups.

    Args:
        config, workload: of the run.
        greedy_baseline: whether each task is also rolled out greedily.
        service: plays the requests.
        recovery: says how far the run has come.
        tracker: for what a person should know meanwhile.
        num_updates: policy updates of the whole run.
    """

    def __init__(
        self,
        config: TrainConfig,
        workload: Workload,
        greedy_baseline: bool,
        service: RolloutService,
        recovery: Recovery,
        tracker: Tracker,
        num_updates: int,
    ) -> None:
        self._config, self._tasks = config, workload.train_dataset
        self._service, self._recovery, self._tracker = service, recovery, tracker
        self._num_updates = num_updates
        make_requests = partial(group_requests, config, self._tasks, greedy_baseline)
        num_slots = (config.rollout.max_staleness + 1) * config.rollout.groups_per_step
        self._scheduler = GroupScheduler(
            service.stream, make_requests, num_slots, recovery.progress.num_groups
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
        while not self._service.wait_until_up(REMIND_SECONDS):
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
        progress, waiting = self._recovery.progress, self._recovery.saved_stream()
        digest = tasks_digest(self._config, self._tasks)
        if digest == progress.tasks_digest:
            self._scheduler.restore(waiting, progress.version)
        elif waiting.ready:
            self._tracker.announce(
                f"The tasks, their order or the temperature have changed: {len(waiting.ready)} finished "
                "rollouts of the old ones are not used."
            )
        progress.tasks_digest = digest
        self.have_begun = True

    def request(self, num_selected: int = 0) -> None:
        """Request groups for the free slots.

        Args:
            num_selected: groups that are there already for the update that is being made.
        """
        progress = self._recovery.progress
        wanted = (self._num_updates - progress.step) * self._config.rollout.groups_per_step
        self._scheduler.fill(progress.version, wanted - num_selected)

    def take(self) -> TrajectoryGroup:
        """The next group in the order of the tasks, once complete. Raises as ``TrajectoryStream.take``."""
        return self._scheduler.take()

    def replace(self, num_selected: int) -> None:
        """Request another group for the one that was taken last and is dropped."""
        self._scheduler.drop()
        self.request(num_selected)

    def commit(self) -> None:
        """The groups that were taken are used up, and the weights published: request those that come next."""
        self._scheduler.commit()
        self._recovery.progress.num_groups = self._scheduler.num_committed
        self.request()

    def resize(self, num_actors: int) -> None:
        """Play with ``num_actors`` rollout actors from now on; no rollout is lost."""
        self._service.resize(num_actors)

    def state(self) -> StreamState:
        """Finished and requested rollouts: until rollouts begin, those of the last checkpoint."""
        return self._scheduler.state() if self.have_begun else self._recovery.saved_stream()
