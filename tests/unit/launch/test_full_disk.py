"""A disk that is full, which every Linux has as ``/dev/full``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from environments.errors import TroupeError
from launch import train
from launch.reporting.tracker import SETTINGS
from launch.run_folder.disk import full_disk_explained
from launch.run_folder.jsonl_log import JsonlLog


def test_full_disk_ends_a_training_with_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first file that grows is that of the settings: nothing else has been started by then."""
    (tmp_path / SETTINGS).symlink_to("/dev/full")
    assert train.main(["recipe=calculator", f"run.directory={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "A disk is full" in said and f"run.directory={tmp_path} run.resume=true" in said


def test_full_disk_is_told_from_another_error_by_what_led_to_it(tmp_path: Path) -> None:
    with pytest.raises(TroupeError, match="A disk is full"), full_disk_explained(tmp_path):
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("the plot was not drawn") from None
    with pytest.raises(RuntimeError, match="not drawn"), full_disk_explained(tmp_path):
        raise RuntimeError("the plot was not drawn")


def test_folder_that_is_deleted_ends_a_run_with_one_sentence(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    log = JsonlLog(folder / "metrics.jsonl", last_step=0)
    shutil.rmtree(folder)
    with pytest.raises(TroupeError, match=f"{folder} was deleted while"), full_disk_explained(folder):
        log.append({"step": 1})
