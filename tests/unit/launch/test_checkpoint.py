from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from environments.errors import ConfigError
from environments.types import Completion, Step, TerminationReason, Trajectory
from launch.run_folder.checkpoint import CheckpointFolder, Progress, StreamState

NOTHING = StreamState()
METRIC = "eval/reward_mean"


def write_weights(text: str = "weights"):
    def save(folder: str) -> None:
        (Path(folder) / "huggingface").mkdir()
        (Path(folder) / "huggingface" / "weights").write_text(text)

    return save


def fail(folder: str) -> None:
    (Path(folder) / "weights").write_text("half")
    raise OSError("The disk is full.")


def save_steps(folder: CheckpointFolder, *steps: int) -> None:
    for step in steps:
        folder.begin_save(Progress(step=step), NOTHING, write_weights())()


def kept_in(directory: Path) -> set[str]:
    """All that lies in the folder, hidden or not."""
    return {path.name for path in (directory / "checkpoints").iterdir()}


def link_latest(directory: Path, name: str) -> None:
    latest = directory / "checkpoints" / "latest"
    latest.unlink()
    latest.symlink_to(name)


def step_of(checkpoint: Path | None) -> int:
    assert checkpoint is not None
    return CheckpointFolder.progress(checkpoint).step


# -- what is saved is found again ----------------------------------------------------------------------


def test_folder_without_checkpoints_has_no_latest_and_no_best(tmp_path: Path) -> None:
    assert CheckpointFolder(tmp_path, kept=2).latest() is None
    assert CheckpointFolder(tmp_path, kept=2).best() is None


def test_what_was_saved_is_found_again(tmp_path: Path) -> None:
    progress = Progress(
        stage_steps={"warm_start": 5}, step=3, version=4, num_groups=24, tasks_digest="abc", kl_coef=0.1 + 0.2
    )
    saved = CheckpointFolder(tmp_path, kept=2).begin_save(progress, NOTHING, write_weights())()
    latest = CheckpointFolder(tmp_path, kept=2).latest()
    assert latest == saved
    assert (latest / "huggingface" / "weights").read_text() == "weights"
    assert CheckpointFolder.progress(latest) == progress
    assert CheckpointFolder.stream(latest) == NOTHING


def test_ready_trajectories_grow_linearly_with_a_conversation(tmp_path: Path) -> None:
    sizes = []
    for num_turns in (10, 20, 40):
        turns = [
            [{"role": "user", "content": f"{number}" * 50} for number in range(turn)]
            for turn in range(1, num_turns + 1)
        ]
        steps = [
            Step(
                chat_completions=messages,
                completion=Completion(
                    prompt_ids=tuple(range(20 * len(messages))), text="", finish_reason="stop"
                ),
            )
            for messages in turns
        ]
        ready = StreamState(ready=(Trajectory(steps=steps),))
        saved = CheckpointFolder(tmp_path, kept=1).begin_save(
            Progress(step=num_turns), ready, write_weights()
        )()
        assert CheckpointFolder.stream(saved) == ready
        sizes.append((saved / "ready.jsonl").stat().st_size)
    assert sizes[2] - sizes[1] < 2.3 * (sizes[1] - sizes[0])


def test_latest_is_a_link_that_other_programs_can_follow(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=1)
    for step in (1, 2):
        save_steps(folder, step)
        link = tmp_path / "checkpoints" / "latest"
        assert str(link.readlink()) == f"step_{step:06d}", "it holds when the folder is moved"
        assert (link / "huggingface" / "weights").read_text() == "weights"


def test_latest_is_a_file_with_a_name_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("Links are not supported.")

    monkeypatch.setattr(Path, "symlink_to", fail)
    folder = CheckpointFolder(tmp_path, kept=1)
    save_steps(folder, 1, 2)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_000002\n"
    assert step_of(folder.latest()) == 2


def test_what_was_between_fleet_and_loop_is_found_again(tmp_path: Path) -> None:
    completion = Completion(
        prompt_ids=(1, 2),
        completion_ids=(3,),
        logprobs=(-0.1,),
        text="x",
        finish_reason="stop",
        token_versions=(7,),
    )
    ready = tuple(
        Trajectory(
            task={"question": "?"},
            steps=[Step(completion=completion, reward=0.5, info={"judge": lambda answer: answer + 1})],
            reward=0.5,
            rollout_id=f"00000002/000{member}",
            termination_reason=TerminationReason.ENV_DONE,
        )
        for member in (1, 0)
    )
    stream = StreamState(ready=ready, in_flight=("00000002/0002", "00000003/0000"))
    saved = CheckpointFolder(tmp_path, kept=1).begin_save(Progress(step=1), stream, write_weights())()

    found = CheckpointFolder.stream(saved)
    assert found.in_flight == stream.in_flight
    assert [each.rollout_id for each in found.ready] == ["00000002/0001", "00000002/0000"]
    assert found.ready[0].steps[0].completion == completion
    assert found.ready[0].termination_reason is TerminationReason.ENV_DONE
    assert "lambda" in found.ready[0].steps[0].info["judge"], "what Ray can carry stops no checkpoint"
    manifest = json.loads((saved / "state.json").read_text())
    assert (manifest["num_ready"], manifest["in_flight"]) == (2, list(stream.in_flight))


def test_rollout_comes_back_from_a_checkpoint_to_the_last_bit(tmp_path: Path) -> None:
    completion = Completion(
        prompt_ids=(1, 2),
        completion_ids=(3, 4),
        logprobs=(-0.1 - 1e-17, -1 / 3),
        text="ü\ud800",
        finish_reason="stop",
        policy_version=3,
        token_versions=(3, 4),
        tool_calls=({"function": {"name": "f", "arguments": "{}"}},),
        usage=(2, 2),
    )
    steps = [
        Step(chat_completions=[{"role": "user", "content": "x"}], reward=0.1, completion=completion),
        Step(),
    ]
    trajectory = Trajectory(
        task={"n": 1},
        steps=steps,
        reward=0.1 + 0.2,
        rollout_id="00000001/0002",
        termination_reason=TerminationReason.ENV_DONE,
        metrics={"hits": float("inf")},
        masked=True,
        seconds=1 / 7,
    )
    folder = CheckpointFolder(tmp_path, kept=1)
    checkpoint = folder.begin_save(Progress(step=1), StreamState(ready=(trajectory,)), lambda _: None)()
    assert CheckpointFolder.stream(checkpoint).ready == (trajectory,)


# -- what interrupts a save ----------------------------------------------------------------------------


def test_save_that_fails_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    first = folder.begin_save(Progress(step=1), NOTHING, write_weights())()
    with pytest.raises(OSError, match="full"):
        folder.begin_save(Progress(step=2), NOTHING, fail)()
    assert folder.latest() == first
    assert [path.name for path in first.parent.glob("step_*")] == ["step_000001"]


def test_step_saved_again_replaces_the_old_one_in_any_case(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    folder.begin_save(Progress(step=1, version=1), NOTHING, write_weights("old"))()
    with pytest.raises(OSError, match="full"):
        folder.begin_save(Progress(step=1, version=2), NOTHING, fail)()
    latest = folder.latest()
    assert latest is not None
    assert (latest / "huggingface" / "weights").read_text() == "old"
    folder.begin_save(Progress(step=1, version=2), NOTHING, write_weights("new"))()
    assert (latest / "huggingface" / "weights").read_text() == "new"
    assert CheckpointFolder.progress(latest).version == 2
    assert kept_in(tmp_path) == {"step_000001", "latest"}


class Killed(BaseException):
    """As SIGKILL: nothing catches it, nothing is cleaned up."""


def kill_before(monkeypatch: pytest.MonkeyPatch, operation: int) -> None:
    """Die before the given rename, replacement or deletion of a folder; deletions are half done by then."""
    count = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count > operation:
                if real is rmtree and (Path(arguments[0]) / "state.json").exists():
                    (Path(arguments[0]) / "state.json").unlink()
                raise Killed
            return real(*arguments, **options)

        return call

    rmtree = shutil.rmtree
    monkeypatch.setattr(Path, "rename", dying(Path.rename))
    monkeypatch.setattr(os, "replace", dying(os.replace))
    monkeypatch.setattr(shutil, "rmtree", dying(rmtree))


@pytest.mark.parametrize("step", [3, 2], ids=["another step", "the same step again"])
def test_kill_at_any_moment_of_save_leaves_whole_checkpoint(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = []
    for operation in range(100):
        directory = tmp_path / str(operation)
        folder = CheckpointFolder(directory, kept=2)
        save_steps(folder, 1, 2)
        killed = False
        with monkeypatch.context() as patch:
            kill_before(patch, operation)
            try:
                folder.begin_save(Progress(step=step, version=9), NOTHING, write_weights("new"))()
            except Killed:
                killed = True

        latest = CheckpointFolder(directory, kept=2).latest()
        assert latest is not None
        progress = CheckpointFolder.progress(latest)
        assert progress in (Progress(step=2), Progress(step=step, version=9)), operation
        versions.append(progress.version)

        save_steps(CheckpointFolder(directory, kept=2), 4)  # the resumed run goes on
        whole = kept_in(directory) - {"latest"}
        assert whole in ({f"step_{progress.step:06d}", "step_000004"}, {"step_000003", "step_000004"})
        assert all(step_of(directory / "checkpoints" / name) for name in whole), operation
        if not killed:
            break
    assert operation > 3, "no operation of the save was reached"
    assert versions == sorted(versions), "it is the old one first, then the new one"
    assert versions[0] == 0
    assert versions[-1] == 9


def test_what_kill_has_left_behind_is_swept_away_by_next_save(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    save_steps(folder, 1)
    for leftover in (".step_000001.old", ".step_000007.tmp", "step_000007", ".step_000007.old"):
        (tmp_path / "checkpoints" / leftover / "huggingface").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".latest.tmp").write_text("step_0000")
    assert step_of(folder.latest()) == 1
    save_steps(folder, 2)
    assert kept_in(tmp_path) == {"step_000001", "step_000002", "latest"}


def test_half_a_checkpoint_gives_its_room_to_the_next_one(tmp_path: Path) -> None:
    """It is that of a full disk: with one left behind each time, no attempt would ever fit."""
    checkpoints = tmp_path / "checkpoints"

    def fill_disk(folder: str) -> None:
        assert [path.name for path in checkpoints.glob(".step_*")] == [Path(folder).name]
        Path(folder, "weights").write_bytes(b"half")
        raise OSError("No space left on device")

    (checkpoints / ".step_000007.2.tmp" / "huggingface").mkdir(parents=True)  # of a process that was killed
    folder = CheckpointFolder(tmp_path, kept=1)
    for step in (6, 7):
        with pytest.raises(OSError, match="No space"):
            folder.begin_save(Progress(step=step), StreamState(), fill_disk)()


# -- what is kept --------------------------------------------------------------------------------------


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    save_steps(CheckpointFolder(tmp_path, kept=2), 1, 2, 10, 11)
    assert kept_in(tmp_path) == {"step_000010", "step_000011", "latest"}


def test_number_kept_holds_across_restarts(tmp_path: Path) -> None:
    for step in (1, 2, 3, 999_999, 1_000_000):
        save_steps(CheckpointFolder(tmp_path, kept=2), step)
    assert kept_in(tmp_path) == {"step_999999", "step_1000000", "latest"}
    save_steps(CheckpointFolder(tmp_path, kept=1), 1_000_001)
    assert kept_in(tmp_path) == {"step_1000001", "latest"}


def test_folder_that_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    save_steps(CheckpointFolder(tmp_path, kept=1), 1)
    shutil.copytree(tmp_path / "checkpoints" / "step_000001", tmp_path / "checkpoints" / "step_000001_copy")
    save_steps(CheckpointFolder(tmp_path, kept=1), 2)
    assert kept_in(tmp_path) == {"step_000001_copy", "step_000002", "latest"}


def test_run_that_went_back_drops_checkpoints_of_future_it_left(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=3)
    save_steps(folder, 2, 4, 6)
    assert folder.mark_best(6, METRIC, 0.9)
    link_latest(tmp_path, "step_000002")
    resumed = CheckpointFolder(tmp_path, kept=3)
    save_steps(resumed, 3)
    assert kept_in(tmp_path) == {"step_000002", "step_000003", "latest"}
    assert resumed.mark_best(3, METRIC, 0.1), "the best of the future that was left counts no longer"


def test_best_checkpoint_is_kept_as_long_as_it_is_the_best(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=1)
    save_steps(folder, 1)
    assert folder.mark_best(1, METRIC, 0.5)
    save_steps(folder, 2)
    assert not folder.mark_best(2, METRIC, 0.5)
    save_steps(folder, 3)
    assert kept_in(tmp_path) == {"step_000001", "step_000003", "latest", "best"}
    assert step_of(folder.best()) == 1
    assert folder.mark_best(3, METRIC, 0.6)
    assert kept_in(tmp_path) == {"step_000003", "latest", "best"}


@pytest.mark.parametrize(("value", "kept"), [(0.9, {"step_000002"}), (0.1, {"step_000001"})])
def test_checkpoint_under_evaluation_stays_until_it_is_judged(
    tmp_path: Path, value: float, kept: set[str]
) -> None:
    folder = CheckpointFolder(tmp_path, kept=1)
    save_steps(folder, 1)
    folder.mark_best(1, METRIC, 0.5)
    save_steps(folder, 2)
    folder.begin_save(Progress(step=3), StreamState(), write_weights(), step_under_evaluation=2)()
    assert folder.mark_best(2, METRIC, value) == (value > 0.5)
    assert kept_in(tmp_path) == {*kept, "step_000003", "latest", "best"}


def test_best_value_is_known_after_a_restart(tmp_path: Path) -> None:
    save_steps(CheckpointFolder(tmp_path, kept=1), 1)
    CheckpointFolder(tmp_path, kept=1).mark_best(1, METRIC, 0.1 + 0.2)
    resumed = CheckpointFolder(tmp_path, kept=1)
    save_steps(resumed, 2)
    assert not resumed.mark_best(2, METRIC, 0.1 + 0.2)
    assert resumed.mark_best(2, METRIC, 0.31)
    assert step_of(resumed.best()) == 2


@pytest.mark.parametrize(("step", "value"), [(1, float("nan")), (7, 0.9)], ids=["no number", "not kept"])
def test_what_cannot_be_the_best_is_not(tmp_path: Path, step: int, value: float) -> None:
    folder = CheckpointFolder(tmp_path, kept=1)
    save_steps(folder, 1)
    assert not folder.mark_best(step, METRIC, value)
    assert folder.best() is None
    assert folder.mark_best(1, METRIC, -2.0)


def test_what_an_interrupted_run_has_left_cannot_be_the_best(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    save_steps(folder, 1)
    (tmp_path / "checkpoints" / "latest").unlink()  # killed before there was a pointer
    assert not folder.mark_best(1, METRIC, 0.9)
    assert folder.best() is None


def test_best_step_that_is_evaluated_again_has_the_new_value(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    save_steps(folder, 1, 2)
    folder.mark_best(1, METRIC, 0.9)
    assert folder.mark_best(1, METRIC, 0.4)
    assert folder.mark_best(2, METRIC, 0.5)


def test_values_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    save_steps(folder, 1, 2, 3)
    folder.mark_best(2, "eval/response_tokens_mean", 212.0)
    assert folder.mark_best(3, METRIC, 0.9)
    assert step_of(folder.best()) == 3
    (tmp_path / "checkpoints" / "best").write_text("step_000002 212.0\n")
    assert folder.mark_best(3, METRIC, 0.9)


def test_best_pointer_that_says_nothing_is_refused(tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    save_steps(folder, 1)
    (tmp_path / "checkpoints" / "best").write_text("step_000001\n")
    with pytest.raises(ConfigError, match=r"best holds 'step_000001\\n'.* repair or delete it"):
        folder.best()


# -- what is damaged -----------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["{", "{}", '{"unknown": 1}', "[1]", '"sha256"', None])
def test_checkpoint_without_its_manifest_is_refused_with_remedy(tmp_path: Path, state: str | None) -> None:
    folder = CheckpointFolder(tmp_path, kept=2)
    save_steps(folder, 1, 2)
    checkpoint = tmp_path / "checkpoints" / "step_000002"
    path = checkpoint / "state.json"
    path.unlink() if state is None else path.write_text(state)
    for read in (CheckpointFolder.progress, CheckpointFolder.stream):
        with pytest.raises(
            ConfigError,
            match=r"step_000002 cannot be read .*: link .*latest to .*\(step_000001\).*start with a",
        ):
            read(checkpoint)


@pytest.mark.parametrize(
    "edited",
    [
        lambda state: "",
        lambda state: state[: len(state) // 2],
        lambda state: state.replace('"num_groups": 0', '"num_groups": "0"'),
        lambda state: state.replace(' "num_ready": 0,', ""),
        lambda state: state.replace('  "step": 2,', ""),
        lambda state: state.replace('  "step": 2,', '  "step": 20,'),
    ],
    ids=["empty", "cut", "another type", "a field missing", "one with a default missing", "a value"],
)
def test_manifest_that_is_not_what_was_written_is_named(tmp_path: Path, edited: Callable[[str], str]) -> None:
    save_steps(CheckpointFolder(tmp_path, kept=2), 1, 2)
    path = tmp_path / "checkpoints" / "step_000002" / "state.json"
    before = path.read_text()
    assert edited(before) != before
    path.write_text(edited(before))
    for read in (CheckpointFolder.progress, CheckpointFolder.stream):
        reason = r"state\.json is (no JSON|not what this version has written): .*"
        with pytest.raises(ConfigError, match=rf"step_000002 cannot be read \({reason}: link .*latest"):
            read(path.parent)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"weight", "has 6 bytes instead of 7"),
        (b"weighty", "is not what was written"),
        (None, "is missing"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, content: bytes | None, fault: str) -> None:
    checkpoint = CheckpointFolder(tmp_path, kept=2).begin_save(Progress(step=1), NOTHING, write_weights())()
    path = checkpoint / "huggingface" / "weights"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"huggingface/weights {fault}.*start with a new run.directory"):
        CheckpointFolder.progress(checkpoint)


def test_shard_without_a_digest_is_refused(tmp_path: Path) -> None:
    checkpoint = CheckpointFolder(tmp_path, kept=2).begin_save(Progress(step=1), NOTHING, write_weights())()
    (checkpoint / "state_00000_of_00001.safetensors").write_text("weights")
    with pytest.raises(ConfigError, match=r"state_00000_of_00001\.safetensors has no digest in state\.json"):
        CheckpointFolder.progress(checkpoint)


def test_damaged_trajectories_are_not_read(tmp_path: Path) -> None:
    ready = StreamState(ready=(Trajectory(rollout_id="00000000/0000"),))
    checkpoint = CheckpointFolder(tmp_path, kept=2).begin_save(Progress(step=1), ready, write_weights())()
    path = checkpoint / "ready.jsonl"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ConfigError, match=r"ready.jsonl is not what was written"):
        CheckpointFolder.stream(checkpoint)


def test_move_of_environments_own_class_comes_back_as_its_text(tmp_path: Path) -> None:
    ready = StreamState(ready=(Trajectory(steps=[Step(action={"moves": (Fraction(1, 2),)})]),))
    checkpoint = CheckpointFolder(tmp_path, kept=2).begin_save(Progress(step=1), ready, write_weights())()
    (trajectory,) = CheckpointFolder.stream(checkpoint).ready
    assert trajectory.steps[0].action == {"moves": ["1/2"]}
