"""Rows of tasks in files: JSON, JSON lines, CSV and parquet are read, JSON lines are written."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import date, time
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from environments.disk import replaced
from environments.errors import DatasetError

Row = dict[str, Any]

_PAIRS = (("input", "output"), ("inputs", "outputs"))
_OF_TESTS = re.compile("test|truth|case", re.IGNORECASE)

_MAX_BITS = 14_280
"""Size of a whole number: Python reads and writes up to 4300 digits."""


def read_rows(path: Path) -> Iterator[Row]:
    """Read a file as its extension says; all but ``.json`` row by row, however large the file is.

    - ``.json``: a list of objects.
    - ``.jsonl``: one object per line; a blank line is no row.
    - ``.csv``: a line of column names, then one row per line. Each value is a text as it stands in the
      file (``"7"`` and not 7, an empty field is ``""``), since a CSV file has no types. A
      blank line is no row: the empty field of an only column stands in quotes, as ``csv`` writes it.
    - ``.parquet``: one row per row, each value in its Python type, without the nulls by which parquet fills
      up rows of different shapes; see ``without_filling``.

    Raises:
        DatasetError: there is no such file, its extension is another one, or, while the rows are read,
            its content does not fit its extension.
    """
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise DatasetError(
            f"{path} ends in {path.suffix!r}, which names no known format. Known: {', '.join(READERS)}."
        )
    if not path.is_file():
        raise DatasetError(f"There is no file {path.absolute()}. Correct the path.")
    return _decoded(path, read(path))


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace the file at ``path`` by JSON lines, or, if anything goes wrong, leave it as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def plain_rows(rows: Iterable[Any]) -> Iterator[Row]:
    """Copy rows as JSON can hold them: rows that are written and read again equal the rows yielded here.

    Tuples and the arrays and numbers of numpy and torch become lists and numbers, dates and times become
    ISO texts.

    Raises:
        DatasetError: a row is no dict, or holds something else (bytes, a Decimal, NaN, ...): the error
            names the row, the key and the type.
    """
    for index, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise DatasetError(f"Row {index} is {row!r}: each task has to be a dict.")
        try:
            yield {_text_key(key, f"Row {index}"): _plain(row[key], f"Row {index}[{key!r}]") for key in row}
        except RecursionError as error:
            raise DatasetError(f"Row {index} is nested too deeply, or contains itself.") from error


def without_filling(rows: Iterable[Row], source: str) -> Iterator[Row]:
    """Leave out the nulls within nested fields of rows that come from Arrow or parquet.

    There, all values of a column have the same fields, so what a row does not have is filled with null. A
    null in a column itself, or in a list, was written as such, and stays.

    Raises:
        DatasetError: a test has an input and a null for its output, or the other way round. Such a null may
            have been written, and is then part of the test; nothing in the file says so.
    """
    for index, row in enumerate(rows):
        yield {key: _without_nulls(row[key], f"{source}, row {index}", f"column {key!r}") for key in row}


def _without_nulls(value: Any, row: str, path: str) -> Any:
    if isinstance(value, list | tuple):  # the items of a map are tuples
        return type(value)(_without_nulls(item, row, f"{path}[{i}]") for i, item in enumerate(value))
    if not isinstance(value, dict):
        return value
    for pair in _PAIRS:
        missing = [name for name in pair if name in value and value[name] is None]
        if len(missing) == 1 and value.keys() >= set(pair) and _OF_TESTS.search(path):
            raise DatasetError(
                f"{row}, {path} is a test with null as its {missing[0]!r}, which was written or filled in: "
                "parquet does not say which. Store the tests as JSON text, or the rows as JSON lines."
            )
    return {
        key: _without_nulls(item, row, f"{path}[{key!r}]") for key, item in value.items() if item is not None
    }


@runtime_checkable
class Table(Protocol):
    """Attributes that a DataFrame of pandas has, and no other source of rows, so that it is not imported
    here."""

    def itertuples(self) -> Any: ...

    def to_dict(self, orient: Any = ..., /) -> Any: ...


def _plain(value: Any, where: str) -> Any:
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise DatasetError(f"{where} is too long a number for JSON to be read again: make it a text.")
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float | date | time):
        # Missing values, NaN and pandas' NaT, are the only ones that differ from themselves.
        if value != value or value in (math.inf, -math.inf):
            raise DatasetError(f"{where} is {value}, which JSON cannot hold: use None, or leave the row out.")
        return value if isinstance(value, float) else value.isoformat()
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {_text_key(key, where): _plain(value[key], f"{where}[{key!r}]") for key in value}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):  # of numpy or torch, which are not imported here
        if str(value.dtype).startswith("datetime64"):
            value = value.astype("datetime64[us]")  # finer ones become bare integers
        return _plain(value.tolist(), where)
    raise DatasetError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which JSON cannot hold: "
        "convert it to a text, a number, a list or a dict first."
    )


def _text_key(key: Any, where: str) -> str:
    if not isinstance(key, str):
        raise DatasetError(f"{where} is a dict with the key {key!r}: in JSON, each key is a text.")
    return key


def _json(path: Path) -> Iterator[Row]:
    text = path.read_text(encoding="utf-8-sig")
    rows = _parsed(text, str(path), "If each line is an object of its own, name it .jsonl.")
    if not isinstance(rows, list):
        raise DatasetError(f"{path} holds a {type(rows).__name__}: it has to be a list of objects.")
    yield from rows


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            row = _parsed(line, f"{path}, line {number}", "Write the file again.")
            if not isinstance(row, dict):
                raise DatasetError(f"{path}, line {number} is no JSON object. Write the file again.")
            yield row


def _parsed(text: str, where: str, remedy: str) -> Any:
    try:
        return json.loads(text)
    except RecursionError as error:
        raise DatasetError(f"{where} is nested too deeply. {remedy}") from error
    except ValueError as error:  # which a number of more than 4300 digits is too
        raise DatasetError(f"{where} is no JSON that can be read: {error}. {remedy}") from error


def _csv(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        csv.field_size_limit(sys.maxsize)  # of 128 Ki characters; many a prompt is longer
        lines = csv.reader(file, strict=True)
        try:
            names = next(lines, [])
            _check_names(path, names)
            for values in lines:
                if len(values) == len(names):
                    yield dict(zip(names, values, strict=True))
                elif values:  # an empty line is no row
                    raise DatasetError(
                        f"{path}, line {lines.line_num} has {len(values)} fields, but there are {len(names)} "
                        f"columns ({', '.join(names)}). Put quotes around fields that contain commas."
                    )
        except csv.Error as error:
            raise DatasetError(
                f"{path}, line {lines.line_num} is no CSV: {error}. Store it as JSON lines or parquet."
            ) from error


def _parquet(path: Path) -> Iterator[Row]:
    import pyarrow.parquet
    from pyarrow import ArrowException

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            _check_names(path, file.schema_arrow.names)
            batches = file.iter_batches(batch_size=1024)
            yield from without_filling((row for batch in batches for row in batch.to_pylist()), str(path))
    except ArrowException as error:
        raise DatasetError(f"{path} cannot be read as parquet: {error}. Write the file again.") from error


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".json": _json,
    ".jsonl": _json_lines,
    ".csv": _csv,
    ".parquet": _parquet,
}


def _check_names(path: Path, names: list[str]) -> None:
    if not names or len(set(names)) < len(names):
        raise DatasetError(f"{path} has the columns {names}: at least one is needed, and no name twice.")


def _decoded(path: Path, rows: Iterator[Row]) -> Iterator[Row]:
    try:
        yield from rows
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8: {error}. Convert it, for example with iconv.") from error
