"""Tasks of a training: which one each group plays, which are set aside, and when failures end the run."""

from __future__ import annotations

import random
import re
from collections import Counter, deque
from collections.abc import Iterator, Sequence

from actors.rollouts.rollout import RolloutRequest
from environments.errors import EnvironmentFailure
from environments.types import TerminationReason, Trajectory, TrajectoryGroup
from launch.reporting.tracker import Tracker
from launch.run_folder.checkpoint import StreamState
from launch.settings.tree import TrainConfig
from launch.training.rollout_requests import group_requests, task_index, tasks_digest
from launch.training.run_state import SET_ASIDE, RunState
from launch.workload import Workload
from policies.learning.samples import is_judged

WORLD_FAILURES = {TerminationReason.ENV_ERROR, TerminationReason.OUT_OF_MEMORY, TerminationReason.CRASHED}
"""Endings for which the environment or its process is to blame, and neither the agent nor the server."""
MOST_SPOILT = 0.5
"""Share of the newest rollouts that an environment may spoil before the run ends."""
WINDOW = 200
"""Newest rollouts that the budget counts."""
LEAST_FAILURES = 30
"""Failures among them without which no run ends: the first few say nothing about a night."""
LEAST_ATTEMPTS = 3
"""A task has to fail so often before it is set aside."""
NUM_SAMPLES = 3
"""Tracebacks in the error that ends a run."""
RAISED = re.compile(r"raised in (\S+): (\w+)")
BELOW_TRACEBACK = re.compile(r"^Traceback \(.*\):\n(?: .*\n)*(?:\w+\.)*(.*)", re.MULTILINE)


class TaskPlan:
    """Makes the requests of each group, and leaves out tasks that failed in all their rollouts.

    Without a curriculum a group's task is a function of its number. A curriculum chooses the task when the
    group is requested, by the results of the groups that are used up then; ``Progress`` holds its choice
    until the group is used up too, so that what is played again plays the same.

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
        self._budget = FailureBudget(workload.pair.env_class.__name__)
        # A replay has the tasks of the recorded run, whoever has chosen them.
        self._curriculum = workload.curriculum if config.run.replay is None else None
        if self._curriculum is not None:
            method = type(self._curriculum).observe.__qualname__
            progress = state.progress
            if progress.curriculum and progress.observed_by != method:
                progress.curriculum.clear()
                tracker.announce(f"The results were kept by {progress.observed_by}: {method} begins anew.")
            progress.observed_by = method
            self._curriculum.state = progress.curriculum
            tracker.announce(f"Curriculum: {self._curriculum}.")

    def requests(self, number: int, version: int) -> list[RolloutRequest]:
        """The requests of the group ``number``, to be sampled by ``version`` or newer."""
        task = self._tasks[self._index(number)]
        return group_requests(self._config, task, self._greedy_baseline, number, version)

    def _index(self, number: int) -> int:
        """The place of the task that the group ``number`` plays, or has played if it is not used up."""
        if self._curriculum is None:
            return task_index(self._config, self._tasks, number, self._set_aside)
        chosen = self._state.progress.chosen_tasks
        if str(number) not in chosen:
            rng = random.Random(f"{self._config.seed}/curriculum/{number}")
            chosen[str(number)] = self._curriculum.select(self._tasks, self._turns(), rng)
        return chosen[str(number)]

    def _turns(self) -> Iterator[int]:
        """Places of the tasks from here on, in the order in which no curriculum plays them all."""
        progress, set_aside = self._state.progress, dict.fromkeys(self._set_aside, 0)
        while True:
            progress.num_turns += 1
            yield task_index(self._config, self._tasks, progress.num_turns - 1, set_aside)

    def record_results(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Take note of groups that are used up, in their order; return metrics of the curriculum."""
        if self._curriculum is None:
            return {}
        progress = self._state.progress
        for group in groups:
            index = progress.chosen_tasks.pop(str(int(group.group_id)))
            if rollouts := [each for each in group.trajectories if is_judged(each)]:
                self._curriculum.observe(self._tasks[index], rollouts)
        metrics = self._curriculum.metrics() | {"passes": progress.num_turns / len(self._tasks)}
        return {f"curriculum/{name}": value for name, value in metrics.items()}

    def still_wanted(self, saved: StreamState) -> StreamState:
        """The rollouts of a checkpoint, to be played again where the tasks are others now."""
        progress, digest = self._state.progress, tasks_digest(self._config, self._tasks)
        if self._curriculum is not None:  # it chooses other tasks for the same numbers
            digest += "/curriculum"
        if digest == progress.tasks_digest:
            return saved
        progress.tasks_digest = digest
        if saved.ready:
            self._tracker.announce(
                f"The tasks, their order, the temperature or the forks have changed: {len(saved.ready)} "
                "finished rollouts of the old ones are not used."
            )
        if self._set_aside:
            self._tracker.announce(
                f"{len(self._set_aside)} of the old tasks were set aside. All of the new ones are played."
            )
            self._set_aside.clear()  # they are known by their place
        progress.chosen_tasks.clear()
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
        index = self._index(int(group.group_id))
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


class FailureBudget:
    """The share of the newest rollouts that an environment class may spoil.

    Args:
        environment: name of the class.
        share: above it the run ends.
    """

    def __init__(self, environment: str, share: float = MOST_SPOILT) -> None:
        self._environment, self._share = environment, share
        self._recent: deque[str | None] = deque(maxlen=WINDOW)
        """Error of each rollout, ``None`` if the environment has not failed."""

    def record(self, trajectories: Sequence[Trajectory]) -> None:
        """Count finished rollouts.

        Raises:
            EnvironmentFailure: more of the newest rollouts have failed than the budget allows.
        """
        for each in trajectories:
            failed = each.termination_reason in {*WORLD_FAILURES, TerminationReason.UNJUDGED}
            self._recent.append(each.error or "no error text" if failed else None)
        errors = [each for each in self._recent if each is not None]
        if len(errors) >= LEAST_FAILURES and len(errors) > self._share * len(self._recent):
            raise EnvironmentFailure(self._verdict(errors))

    def _verdict(self, errors: Sequence[str]) -> str:
        kinds = Counter(kind_of(error) for error in errors).most_common()
        counts = "\n".join(f"  {number} times {kind}" for kind, number in kinds)
        samples = {kind_of(error): error for error in errors}
        shown = "\n\n".join(samples[kind] for kind, _ in kinds[:NUM_SAMPLES])
        return (
            f"{self._environment} failed in {len(errors)} of the last {len(self._recent)} rollouts, after "
            f"their retries, and a run bears a share of {self._share:g}. Repair the environment, or raise "
            f"fleet.retries.\n{counts}\nThe newest of the most frequent:\n\n{shown}"
        )


def kind_of(error: str) -> str:
    """Method and type of an exception, else the first line of the error, which is below its traceback."""
    if found := RAISED.search(error):
        return f"{found[2]} in {found[1]}"
    shown = BELOW_TRACEBACK.findall(error) or [error]
    return str(shown[-1]).partition("\n")[0][:80]


def fails_everywhere(group: TrajectoryGroup, attempts_per_rollout: int) -> bool:
    """True if the environment has failed in every attempt at the task of ``group``, on actor after actor."""
    enough = len(group.trajectories) * attempts_per_rollout >= LEAST_ATTEMPTS
    return enough and all(each.termination_reason in WORLD_FAILURES for each in group.trajectories)
