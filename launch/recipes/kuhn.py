"""Kuhn poker by self-play: one policy in both seats, each of which sees its own card alone.

Both players put one chip in and get one card of three. Source: H. W. Kuhn, A Simplified Two-Person Poker
(1950), by which the first player loses 1/18 of a chip in a game, if both play as well as one can.
"""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

from environments import Dataset
from environments.base import TaskEnvironment
from environments.errors import ConfigError, EnvironmentFailure
from launch.recipes.demonstration import Demonstration, Demonstrations, demonstrate
from launch.workload import Workload
from policies import SeatsAgent

DEALS = ["".join(cards) for cards in permutations("JQK", 2)]
"""The cards of both players, K above Q above J."""
NUM_DEMONSTRATIONS = 4000
QUESTIONS = {
    "": "You begin: check or bet?",
    "p": "The other player checks: check or bet?",
    "b": "The other player bets: fold or call?",
    "pb": "The other player bets: fold or call?",
}
"""Questions by the moves so far: p for check or fold, b for bet or call."""
WORDS = {"": {"check": "p", "bet": "b"}, "b": {"fold": "p", "call": "b"}}
WORDS |= {"p": WORDS[""], "pb": WORDS["b"]}
"""Words that answer them, with the moves that they are."""
NO_MOVE = "x"
SEATS = ("first", "second")
HABITS = {"J": 0.4, "Q": 0.5, "K": 0.6}
"""Shares in which players of the demonstrations bet or call."""
Script = tuple[str, list[str]]
"""The cards, and the messages of the players in turn."""


class KuhnPoker(TaskEnvironment):
    """A game whose reward are the chips that a seat wins or loses.

    A message that is neither word of its question loses two chips to the other player, the most that a game
    can cost, and ends it.

    Metrics: ``first_reward`` and ``second_reward`` are those of the seats, and ``legal_moves`` is the share
    of the messages that were one of the two words of their question.

    Args:
        task: its ``cards`` are the first player's and the second's, such as ``"JK"``.
    """

    resumes_by = "replay"

    def __init__(self, task: dict[str, Any]) -> None:
        if task.get("cards") not in DEALS:
            raise ConfigError(f"cards={task.get('cards')!r} is no deal: use one of {', '.join(DEALS)}.")
        self.cards: str = task["cards"]
        self.moves = ""
        self._num_legal = 0

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        self.moves, self._num_legal = "", 0
        return self._question(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict[str, Any]]:
        if self.moves not in QUESTIONS:
            raise EnvironmentFailure("KuhnPoker is over: call reset() first.")
        word, words, mover = str(action).strip(), WORDS[self.moves], len(self.moves) % 2
        self._num_legal += word in words
        self.moves += words.get(word, NO_MOVE)
        if self.moves in QUESTIONS:
            return self._question(), 0.0, False, {}
        chips = chips_of_first(self.cards, self.moves)
        rewards = {"first": chips, "second": -chips}
        return "", rewards[SEATS[mover]], True, {"seat_rewards": rewards}

    def compute_metrics(self) -> dict[str, float]:
        if self.moves in QUESTIONS:  # a limit has ended it
            return {}
        chips = chips_of_first(self.cards, self.moves)
        share = self._num_legal / len(self.moves)
        return {"first_reward": chips, "second_reward": -chips, "legal_moves": share}

    def _question(self) -> dict[str, str]:
        seat = len(self.moves) % 2
        card = f"You have {self.cards[seat]}. " if len(self.moves) < len(SEATS) else ""
        return {"seat": SEATS[seat], "question": card + QUESTIONS[self.moves]}


def chips_of_first(cards: str, moves: str) -> float:
    """Chips that the first player wins in a game that is over."""
    if moves.endswith(NO_MOVE):
        return 2.0 if len(moves) % 2 == 0 else -2.0
    if moves.endswith("bp"):  # the last one has folded
        return 1.0 if len(moves) % 2 == 0 else -1.0
    stake = 2.0 if moves.endswith("bb") else 1.0
    return stake if "JQK".index(cards[0]) > "JQK".index(cards[1]) else -stake


def workload(seed: int) -> Workload:
    """All six deals, for training and evaluation alike: what is learned is how to play them.

    The demonstrations teach the words, and to read the card: otherwise the play is random.
    """
    rng = random.Random(seed)
    tasks = [{"cards": cards} for cards in DEALS]
    return Workload(
        agent_class=SeatsAgent,
        env_class=KuhnPoker,
        train_dataset=Dataset(tasks, name="kuhn", split="train"),
        val_dataset=Dataset(tasks, name="kuhn", split="test"),
        demonstrations=Demonstrations(_play, [_script(rng) for _ in range(NUM_DEMONSTRATIONS)]),
    )


def _script(rng: random.Random) -> Script:
    """The beginning of a game: what is shown is the conversation of the player who moves last."""
    cards, moves, words = rng.choice(DEALS), "", list[str]()
    for _ in range(rng.randint(1, 3)):
        if moves in QUESTIONS:
            bets = rng.random() < HABITS[cards[len(moves) % 2]]
            words.append(list(WORDS[moves])[bets])
            moves += WORDS[moves][words[-1]]
    return cards, words


def _play(script: Script) -> Demonstration:
    cards, words = script
    return demonstrate(SeatsAgent(), KuhnPoker({"cards": cards}), words)
