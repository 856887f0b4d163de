"""Finished trajectories as JSON lines: an interrupted evaluation goes on from them."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

from environments.data.trajectory_json import Json, plain_json, trajectory_from_json, trajectory_line
from environments.errors import ConfigError, DatasetError
from environments.types import Trajectory

_BEGINNING = b'{"evaluation": '


class TrajectoryFile:
    """An evaluation's trajectories: a line that describes the evaluation, then a line for each result.

    Opening reads the results of earlier calls. A last line that was cut off in the middle is dropped, and
    so are results that only infrastructure has spoilt: their tasks are to be played again.

    Args:
        path: the file; it is made if there is none, and belongs to this object until ``close``.
        evaluation: the description of the evaluation, as JSON. An existing file has to hold the same.
        tasks: all tasks of the evaluation, in order.

    Raises:
        ConfigError: the file belongs to another evaluation, or another process is writing to it.
        DatasetError: the file holds something else.
    """

    def __init__(self, path: str | Path, evaluation: Json, tasks: Sequence[Json]) -> None:
        self.path = Path(path)
        self.finished: dict[int, Trajectory] = {}
        """Results that need not be played again, by the task's position."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            self._lock()
            self._drop_cut_line()
            self._read(plain_json(evaluation), [plain_json(task) for task in tasks])
        except BaseException:
            self._file.close()
            raise

    def append(self, index: int, trajectory: Trajectory) -> None:
        """Write the result of task ``index``; a value that JSON does not know becomes its text."""
        self._write(trajectory_line(trajectory, {"index": index}))

    def close(self) -> None:
        """Close the file, and release its lock."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"Another process writes to {self.path}: wait, or name another file.") from None

    def _drop_cut_line(self) -> None:
        content = self.path.read_bytes()
        if not content.startswith(_BEGINNING[: len(content)]):
            raise DatasetError(f"{self.path} is no trajectory file: name another one.")
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)

    def _read(self, evaluation: Json, tasks: Sequence[Json]) -> None:
        lines = _lines(self.path)
        found = next(lines, None)
        if found is None:
            self._write(json.dumps({"evaluation": evaluation}).encode() + b"\n")
            return
        _compare(self.path, found.get("evaluation"), evaluation)
        for line in lines:
            index, trajectory = _index_and_trajectory(self.path, line)
            if index >= len(tasks) or not _equal(trajectory.task, tasks[index]):
                raise ConfigError(f"{self.path} holds other tasks' results: name another file, or delete it.")
            if trajectory.termination_reason is None or not trajectory.termination_reason.is_infrastructure:
                self.finished[index] = trajectory

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()


def is_trajectory_file(path: Path) -> bool:
    """Return whether a file begins as an evaluation's does."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """The trajectories of a file, in the order of their tasks; of a task that was played twice, the last.

    Raises:
        DatasetError: the file is no trajectory file.
    """
    lines = _lines(Path(path))
    next(lines, None)
    trajectories = dict(_index_and_trajectory(Path(path), line) for line in lines)
    return [trajectories[index] for index in sorted(trajectories)]


def _lines(path: Path) -> Iterator[Json]:
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                if not text.endswith(b"\n"):  # a program that was ended has cut it off, or still writes it
                    return
                raise DatasetError(
                    f"{path}, line {number} is no JSON: {error}. Name another file."
                ) from error
            yield line if isinstance(line, dict) else {}


def _index_and_trajectory(path: Path, line: Json) -> tuple[int, Trajectory]:
    try:
        return int(line["index"]), trajectory_from_json(line)
    except (LookupError, TypeError, ValueError) as error:
        raise DatasetError(f"A line of {path} is no trajectory ({error!r}): name another file.") from error


def _compare(path: Path, found: Any, wanted: Json) -> None:
    if not isinstance(found, dict):
        raise DatasetError(f"{path} is no trajectory file: name another one.")
    for name in sorted({*found, *wanted}):
        if not _equal(found.get(name), wanted.get(name)):
            raise ConfigError(
                f"{path} holds results with {name}={found.get(name)!r}, and this evaluation has "
                f"{wanted.get(name)!r}: name another file, or delete it."
            )


def _equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal; NaN, which is not equal to itself, is where both have it."""
    return one == other or json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)
