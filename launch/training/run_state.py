"""State of a run that outlives its processes: progress, checkpoints, log of consumed rollouts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from ray.exceptions import RayTaskError

from environments.background import in_background
from environments.data.trajectory_json import plain_json
from environments.errors import ConfigError, TroupeError
from environments.types import TrajectoryGroup
from launch.reporting.metrics import success_judge
from launch.reporting.tracker import METRICS, SETTINGS, read_metrics
from launch.run_folder.checkpoint import LATEST, CheckpointFolder, Progress, SaveLearner, StreamState
from launch.run_folder.consumed_log import CONSUMED_LOG, ConsumedLog
from launch.run_folder.disk import full_disk_explained
from launch.run_folder.jsonl_log import JsonlLog
from launch.run_folder.lock import LOCK
from launch.run_folder.remote import RemoteCheckpoints
from launch.run_folder.trajectory_log import FOLDER, TrajectoryLog
from launch.settings.tree import TrainConfig

SET_ASIDE = "set_aside_tasks.jsonl"
"""File of a run with the tasks that failed everywhere."""
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
OF_A_RUN = {METRICS, SETTINGS, CONSUMED_LOG, SET_ASIDE, FOLDER}
"""Files that a run's folder holds soon after the start: one of them makes it such a folder."""


class RunState:
    """Progress of a run, and the files from which it goes on.

    Args:
        config: of the run.
        directory: the run's folder.

    Raises:
        ConfigError: the folder holds a run that is not to be resumed, or that cannot be: its checkpoint is
            damaged, or which one is the newest is unknown.
    """

    def __init__(self, config: TrainConfig, directory: Path) -> None:
        self.directory = directory
        self.checkpoints = CheckpointFolder(directory, config.run.saving.kept)
        self._remote = self._open_remote(config)
        self.checkpoint = self.checkpoints.latest()
        """The checkpoint that this process goes on from; ``None`` if it begins."""
        if self.checkpoint is not None and not config.run.resume:
            raise ConfigError(
                f"run.directory={config.run.directory} holds a run: set run.resume=true, or name another one."
            )
        self._check_beginning(config)
        if self._remote is not None:
            self._remote.check_beginning(self.checkpoints)
        began = None if self.checkpoint is None else CheckpointFolder.progress(self.checkpoint)
        self.progress = began or Progress.first(config.learner)
        self.progress.run = self.progress.run or uuid4().hex
        self.saved = deepcopy(self.progress) if self.checkpoint else None
        """Progress in the newest checkpoint, be it whole or being written; ``None`` without a checkpoint."""
        self._whole = self.saved
        self._write: Future[Path] | None = None
        self._copied: Progress | None = None
        """Progress in the newest checkpoint that was whole when the last copy was begun."""
        self._copy: Future[None] | None = None
        self._consumed = ConsumedLog(directory, self.progress.step)
        self._set_aside = JsonlLog(directory / SET_ASIDE, self.progress.step)
        self.trajectories = TrajectoryLog(directory, config.run.trajectories_kept)
        """Conversations of this run's updates and evaluations."""
        self.trajectories.forget_after(self.progress.step)
        self._logging: Future[None] | None = None

    def _open_remote(self, config: TrainConfig) -> RemoteCheckpoints | None:
        """The place of copies, if there is one. A newer checkpoint than those that are here is fetched first.

        Raises:
            ConfigError: an address cannot be opened, or is of another run.
        """
        to, resume = config.run.saving.to, config.run.resume
        remote = RemoteCheckpoints("run.checkpoints.to", to) if to else None
        source = RemoteCheckpoints("run.resume", resume) if isinstance(resume, str) else remote
        if resume and source is not None:
            source.fetch(self.checkpoints, self.directory)
        if isinstance(resume, str) and self.checkpoints.latest() is None:
            raise ConfigError(
                f"run.resume={resume} holds no whole checkpoint: name the run.checkpoints.to of a run, or "
                "set run.resume=true."
            )
        return remote

    def _check_beginning(self, config: TrainConfig) -> None:
        """A run that begins writes over what is in its folder. Raises ``ConfigError`` if that is a run."""
        if self.checkpoint is not None:
            return
        if found := self.checkpoints.all():
            names, link = ", ".join(each.name for each in found), found[-1].with_name(LATEST)
            raise ConfigError(
                f"run.directory={config.run.directory} holds {names}, and no link {LATEST!r} to the one to "
                f"go on from (a copy may leave links out): run `ln -sfn {found[-1].name} {link}` and set "
                "run.resume=true, or name another directory."
            )
        there = {each.name for each in self.directory.iterdir()} - {LOCK}
        if config.run.resume and there and not there & OF_A_RUN:
            raise ConfigError(
                f"run.resume=true, and run.directory={config.run.directory} holds something else than a run "
                f"({', '.join(sorted(there)[:3])}): name the folder of a run, or a new one."
            )
        if not config.run.resume and read_metrics(self.directory):
            raise ConfigError(
                f"run.directory={config.run.directory} holds the metrics of a run without a checkpoint: name "
                "another directory, or set run.resume=true to begin the run anew there."
            )

    @property
    def saved_step(self) -> int:
        """Policy updates that the newest whole checkpoint knows of; -1 without a checkpoint."""
        return self._whole.step if self._whole else -1

    @property
    def is_saving(self) -> bool:
        """True while a checkpoint is written, and until ``finish_save`` has returned it."""
        return self._write is not None

    @property
    def is_copying(self) -> bool:
        """True from the beginning of a copy until ``copy`` has seen its end."""
        return self._copy is not None

    def saved_stream(self) -> StreamState:
        """Finished and requested rollouts at the time of the checkpoint that this process goes on from."""
        with self.checkpoints.lock:  # one of the same step may be taking its place
            return CheckpointFolder.stream(self.checkpoint) if self.checkpoint else StreamState()

    def record_consumed(
        self, trained: Sequence[TrajectoryGroup], dropped: Mapping[str, Sequence[TrajectoryGroup]]
    ) -> None:
        """Write down the rollouts that the update of ``progress.step`` has used up."""
        ids = {reason: _rollout_ids(groups) for reason, groups in dropped.items()}
        self._consumed.record(self.progress.step, _rollout_ids(trained), ids)

    def record_set_aside(self, index: int, task: Mapping[str, Any], error: str | None) -> None:
        """Write down that the task at ``index`` failed everywhere, with the error of one of its rollouts."""
        plain = plain_json(task)
        # By the process that was resumed. In other tasks another one may have the place.
        for each in self._set_aside.kept:
            if each["index"] == index and _without_addresses(each["task"]) == _without_addresses(plain):
                return
        self._set_aside.append({"step": self.progress.step, "index": index, "task": plain, "error": error})

    def log_beside(self, record: Callable[[TrajectoryLog], None]) -> None:
        """Have trajectories recorded while the run goes on, once those before are."""
        self.finish_log()
        self._logging = in_background(partial(record, self.trajectories), "trajectories")

    def finish_log(self) -> None:
        """Wait until all trajectories are recorded. Raises the error of those that could not be written."""
        logging, self._logging = self._logging, None
        if logging is not None:
            logging.result()

    def note_judge(self, kind: str, groups: Sequence[TrajectoryGroup]) -> str | None:
        """Write down who judges success in ``groups``; return a sentence if it was somebody else before.

        Args:
            kind: "rollout" for an update, "eval" for an evaluation.
        """
        judge, before = success_judge(groups), self.progress.judged_by.get(kind)
        if judge is None:
            return None
        self.progress.judged_by[kind] = judge
        if before in (None, judge):
            return None
        return (
            f"{kind}/pass_at_k: success was judged by {before} up to here, and from step "
            f"{self.progress.step} on by {judge}. The values before and after cannot be compared."
        )

    def begin_save(
        self, stream: StreamState, save_learner: SaveLearner, step_under_evaluation: int | None = None
    ) -> None:
        """Begin to write a checkpoint, once ``finish_save`` has returned the one before it."""
        assert self._write is None, "one is written at a time"
        self.finish_log()  # the checkpoint counts on it: a resumed run does not make these updates again
        progress = deepcopy(self.progress)
        finish = self.checkpoints.begin_save(progress, stream, save_learner, step_under_evaluation)
        self.saved, self._write = progress, in_background(finish, "checkpoint")

    def finish_save(self, seconds: float | None = None) -> Path | None:
        """The checkpoint that has become whole since the last call, if any.

        Args:
            seconds: longest wait for one that is being written; 0 to leave that for a later call.

        Raises:
            TroupeError: it could not be written; names the file and the reason.
        """
        if self._write is None or (seconds == 0 and not self._write.done()):
            return None
        try:
            with full_disk_explained(self.directory):
                path = self._write.result(seconds)
        except Exception as error:
            self.checkpoints.give_up()
            step = self.saved.step if self.saved else 0
            self.saved, self._write = self._whole, None
            if isinstance(error, TroupeError):
                raise
            whole = self.checkpoints.latest()
            before = f"{whole.name} before it is whole" if whole else "there is none before it"
            reason = error.cause if isinstance(error, RayTaskError) else error
            reason = str(reason) or f"it was not whole after {seconds} s"
            raise TroupeError(
                f"The checkpoint of step {step} was not written, and {before}: {reason}. Go on when that is "
                f"mended, with run.directory={self.directory} run.resume=true"
            ) from error
        self._whole, self._write = self.saved, None
        return path

    def copy(self, wait: bool = False) -> None:
        """Begin to copy the newest whole checkpoint to ``run.checkpoints.to``, unless that was done.

        Args:
            wait: until all that is here is there.

        Raises:
            TroupeError: the copy before has failed or, with ``wait``, this one, which makes up for it. The
                checkpoint is here all the same.
        """
        if self._copy is not None and (wait or self._copy.done()):
            copy, self._copy = self._copy, None
            if (error := copy.exception()) is not None and not wait:
                raise error
        if self._remote is None or self._whole is None or self._copy is not None:
            return
        if wait:
            self._remote.mirror(self.checkpoints)
        elif self._copied is not self._whole:
            self._copied = self._whole
            self._copy = in_background(partial(self._remote.mirror, self.checkpoints), "copy")


def _without_addresses(task: Any) -> str:
    """The text of a task, without the addresses of its objects, which are others in each process."""
    return ADDRESS.sub("", json.dumps(task))


def _rollout_ids(groups: Sequence[TrajectoryGroup]) -> list[str]:
    return [trajectory.rollout_id for group in groups for trajectory in group.rollouts]
