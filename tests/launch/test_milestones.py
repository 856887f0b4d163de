"""When a checkpoint is written, without a learner."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.config import RunConfig
from launch.run_folder.checkpoint import Progress, StreamState
from launch.training.milestones import checkpoint_due
from launch.training.recovery import Recovery


def recovery_of(directory: Path, resume: bool = False) -> Recovery:
    run = RunConfig(directory=str(directory), resume=resume)
    return Recovery(SimpleNamespace(run=run), directory)  # type: ignore[arg-type]


def run_of(num_updates: int, checkpoint_every: int) -> Any:
    return SimpleNamespace(
        num_updates=num_updates,
        config=SimpleNamespace(run=SimpleNamespace(checkpoint_every=checkpoint_every)),
    )


@pytest.mark.parametrize(
    ("progress", "due"),
    [
        (Progress(), False),
        (Progress(stage_steps={"warm_start": 30}), True),
        (Progress(stage_steps={"reinforce": 1}, step=1), False),
        (Progress(stage_steps={"reinforce": 2}, step=2), True),
        (Progress(stage_steps={"reinforce": 5}, step=5), True),
    ],
    ids=["nothing learned", "after a warm start", "between", "as often as chosen", "the end"],
)
def test_a_checkpoint_is_due(tmp_path: Path, progress: Progress, due: bool) -> None:
    recovery = recovery_of(tmp_path)
    recovery.progress = progress
    assert checkpoint_due(run_of(5, 2), recovery) == due


def test_a_warm_start_that_was_interrupted_is_saved_once_more_when_it_is_done(tmp_path: Path) -> None:
    run, interrupted = run_of(5, 2), recovery_of(tmp_path)
    interrupted.progress = Progress(stage_steps={"warm_start": 10})
    interrupted.save(StreamState(), lambda folder: None)
    interrupted.close()

    recovery = recovery_of(tmp_path, resume=True)
    assert not checkpoint_due(run, recovery), "nothing is new"
    recovery.progress.stage_steps["warm_start"] = 30
    assert checkpoint_due(run, recovery)
    recovery.save(StreamState(), lambda folder: None)
    assert not checkpoint_due(run, recovery)
    assert recovery.saved_step == 0
