"""Logs of Inspect: what they hold, and that inspect_ai itself reads all of it back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from machine import cpu_seconds
from test_conversation import played
from test_trajectory_log import conversation, group

from environments.types import Step, TerminationReason, Trajectory
from launch.export import main as export
from launch.reporting.inspect_messages import MessagePool, inspect_message
from launch.run_folder.trajectory_log import (
    EVALUATION,
    TRAIN,
    KeptTrajectory,
    TrajectoryLog,
    kept_steps,
    read_kept,
)

INSPECT = "inspect_ai==0.3.285"
READER = """
import json, sys
from inspect_ai.log import list_eval_logs, read_eval_log
logs = [read_eval_log(each, resolve_attachments=True) for each in list_eval_logs(sys.argv[1])]
json.dump([each.model_dump() for each in logs], sys.stdout, default=str)
"""


def odd(rollout_id: str) -> Trajectory:
    """Messages for which Inspect's form has no place, and a turn that the agent's own code decided."""
    picture = {"type": "image_url", "image_url": {"url": "data:,"}}
    bad = {"id": "c1", "type": "function", "function": {"name": "search", "arguments": "{no json"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, picture], "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [bad]},
    ]
    steps = [Step(chat_completions=messages, model_response="", reward=-1.5, info={"why": "odd"})]
    return Trajectory(
        task="a text",
        steps=steps,
        reward=-1.5,
        rollout_id=rollout_id,
        termination_reason=TerminationReason.TIMEOUT,
        error="TimeoutError: 5 s\n  in step",
        seconds=5.25,
    )


def read_in_text(rollout_id: str) -> Trajectory:
    """The history holds a tool call as text only: the agent has read it, and acts on it."""
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "2+3?"},
        {"role": "assistant", "content": "<tool_call>add</tool_call>"},
        {"role": "tool", "content": "5", "tool_call_id": "call_0"},
        {"role": "assistant", "content": "It is 5."},
    ]
    steps = [
        Step(chat_completions=messages[:2], model_response=messages[1]["content"], action=[call]),
        Step(chat_completions=messages, model_response="It is 5.", action=None, reward=1.0),
    ]
    return Trajectory(
        steps=steps, reward=1.0, rollout_id=rollout_id, termination_reason=TerminationReason.MAX_STEPS
    )


def forgetful(rollout_id: str) -> Trajectory:
    """An agent that keeps the instructions and forgets its first turn."""
    said = [{"role": "system", "content": "Count."}]
    said += [{"role": role, "content": f"{role} {turn}"} for turn in (1, 2) for role in ("user", "assistant")]
    steps = [
        Step(chat_completions=messages, model_response=messages[-1]["content"])
        for messages in (said[:3], [said[0], *said[3:]])
    ]
    return Trajectory(steps=steps, rollout_id=rollout_id, termination_reason=TerminationReason.ENV_DONE)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of one update and two evaluations, with everything that is hard to write."""
    folder = tmp_path / "run"
    folder.mkdir()
    log = TrajectoryLog(folder, 9)
    crashed = Trajectory(
        rollout_id="00000001/0001", termination_reason=TerminationReason.CRASHED, error="gone\n  at once"
    )
    first = group(
        0,
        conversation("00000000/0000", 5),
        conversation("00000000/0001", 3, rewrites=True),
        baseline=conversation("00000000/greedy", 1),
    )
    second = group(1, played(rollout_id="00000001/0000"), crashed, odd("00000001/0002"))
    log.record_update(3, [first], {"zero_signal": [second]}, {"00000000/0000": [0.5, -0.25, 0.0, 1.0, 2.0]})
    for step in (0, 3):
        tasks = [read_in_text(f"eval-{step}-000000/0000"), forgetful(f"eval-{step}-000001/0000")]
        log.record_evaluation(step, [group(number, each) for number, each in enumerate(tasks)])
    return folder


def test_log_is_a_zip_of_json_with_a_sample_for_each_member(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(["--inspect", str(run)]) == 0
    assert capsys.readouterr().out == f"10 trajectories in 3 logs: {run}/inspect\n"
    names = ["eval_000000.eval", "eval_000003.eval", "step_000003.eval"]
    assert sorted(path.name for path in (run / "inspect").iterdir()) == names
    with zipfile.ZipFile(run / "inspect" / names[2]) as archive:
        assert archive.testzip() is None
        header, summaries = (json.loads(archive.read(f"{part}.json")) for part in ("header", "summaries"))
    assert [(row["id"], row["epoch"]) for row in summaries] == [
        ("00000000", 1),
        ("00000000", 2),
        ("00000000", 3),
        ("00000001", 1),
        ("00000001", 2),
        ("00000001", 3),
    ]
    assert [row["error"] for row in summaries[3:]] == [None, "gone", "TimeoutError: 5 s"]
    assert [row["limit"] for row in summaries[3:]] == [None, None, "time"]
    means = {each["name"]: each["metrics"]["mean"]["value"] for each in header["results"]["scores"]}
    assert means == pytest.approx({"reward": (0.5 + 0.5 + 1 - 1.5) / 5, "success": 3 / 5})
    assert header["eval"]["config"] == {"epochs": 3}


def test_export_can_be_repeated_and_go_elsewhere(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "a" / "logs"
    for _ in range(2):
        assert export([str(run), "--inspect-folder", str(target)]) == 0
    assert len(list(target.iterdir())) == 3 and not (run / "inspect").exists()


def test_what_cannot_be_exported_is_told(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export([str(tmp_path), "--inspect"]) == 2
    assert "has kept no trajectories" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert export([str(run), "--inspect-folder", str(tmp_path / "file")]) == 2
    assert "cannot be written to" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        export([str(run)])
    assert "--inspect, --model FOLDER or --hub OWNER/NAME" in capsys.readouterr().err


def test_message_is_written_once_however_many_turns_repeat_it() -> None:
    pool = MessagePool()
    asked = [pool.add_turn(step).places for step in conversation("0/0", 4).steps]
    assert asked == [[(0, 1)], [(0, 3)], [(0, 5)], [(0, 7)]]
    assert len(pool.messages) == 8


def test_answer_without_a_name_belongs_to_the_next_call() -> None:
    calls = [{"function": {"name": name, "arguments": {}}} for name in ("one", "two")]
    said = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "3"},
    ]
    answers = MessagePool().add_turn(Step(chat_completions=said)).answers
    assert [(answer["function"], answer["result"]) for answer in answers] == [("one", "1"), ("two", "2")]


def test_what_has_no_place_in_the_form_stands_in_the_metadata() -> None:
    for message in odd("0/0").steps[0].chat_completions:
        assert inspect_message(message, "m")["metadata"] == {"message": message}
    assert "metadata" not in inspect_message({"role": "user", "content": "Hi"}, "m")


@pytest.mark.slow
def test_step_of_64_trajectories_is_written_in_no_time(tmp_path: Path) -> None:
    members = [conversation(f"00000000/{member:04d}", 5) for member in range(64)]
    TrajectoryLog(tmp_path, 9).record_update(1, [group(0, *members)], {}, {})
    assert export([str(tmp_path), "--inspect"]) == 0
    assert cpu_seconds(lambda: export([str(tmp_path), "--inspect"])) < 4.0


# -- read by inspect_ai ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def inspect_python() -> Path:
    """The interpreter of an environment with inspect_ai; made once on a machine, in some minutes."""
    folder = Path(os.environ.get("TROUPE_CACHE") or "~/.cache/troupe").expanduser() / INSPECT
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=300)
        pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--retries", "1", INSPECT]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=500)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            pytest.skip(f"pip cannot install {INSPECT} here, so it reads nothing back: {reason}")
        (folder / "complete").touch()
    return python


@pytest.mark.outside
def test_inspect_ai_reads_back_what_the_run_has_kept(run: Path, inspect_python: Path) -> None:
    assert export([str(run), "--inspect"]) == 0
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [inspect_python, "-c", READER, run / "inspect"],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    logs = {log["eval"]["task"]: log for log in json.loads(done.stdout)}
    kinds = [(kind, step) for kind in (TRAIN, EVALUATION) for step in kept_steps(run, kind)]
    assert sorted(logs) == sorted(f"{kind}_{step:06d}" for kind, step in kinds)
    for kind, step in kinds:
        log = logs[f"{kind}_{step:06d}"]
        assert (log["status"], log["eval"]["metadata"]["update"]) == ("success", step)
        samples = {sample["metadata"]["rollout_id"]: sample for sample in log["samples"]}
        kept = read_kept(run, kind, step)
        assert len(log["samples"]) == len(kept) == len(samples)
        for each in kept:
            check_sample(samples[each.trajectory.rollout_id], each)


def check_sample(sample: dict[str, Any], kept: KeptTrajectory) -> None:
    trajectory, metadata = kept.trajectory, sample["metadata"]
    assert sample["id"] == metadata["group_id"] == kept.group_id
    assert metadata["task"] == trajectory.task and metadata["metrics"] == trajectory.metrics
    assert (metadata["fate"], metadata["ended_by"]) == (kept.outcome, str(trajectory.termination_reason))
    assert tuple(metadata["advantages"]) == kept.advantages
    assert sample["scores"]["reward"]["value"] == trajectory.reward
    assert sample["scores"]["success"]["value"] is trajectory.succeeded
    assert sample["scores"]["success"]["explanation"] == f"judged by {trajectory.judged_by}"
    assert metadata["judged_by"] == trajectory.judged_by
    assert (sample["total_time"], sample["turn_count"]) == (trajectory.seconds, len(trajectory.steps))
    assert (sample["error"] or {}).get("traceback") == trajectory.error
    overlong = trajectory.termination_reason is not None and trajectory.termination_reason.is_overlong
    assert (sample["limit"] or {}).get("reason") == (str(trajectory.termination_reason) if overlong else None)
    models, scores = (
        [event for event in sample["events"] if event["event"] == kind] for kind in ("model", "score")
    )
    assert len(models) == len(scores) == len(trajectory.steps)
    for turn, step in enumerate(trajectory.steps):
        check_turn(models[turn], step)
        assert scores[turn]["score"]["value"] == step.reward
        advantage = kept.advantages[turn] if kept.advantages else None
        assert scores[turn]["score"]["metadata"] == {"advantage": advantage}
    if trajectory.steps:
        check_messages(sample["messages"], trajectory.steps[-1].chat_completions)
        check_tools(sample, trajectory.steps[-1].chat_completions)


def check_turn(event: dict[str, Any], step: Step) -> None:
    check_messages([*event["input"], event["output"]["choices"][0]["message"]], step.chat_completions)
    assert event["metadata"]["info"] == step.info
    completion, logprobs = step.completion, event["output"]["choices"][0]["logprobs"]
    if completion is None:
        assert (event["model"], logprobs, event["output"]["usage"]) == ("agent", None, None)
        return
    assert [each["logprob"] for each in logprobs["content"]] == list(completion.logprobs)
    assert [each["token"] for each in logprobs["content"]] == list(map(str, completion.completion_ids))
    metadata = event["output"]["metadata"]
    assert metadata["token_ids"] == list(completion.completion_ids)
    assert metadata["token_versions"] == list(completion.token_versions)
    assert metadata["policy_version"] == completion.policy_version
    assert metadata["finish_reason"] == completion.finish_reason
    usage = event["output"]["usage"]
    counted = (completion.num_prompt_tokens, completion.num_completion_tokens)
    assert (usage["input_tokens"], usage["output_tokens"]) == counted


def check_messages(read: list[dict[str, Any]], said: list[dict[str, Any]]) -> None:
    assert len(read) == len(said)
    for one, other in zip(read, said, strict=True):
        if one["metadata"] is not None:
            assert one["metadata"] == {"message": other}
            continue
        assert (one["role"], one["content"]) == (other["role"], other["content"])
        for call, asked in zip(one.get("tool_calls") or (), other.get("tool_calls") or (), strict=False):
            assert call["function"] == asked["function"]["name"]
            assert call["arguments"] == asked["function"]["arguments"]


def check_tools(sample: dict[str, Any], said: list[dict[str, Any]]) -> None:
    """Every answer of a tool is an event, beside the call that it answers."""
    events = [event for event in sample["events"] if event["event"] == "tool"]
    assert [event["result"] for event in events] == [
        each["content"] for each in said if each["role"] == "tool"
    ]
    answers = [message for message in sample["messages"] if message["role"] == "tool"]
    assert [(each["tool_call_id"], each["function"]) for each in answers] == [
        (event["id"], event["function"]) for event in events
    ]
    calls = {call["id"]: call for message in sample["messages"] for call in message.get("tool_calls") or ()}
    for event in events:
        assert calls[event["id"]]["function"] == event["function"]
        assert calls[event["id"]]["arguments"] == event["arguments"]
