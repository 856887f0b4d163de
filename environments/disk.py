"""Files that are written whole, and outlive a power failure."""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from environments.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """Size and hash of a file, to know it as the one that was written."""

    num_bytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> FileDigest:
        """The digest of the file as it is now. Raises ``OSError``."""
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            return FileDigest(num_bytes=os.fstat(file.fileno()).st_size, sha256=sha256)


def sync(path: Path) -> None:
    """Force a file, or the names that a folder lists, to the disk. Raises ``OSError``."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def replaced(path: Path, is_new: bool = False) -> Iterator[Path]:
    """A path beside ``path``: the file that the block writes there takes its place, whole and on the disk.

    After an error nothing has changed. The name begins with a dot, so that listings leave it out. A file that
    has to be new replaces none: ``FileExistsError``.
    """
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield unfinished
        sync(unfinished)
        if is_new:
            os.link(unfinished, path)  # unlike a renaming, it fails where there is one
        else:
            os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    sync(path.parent)


def place(made: Path, folder: Path) -> None:
    """Give a whole folder its name. Another process may have made the same meanwhile: then that one stays."""
    try:
        made.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


@contextmanager
def writing_to(folder: str, remedy: str) -> Iterator[None]:
    """Raises ``ConfigError`` in place of an ``OSError`` of the block: it names the folder, and the remedy."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written to ({error}): {remedy}.") from error
