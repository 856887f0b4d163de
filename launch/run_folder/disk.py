"""A full disk: it shows in any of a run's files, in many libraries, as many kinds of errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from environments.errors import TroupeError

SIGNS = ("No space left on device", "Disk quota exceeded")
MIN_FREE_BYTES = 1 << 20
"""Free bytes below which a disk is full, whatever the error of the library that could not write."""


@contextmanager
def full_disk_explained(directory: Path) -> Iterator[None]:
    """Raises ``TroupeError`` for what a full disk has ended in the block, which writes to ``directory``, or
    the end of that folder.
    """
    try:
        yield
    except TroupeError:
        raise
    except Exception as error:
        if not directory.exists():
            raise TroupeError(
                f"run.directory={directory} was deleted while its run was writing to it: start anew, or "
                "from its copy at run.checkpoints.to, if it has one, by run.resume=ADDRESS."
            ) from error
        free = shutil.disk_usage(directory).free
        if free >= MIN_FREE_BYTES and not any(sign in _messages(error) for sign in SIGNS):
            raise
        raise TroupeError(
            f"A disk is full; that of run.directory={directory} has {free / 1e6:.0f} MB left. Free some, "
            f"and go on from the last checkpoint with run.directory={directory} run.resume=true"
        ) from error


def _messages(error: BaseException | None) -> str:
    """The messages of an error and of those that it came from."""
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)
