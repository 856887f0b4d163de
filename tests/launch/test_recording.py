"""A recording of another run, in the place of a rollout service."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.rollouts.rollout import RolloutRequest
from environments.errors import ConfigError, TroupeError
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.config import compose
from launch.run_folder.trajectory_log import TrajectoryLog
from launch.training.recording import RecordedStream
from launch.validation.replay import check_recording, check_replay


def trajectory(group: int, member: str, has_tokens: bool = True) -> Trajectory:
    completion = Completion(
        prompt_ids=(1,), completion_ids=(2,), logprobs=(-1.0,), text="a", finish_reason="stop"
    )
    return Trajectory(
        steps=[Step(chat_completions=[], model_response="a", completion=completion if has_tokens else None)],
        reward=group + (member == "0001"),
        rollout_id=f"{group:08d}/{member}",
        task={"group": group},
        termination_reason=TerminationReason.ENV_DONE,
    )


def group(number: int, has_tokens: bool = True) -> TrajectoryGroup:
    members = tuple(trajectory(number, member, has_tokens) for member in ("0000", "0001"))
    baseline = trajectory(number, "greedy", has_tokens)
    return TrajectoryGroup(
        group_id=f"{number:08d}", task={"group": number}, trajectories=members, baseline=baseline
    )


def recorded(folder: Path, kept: int = 10, has_tokens: bool = True) -> Path:
    """Three updates of two groups each, of which the second was left out."""
    folder.mkdir(exist_ok=True)
    log = TrajectoryLog(folder, kept)
    for step in (1, 2, 3):
        trained, dropped = group(2 * step - 2, has_tokens), group(2 * step - 1, has_tokens)
        log.record_update(step, [trained], {"zero_signal": [dropped]}, {})
    return folder


def test_groups_come_whole_and_those_that_were_left_out_too(tmp_path: Path) -> None:
    stream = RecordedStream(recorded(tmp_path))
    stream.request([RolloutRequest(rollout_id="00000000/0000", group_id="00000000", task={})])
    for number in range(6):
        taken = stream.take(f"{number:08d}")
        assert taken == group(number)
    with pytest.raises(TroupeError, match="no rollouts of group 6: it made fewer updates"):
        stream.take("00000006")


def test_a_resumed_replay_finds_the_groups_that_come_next(tmp_path: Path) -> None:
    assert RecordedStream(recorded(tmp_path)).take("00000004") == group(4)


def test_a_recording_that_is_not_whole_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no trajectories"):
        check_recording(tmp_path, 1)
    check_recording(recorded(tmp_path / "whole"), 3)
    with pytest.raises(ConfigError, match=r"has made 3 updates: set run\.num_steps=3"):
        check_recording(tmp_path / "whole", 4)
    with pytest.raises(ConfigError, match=r"updates 2 to 3 only.*run\.trajectories_kept"):
        check_recording(recorded(tmp_path / "part", kept=2), 3)
    with pytest.raises(ConfigError, match="turns without tokens"):
        check_recording(recorded(tmp_path / "outside", has_tokens=False), 3)


@pytest.mark.parametrize(
    "setting",
    [
        "rollout.max_staleness=2",
        "server.http_port=8000",
        "evaluation.every=5",
        "run.best_metric=eval/reward_mean",
    ],
)
def test_a_setting_that_needs_an_engine_is_an_error(setting: str, tmp_path: Path) -> None:
    config = compose(["recipe=calculator", f"run.replay={recorded(tmp_path)}", "run.num_steps=3", setting])
    with pytest.raises(ConfigError, match=r"needs an engine, and run\.replay starts none"):
        check_replay(config)
