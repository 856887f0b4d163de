"""Tasks in memory (``Dataset``) and on disk, by name (``DatasetRegistry``)."""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Protocol, overload, runtime_checkable

from environments.errors import DatasetError

Row = dict[str, Any]


class Dataset(Sequence[Row]):
    """A fixed sequence of tasks. A slice is a Dataset; what changes the selection returns a new one."""

    def __init__(self, data: Iterable[Row], name: str | None = None, split: str | None = None) -> None:
        self._rows = list(data)
        self.name = name
        self.split = split
        for index, row in enumerate(self._rows):
            if not isinstance(row, dict):
                raise DatasetError(f"Row {index} is {row!r}: each task has to be a dict.")

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Dataset: ...

    def __getitem__(self, index: int | slice) -> Row | Dataset:
        return self._with(self._rows[index]) if isinstance(index, slice) else self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Dataset(name={self.name!r}, split={self.split!r}, {len(self)} rows)"

    def get_data(self) -> list[Row]:
        """Return the rows as a list."""
        return list(self._rows)

    def repeat(self, n: int) -> Dataset:
        """Return each row ``n`` times, copies next to each other and independent of each other.

        Raises:
            ValueError: ``n`` is below 1.
        """
        if n < 1:
            raise ValueError(f"repeat(n={n}) would leave nothing: use 1 and above.")
        return self._with(copy.deepcopy(row) for row in self._rows for _ in range(n))

    def shuffle(self, seed: int | None = None) -> Dataset:
        """Return the rows in random order, the same for the same seed."""
        rows = list(self._rows)
        random.Random(seed).shuffle(rows)
        return self._with(rows)

    def select(self, indices: Iterable[int]) -> Dataset:
        """Return the rows at ``indices``, in that order.

        Raises:
            IndexError: an index is not within the dataset.
        """
        return self._with(self._rows[index] for index in indices)

    def _with(self, rows: Iterable[Row]) -> Dataset:
        return Dataset(rows, name=self.name, split=self.split)


@runtime_checkable
class HasToList(Protocol):
    """What a Hugging Face dataset can do, so that its library need not be imported here."""

    def to_list(self) -> list[Row]: ...


class DatasetRegistry:
    """Datasets on disk: ``$TROUPE_HOME/datasets/<name>/<split>.jsonl``, by default in ``~/.troupe``.

    The folder is the index, and each split is replaced as a whole: any number of processes may read and
    register at the same time, and nobody ever sees half a file.
    """

    @classmethod
    def register_dataset(cls, name: str, data: Iterable[Row] | HasToList, split: str = "default") -> Dataset:
        """Store ``data`` as JSON lines, in place of what was there, and return what will be loaded.

        Raises:
            DatasetError: a name cannot be a file's, or a row is no JSON object.
        """
        path = _path(name, split)
        rows = data.to_list() if isinstance(data, HasToList) else data
        _write_atomically(path, (_line(row, index) for index, row in enumerate(rows)))
        return cls.load_dataset(name, split)

    @classmethod
    def load_dataset(cls, name: str, split: str = "default") -> Dataset:
        """Read a split.

        Raises:
            DatasetError: there is no such dataset or split (the error lists those that exist), or a line
                of the file is no JSON object.
        """
        path = _path(name, split)
        if not path.is_file():
            splits = cls.get_dataset_splits(name)
            raise DatasetError(_unknown(f"split of {name!r}", split, splits))
        with path.open(encoding="utf-8") as file:
            return Dataset([_row(line, path, number) for number, line in enumerate(file, 1)], name, split)

    @classmethod
    def get_dataset_names(cls) -> list[str]:
        """Return the names of all datasets, sorted."""
        return sorted({path.parent.name for path in _root().glob("*/*.jsonl")})

    @classmethod
    def get_dataset_splits(cls, name: str) -> list[str]:
        """Return the splits of a dataset, sorted, or raise a DatasetError that lists the datasets."""
        splits = _splits(name)
        if not splits:
            raise DatasetError(_unknown("dataset", name, cls.get_dataset_names()))
        return splits

    @classmethod
    def dataset_exists(cls, name: str, split: str | None = None) -> bool:
        """Whether there is such a split, or, without one, any."""
        splits = _splits(name)
        return bool(splits) if split is None else _checked("split", split) in splits

    @classmethod
    def remove_dataset_split(cls, name: str, split: str) -> bool:
        """Delete a split; return whether there was one."""
        path = _path(name, split)
        existed = path.is_file()
        path.unlink(missing_ok=True)
        return existed

    @classmethod
    def remove_dataset(cls, name: str) -> bool:
        """Delete a dataset with all its splits; return whether there was one."""
        existed = cls.dataset_exists(name)
        if existed:
            shutil.rmtree(_root() / name)
        return existed


def _root() -> Path:
    return Path(os.environ.get("TROUPE_HOME") or Path.home() / ".troupe") / "datasets"


def _path(name: str, split: str) -> Path:
    return _root() / _checked("dataset", name) / f"{_checked('split', split)}.jsonl"


def _splits(name: str) -> list[str]:
    return sorted(path.stem for path in (_root() / _checked("dataset", name)).glob("*.jsonl"))


def _checked(kind: str, name: str) -> str:
    # No dot in front: that is how "..", and our own unfinished files, begin.
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]*", name):
        raise DatasetError(
            f"{name!r} cannot name a {kind}: use letters, digits, '_', '-' and '.', with no '.' in front."
        )
    return name


def _unknown(kind: str, name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, n=1)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(known) or f"none in {_root()}"
    return f"Unknown {kind}: {name!r}. {guess}Known: {listed}. Add it with DatasetRegistry.register_dataset."


def _line(row: Any, index: int) -> str:
    if not isinstance(row, dict):
        raise DatasetError(f"Row {index} is {row!r}: each task has to be a dict.")
    try:
        return json.dumps(row) + "\n"
    except (TypeError, ValueError) as error:
        raise DatasetError(f"Row {index} is no JSON: {error}. Convert it to plain values first.") from error


def _row(line: str, path: Path, number: int) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DatasetError(
            f"{path}, line {number} is no JSON: {error}. Register the dataset again."
        ) from error
    if not isinstance(row, dict):
        raise DatasetError(f"{path}, line {number} is no JSON object. Register the dataset again.")
    return row


def _write_atomically(path: Path, lines: Iterable[str]) -> None:
    """Replace the file at ``path``, or, if anything goes wrong, leave it as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a rename is atomic only within a file system; hidden from the listings.
    unfinished = path.parent / f".{path.stem}.{uuid.uuid4().hex}.unfinished"
    try:
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(lines)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
