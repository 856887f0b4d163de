"""The progress bar of an evaluation."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import pytest

from actors.engine import RolloutProgress
from environments.types import TerminationReason, Trajectory


def ended(reason: TerminationReason, reward: float) -> Trajectory:
    return Trajectory(reward=reward, termination_reason=reason)


def test_rollout_that_failed_with_some_reward_has_not_passed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with closing(RolloutProgress(4)) as progress:
        progress.add(ended(TerminationReason.ENV_DONE, 1.0))
        progress.add(ended(TerminationReason.ENV_DONE, 0.0))
        progress.add(ended(TerminationReason.AGENT_ERROR, 0.5))
        progress.add(ended(TerminationReason.CRASHED, 0.5))
    assert "pass rate 0.250, 1 failed" in capsys.readouterr().err


def test_bar_left_out_counts_replayed_rollouts_in_silence() -> None:
    program = (
        "from actors.engine import RolloutProgress; from environments.types import Trajectory\n"
        "progress = RolloutProgress(2)\n"
        "progress.add(Trajectory(), replayed=True)\n"
        "progress.add(Trajectory())\n"
        "progress.close()\n"
    )
    environment = {**os.environ, "TQDM_DISABLE": "1"}  # tqdm reads it when it is imported
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
