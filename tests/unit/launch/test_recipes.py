"""The tasks and demonstrations of the recipes that learn on two CPU cores."""

from __future__ import annotations

import re
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from environments.check import check_environment
from environments.errors import EnvironmentFailure
from environments.text_games import GuessEnvironment
from launch.recipes import calculator, guess
from launch.recipes.demonstration import demonstrate
from launch.workload import Workload
from policies import GameAgent


@cache
def made(recipe: ModuleType, seed: int) -> Workload:
    workload: Workload = recipe.workload(seed)
    return workload


def questions(workload: Workload) -> list[str]:
    """What the demonstrations are asked."""
    conversations = workload.demonstrations
    return [next(each["content"] for each in one if each["role"] == "user") for one in conversations]


@pytest.mark.parametrize("recipe", [calculator, guess])
def test_held_out_tasks_are_the_same_for_every_seed_and_unique(recipe: ModuleType) -> None:
    first, second = made(recipe, 0), made(recipe, 1)
    assert first.val_dataset is not None and second.val_dataset is not None
    assert list(first.val_dataset) == list(second.val_dataset)
    assert len({str(task) for task in first.val_dataset}) == len(first.val_dataset) == 200
    assert list(first.train_dataset) != list(second.train_dataset)
    assert first.demonstrations != second.demonstrations


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_range_of_evaluation_occurs_in_no_training(seed: int) -> None:
    workload = made(guess, seed)
    assert workload.val_dataset is not None
    held_out = {(task["low"], task["high"]) for task in workload.val_dataset}
    seen = {(task["low"], task["high"]) for task in workload.train_dataset}
    numbers = [re.findall(r"\d+", question) for question in questions(workload)]
    seen |= {(int(low), int(high)) for low, high, _ in numbers}
    assert len(held_out) > 50
    assert not held_out & seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_problem_of_evaluation_occurs_in_no_training(seed: int) -> None:
    workload = made(calculator, seed)
    assert workload.val_dataset is not None
    held_out = {task["question"] for task in workload.val_dataset}
    assert not held_out & {task["question"] for task in workload.train_dataset}
    assert all(question.startswith("What is") for question in questions(workload))
    assert not held_out & set(questions(workload))


def test_guess_task_leaves_its_secret_to_its_groups_seed() -> None:
    workload = made(guess, 0)
    secrets = set()
    for seed in range(50):
        env = workload.env_class.from_dict({"seed": seed, **workload.train_dataset[0], **workload.env_args})
        env.reset()
        for _ in range(4):
            _, _, done, info = env.step("no number")
        assert done
        secrets.add(info["secret"])
    low = workload.train_dataset[0]["low"]
    assert secrets == set(range(low, low + 9))


def test_demonstration_ends_with_assistant_and_knows_its_reward() -> None:
    for each in guess.demonstrations(0)[:200].with_rewards():
        *_, answer, last = each.messages
        assert last["role"] == "assistant"
        assert (len(each.messages) < 8) <= (each.reward == 1.0), "only a hit ends a game early"
        assert answer["content"] in ("Higher.", "Lower.") or len(each.messages) == 2


def test_demonstration_whose_step_raises_closes_its_environment() -> None:
    closed = []

    class Breaking(GuessEnvironment):
        def step(self, action: str) -> tuple[str, float, bool, dict[str, Any]]:
            raise EnvironmentFailure("It broke.")

        def close(self) -> None:
            closed.append(self)

    env = Breaking.from_dict({"low": 1, "high": 9, "secret": 3})
    with pytest.raises(EnvironmentFailure, match="It broke"):
        demonstrate(GameAgent(), env, ["5"])
    assert closed == [env]


@pytest.mark.slow
def test_most_demonstrations_of_guess_are_weak() -> None:
    """A search by halving always succeeds: demonstrations that win as often would leave nothing to learn."""
    rewards = [each.reward for each in guess.demonstrations(0).with_rewards()]
    assert 0.4 < sum(rewards) / len(rewards) < 0.7


@pytest.mark.parametrize("recipe", [calculator, guess])
def test_environment_of_a_recipe_is_sound(recipe: ModuleType) -> None:
    workload = made(recipe, 0)
    report = check_environment(workload.env_class, workload.train_dataset[0], workload.env_args)
    assert report.ok, str(report)
