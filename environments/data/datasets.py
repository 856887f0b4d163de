"""Tasks in memory (``Dataset``) and on disk, by name (``DatasetRegistry``)."""

from __future__ import annotations

import copy
import os
import platform
import random
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import overload

from environments.bounds import near_name
from environments.data.dataset_files import Row, Table, plain_rows, read_rows, without_filling, write_rows
from environments.disk import writing_to
from environments.errors import DatasetError


class Dataset(Sequence[Row]):
    """A fixed sequence of tasks. A slice is a Dataset; methods that change the selection return a new one.

    It is pickled with its rows, so it can be sent to any node. ``path`` is where the rows were read from.
    """

    def __init__(
        self,
        data: Iterable[Row],
        name: str | None = None,
        split: str | None = None,
        *,
        path: Path | None = None,
    ) -> None:
        self._rows = list(data)
        self.name = name
        self.split = split
        self._path = path
        for index, row in enumerate(self._rows):
            if not isinstance(row, dict):
                raise DatasetError(f"Row {index} is {row!r}: each task has to be a dict.")

    @classmethod
    def load_data(cls, path: str | os.PathLike[str]) -> Dataset:
        """Read a ``.json``, ``.jsonl``, ``.csv`` or ``.parquet`` file; see ``dataset_files`` for the rules.

        Raises:
            DatasetError: there is no such file, or its content does not fit its extension.
        """
        return cls(plain_rows(read_rows(Path(path))), path=Path(path).absolute())

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

    def get_data_path(self) -> str | None:
        """Return the file that this was read from, or None if it was made or selected in memory."""
        return None if self._path is None else str(self._path)

    def repeat(self, n: int) -> Dataset:
        """Return each row ``n`` times, copies next to each other and independent of each other.

        Raises:
            ValueError: ``n`` is below 1.
        """
        if n < 1:
            raise ValueError(f"repeat(n={n}) would leave no rows: use 1 and above.")
        return self._with(copy.deepcopy(row) for row in self._rows for _ in range(n))

    def shuffle(self, seed: int | None = None) -> Dataset:
        """Return the rows in random order, the same for the same seed."""
        rows = list(self._rows)
        random.Random(seed).shuffle(rows)
        return self._with(rows)

    def train_test_split(self, test_size: float, seed: int | None = None) -> dict[str, Dataset]:
        """Return ``{"train": ..., "test": ...}``: the rows in random order, divided in two.

        Args:
            test_size: number of rows of the test, or below 1 their share.

        Raises:
            ValueError: one of the two would have no row.
        """
        number = round(test_size * len(self)) if test_size < 1 else int(test_size)
        if not 0 < number < len(self):
            raise ValueError(f"test_size={test_size} of {len(self)} rows leaves one of the two parts empty.")
        shuffled = self.shuffle(seed)
        return {"train": shuffled[number:], "test": shuffled[:number]}

    def select(self, indices: Iterable[int]) -> Dataset:
        """Return the rows at ``indices``, in that order.

        Raises:
            IndexError: an index is not within the dataset.
        """
        return self._with(self._rows[index] for index in indices)

    def _with(self, rows: Iterable[Row]) -> Dataset:
        return Dataset(rows, name=self.name, split=self.split)


class DatasetRegistry:
    """Datasets on disk: ``$TROUPE_HOME/datasets/<name>/<split>.jsonl``, by default in ``~/.troupe``.

    The folder is the index, and each split is replaced as a whole: any number of processes may read and
    register at the same time, and none reads half a file.

    On a cluster, the tasks of a run are read by its driver alone, and travel to the nodes one by one. Data
    that the nodes read themselves, such as a retrieval tool's corpus, lie on a disk that they share, or are
    sent with the job: a relative ``TROUPE_HOME`` is resolved against the current directory of each process,
    which for the processes of a Ray job is their copy of its working directory. So register under
    ``TROUPE_HOME=.troupe`` before ``ray job submit --working-dir . --runtime-env-json
    '{"env_vars": {"TROUPE_HOME": ".troupe"}}' -- ...``. Ray sends at most 512 MiB, and nothing that
    ``.gitignore`` names.
    """

    @classmethod
    def register_dataset(
        cls, name: str, data: Iterable[Row] | Table | str | os.PathLike[str], split: str = "default"
    ) -> Dataset:
        """Store ``data`` as JSON lines, in place of the old file, and return the rows as they will be loaded.

        ``data`` is a list of dicts, one split of a Hugging Face dataset, a DataFrame of pandas, anything else
        that yields dicts, or the path of a ``.json``, ``.jsonl``, ``.csv`` or ``.parquet`` file. All but a
        DataFrame is read row by row. For values that are no JSON, see ``dataset_files``.

        Raises:
            DatasetError: a name cannot be a file's, the file cannot be read, or a row is no JSON object.
            ConfigError: the folder cannot be written to.
        """
        path = _path(name, split)
        if isinstance(data, Mapping):
            raise DatasetError(
                f"The data for {name!r} are a dict with the keys {', '.join(map(repr, data))}, not rows. "
                f"If these are splits, register each: register_dataset({name!r}, data[split], split)."
            )
        if isinstance(data, str | os.PathLike):
            rows: Iterable[Row] = read_rows(Path(data))
        elif isinstance(data, Table):
            rows = data.to_dict("records")
        else:  # only a split of a Hugging Face dataset has features
            rows = without_filling(data, f"The data for {name!r}") if hasattr(data, "features") else data
        with writing_to(str(path.parent), "set TROUPE_HOME to a folder that can, on a disk with room"):
            path.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path.parent).close()
        write_rows(path, plain_rows(rows))
        return cls.load_dataset(name, split)

    @classmethod
    def load_dataset(cls, name: str, split: str = "default") -> Dataset:
        """Read a split.

        Raises:
            DatasetError: there is no such dataset or split (the error lists those that exist), or a line
                of the file is no JSON object.
        """
        path = cls.get_split_path(name, split)
        return Dataset(read_rows(path), name, split, path=path.absolute())

    @classmethod
    def get_split_path(cls, name: str, split: str = "default") -> Path:
        """Return the file of a split, or raise a DatasetError that lists those that exist."""
        path = _path(name, split)
        if not path.is_file():
            raise DatasetError(_unknown(f"split of {name!r}", split, cls.get_dataset_splits(name)))
        return path

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
        """Return whether there is such a split, or, without one, any."""
        splits = _splits(name)
        return bool(splits) if split is None else _checked("split", split) in splits

    @classmethod
    def remove_dataset_split(cls, name: str, split: str) -> bool:
        """Delete a split; return whether there was one."""
        try:
            _path(name, split).unlink()
        except FileNotFoundError:
            return False
        return True

    @classmethod
    def remove_dataset(cls, name: str) -> bool:
        """Delete a dataset with all its splits; return whether there was one."""
        # Its folder stays: another process may be about to put a split there.
        splits = _splits(name)
        for split in splits:
            cls.remove_dataset_split(name, split)
        return bool(splits)


def _root() -> Path:
    return Path(os.environ.get("TROUPE_HOME") or "~/.troupe").expanduser() / "datasets"


def _path(name: str, split: str) -> Path:
    return _root() / _checked("dataset", name) / f"{_checked('split', split)}.jsonl"


def _splits(name: str) -> list[str]:
    return sorted(path.stem for path in (_root() / _checked("dataset", name)).glob("*.jsonl"))


def _checked(kind: str, name: str) -> str:
    # No dot in front: that is how "..", and our own unfinished files, begin. Those have longer names than
    # the splits, and no file's may be longer than 255.
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}", name):
        raise DatasetError(
            f"{name!r:.100} cannot name a {kind}: use 1 to 200 letters, digits, '_', '-' and inner '.'."
        )
    return name


def _unknown(kind: str, name: str, known: Collection[str]) -> str:
    return (
        f"Unknown {kind}: {name!r}.{near_name(name, known)} Known in {_root().absolute()} on host "
        f"{platform.node()}: {', '.join(known) or 'none'}. Add it with "
        "DatasetRegistry.register_dataset, or a public one by `python -m environments.data.prepare NAME "
        "--from hub`; if it is registered on another host, put TROUPE_HOME on a "
        "shared disk or send it with the job (see DatasetRegistry). "
        "DatasetRegistry.dataset_exists(name, split) says beforehand whether it is there."
    )
