"""The recipe ``guess`` with demonstrations none of which knows the best way.

Each guess is drawn from the numbers that the answers before have left. Who plays like that finds the number
in 0.802 of the games; who halves what is left, in all of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from environments.text_games import GuessEnvironment
from launch.recipes.demonstration import Demonstration, Demonstrations, demonstrate
from launch.recipes.guess import ENV_ARGS, NUM_DEMONSTRATIONS, split_ranges
from launch.recipes.guess import workload as recipe
from launch.workload import Workload
from policies import GameAgent

Script = tuple[int, int, int, list[int]]
"""The lowest and the highest number, the secret, and the guesses."""


def workload(seed: int) -> Workload:
    """The recipe's, with these demonstrations."""
    rng = random.Random(seed)
    _, ranges = split_ranges()
    scripts = [_script(*rng.choice(ranges), rng) for _ in range(NUM_DEMONSTRATIONS)]
    return replace(recipe(seed), demonstrations=Demonstrations(_play, scripts))


def _script(low: int, high: int, rng: random.Random) -> Script:
    secret = rng.randint(low, high)
    return low, high, secret, list(_guesses(low, high, secret, rng))


def _guesses(low: int, high: int, secret: int, rng: random.Random) -> Iterator[int]:
    guess = None
    while guess != secret:
        yield (guess := rng.randint(low, high))
        low, high = (guess + 1, high) if secret > guess else (low, guess - 1)


def _play(script: Script) -> Demonstration:
    low, high, secret, guesses = script
    env = GuessEnvironment(low=low, high=high, secret=secret, **ENV_ARGS)
    return demonstrate(GameAgent(), env, [str(guess) for guess in guesses])
