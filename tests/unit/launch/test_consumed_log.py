from __future__ import annotations

from pathlib import Path

import pytest

from environments.errors import TroupeError
from launch.run_folder.consumed_log import CONSUMED_LOG, ConsumedLog, read_consumed_log


def record(directory: Path, steps: range, last_step: int = 0) -> None:
    journal = ConsumedLog(directory, last_step)
    for step in steps:
        journal.record(
            step, [f"{step:08d}/0000", f"{step:08d}/0001"], {"stale": [f"{step:08d}/0002"], "none": []}
        )


def steps_of(directory: Path) -> list[int]:
    return [each["step"] for each in read_consumed_log(directory)]


def test_what_was_consumed_is_written_down(tmp_path: Path) -> None:
    record(tmp_path, range(1, 3))
    assert read_consumed_log(tmp_path)[1] == {
        "step": 2,
        "trained": ["00000002/0000", "00000002/0001"],
        "dropped": {"stale": ["00000002/0002"]},
    }
    assert steps_of(tmp_path) == [1, 2]


def test_line_is_readable_as_soon_as_it_is_recorded(tmp_path: Path) -> None:
    ConsumedLog(tmp_path, 0).record(1, ["a/0"], {})
    assert read_consumed_log(tmp_path) == [{"step": 1, "trained": ["a/0"], "dropped": {}}]


def test_rollouts_consumed_after_a_checkpoint_are_used_again(tmp_path: Path) -> None:
    record(tmp_path, range(1, 6))
    record(tmp_path, range(3, 5), last_step=2)
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    record(tmp_path, range(1, 2))
    assert steps_of(tmp_path) == [1]


@pytest.mark.parametrize("cut_off", ['{"step": 4, "tra', '{"step": 4}'], ids=["inside", "before the end"])
def test_resumed_run_goes_on_after_a_line_that_a_crash_cut_off(tmp_path: Path, cut_off: str) -> None:
    record(tmp_path, range(1, 4))
    with (tmp_path / CONSUMED_LOG).open("a") as file:
        file.write(cut_off)
    record(tmp_path, range(4, 5), last_step=3)
    assert steps_of(tmp_path) == [1, 2, 3, 4]
    assert len(read_consumed_log(tmp_path)[-1]["trained"]) == 2


def test_damaged_line_in_the_middle_is_not_passed_over(tmp_path: Path) -> None:
    record(tmp_path, range(1, 4))
    lines = (tmp_path / CONSUMED_LOG).read_text().splitlines()
    (tmp_path / CONSUMED_LOG).write_text("\n".join([lines[0], lines[1][:9], lines[2]]))
    with pytest.raises(TroupeError, match=r"consumed.jsonl, line 2, is no JSON .*: repair or delete"):
        ConsumedLog(tmp_path, last_step=3)
    assert len((tmp_path / CONSUMED_LOG).read_text().splitlines()) == 3, "nothing was thrown away"


def test_folder_without_a_journal_has_consumed_nothing(tmp_path: Path) -> None:
    assert read_consumed_log(tmp_path) == []
