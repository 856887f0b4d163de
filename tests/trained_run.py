"""A run's folder, as a training leaves it."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from launch.run_folder.checkpoint import CheckpointFolder, Progress, SaveLearner, StreamState
from launch.training.run_state import RunState


def make_run(directory: Path, model: Path, step: int = 30) -> Path:
    """A run's folder with one checkpoint, which is returned."""
    progress = Progress(step=step, version=step + 1)  # a warm start has published version 1
    return CheckpointFolder(directory, kept=9).begin_save(
        progress, StreamState(), partial(save_model, model)
    )()


def save_whole(state: RunState, stream: StreamState, save_learner: SaveLearner) -> Path:
    """Write a checkpoint, and wait until it is whole."""
    state.begin_save(stream, save_learner)
    path = state.finish_save()
    assert path is not None
    return path


def save_model(model: Path, folder: str) -> None:
    shutil.copytree(model, Path(folder) / "huggingface")
