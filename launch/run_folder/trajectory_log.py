"""Trajectories of training and evaluations: a file of JSON lines for each update and each evaluation."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from environments.data.trajectory_json import Json, trajectory_from_json, trajectory_line
from environments.disk import replaced
from environments.errors import TroupeError
from environments.turns import encoded
from environments.types import Completion, Trajectory, TrajectoryGroup

FOLDER = "trajectories"
TRAIN, EVALUATION = "step", "eval"
"""Beginnings of the files' names."""
TRAINED, EVALUATED, BASELINE, NOT_IMITATED = "trained", "evaluated", "baseline", "not_imitated"
"""Outcomes of a trajectory, if it was not left out for a reason of its own."""
FILE_NAME = re.compile(rf"({TRAIN}|{EVALUATION})_(\d+)\.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTrajectory:
    """A trajectory of a finished run, with what the run made of it."""

    trajectory: Trajectory
    outcome: str
    """"trained", "evaluated", "baseline", "not_imitated" (in a group of which others were), or the reason for
    which its group was not trained on."""
    advantages: tuple[float, ...] = ()
    """Advantages of the turns, each the mean over its tokens; empty where nothing was learned from it."""

    @property
    def group_id(self) -> str:
        return self.trajectory.rollout_id.rpartition("/")[0]

    def facts(self) -> Json:
        """Facts about the whole of it, by the names of the columns of ``launch.export``."""
        trajectory = self.trajectory
        return {
            "fate": self.outcome,
            "group_id": self.group_id,
            "rollout_id": trajectory.rollout_id,
            "reward": trajectory.reward,
            "success": trajectory.succeeded,
            "judged_by": trajectory.judged_by,
            "ended_by": str(trajectory.termination_reason),
            "error": trajectory.error,
        }


@dataclass
class TrajectoryLog:
    """Writes the trajectories of a run into its folder, and forgets the oldest.

    A file appears when it is whole. An update that is done once more after a resume replaces its file, so no
    trajectory stands there twice.

    Args:
        directory: the run's folder.
        num_kept: files of updates, and of evaluations, that stay; 0 writes none.
    """

    directory: Path
    num_kept: int

    def forget_after(self, step: int) -> None:
        """Delete what later updates have left: a resumed run makes them again, with other rollouts."""
        for kind in (TRAIN, EVALUATION):
            for later in kept_steps(self.directory, kind):
                if later > step:
                    trajectory_path(self.directory, kind, later).unlink(missing_ok=True)

    def record_update(
        self,
        step: int,
        trained: Sequence[TrajectoryGroup],
        unused: Mapping[str, Sequence[TrajectoryGroup]],
        advantages: Mapping[str, Sequence[float]],
        not_imitated: Collection[str] = (),
    ) -> None:
        """Keep the trajectories that the update ``step`` has used, and those that it has left out.

        Args:
            unused: groups by the reason.
            advantages: of the turns of a rollout, by its id.
            not_imitated: ids of the rollouts of ``trained`` that a stage which imitates has left out.
        """
        others = (_lines(groups, reason, advantages) for reason, groups in unused.items())
        self._write(TRAIN, step, chain(_lines(trained, TRAINED, advantages, not_imitated), *others))

    def record_evaluation(self, step: int, groups: Sequence[TrajectoryGroup]) -> None:
        """Keep the trajectories of the evaluation after ``step`` updates."""
        self._write(EVALUATION, step, _lines(groups, EVALUATED, {}))

    def _write(self, kind: str, step: int, lines: Iterable[bytes]) -> None:
        if self.num_kept == 0:
            return
        path = trajectory_path(self.directory, kind, step)
        path.parent.mkdir(exist_ok=True)
        with replaced(path) as unfinished, unfinished.open("wb") as file:
            file.writelines(lines)
        for older in kept_steps(self.directory, kind)[: -self.num_kept]:
            trajectory_path(self.directory, kind, older).unlink(missing_ok=True)


def trajectory_path(run: Path, kind: str, step: int) -> Path:
    """The file of an update, or with ``EVALUATION`` of an evaluation, in the folder of ``run``."""
    return run / FOLDER / f"{kind}_{step:06d}.jsonl"


def kept_steps(directory: Path, kind: str) -> list[int]:
    """The updates, or with ``EVALUATION`` the evaluations, whose trajectories are there, in order."""
    found = (FILE_NAME.fullmatch(path.name) for path in (directory / FOLDER).glob(f"{kind}_*.jsonl"))
    return sorted(int(name[2]) for name in found if name is not None)


def read_kept(directory: Path, kind: str, step: int) -> list[KeptTrajectory]:
    """The trajectories of an update or an evaluation, in the order in which they were written.

    Raises:
        TroupeError: they are not there, or the file holds something else.
    """
    path = trajectory_path(directory, kind, step)
    try:
        with path.open("rb") as file:
            return [_kept(json.loads(line)) for line in file]
    except FileNotFoundError:
        raise TroupeError(
            f"{path} does not exist: run.trajectories_kept says of how many steps a run keeps them."
        ) from None
    except (LookupError, TypeError, ValueError) as error:
        raise TroupeError(f"{path} holds no trajectories ({error!r}): repair or delete it.") from error


def _lines(
    groups: Sequence[TrajectoryGroup],
    outcome: str,
    advantages: Mapping[str, Sequence[float]],
    not_imitated: Collection[str] = (),
) -> Iterator[bytes]:
    for group in groups:
        for trajectory in group.rollouts:
            own = NOT_IMITATED if trajectory.rollout_id in not_imitated else outcome
            before = {
                "fate": BASELINE if trajectory is group.baseline else own,
                "advantages": list(advantages.get(trajectory.rollout_id, ())),
            }
            yield trajectory_line(trajectory, before)


def _kept(line: Json) -> KeptTrajectory:
    return KeptTrajectory(
        trajectory=trajectory_from_json(line),
        outcome=str(line["fate"]),
        advantages=tuple(map(float, line["advantages"])),
    )


def find_task(directory: Path, task: object) -> list[Json]:
    """Kept trajectories of ``task``, as a file has it, over the course of the training: of each the row in
    the file of its update or evaluation, its reward and what became of it.
    """
    as_written_by_python = f'"task": {json.dumps(task)}'.encode()  # in a line with half a character
    wanted = (b'"task":' + encoded(task), as_written_by_python)
    found: list[Json] = []
    for kind in (TRAIN, EVALUATION):
        for step in kept_steps(directory, kind):
            with trajectory_path(directory, kind, step).open("rb") as file:
                for row, line in enumerate(file):
                    if any(each in line for each in wanted):  # only these are parsed: a run may keep 100,000
                        read = json.loads(line)
                        outcome = {"reward": read["reward"], "fate": read["fate"]}
                        found.append({"kind": kind, "step": step, "row": row, **outcome})
    return sorted(found, key=lambda each: (each["step"], each["kind"], each["row"]))


def first_completions(directory: Path) -> list[Completion]:
    """Completions of the first update of a run. A turn that the agent's own code decided has none."""
    return [each for kept in read_kept(directory, TRAIN, 1) for each in kept.trajectory.completions]
