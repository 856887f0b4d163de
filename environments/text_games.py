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
        self._begin()

    def _begin(self) -> None:
        self._guesses: list[int | None] = []
        """Guesses of the present game; None stands for a message that is no number."""
        self._first, self._last = self.low, self.high
        """The first and the last number that the answers have left."""
        self._num_possible = 0

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        drawn = self._random.randint(self.low, self.high)
        self._secret = drawn if self._fixed_secret is None else self._fixed_secret
        self._begin()
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
        answer = "Invalid."
        if guess is not None:
            self._num_possible += self._first <= guess <= self._last
            answer = "Correct." if guess == secret else "Higher." if secret > guess else "Lower."
            if answer == "Higher.":
                self._first = max(self._first, guess + 1)
            elif answer == "Lower.":
                self._last = min(self._last, guess - 1)
        done = guess == secret or len(self._guesses) == self.max_guesses
        return answer, float(guess == secret), done, {"secret": secret} if done else self._state()

    def _state(self) -> dict[str, Any]:
        return {STATE_KEY: [self._first, self._last, self.max_guesses - len(self._guesses)]}

    def is_correct(self) -> bool:
        return self._secret in self._guesses

    def compute_metrics(self) -> dict[str, float]:
        return {"possible_guesses": self._num_possible / len(self._guesses)} if self._guesses else {}


def _number(message: str) -> int | None:
    """The integer that is the whole message, but for the space around it."""
    number = re.fullmatch(r"\s*([+-]?[0-9]{1,18})\s*", message)
    return int(number[1]) if number else None  # the group: int() does not know all kinds of space
