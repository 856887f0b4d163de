from __future__ import annotations

import pytest

from environments.errors import ConfigError, EnvironmentFailure
from environments.text_games import GuessEnvironment


def started(**arguments):
    env = GuessEnvironment(**arguments)
    env.reset()
    return env


def secret_of(**arguments):
    return started(max_guesses=1, **arguments).step("x")[3]["secret"]


def test_question():
    env = GuessEnvironment(secret=3)
    assert env.reset() == (
        {"question": "Guess my number from 1 to 9. You have 4 guesses."},
        {"state_key": [1, 9, 4]},
    )
    env = GuessEnvironment(low=0, high=1, max_guesses=1)
    assert env.reset()[0]["question"] == "Guess my number from 0 to 1. You have 1 guess."


def test_game_that_is_won():
    env = started(secret=3)
    assert env.step("5") == ("Lower.", 0.0, False, {"state_key": [1, 4, 3]})
    assert env.step(" 2\n") == ("Higher.", 0.0, False, {"state_key": [3, 4, 2]})
    assert env.step("3") == ("Correct.", 1.0, True, {"secret": 3})


def test_guess_that_rules_nothing_out_changes_the_state_by_one():
    env = started(secret=3, high=5, max_guesses=5)
    states = [env.step(message)[3]["state_key"] for message in ("x", "9", "2", "1")]
    assert states == [[1, 5, 4], [1, 5, 3], [3, 5, 2], [3, 5, 1]]


def test_hit_with_the_last_guess_counts():
    env = started(secret=3, max_guesses=2)
    env.step("1")
    assert env.step("3")[1:3] == (1.0, True)


def test_game_that_is_lost():
    env = started(secret=3, max_guesses=2)
    assert env.step("4")[1:3] == (0.0, False)
    assert env.step("4") == ("Lower.", 0.0, True, {"secret": 3})


@pytest.mark.parametrize(
    "message", ["", "three", "3.", "3 4", "It is 3", "\N{FULLWIDTH DIGIT THREE}", "3" * 5000]
)
def test_what_is_no_integer_uses_up_a_guess(message):
    env = started(secret=3, max_guesses=2)
    assert env.step(message)[:3] == ("Invalid.", 0.0, False)
    assert env.step(message)[:3] == ("Invalid.", 0.0, True)


@pytest.mark.parametrize("space", [chr(code) for code in (*range(9, 14), *range(28, 33), 0x85, 0xA0, 0x2028)])
def test_whatever_counts_as_space_may_stand_around_a_number(space):
    assert started(secret=3).step(f"{space}3{space}")[0] == "Correct."


def test_number_out_of_range_is_answered_like_any_other():
    assert started(secret=3).step("99")[0] == "Lower."


def test_seeds_decide_the_secret_and_cover_the_range():
    assert secret_of(seed=7) == secret_of(seed=7)
    assert {secret_of(seed=seed) for seed in range(200)} == set(range(1, 10))


def test_given_secret_is_kept_whatever_the_seed():
    assert {secret_of(secret=4, seed=seed) for seed in range(20)} == {4}


def test_each_reset_draws_anew_and_gives_all_guesses_back():
    env = GuessEnvironment(seed=0, max_guesses=1)
    secrets = set()
    for _ in range(100):
        env.reset()
        secrets.add(env.step("x")[3]["secret"])
    assert len(secrets) > 1


def test_from_dict_reads_its_keys_and_leaves_the_dict_alone():
    info = {"secret": 12, "high": 15, "question": "other", "uid": 3}
    env = GuessEnvironment.from_dict(info)
    assert info == {"secret": 12, "high": 15, "question": "other", "uid": 3}
    assert env.reset()[0]["question"] == "Guess my number from 1 to 15. You have 4 guesses."
    assert env.step("12")[1] == 1.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"low": 5, "high": 4}, "low=5"),
        ({"secret": 10}, "secret=10"),
        ({"secret": 0}, "secret=0"),
        ({"max_guesses": 0}, "max_guesses=0"),
    ],
)
def test_impossible_games_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GuessEnvironment(**arguments)


def test_step_outside_a_game_is_an_error():
    env = GuessEnvironment(secret=3)
    with pytest.raises(EnvironmentFailure, match="reset"):
        env.step("3")
    env.reset()
    env.step("3")
    with pytest.raises(EnvironmentFailure, match="reset"):
        env.step("3")


def test_guess_counts_as_possible_until_an_answer_rules_it_out():
    env = GuessEnvironment(secret=3, max_guesses=6)
    assert env.compute_metrics() == {}
    env.reset()
    shares = []
    for guess in ("6", "8", "x", "2", "2", "3"):  # 8 is above 6, x is no number, the second 2 was answered
        env.step(guess)
        shares.append(env.compute_metrics()["possible_guesses"])
    assert shares == pytest.approx([1, 1 / 2, 1 / 3, 2 / 4, 2 / 5, 3 / 6])
    env.reset()
    assert env.compute_metrics() == {}, "a new game begins without a guess"


def test_game_is_a_success_when_the_number_is_found():
    env = GuessEnvironment(secret=5, max_guesses=2)
    env.reset()
    env.step("4")
    assert env.is_correct() is False
    env.step("5")
    assert env.is_correct() is True
    env.reset()
    assert env.is_correct() is False
