"""Workloads of files of tasks, in the shapes in which the field's data sets come."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from machine import free_port

from actors.gateway.remote_program import RemoteProgram
from environments import CodeEnvironment, Dataset, DatasetRegistry, RewardOutput
from environments.data.task_columns import named_columns
from environments.errors import ConfigError, DatasetError
from launch.recipes.task_file import workload_of
from launch.settings.compose import compose
from launch.validation.trial import check_agent
from launch.validation.workload import check_classes
from launch.workload import Workload
from policies import CodingAgent, MathAgent
from policies.agents.answering import PromptAgent

GSM8K = {"question": "Ann has 3 bags of 14 apples. How many?", "answer": "3*14=<<3*14=42>>42\n#### 42"}
VERL = {
    "data_source": "math",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 6*7?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 0},
}
MATH = {"problem": "Compute $6 \\cdot 7$.", "level": "Level 1", "solution": "It is $\\boxed{42}$."}
AIME = {"id": 1, "problem": "Compute 6*7.", "answer": 42}
CODE = {"question": "Print 42.", "tests": [{"input": "", "output": "42"}]}


def written(folder: Path, *rows: Any, name: str = "tasks.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def made(*settings: str) -> Workload:
    return workload_of(compose(["run.directory=unused", *settings]))


def played(workload: Workload, answer: str) -> tuple[list[Any], float]:
    """What the model is shown first, and the reward of its answer."""
    pair = workload.pair
    agent = pair.agent_class(**pair.agent_args)
    env = pair.env_class.from_dict({**workload.train_dataset[0], **pair.env_args})
    observation, info = env.reset()
    agent.update_from_env(observation=observation, reward=0.0, done=False, info=info)
    shown = agent.chat_completions
    _, reward, _, _ = env.step(agent.update_from_model(answer).action)
    return shown, reward


@pytest.mark.parametrize("row", [GSM8K, VERL, MATH, AIME], ids=["gsm8k", "verl", "math", "aime"])
def test_file_in_a_known_shape_needs_a_reward_alone(tmp_path: Path, row: dict[str, Any]) -> None:
    workload = made(f"dataset={written(tmp_path, row)}", "reward=math")
    check_classes(workload)
    assert workload.agent_class is (PromptAgent if row is VERL else MathAgent)
    shown, reward = played(workload, "\\boxed{42}")
    assert reward == 1.0 and played(workload, "\\boxed{41}")[1] == 0.0
    if row is VERL:
        assert shown == VERL["prompt"]
    else:
        assert shown[0]["content"].startswith(str(row.get("question") or row["problem"]))
    assert workload.train_dataset[0].items() >= row.items(), "no column is lost"


def test_columns_that_are_used_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, GSM8K, GSM8K)
    made(f"dataset={path}", "reward=math")
    line = f"{path}: 2 tasks, the question from 'question', the right answer from 'answer'.\n"
    assert capsys.readouterr().out == line


def test_columns_may_be_in_capitals() -> None:
    tasks, _ = named_columns(Dataset([{"ID": "I-1", "Problem": "Compute 6*7.", "Answer": 42}]), "aime.csv")
    assert (tasks[0]["question"], tasks[0]["ground_truth"]) == ("Compute 6*7.", 42)


def test_code_is_judged_by_its_tests(tmp_path: Path) -> None:
    workload = made(f"dataset={written(tmp_path, CODE)}", "agent=code", "reward=code")
    assert (workload.agent_class, workload.env_class) == (CodingAgent, CodeEnvironment)
    assert played(workload, "```python\nprint(42)\n```")[1] == 1.0


def test_registered_data_have_their_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_HOME", str(tmp_path))
    DatasetRegistry.register_dataset("sums", [GSM8K, AIME], "train")
    DatasetRegistry.register_dataset("sums", [AIME], "test")
    with pytest.raises(DatasetError, match=r"sums, row 1 has no 'question'"):
        made("dataset=sums", "reward=math")
    workload = made("dataset=sums/test", "held_out=sums", "reward=math")
    assert [len(each or ()) for each in (workload.train_dataset, workload.val_dataset)] == [1, 1]


def test_order_follows_the_seed(tmp_path: Path) -> None:
    path = written(tmp_path, *({**AIME, "id": number} for number in range(30)))
    orders = [
        [row["id"] for row in made(f"dataset={path}", "reward=math", f"seed={seed}").train_dataset]
        for seed in (0, 0, 1)
    ]
    assert orders[0] == orders[1] != orders[2]


def own_reward(task_info: dict[str, Any], action: str) -> RewardOutput:
    return RewardOutput(reward=0.25, is_correct="7" in action)


class OwnAgent(MathAgent):
    """Another agent."""


def test_own_agent_and_reward_are_named_by_module(tmp_path: Path) -> None:
    here = __name__
    own = (f"agent='{here}:OwnAgent'", f"reward='{here}:own_reward'")
    workload = made(f"dataset={written(tmp_path, AIME)}", *own)
    assert workload.agent_class is OwnAgent
    assert played(workload, "7")[1] == 0.25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["dataset={}"], "set reward=math"),
        (["dataset={}", "reward=maths"], "reward='maths' is unknown. Choose one of math, code, search"),
        (["dataset={}", "reward=json:nothing"], "json has no function 'nothing'"),
        (["dataset={}", "reward=math", "agent=mat"], "Did you mean 'math'"),
        (["dataset={}", "reward=math", "agent=messages"], "whose question is a text: set agent=math"),
        (["dataset={}", "reward=math", "recipe=calculator"], "both name the tasks"),
        (["dataset=missing.jsonl", "reward=math"], "There is no file"),
        (["reward=math"], "reward=math belongs to a dataset: set dataset=tasks.jsonl"),
        (["agent=math", "recipe=calculator"], "agent=math belongs to a dataset"),
        (["dataset={}", "agent=outside:10.0.0.1:"], "'' is no port"),
        (["dataset={}", "agent=outside:http"], "'http' is no port. Write agent=outside:8100."),
        (["dataset={}", "agent=outside", "reward=math"], "reward=math has no effect with agent=outside"),
        (["dataset={}", "agent=outside"], "set TROUPE_API_KEYS=name:key"),
    ],
)
def test_wrong_choice_is_answered_by_a_sentence(tmp_path: Path, settings: list[str], message: str) -> None:
    path = written(tmp_path, AIME)
    with pytest.raises((ConfigError, DatasetError), match=re.escape(message)):
        made(*(each.format(path) for each in settings))


def test_tasks_for_programs_elsewhere_are_not_tried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or a start would wait for a program, which would play with a model that is none."""
    monkeypatch.setenv("TROUPE_API_KEYS", "programs:a-key-of-the-programs")
    port = free_port()
    workload = made(f"dataset={written(tmp_path, GSM8K)}", f"agent=outside:{port}")
    check_classes(workload)
    assert re.search(
        rf"Programs fetch tasks by POST http://[\d.]+:{port}/sessions\.\n", capsys.readouterr().out
    )
    with monkeypatch.context() as patch:
        patch.setattr(RemoteProgram, "__call__", None)
        check_agent(workload, workload.train_dataset)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "has no rows"),
        (
            [{"text": "What?"}],
            "its columns are text. Name the question's column as one of",
        ),
        ([AIME, {**AIME, "problem": ""}], "row 1 has no 'problem'"),
    ],
)
def test_data_without_questions_are_rejected(rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(DatasetError, match=re.escape(message)):
        named_columns(Dataset(rows), "tasks.jsonl")


@pytest.mark.slow
def test_folder_of_harbor_tasks_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = Path(__file__).parents[2] / "harbor_tasks"
    workload = made(f"workload=harbor:{tasks}")
    check_classes(workload)
    assert f"harbor:{tasks}: 2 tasks; 1 cannot be played." in (output := capsys.readouterr().out)
    assert "Dockerfile, line 4: RUN make cannot be followed" in output
    shown, reward = played(workload, "I give up.")
    assert '"name": "shell"' in shown[0]["content"]
    assert shown[1]["content"] == workload.train_dataset[0]["question"]
    assert reward < 1
    pair = workload.pair
    agent = pair.agent_class(**pair.agent_args)
    row = next(row for row in workload.train_dataset if row["name"] == "repair")
    env = pair.env_class.from_dict({**row, **pair.env_args})
    observation, _ = env.reset()
    for text in (
        'I look.\n<tool_call>\n{"name": "shell", "arguments": {"command": "cat *.py"}}\n</tool_call>',
        '<tool_call>\n{"name": "edit", '
        '"arguments": {"path": "prices.py", "old": "[1:]", "new": ""}}\n</tool_call>',
        "It adds up all prices now.",
    ):
        agent.update_from_env(observation=observation, reward=0.0, done=False, info={})
        observation, reward, done, _ = env.step(agent.update_from_model(text).action)
    assert (reward, done) == (1.0, True)
    assert "return sum(prices[1:])" in agent.chat_completions[-4]["content"]
    with pytest.raises(DatasetError, match="no task of Harbor"):
        made("workload=harbor:nowhere")
