"""Checkpoints: written to a temporary folder, renamed when whole, found again by a pointer file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from environments.errors import ConfigError

LATEST = "latest"
STATE = "state.json"
PREFIX = "step_"


@dataclass
class Progress:
    """How far a run has come: with the learner's state, all that a resumed run needs to know."""

    warm_start_steps: int = 0
    """Optimizer steps of the warm start that are done."""
    step: int = 0
    """Policy updates that are done."""
    version: int = 0
    """Version of the policy that is published."""
    num_groups: int = 0
    """Groups taken from the tasks so far: the data cursor."""
    evaluated: bool = False
    """Whether the policy was evaluated before the first update."""


class CheckpointFolder:
    """The checkpoints of one run.

    A checkpoint is a folder ``step_000012`` with ``state.json``, the learner's shards, and
    ``huggingface/``, which ``AutoModelForCausalLM.from_pretrained`` loads.
    """

    def __init__(self, directory: Path, kept: int) -> None:
        self._directory = directory / "checkpoints"
        self._kept = kept

    def save(self, progress: Progress, save_learner: Callable[[str], None]) -> Path:
        """Write a checkpoint. What ``save_learner`` writes goes to the folder that it is given."""
        name = f"{PREFIX}{progress.step:06d}"
        temporary, final = self._directory / f".{name}.tmp", self._directory / name
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        save_learner(str(temporary))
        (temporary / STATE).write_text(json.dumps(asdict(progress), indent=1), encoding="utf-8")
        _flush(temporary)
        if final.exists():  # the same step again, for example at a Ctrl-C right after a checkpoint
            final.rename(old := self._directory / f".{name}.old")
            temporary.rename(final)
            shutil.rmtree(old)
        else:
            temporary.rename(final)
        self._point_to(name)
        self._drop_old()
        return final

    def latest(self) -> Path | None:
        """The newest whole checkpoint."""
        pointer = self._directory / LATEST
        return self._directory / pointer.read_text(encoding="utf-8").strip() if pointer.exists() else None

    @staticmethod
    def progress(checkpoint: Path) -> Progress:
        """What was done when ``checkpoint`` was written."""
        try:
            return Progress(**json.loads((checkpoint / STATE).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"The checkpoint {checkpoint} cannot be read ({error}): write the name of another one into "
                f"{checkpoint.parent / LATEST}, or start with a new run.directory."
            ) from error

    def _point_to(self, name: str) -> None:
        temporary = self._directory / f".{LATEST}.tmp"
        temporary.write_text(name + "\n", encoding="utf-8")
        os.replace(temporary, self._directory / LATEST)

    def _drop_old(self) -> None:
        checkpoints = sorted(self._directory.glob(f"{PREFIX}*"))
        for checkpoint in checkpoints[: -self._kept]:
            shutil.rmtree(checkpoint)


def _flush(folder: Path) -> None:
    """Force the files to disk, so that no power cut leaves a renamed folder of empty files."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())
