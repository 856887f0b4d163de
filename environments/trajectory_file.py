"""Finished trajectories as JSON lines: kept while they come in, so that an interrupted evaluation goes on."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from environments.errors import ConfigError, DatasetError
from environments.types import Completion, Step, TerminationReason, Trajectory

Json = dict[str, Any]


class TrajectoryFile:
    """One evaluation's trajectories: a line that says what is evaluated, then one line for each result.

    Opening reads what an earlier call has left. A last line that was cut off in the middle is dropped, and
    so are results that only infrastructure has spoilt: their tasks are to be played again.

    Args:
        path: the file; it is made if there is none, and belongs to this object until ``close``.
        evaluation: what is evaluated, as JSON. An existing file has to say the same.
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
        self._file = self.path.open("a+", encoding="utf-8")
        try:
            self._lock()
            self._drop_cut_line()
            self._read(_plain(evaluation), [_plain(task) for task in tasks])
        except BaseException:
            self._file.close()
            raise

    def append(self, index: int, trajectory: Trajectory) -> None:
        """Write the result of task ``index``; what JSON does not know becomes its text."""
        self._write({"index": index, **asdict(trajectory)})

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"Another process is writing to {self.path}: wait for it, or name another file."
            ) from None

    def _drop_cut_line(self) -> None:
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(self.path, whole)

    def _read(self, evaluation: Json, tasks: Sequence[Json]) -> None:
        lines = _lines(self.path)
        found = next(lines, None)
        if found is None:
            self._write({"evaluation": evaluation})
            return
        _compare(self.path, found.get("evaluation"), evaluation)
        for line in lines:
            index, trajectory = _index_and_trajectory(self.path, line)
            if index >= len(tasks) or trajectory.task != tasks[index]:
                raise ConfigError(
                    f"{self.path} holds results of other tasks: name another file, or delete it."
                )
            if trajectory.termination_reason is None or not trajectory.termination_reason.is_infrastructure:
                self.finished[index] = trajectory

    def _write(self, line: Json) -> None:
        self._file.write(json.dumps(line, default=str) + "\n")
        self._file.flush()


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
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            try:
                line = json.loads(text)
            except ValueError as error:
                raise DatasetError(
                    f"{path}, line {number} is no JSON: {error}. Name another file."
                ) from error
            yield line if isinstance(line, dict) else {}


def _index_and_trajectory(path: Path, line: Json) -> tuple[int, Trajectory]:
    try:
        fields = dict(line)
        index = int(fields.pop("index"))
        steps = [_step(step) for step in fields.pop("steps")]
        reason = fields.pop("termination_reason")
        trajectory = Trajectory(
            **fields, steps=steps, termination_reason=None if reason is None else TerminationReason(reason)
        )
    except (LookupError, TypeError, ValueError) as error:
        raise DatasetError(
            f"{path} holds a line that is no trajectory ({error!r}): name another file."
        ) from error
    return index, trajectory


def _step(fields: Json) -> Step:
    completion = fields.pop("completion")
    return Step(**fields, completion=None if completion is None else _completion(completion))


def _completion(fields: Json) -> Completion:
    arguments: Json = {
        name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()
    }
    return Completion(**arguments)


def _compare(path: Path, found: Any, wanted: Json) -> None:
    if not isinstance(found, dict):
        raise DatasetError(f"{path} is no trajectory file: name another one.")
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise ConfigError(
                f"{path} holds results with {name}={found.get(name)!r}, and this evaluation has "
                f"{wanted.get(name)!r}: name another file, or delete it."
            )


def _plain(value: Mapping[str, Any]) -> Json:
    """The value as it will be read again."""
    plain: Json = json.loads(json.dumps(value, default=str))
    return plain
