"""Supervised learning on a file of conversations: its shapes, its mistakes, and what a run of it starts."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from environments.data.conversation_file import ToolConversation, read_conversations
from environments.data.trajectory_file import TrajectoryFile
from environments.errors import ConfigError, DatasetError
from environments.types import Message, Step, Trajectory
from launch.health.interrupt import Interrupts
from launch.recipes.task_file import workload_of
from launch.run_folder.jsonl_log import read_records
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig, WarmStartConfig
from launch.train import main
from launch.training.activity import Activity, Clock
from launch.training.run_state import RunState
from launch.training.stages.base import parts_needed
from launch.training.stages.chosen import chosen_stages
from launch.training.stages.warm_start import WARM_START_STEPS, WarmStart, divided, with_epochs
from launch.training.trainer import AgentTrainer, check_training
from launch.validation.resources import num_replicas, num_rollout_actors
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.demonstrations import check_demonstrations, demonstration_samples
from policies.learning.samples import LearnerUpdate, TrainBatch
from policies.tiny import build_tokenizer

TALK: list[Message] = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 1}'}}
WITH_TOOL: list[Message] = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "2"},
    {"role": "assistant", "content": "It is 2."},
]


def written(folder: Path, *rows: Any, name: str = "chats.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def configured(path: Path, *settings: str) -> TrainConfig:
    return compose([f"demonstrations={path}", f"run.directory={path.parent / 'run'}", *settings])


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"messages": TALK}, "the messages from 'messages'"),
        ({"Messages": json.dumps(TALK)}, "the messages from 'Messages'"),
        (
            {"conversations": [{"from": "human", "value": "1+1?"}, {"from": "gpt", "value": "2"}]},
            "the messages from 'conversations'",
        ),
        ({"prompt": "1+1?", "completion": "2"}, "the prompt from 'prompt', the completion from 'completion'"),
        ({"prompt": TALK[:1], "completion": TALK[1:]}, "the completion from 'completion'"),
        ({"question": "1+1?", "answer": "2"}, "the prompt from 'question', the completion from 'answer'"),
    ],
)
def test_conversation_is_found_by_its_columns(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    (found,), text = read_conversations(written(tmp_path, row))
    assert found == TALK
    assert "1 conversations" in text and sentence in text


def test_input_of_alpaca_stands_below_its_instruction(tmp_path: Path) -> None:
    row = {"instruction": "Add.", "input": "1+1", "output": "2"}
    (found, other), text = read_conversations(written(tmp_path, row, {**row, "input": ""}))
    assert [found[0]["content"], other[0]["content"]] == ["Add.\n\n1+1", "Add."]
    assert "below the prompt from 'input'" in text


def test_tables_hold_conversations_too(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = tmp_path / "chats.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": WITH_TOOL, "tools": json.dumps([ADD])}]), table)
    (found,), _ = read_conversations(table)
    assert isinstance(found, ToolConversation) and found.tools == [ADD]
    assert found[1]["tool_calls"] == [CALL] and "tool_calls" not in found[0]
    path = tmp_path / "chats.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["messages"], [json.dumps(TALK)]])
    assert read_conversations(path)[0] == [TALK]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": TALK[:1]}, r"row 1 has no message of the role 'assistant'.*leave the row out"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"row 1: message 0 has the role 'bot': write one"),
        ({"messages": [*TALK, {"role": "user"}]}, r"row 1: message 2, of the role 'user', has the content"),
        ({"messages": []}, r"row 1 has no list of messages"),
        ({"other": 1}, r"row 1 has no list of messages: None"),
        (
            {"messages": [*TALK, {"role": "assistant", "tool_calls": [{"name": "add"}]}]},
            r"row 1: message 2 has the tool call .*'arguments'",
        ),
        ({"messages": TALK, "tools": "add"}, r"row 1 has tools that are no list"),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0}]}, r"row 1 has no message .* without 'weight': 0"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "text": None}]}, TALK[1]]},
            r"message 0, of the role 'user', has the content \[",
        ),
        ({"messages": [*TALK, {"role": "assistant", "tool_calls": 5}]}, r"message 2 has the tool call 5"),
        ({"messages": [{"from": ["human"], "value": "?"}]}, r"message 0 has the role \['human'\]"),
    ],
)
def test_row_that_cannot_be_imitated_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], message: str
) -> None:
    path = written(tmp_path, {"messages": TALK, "tools": []}, row)
    with pytest.raises(DatasetError, match=message):
        read_conversations(path)
    assert main([f"demonstrations={path}", "model.path=no-such-model"]) == 2
    assert f"{path}, row 1" in capsys.readouterr().err, "before the model is so much as looked for"


def test_file_without_conversations_is_refused_with_names(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"columns are text\. Name the column of messages as one of"):
        read_conversations(written(tmp_path, {"text": "1+1=2"}))


def test_calls_are_trained_as_the_template_writes_them(tmp_path: Path) -> None:
    build_tokenizer([TALK]).save_pretrained(tmp_path)
    renderer = ChatRenderer(load_tokenizer(tmp_path))
    (sample,) = demonstration_samples(renderer, [ToolConversation(WITH_TOOL, [ADD])])
    sampled = [token for token, bit in zip(sample.response_ids, sample.loss_mask, strict=True) if bit]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 1}}\n</tool_call>'
    assert renderer.text_of(sampled) == f"{call}<|im_end|>It is 2.<|im_end|>"
    assert "You can call add()" in renderer.text_of(sample.prompt_ids)
    no_calls = build_tokenizer([TALK])
    no_calls.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    with pytest.raises(DatasetError, match=r"shows no .*, and demonstration 1 has some"):
        check_demonstrations(ChatRenderer(no_calls), [TALK, WITH_TOOL])


def test_file_alone_starts_no_engine(tmp_path: Path) -> None:
    config = configured(written(tmp_path, *[{"messages": TALK}] * 40), "warm_start.held_out_share=0")
    workload = workload_of(config)
    config = with_epochs(config, workload)
    assert (config.stages, config.warm_start.num_steps) == (["warm_start"], 8), "3 passes of 40 by 16"
    check_training(config, workload)
    stages = chosen_stages(config)
    needed = parts_needed(config, stages, workload)
    assert (num_replicas(needed), num_rollout_actors(needed)) == (0, 0)
    served = compose([f"demonstrations={config.demonstrations}", "server.http_port=8000"])
    assert num_replicas(parts_needed(served, stages, workload)) == 1, "its clients need one"


def test_file_precedes_reinforcement_on_tasks(tmp_path: Path) -> None:
    chats = written(tmp_path, {"messages": TALK})
    config = configured(chats, "recipe=calculator", "warm_start.num_steps=3")
    workload = workload_of(config)
    assert workload.demonstrations == [TALK] and len(workload.train_dataset) > 1
    assert parts_needed(config, chosen_stages(config), workload) is config
    with pytest.raises(ConfigError, match=r"num_epochs=1 and warm_start\.num_steps=3 both"):
        with_epochs(configured(chats, "warm_start.num_steps=3", "warm_start.num_epochs=1"), workload)


class Forgetful:
    """A learner whose loss is its number of steps in training and twice that on what is held out."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def fit(self, batches: list[TrainBatch]) -> LearnerUpdate:
        self.taken += [sample.rollout_id for batch in batches for sample in batch.samples]
        metrics = {"learn/loss": 1.0, "learn/grad_norm": 1.0, "learn/lr": 0.1}
        return LearnerUpdate(metrics=metrics, num_optimizer_steps=len(batches))

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        return [[-0.1 * len(self.taken)] * len(sample.response_ids) for sample in batch.samples]

    def publish(self, version: int) -> None: ...


def trained(tmp_path: Path, long: int, share: float) -> tuple[list[dict[str, Any]], list[str], list[str]]:
    """Two passes over 20 conversations, the ``long``-th too long: losses, what is learned, announcements."""
    talks = [[{"role": "user", "content": f"{n}?"}, TALK[1]] for n in range(20)]
    talks[long][0]["content"] = "1 " * 500
    config = configured(
        written(tmp_path, *({"messages": each} for each in talks)),
        f"warm_start={{num_epochs: 2, batch_size: 4, held_out_share: {share}}}",
        "learner.num_workers=2",
        "learner.verl.engine.ulysses_sequence_parallel_size=2",
        "learner.micro_batch_tokens=150",
    )
    workload = workload_of(config)
    config = with_epochs(config, workload)
    build_tokenizer(talks).save_pretrained(tmp_path / "model")
    (tmp_path / "run").mkdir()
    state, learner, said = RunState(config, tmp_path / "run"), Forgetful(), list[str]()
    run: Any = SimpleNamespace(
        config=config,
        workload=workload,
        model_path=str(tmp_path / "model"),
        learner=learner,
        interrupts=Interrupts(),
        tracker=SimpleNamespace(announce=said.append, offline_step=lambda *parts: None),
    )
    stage = WarmStart(config)
    while stage.num_done(state) < stage.num_steps:
        stage.step(run, state, Clock(Activity()))
    return read_records(tmp_path / "run" / WARM_START_STEPS), learner.taken, said


def test_held_out_part_is_measured_and_not_learned(tmp_path: Path) -> None:
    records, taken, said = trained(tmp_path, long=0, share=0.2)
    assert [each["step"] for each in records] == [0, 5, 8]
    losses = [each["held_out_loss"] for each in records]
    assert losses == pytest.approx([0.0, 1.8, 3.0]), "it rises while the loss of training stands still"
    assert sorted(taken) == sorted([*set(taken)] * 2), "two passes, whatever is left out"
    assert len(set(taken)) == 15, "the long one is left out"
    limit = "more than 300 tokens, which is learner.micro_batch_tokens of 2 ranks together;"
    assert any("1 of" in line and limit in line for line in said)


def test_held_out_part_that_is_too_long_ends_no_training(tmp_path: Path) -> None:
    _, (held_out,) = divided(compose(["warm_start.held_out_share=0.05"]), 20)
    records, taken, said = trained(tmp_path, long=held_out, share=0.05)
    assert len(set(taken)) == 19 and not any("held_out_loss" in each for each in records)
    assert any("1 of 20" in line and "left out" in line for line in said)


def test_file_that_no_step_learns_from_is_refused(tmp_path: Path) -> None:
    config = configured(written(tmp_path, {"messages": TALK}), "recipe=calculator", "model.path=a-model")
    config = replace(config, warm_start=WarmStartConfig())
    with pytest.raises(ConfigError, match=r"chats\.jsonl has no effect .* set warm_start\.num_epochs=1"):
        chosen_stages(config)


def test_row_without_its_prompt_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "1?", "completion": "1"}, {"prompt": "", "completion": "2"})
    with pytest.raises(DatasetError, match=r"row 1: message 0, of the role 'user', has the content None"):
        read_conversations(path)


def test_successes_of_an_evaluation_are_demonstrations(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.jsonl"
    with TrajectoryFile(path, {"model": "teacher"}, [{}, {}, {}]) as file:
        for index, reward in enumerate((1.0, 0.0)):
            steps = [Step(chat_completions=TALK[:2]), Step(chat_completions=[*TALK, *TALK])]
            steps += [Step(chat_completions=TALK, info={"left_out": True})]  # its program says so
            file.append(index, Trajectory(task={}, steps=steps, reward=reward))
    (found,), sentence = read_conversations(path)
    assert found == [*TALK, *TALK] and "the 1 of 2 trajectories that have succeeded" in sentence
    with TrajectoryFile(tmp_path / "none.jsonl", {}, [{}]) as file:
        file.append(0, Trajectory(task={}, reward=0.0))
    with pytest.raises(DatasetError, match="1 trajectories, and none has succeeded"):
        read_conversations(tmp_path / "none.jsonl")


def test_answer_of_weight_0_is_shown_and_not_learned(tmp_path: Path) -> None:
    build_tokenizer([TALK]).save_pretrained(tmp_path)
    renderer = ChatRenderer(load_tokenizer(tmp_path))
    bad: Message = {"role": "assistant", "content": "1", "weight": 0}
    (found,), _ = read_conversations(written(tmp_path, {"messages": [TALK[0], bad, *TALK]}))
    (sample,) = demonstration_samples(renderer, [found])
    sampled = [token for token, bit in zip(sample.response_ids, sample.loss_mask, strict=True) if bit]
    assert renderer.text_of(sampled) == "2<|im_end|>"


def test_trainer_of_classes_reads_the_file_too(tmp_path: Path) -> None:
    path = written(tmp_path, {"messages": TALK})
    assert AgentTrainer(config={"demonstrations": str(path)}).workload.demonstrations == [TALK]
