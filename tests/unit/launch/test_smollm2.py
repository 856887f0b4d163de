"""The recipes that SmolLM2-135M learns."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cluster.threads import with_threads
from launch.recipes import smollm2 as recipe
from launch.recipes import word_problems
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig

# -- the recipes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [recipe, word_problems])
def test_held_out_problems_are_never_trained_on(module: Any) -> None:
    first, second = module.workload(0), module.workload(1)
    held_out = {task["question"] for task in first.val_dataset}
    assert len(held_out) == 200
    assert list(first.val_dataset) == list(second.val_dataset)
    assert not held_out & {task["question"] for task in first.train_dataset}
    assert list(first.train_dataset) != list(second.train_dataset)


SIGNS = {"more": "+", "left": "-", "together": "+", "boxes": "*", "difference": "-", "packs": "*"}


def test_word_problem_has_the_answer_of_its_kind() -> None:
    problems = word_problems.make_problems()[:600]
    assert {problem["kind"] for problem in problems} == set(SIGNS)
    for problem in problems:
        one, other = map(int, re.findall(r"\d+", problem["question"]))
        value = {"+": one + other, "-": one - other, "*": one * other}[SIGNS[problem["kind"]]]
        assert problem["ground_truth"] == str(value)
        assert value > 0


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (r"\boxed{140}", 1.0),
        (r"It is \boxed{ 140 }.", 1.0),
        (r"\boxed{53+87}", 0.0),
        (r"\boxed{141}", 0.0),
        ("140", 0.0),
    ],
)
def test_only_the_calculated_number_is_rewarded(answer: str, reward: float) -> None:
    assert recipe.number_reward_fn({"ground_truth": "140"}, answer).reward == reward


def test_worked_examples_stand_before_every_task() -> None:
    workload = word_problems.workload(0)
    agent = workload.agent_class(**workload.agent_args)
    for task in workload.train_dataset[:2]:
        agent.reset()
        agent.update_from_env(task, 0.0, False, {})
        roles = [message["role"] for message in agent.chat_completions]
        solved = ["user", "assistant", "tool", "assistant"]
        assert roles == ["system", *solved, *solved, "user"]
        assert agent.chat_completions[-1]["content"] == task["question"]


# -- threads ---------------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(500_000_000)
    return str(tmp_path)


def threads(config: TrainConfig, model_path: str) -> tuple[int | None, int | None]:
    decided = with_threads(config, model_path)
    return decided.learner.num_threads, decided.server.engine.num_threads


def test_large_model_gets_cores_and_small_one_single_thread(
    large: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    config = compose(["recipe=smollm2"])
    assert threads(config, large) == (8, 8)
    assert threads(config, "some/hub-name") == (8, 8)
    assert threads(config, str(tiny_model)) == (1, 1)


def test_ranks_replicas_and_the_two_sides_share_the_cores(
    large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    config = compose(["recipe=smollm2", "learner.num_workers=2", "server.num_replicas=4"])
    assert threads(config, large) == (4, 2)
    asynchronous = replace(config, rollout=replace(config.rollout, max_staleness=1))
    assert threads(asynchronous, large) == (2, 1)


def test_numbers_that_are_set_stay(large: str) -> None:
    config = compose(["recipe=smollm2", "learner.num_threads=3", "server.engine.options={num_threads: 5}"])
    assert threads(config, large) == (3, 5)
