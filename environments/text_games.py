"""Games that are played in plain text."""

from __future__ import annotations

import random
import re
from typing import Any, Self

from environments.base import BaseEnv, split_info
from environments.errors import ConfigError, EnvironmentFailure


class GuessEnvironment(BaseEnv):
    """Find a secret number; each guess is answered by ``Higher.``, ``Lower.`` or ``Invalid.``.

    The model's whole message has to be an integer; anything else uses up a guess too. Reward 1 for a hit
    within ``max_guesses``, else 0. Without ``secret``, each reset draws one from ``low`` to ``high``,
    with a generator that starts from ``seed``: the members of a group get different secrets thereby.
    """

    wants_seed = True

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
            raise ConfigError(f"secret={secret} is outside low={low} to high={high}: nobody would guess it.")
        if max_guesses < 1:
            raise ConfigError(f"max_guesses={max_guesses} leaves no guess: use 1 and above.")
        self.low = low
        self.high = high
        self.max_guesses = max_guesses
        self._fixed_secret = secret
        self._random = random.Random(seed)
        self._secret: int | None = None
        self._guesses_left = 0

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        drawn = self._random.randint(self.low, self.high)
        self._secret = drawn if self._fixed_secret is None else self._fixed_secret
        self._guesses_left = self.max_guesses
        noun = "guess" if self.max_guesses == 1 else "guesses"
        question = f"Guess my number from {self.low} to {self.high}. You have {self.max_guesses} {noun}."
        return {"question": question}, {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Judge a guess. Info names the secret once the game is over."""
        if self._secret is None or self._guesses_left == 0:
            raise EnvironmentFailure("GuessEnvironment has no game to play: call reset() first.")
        self._guesses_left -= 1
        answer = self._answer(str(action), self._secret)
        hit = answer == "Correct."
        done = hit or self._guesses_left == 0
        info = {"secret": self._secret} if done else {}
        if hit:
            self._guesses_left = 0
        return answer, float(hit), done, info

    @classmethod
    def from_dict(cls, info: dict[str, Any]) -> Self:
        """Read the arguments of ``__init__`` and ignore everything else."""
        arguments, _ = split_info(info, {"secret", "low", "high", "max_guesses", "seed"})
        return cls(**arguments)

    @staticmethod
    def _answer(message: str, secret: int) -> str:
        number = re.fullmatch(r"\s*([+-]?[0-9]{1,18})\s*", message)
        if not number:
            return "Invalid."
        guess = int(number[1])  # without the space around it, not all of which int() knows
        if guess == secret:
            return "Correct."
        return "Higher." if secret > guess else "Lower."
