"""Guess a number from 1 to 9 in four tries: many turns, and one reward at the end."""

from __future__ import annotations

import random

from environments import Dataset
from environments.text_games import GuessEnvironment
from environments.types import Message
from launch.recipes.demonstration import demonstrate
from launch.workload import Workload
from policies import GameAgent

LOW, HIGH, MAX_GUESSES = 1, 9, 4
NUM_DEMONSTRATIONS = 4000
SEARCH_SHARE = 0.2
"""Share of the demonstrations that search by halving; the others guess at random."""

ENV_ARGS = {"low": LOW, "high": HIGH, "max_guesses": MAX_GUESSES}


def workload(seed: int) -> Workload:
    """In training each rollout draws its own number; in evaluation all numbers come up in turn."""
    rng = random.Random(seed)
    return Workload(
        agent_class=GameAgent,
        env_class=GuessEnvironment,
        train_dataset=Dataset([{"game": index} for index in range(1000)], name="guess", split="train"),
        val_dataset=Dataset(
            [{"game": index, "secret": LOW + index % (HIGH - LOW + 1)} for index in range(200)],
            name="guess",
            split="test",
        ),
        env_args=ENV_ARGS,
        demonstrations=[_demonstration(rng) for _ in range(NUM_DEMONSTRATIONS)],
    )


def _demonstration(rng: random.Random) -> list[Message]:
    secret = rng.randint(LOW, HIGH)
    env = GuessEnvironment.from_dict({"secret": secret, **ENV_ARGS})
    return demonstrate(
        GameAgent(), env, _search(secret) if rng.random() < SEARCH_SHARE else _random_guesses(rng)
    )


def _search(secret: int) -> list[str]:
    low, high, guesses = LOW, HIGH, list[int]()
    while not guesses or guesses[-1] != secret:
        guesses.append((low + high) // 2)
        low, high = (guesses[-1] + 1, high) if secret > guesses[-1] else (low, guesses[-1] - 1)
    return [str(guess) for guess in guesses]


def _random_guesses(rng: random.Random) -> list[str]:
    return [str(rng.randint(LOW, HIGH)) for _ in range(MAX_GUESSES)]
