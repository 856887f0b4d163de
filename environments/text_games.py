"""Games that are played in plain text."""

from __future__ import annotations

import random
import re
from typing import Any

from environments.base import WorldEnvironment
from environments.errors import ConfigError, EnvironmentFailure
from environments.types import STATE_KEY


class GuessEnvironment(WorldEnvironment):
    """Find a secret number; each guess is answered by ``Higher.``, ``Lower.`` or ``Invalid.``.

    The model's whole message has to be an integer; anything else uses up a guess too. Reward 1 for a hit
    within ``max_guesses``, else 0. Without ``secret``, each reset draws one from ``low`` to ``high`` with a
    generator that starts from ``seed``, which is the same for all members of a group: so is their secret.

    Metrics: ``possible_guesses`` is the share of the guesses that the answers before had not ruled out yet.
    """

    wants_seed = True
    resumes_by = "replay"

    def __init__(
        self,
        secret: int | None = None,
        low: int = 1,
        high: int = 9,
        max_guesses: int = 4,
        seed: int | None = None,
    ) -> None:
        if low > high:
            raise ConfigError(f"low={low} is above high={high}: there is no number to guess.")
        if secret is not None and not low <= secret <= high:
            raise ConfigError(f"secret={secret} is outside low={low} to high={high}: choose one inside.")
        if max_guesses < 1:
            raise ConfigError(f"max_guesses={max_guesses} leaves no guess: use 1 and above.")
        self.low = low
        self.high = high
        self.max_guesses = max_guesses
        self._fixed_secret = secret
        self._random = random.Random(seed)
        self._secret: int | None = None
        self._guesses: list[int | None] = []
        """Guesses of the present game; None stands for a message that is no number."""

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        drawn = self._random.randint(self.low, self.high)
        self._secret = drawn if self._fixed_secret is None else self._fixed_secret
        self._guesses = []
        noun = "guess" if self.max_guesses == 1 else "guesses"
        question = f"Guess my number from {self.low} to {self.high}. You have {self.max_guesses} {noun}."
        return {"question": question}, self._state()

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Judge a guess. Info names the secret once the game is over, and the state before."""
        secret = self._secret
        if secret is None or len(self._guesses) == self.max_guesses or secret in self._guesses:
            raise EnvironmentFailure("GuessEnvironment has no game to play: call reset() first.")
        guess = _number(str(action))
        self._guesses.append(guess)
        hit = guess == secret
        done = hit or len(self._guesses) == self.max_guesses
        return _answer(guess, secret), float(hit), done, {"secret": secret} if done else self._state()

    def _state(self) -> dict[str, Any]:
        """Name the state: the first and the last number that the answers have left, and the guesses left."""
        assert self._secret is not None
        tried = [guess for guess in self._guesses if guess is not None]
        first = max([self.low, *(guess + 1 for guess in tried if guess < self._secret)])
        last = min([self.high, *(guess - 1 for guess in tried if guess > self._secret)])
        return {STATE_KEY: [first, last, self.max_guesses - len(self._guesses)]}

    def is_correct(self) -> bool:
        return self._secret in self._guesses

    def compute_metrics(self) -> dict[str, float]:
        if self._secret is None or not self._guesses:
            return {}
        first, last, num_possible = self.low, self.high, 0
        for guess in self._guesses:
            if guess is None:
                continue
            num_possible += first <= guess <= last
            if guess < self._secret:
                first = max(first, guess + 1)
            else:
                last = min(last, guess - 1)
        return {"possible_guesses": num_possible / len(self._guesses)}


def _number(message: str) -> int | None:
    """The integer that is the whole message, but for the space around it."""
    number = re.fullmatch(r"\s*([+-]?[0-9]{1,18})\s*", message)
    return int(number[1]) if number else None  # the group: int() does not know all kinds of space


def _answer(guess: int | None, secret: int) -> str:
    if guess is None:
        return "Invalid."
    if guess == secret:
        return "Correct."
    return "Higher." if secret > guess else "Lower."
