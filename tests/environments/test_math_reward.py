from __future__ import annotations

import time

import pytest

from environments import math_reward_fn
from environments.errors import DatasetError
from environments.rewards.math import last_boxed


def reward(answer, truth):
    return math_reward_fn({"ground_truth": truth}, rf"So it is \boxed{{{answer}}}.").reward


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5", "5"),
        ("5", 5),
        ("5.0", 5),
        ("5.", "5"),
        ("+5", "5"),
        ("-5", -5),
        ("\N{MINUS SIGN}5", -5),
        ("007", "7"),
        ("0.50", 0.5),
        (".5", "1/2"),
        (r"\frac{1}{2}", "0.5"),
        (r"\dfrac{2}{4}", r"\tfrac12"),
        (r"-\frac{1}{2}", "-0.5"),
        (r"\frac{-1}{2}", "-1/2"),
        ("1,000,000", "1000000"),
        (r"1,\!000", 1000),
        ("1{,}000", 1000),
        ("$12$", "12"),
        (r"\$12", "12"),
        (r"12\text{ cm}", "12"),
        (r"\text{Evelyn}", "Evelyn"),
        (r"\left( 1, 2 \right)", "(1,2)"),
        ("x + 1", "x+1"),
        (r"\{1, 2\}", r"\{1,2\}"),
        ("7", ["6", 7]),
        ("7", r"\boxed{7}"),
        ("0.0000001", 1e-7),
        ("2", ("1", "2")),
    ],
)
def test_equal_answers(answer, truth):
    assert reward(answer, truth) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5", "6"),
        ("5", "-5"),
        ("0.33", "1/3"),
        ("0.3333333333333333", "1/3"),
        ("1000000000000000000000001", "1000000000000000000000000"),
        ("1,00", "100"),
        ("(1,2)", "(2,1)"),
        (r"3\text{ or }5", "35"),
        (r"1\frac{1}{2}", "1/2"),
        ("1/0", "0"),
        (r"\frac{1}{0}", "1"),
        ("", "5"),
        ("7", ["5", "6"]),
        ("x", "X"),
    ],
)
def test_unequal_answers(answer, truth):
    assert reward(answer, truth) == 0.0


def test_the_verdict_says_what_was_compared():
    output = math_reward_fn({"ground_truth": "4"}, r"\boxed{4}")
    assert output.is_correct is True
    assert output.metadata == {"answer": "4"}


@pytest.mark.parametrize("text", ["The answer is 4.", r"\boxed{4", "boxed{4}", r"\boxed 4", ""])
def test_without_a_complete_box_the_reward_is_zero_and_the_metadata_say_so(text):
    output = math_reward_fn({"ground_truth": "4"}, text)
    assert (output.reward, output.is_correct) == (0.0, False)
    assert "boxed" in output.metadata["error"]


def test_only_what_follows_the_last_think_tag_counts():
    task = {"ground_truth": "4"}
    assert math_reward_fn(task, r"\boxed{4}</think> I give up").reward == 0.0
    assert math_reward_fn(task, r"\boxed{5}</think>\boxed{6}</think>\boxed{4}").reward == 1.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2", "1"),
        (r"\boxed{a\}b}", r"a\}b"),
        (r"\fbox{3}", "3"),
        (r"\boxed {3}", "3"),
        (r"{\boxed{}}", ""),
        (r"\boxed{\boxed{3}}", "3"),
        (r"} \boxed{3} {", "3"),
        (r"\\boxed{3}", "3"),
        ("none", None),
    ],
)
def test_the_last_balanced_box_is_found(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize("task", [{}, {"ground_truth": None}, {"ground_truth": []}, {"answer": "4"}])
def test_a_task_without_ground_truth_is_an_error(task):
    with pytest.raises(DatasetError, match="ground_truth"):
        math_reward_fn(task, r"\boxed{4}")


@pytest.mark.parametrize("answer", ["9" * 10**6, "1e999999999", "1/" + "9" * 10**6, "{" * 10**5, " " * 10**5])
def test_huge_answers_are_judged_quickly(answer):
    start = time.monotonic()
    assert reward(answer, "4") == 0.0
    assert time.monotonic() - start < 2


def test_many_unfinished_boxes_are_judged_quickly():
    start = time.monotonic()
    assert math_reward_fn({"ground_truth": "4"}, r"\boxed{" * 4000).reward == 0.0
    assert time.monotonic() - start < 2
