"""A file of JSON lines about the steps of a run, which a resumed run cuts back and goes on with."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from environments.disk import replaced
from environments.errors import TroupeError


class JsonlLog:
    """Records with a ``step``, one per line, in the order in which they come.

    Args:
        path: the file; its folder is made if there is none.
        last_step: records of later steps are dropped, all at once: a resumed run writes them again.

    Raises:
        TroupeError: a line that is not the last is no record.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.kept = [record for record in read_records(path) if record["step"] <= last_step]
        """Records that were there already and stay."""
        with replaced(path) as unfinished:
            unfinished.write_text("".join(json.dumps(each) + "\n" for each in self.kept), encoding="utf-8")
        self._path = path

    def append(self, record: dict[str, Any]) -> None:
        """Write a record, which is on the disk on return."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file, empty without one. A last line that a crash has cut off is left out.

    Raises:
        TroupeError: another line is no record, or the file no text.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except UnicodeDecodeError as error:
        raise TroupeError(f"{path} is no text ({error}): repair or delete it.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise TroupeError(
                    f"{path}, line {number}, is no JSON ({error}): repair or delete that line."
                ) from error
    return records
