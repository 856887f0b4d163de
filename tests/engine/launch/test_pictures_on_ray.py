"""A training on pictures, and one process in which engine, learner and transformers see the same ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from picture_models import ColourEnvironment, ToldApart, build, picture

from environments.data.datasets import Dataset
from launch.reporting.metrics import FRESH_MISMATCH_MAX
from launch.reporting.tracker import read_metrics
from launch.run_folder.trajectory_log import TRAIN, read_kept
from launch.settings.compose import compose
from launch.training.trainer import run_training
from launch.workload import Workload
from policies.agents.game import GameAgent
from policies.chat import ChatRenderer, load_tokenizer

TESTS = Path(__file__).parents[2]
SMALL = [
    "stages=[reinforce]",
    "run.num_steps=2",
    "run.checkpoints={every: 2}",
    "run.stall_limit_seconds=300",
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "rollout.max_steps=2",
    "rollout.max_prompt_tokens=64",
    "rollout.max_response_tokens=128",
    "rollout.max_turn_tokens=8",
    "fleet.num_actors=2",
    "algorithm.entropy_coef=0.01",  # a gradient though all answers are wrong
    "server.engine.max_model_tokens=256",
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The rows of ``pictures_seen.py``."""
    program = TESTS / "engine" / "policies" / "pictures_seen.py"
    ended = subprocess.run(
        [sys.executable, str(program), str(tmp_path_factory.mktemp("llava"))],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (TESTS.parent, TESTS)))},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_engine_and_learner_see_what_transformers_sees(rows: list[dict[str, Any]]) -> None:
    assert [(row["version"], row["pictures"]) for row in rows] == [(0, 1), (0, 2)] * 2 + [(1, 1), (1, 2)] * 2
    assert rows[0]["chatted"] == rows[0]["answer"], "over HTTP as in a rollout"
    for row in rows:
        assert row["engine"] == pytest.approx(row["transformers"], abs=1e-4)
        assert row["learner"] == pytest.approx(row["transformers"], abs=1e-4)


def test_gradient_of_pictures_is_that_of_transformers(rows: list[dict[str, Any]]) -> None:
    own, expected = rows[0]["grad_norms"]
    assert own == pytest.approx(expected, rel=1e-4)


def test_another_picture_is_answered_otherwise(rows: list[dict[str, Any]]) -> None:
    """To the same prompt, by the same seed."""
    red, _, blue, _ = rows[:4]
    assert red["prompt"] == blue["prompt"]
    assert red["answer"] != blue["answer"] or abs(red["engine"][0] - blue["engine"][0]) > 0.01


def test_two_ranks_learn_from_pictures_and_publish(ray_cluster: None, tmp_path: Path) -> None:
    from transformers_reference import weights_of

    model, folder = build(tmp_path / "model"), tmp_path / "run"
    tasks = Dataset([{"colour": colour} for colour in ("red", "blue")])
    workload = Workload(agent_class=GameAgent, env_class=ColourEnvironment, train_dataset=tasks)
    settings = [*SMALL, "learner.num_workers=2", f"model.path={model}", f"run.directory={folder}"]
    run_training(compose(settings), workload)

    steps = [each for each in read_metrics(folder) if "learn/loss" in each]
    assert len(steps) == 2
    assert all(each["learn/grad_norm"] > 0 for each in steps)
    assert all(each[FRESH_MISMATCH_MAX] < 1e-4 for each in steps if FRESH_MISMATCH_MAX in each)
    [kept, *_] = read_kept(folder, TRAIN, 2)
    first, second = kept.trajectory.completions
    assert first.pictures == (picture(kept.trajectory.task["colour"]),) and len(second.pictures) == 2
    assert second.extends(first)

    saved = folder / "checkpoints" / "step_000002" / "huggingface"
    before, after = weights_of(model), weights_of(saved)
    moved = {name for name in before if not (before[name] == after[name]).all()}
    assert any("vision_model" in name for name in moved) and any("text_model" in name for name in moved)
    assert ChatRenderer(load_tokenizer(saved)).prompt_ids([kept.trajectory.steps[0].chat_completions[0]])


@pytest.mark.slow
def test_run_learns_to_tell_two_pictures_apart(ray_cluster: None, tmp_path: Path) -> None:
    """Their prompts have the same ids: without seeing the pictures, half of the answers are right."""
    settings = [
        "stages=[reinforce]",
        "run.num_steps=12",
        "run.stall_limit_seconds=300",
        "rollout.groups_per_step=4",
        "rollout.group_size=16",
        "rollout.max_steps=1",
        "rollout.max_prompt_tokens=64",
        "rollout.max_response_tokens=8",
        "rollout.max_turn_tokens=1",
        "fleet.num_actors=2",
        "learner.optimizer.lr=2e-3",
        "server.engine.max_model_tokens=128",
        f"model.path={build(tmp_path / 'model')}",
        f"run.directory={tmp_path / 'run'}",
    ]
    tasks = Dataset([{"colour": colour} for colour in ("red", "blue")])
    workload = Workload(agent_class=GameAgent, env_class=ToldApart, train_dataset=tasks)
    run_training(compose(settings), workload)
    rewards = [each["rollout/reward_mean"] for each in read_metrics(tmp_path / "run") if "learn/loss" in each]
    assert sum(rewards[-5:]) / 5 > 0.7
