"""Kuhn poker: its rules, its known equilibrium, and two seats that learn apart."""

from __future__ import annotations

import pytest
from kuhn_policies import FIRST, STATES, VALUE, Table, average, exploitability, learn, play, value

from environments import check_environment
from environments.errors import ConfigError, EnvironmentFailure
from launch.recipes.kuhn import DEALS, KuhnPoker, workload
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig

EQUILIBRIUM = dict.fromkeys(STATES, 0.0) | {
    ("J", ""): 1 / 3,
    ("K", ""): 1.0,
    ("Q", "pb"): 2 / 3,
    ("K", "pb"): 1.0,
    ("J", "p"): 1 / 3,
    ("K", "p"): 1.0,
    ("Q", "b"): 1 / 3,
    ("K", "b"): 1.0,
}
"""Kuhn 1950, of a family in which the first player bets a jack as often as 1/3 at most."""


@pytest.mark.parametrize(
    ("cards", "messages", "first_wins"),
    [
        ("KJ", ["check", "check"], 1.0),
        ("JQ", ["check", "check"], -1.0),
        ("JQ", ["bet", "fold"], 1.0),
        ("JQ", ["bet", "call"], -2.0),
        ("KQ", ["check", "bet", "fold"], -1.0),
        ("KQ", ["check", "bet", " call\n"], 2.0),
        ("KQ", ["call"], -2.0),
        ("KQ", ["check", "nothing"], 2.0),
        ("KQ", ["bet", "bet"], 2.0),
    ],
)
def test_chips_of_each_seat_are_what_the_other_loses(
    cards: str, messages: list[str], first_wins: float
) -> None:
    env = KuhnPoker({"cards": cards})
    env.reset()
    results = [env.step(message) for message in messages]
    assert [done for _, _, done, _ in results] == [False] * (len(messages) - 1) + [True]
    assert results[-1][3] == {"seat_rewards": {"first": first_wins, "second": -first_wins}}
    assert results[-1][1] == (first_wins if len(messages) % 2 else -first_wins)
    assert env.compute_metrics()["first_reward"] == first_wins
    with pytest.raises(EnvironmentFailure, match="reset"):
        env.step("check")


def test_message_that_is_no_move_is_counted() -> None:
    env = KuhnPoker({"cards": "KQ"})
    env.reset()
    env.step("bet")
    env.step("check")
    assert env.compute_metrics()["legal_moves"] == 0.5


def test_seat_sees_its_own_card_alone() -> None:
    env = KuhnPoker({"cards": "KQ"})
    assert env.reset()[0] == {"seat": "first", "question": "You have K. You begin: check or bet?"}
    assert env.step("check")[0] == {
        "seat": "second",
        "question": "You have Q. The other player checks: check or bet?",
    }
    assert env.step("bet")[0] == {"seat": "first", "question": "The other player bets: fold or call?"}


def test_kuhn_poker_keeps_the_contract() -> None:
    assert check_environment(KuhnPoker, {"cards": "JQ"}).ok
    with pytest.raises(ConfigError, match="'JJ' is no deal"):
        KuhnPoker({"cards": "JJ"})


def test_demonstrations_show_each_state_of_both_seats() -> None:
    shown = {
        (messages[0]["content"], len(messages), messages[-1]["content"])
        for messages in workload(0).demonstrations[:400]
    }
    assert len(shown) == 2 * len(STATES)


def test_exploitability_is_nothing_in_the_equilibrium() -> None:
    assert exploitability(EQUILIBRIUM) == pytest.approx(0.0)
    assert value(EQUILIBRIUM, EQUILIBRIUM) == pytest.approx(VALUE)
    assert exploitability(dict.fromkeys(STATES, 0.5)) == pytest.approx(11 / 24)


def test_average_counts_a_state_as_often_as_it_was_played_to() -> None:
    """Kuhn's first player comes to its second move by its own check."""
    never, always = dict.fromkeys(STATES, 0.0), dict.fromkeys(STATES, 1.0)
    mean = average([never, always])
    assert all(mean[state] == (0.0 if state[1] == "pb" else 0.5) for state in FIRST)


@pytest.mark.slow
def test_self_play_makes_a_policy_harder_to_exploit() -> None:
    policy, algorithm = Table(seed=0), resolve(AlgorithmConfig(name="rloo"), 64)
    for update in range(8):
        groups = play([policy], update, group_size=16)
        assert len(groups) == len(DEALS)
        learn(policy, groups, algorithm, lr=4.0, entropy_coef=0.0)
    assert exploitability(policy.strategy) < 0.6 * 11 / 24
