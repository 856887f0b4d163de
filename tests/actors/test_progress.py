"""The progress bar of an evaluation."""

from __future__ import annotations

import pytest

from actors.progress import RolloutProgress
from environments.types import TerminationReason, Trajectory


def ended(reason: TerminationReason, reward: float) -> Trajectory:
    return Trajectory(reward=reward, termination_reason=reason)


def test_a_rollout_that_failed_with_a_part_of_its_reward_has_not_passed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RolloutProgress(4) as progress:
        progress.add(ended(TerminationReason.ENV_DONE, 1.0))
        progress.add(ended(TerminationReason.ENV_DONE, 0.0))
        progress.add(ended(TerminationReason.AGENT_ERROR, 0.5))
        progress.add(ended(TerminationReason.CRASHED, 0.5))
    assert "pass rate 0.250, 1 failed" in capsys.readouterr().err
