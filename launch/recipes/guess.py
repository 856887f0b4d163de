"""Find a number in a range that the question names, in four tries: many turns, and one reward at the end.

A range is a decade without its first number, such as 4571 to 4579. The ranges of the evaluation occur
neither in training nor in the demonstrations, most of which guess at random.
"""

from __future__ import annotations

import random

from environments import Dataset
from environments.text_games import GuessEnvironment
from launch.recipes.demonstration import Demonstration, Demonstrations, demonstrate
from launch.workload import Workload
from policies import GameAgent

DECADES = range(100, 1000)
MAX_GUESSES = 4
NUM_HELD_OUT_RANGES = 100
NUM_TRAIN, NUM_TEST, NUM_DEMONSTRATIONS = 1000, 200, 4000
SEARCH_SHARE = 0.3
"""Share of the demonstrations that halve the range with every guess; the others ignore the answers."""

ENV_ARGS = {"max_guesses": MAX_GUESSES}
Range = tuple[int, int]
"""The lowest and the highest number."""
Script = tuple[dict[str, int], list[int]]
"""A game, and the guesses in it."""


def workload(seed: int) -> Workload:
    """The held-out games are the same for every seed."""
    held_out, rest = split_ranges()
    return Workload(
        agent_class=GameAgent,
        env_class=GuessEnvironment,
        train_dataset=Dataset(_training_tasks(rest, seed), name="guess", split="train"),
        val_dataset=Dataset(_held_out_tasks(held_out), name="guess", split="test"),
        env_args=ENV_ARGS,
        demonstrations=demonstrations(seed),
    )


def split_ranges() -> tuple[list[Range], list[Range]]:
    """The held-out ranges, and those of training and demonstrations."""
    ranges = [(10 * decade + 1, 10 * decade + 9) for decade in DECADES]
    random.Random(0).shuffle(ranges)
    return ranges[:NUM_HELD_OUT_RANGES], ranges[NUM_HELD_OUT_RANGES:]


def demonstrations(seed: int) -> Demonstrations[Script]:
    """Games in the ranges of the training, won and lost."""
    rng = random.Random(seed)
    _, ranges = split_ranges()
    return Demonstrations(_play, [_script(*rng.choice(ranges), rng) for _ in range(NUM_DEMONSTRATIONS)])


def _training_tasks(ranges: list[Range], seed: int) -> list[dict[str, int]]:
    """The environment draws the secret, the same one for all members of a group."""
    rng = random.Random(f"{seed}/tasks")
    drawn = [rng.choice(ranges) for _ in range(NUM_TRAIN)]
    return [{"game": index, "low": low, "high": high} for index, (low, high) in enumerate(drawn)]


def _held_out_tasks(ranges: list[Range]) -> list[dict[str, int]]:
    games = [(low, high, secret) for low, high in ranges for secret in range(low, high + 1)]
    drawn = random.Random(0).sample(games, NUM_TEST)
    return [{"low": low, "high": high, "secret": secret} for low, high, secret in drawn]


def _script(low: int, high: int, rng: random.Random) -> Script:
    secret = rng.randint(low, high)
    if rng.random() < SEARCH_SHARE:
        guesses = _search(low, high, secret)
    else:
        guesses = [rng.randint(low, high) for _ in range(MAX_GUESSES)]
    return {"low": low, "high": high, "secret": secret}, guesses


def _play(script: Script) -> Demonstration:
    game, guesses = script
    env = GuessEnvironment.from_dict({**game, **ENV_ARGS})
    return demonstrate(GameAgent(), env, [str(guess) for guess in guesses])


def _search(low: int, high: int, secret: int) -> list[int]:
    guesses: list[int] = []
    while not guesses or guesses[-1] != secret:
        guess = (low + high) // 2
        guesses.append(guess)
        low, high = (guess + 1, high) if secret > guess else (low, guess - 1)
    return guesses
