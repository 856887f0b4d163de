"""Kuhn poker against its equilibrium: what policies lose to one who knows them, and policies in tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product

import numpy as np

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments.types import Completion, Trajectory, TrajectoryGroup
from launch.recipes.kuhn import DEALS, NO_MOVE, QUESTIONS, SEATS, WORDS, KuhnPoker, chips_of_first
from policies import SeatsAgent
from policies.learning.algorithm import Algorithm
from policies.learning.credit import assign_credit
from policies.learning.samples import samples_by_policy
from policies.sampler import SampleRequest

State = tuple[str, str]
"""The card of the player who moves, and the moves so far."""
Strategy = Mapping[State, float]
"""Probability to bet or call, by state."""
STATES = [(card, moves) for moves in QUESTIONS for card in "JQK"]
FIRST = [state for state in STATES if len(state[1]) % 2 == 0]
SECOND = [state for state in STATES if len(state[1]) % 2 == 1]
VALUE = -1 / 18
"""Chips of the first player where both play an equilibrium."""


def expected_chips(first: Strategy, second: Strategy, cards: str, moves: str = "") -> float:
    """Chips that the first player wins on average from ``moves`` on."""
    if moves not in QUESTIONS:
        return chips_of_first(cards, moves)
    mover = len(moves) % 2
    bets = (first, second)[mover][cards[mover], moves]
    return bets * expected_chips(first, second, cards, moves + "b") + (1 - bets) * expected_chips(
        first, second, cards, moves + "p"
    )


def value(first: Strategy, second: Strategy) -> float:
    """Chips that the first player wins in a game, on average over the deals."""
    return sum(expected_chips(first, second, cards) for cards in DEALS) / len(DEALS)


def exploitability(strategy: Strategy) -> float:
    """Half of what the best answers to both seats of ``strategy`` win together."""
    best_first = max(value(each, strategy) for each in _pure(FIRST))
    best_second = max(-value(strategy, each) for each in _pure(SECOND))
    return (best_first + best_second) / 2


def _pure(states: Sequence[State]) -> Iterable[Strategy]:
    for bets in product((0.0, 1.0), repeat=len(states)):
        yield dict(zip(states, bets, strict=True))


def average(strategies: Iterable[Strategy]) -> dict[State, float]:
    """The average that plays as one of ``strategies``, drawn before the game."""
    bets, reached = dict.fromkeys(STATES, 0.0), dict.fromkeys(STATES, 0.0)
    for strategy in strategies:
        for card, moves in STATES:
            own = 1 - strategy[card, ""] if moves == "pb" else 1.0  # the first player's own check before it
            bets[card, moves] += own * strategy[card, moves]
            reached[card, moves] += own
    return {state: bets[state] / reached[state] if reached[state] else 0.5 for state in STATES}


class Table:
    """A policy of two words a state, by their logits; it samples a word as a token.

    Args:
        name: its seat; empty for a policy that plays both.
    """

    source = "a table"

    def __init__(self, seed: int, name: str = "") -> None:
        self.name = name
        self._rng = np.random.default_rng(seed)
        self._ids: dict[str, int] = {}
        self.logits = dict.fromkeys(STATES, 0.0)

    @property
    def strategy(self) -> dict[State, float]:
        return {state: float(1 / (1 + np.exp(-logit))) for state, logit in self.logits.items()}

    def sample(self, request: SampleRequest) -> Completion:
        state = state_of(request.messages)
        bets = self.strategy[state]
        is_bet = bool(self._rng.random() < bets)
        text = list(WORDS[state[1]])[is_bet]
        prompt = " ".join(str(message["content"]) for message in request.messages).split()
        return Completion(
            prompt_ids=tuple(self._ids.setdefault(word, len(self._ids)) for word in prompt),
            completion_ids=(self._ids.setdefault(text, len(self._ids)),),
            logprobs=(float(np.log(bets if is_bet else 1 - bets)),),
            text=text,
            finish_reason="stop",
            policy=self.name,
        )


def state_of(messages: Sequence[Mapping[str, object]]) -> State:
    """The state in which a player of KuhnPoker is shown ``messages``."""
    shown = " ".join(str(message["content"]) for message in messages if message["role"] == "user")
    asked = str([message for message in messages if message["role"] == "user"][-1]["content"])
    (card,) = (card for card in "JQK" if f"You have {card}." in shown)
    moves = next(each for each in ("pb", "p", "b", "") if asked.endswith(QUESTIONS[each]))
    return card, "b" if moves == "pb" and asked.startswith("You have") else moves


def decisions(trajectory: Trajectory) -> list[tuple[State, bool]]:
    """The states of a game in which a move was made, in their order, and whether it was to bet or call."""
    env, found = KuhnPoker(trajectory.task), []
    for step in trajectory.steps:
        state = env.cards[len(env.moves) % 2], env.moves
        env.step(step.action)
        if not env.moves.endswith(NO_MOVE):
            found.append((state, env.moves.endswith("b")))
    return found


def play(policies: Sequence[Table], update: int, group_size: int) -> list[TrajectoryGroup]:
    """All six deals, each by ``group_size`` members: one policy plays both seats, or two play one each."""
    limits, groups, by_name = RolloutLimits(), [], {each.name: each for each in policies}
    seats = {seat: seat for seat in SEATS} if len(policies) > 1 else None
    for number, cards in enumerate(DEALS):
        name, task = f"{update}.{number}", {"cards": cards}
        members = tuple(
            run_rollout(
                SeatsAgent(policies=seats),
                KuhnPoker(task),
                lambda request: by_name[request.params.policy].sample(request),
                RolloutRequest(rollout_id=f"{name}/{member}", group_id=name, task=task),
                limits,
                Journal(),
            )
            for member in range(group_size)
        )
        groups.append(TrajectoryGroup(group_id=name, task=task, trajectories=members))
    return groups


def learn(
    policy: Table, groups: Sequence[TrajectoryGroup], algorithm: Algorithm, lr: float, entropy_coef: float
) -> None:
    """A step of gradient ascent by what ``assign_credit`` says of its turns, with a bonus for the entropy."""
    trajectories = {each.rollout_id: each for group in groups for each in group.trajectories}
    samples = {name: samples_by_policy(each).get(policy.name, []) for name, each in trajectories.items()}
    credited, _ = assign_credit(groups, samples, algorithm, kl_coef=0.0)
    strategy, gradient = policy.strategy, dict.fromkeys(STATES, 0.0)
    counts = dict.fromkeys(STATES, 0)
    for name, rows in credited.items():
        for sample in rows:
            for turn, advantage in zip(sample.turns, sample.advantages, strict=True):
                if turn >= 0:
                    state, is_bet = decisions(trajectories[name])[turn]
                    gradient[state] += advantage * (is_bet - strategy[state])
                    counts[state] += 1
    total = sum(counts.values())
    for state, bets in strategy.items():
        bonus = -entropy_coef * counts[state] * bets * (1 - bets) * policy.logits[state]
        policy.logits[state] += lr * (gradient[state] + bonus) / total
