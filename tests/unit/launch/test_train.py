"""What the program refuses before it starts anything."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.train import main

ROOT = Path(__file__).resolve().parents[3]


Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Refused:
    """``refused(*overrides)``: run the command with bad input; return what it says."""
    monkeypatch.chdir(tmp_path)

    def refuse(*overrides: str) -> str:
        assert main(list(overrides)) == 2
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        assert "Ray:" not in said.out, "the refusal came only after Ray was started"
        return said.err.strip()

    return refuse


def test_unknown_key_is_refused_with_the_nearest_name(refused: Refused) -> None:
    assert "learner.optimizer.lr" in refused("recipe=calculator", "learner.lr=1e-4")


def test_unknown_recipe_is_refused_with_the_nearest_name(refused: Refused) -> None:
    assert "calculator" in refused("recipe=calculatr")


def test_value_of_the_wrong_type_is_refused_by_name(refused: Refused) -> None:
    message = refused("recipe=calculator", "run.num_steps=many")
    assert "run.num_steps" in message
    assert "many" in message


def test_group_of_one_is_refused_with_grpo(refused: Refused) -> None:
    message = refused("recipe=calculator", "rollout.group_size=1")
    assert "rollout.group_size=1" in message
    assert "grpo" in message


def test_model_folder_without_a_tokenizer_is_refused(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    message = refused("recipe=calculator", f"model.path={tmp_path}")
    assert str(tmp_path) in message
    assert "save_pretrained" in message


BROKEN = """
from environments import Dataset, DatasetRegistry, ToolEnvironment, math_reward_fn
from launch.workload import Workload
from policies import MathAgent, ToolAgent
from environments.types import Action

class Forgetful(MathAgent):
    def update_from_model(self, response, **kwargs):
        return Action(action=response)

def workload(seed):
    if MISSING_DATASET:
        DatasetRegistry.load_dataset("no_such_data", "train")
    return Workload(
        agent_class=Forgetful,
        env_class=ToolEnvironment,
        env_args={"tools": ["calculator"], "reward_fn": math_reward_fn},
        train_dataset=Dataset([{"question": "1+1?", "ground_truth": "2"}]),
        demonstrations=[[{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]],
    )
"""


@pytest.mark.parametrize(
    ("missing_dataset", "expected"), [(True, "no_such_data"), (False, "Forgetful")], ids=["dataset", "agent"]
)
def test_missing_dataset_and_agent_without_steps_are_refused(
    refused: Refused,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    missing_dataset: bool,
    expected: str,
) -> None:
    name = f"broken_workload_{missing_dataset}"
    (tmp_path / f"{name}.py").write_text(f"MISSING_DATASET = {missing_dataset}\n{BROKEN}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TROUPE_HOME", str(tmp_path))
    message = refused(f"workload={name}", f"run.directory={tmp_path / 'run'}")
    assert expected in message
    if not missing_dataset:
        assert "append" in message


def test_help_answers_at_once() -> None:
    before = os.times()
    done = subprocess.run(
        [sys.executable, "-m", "launch.train", "--help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "recipe" in done.stdout
    after = os.times()  # of the processor: a machine may have other things to do
    assert (after.children_user + after.children_system) - (before.children_user + before.children_system) < 6
