from __future__ import annotations

from pathlib import Path

import pytest

from environments.errors import ConfigError
from launch.checkpoint import CheckpointFolder, Progress


def write_weights(text: str = "weights"):
    def save(folder: str) -> None:
        (Path(folder) / "weights").write_text(text)

    return save


def fail(folder: str) -> None:
    (Path(folder) / "weights").write_text("half")
    raise OSError("The disk is full.")


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path, kept=2).latest() is None


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    progress = Progress(warm_start_steps=5, step=3, version=4, num_groups=24, evaluated=True)
    saved = CheckpointFolder(tmp_path, kept=2).save(progress, write_weights())
    latest = CheckpointFolder(tmp_path, kept=2).latest()
    assert latest == saved
    assert (latest / "weights").read_text() == "weights"
    assert CheckpointFolder.progress(latest) == progress


def test_a_save_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    first = folder.save(Progress(step=1), write_weights())
    with pytest.raises(OSError, match="full"):
        folder.save(Progress(step=2), fail)
    assert folder.latest() == first
    assert [path.name for path in first.parent.glob("step_*")] == ["step_000001"]
    assert folder.latest() == first


def test_a_failed_save_does_not_disturb_the_next(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    with pytest.raises(OSError, match="full"):
        folder.save(Progress(step=1), fail)
    saved = folder.save(Progress(step=1), write_weights("whole"))
    assert (saved / "weights").read_text() == "whole"


def test_a_step_saved_again_replaces_what_was_there_even_when_that_fails_midway(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    folder.save(Progress(step=1, version=1), write_weights("old"))
    with pytest.raises(OSError, match="full"):
        folder.save(Progress(step=1, version=2), fail)
    latest = folder.latest()
    assert latest is not None
    assert (latest / "weights").read_text() == "old"
    folder.save(Progress(step=1, version=2), write_weights("new"))
    assert (latest / "weights").read_text() == "new"
    assert CheckpointFolder.progress(latest).version == 2


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    for step in (1, 2, 10, 11):
        folder.save(Progress(step=step), write_weights())
    names = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert names == {"step_000010", "step_000011", "latest"}


@pytest.mark.parametrize("state", ["{", '{"unknown": 1}', None])
def test_a_damaged_checkpoint_is_refused_with_a_remedy(tmp_path: Path, state: str | None) -> None:
    checkpoint = CheckpointFolder(tmp_path, kept=2).save(Progress(step=1), write_weights())
    path = checkpoint / "state.json"
    path.unlink() if state is None else path.write_text(state)
    with pytest.raises(ConfigError, match=r"step_000001 cannot be read .*latest, or start with a new run"):
        CheckpointFolder.progress(checkpoint)
