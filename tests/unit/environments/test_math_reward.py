from __future__ import annotations

import time

import pytest

from environments import math_reward_fn
from environments.errors import DatasetError
from environments.rewards import math
from environments.rewards.reading import last_boxed


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
        (r"1/\sqrt{2}", r"\frac{\sqrt{2}}{2}"),
        ("x=3", "3"),
        ("3", "x=3"),
        ("(x+1)^2", "x^2+2x+1"),
        (r"\{2, 1\}", r"\{1, 2\}"),
        (r"x \in [0, 1)", "[0,1)"),
        (r"\frac{3\pi}{6}", r"\frac{\pi}{2}"),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}"),
        (r"2\sqrt{2}", ["7", r"\sqrt{8}"]),
        ("50", r"50\%"),
        (r"50\%", "50"),
        ("50 %.", r"$50\%$"),
        (r"\frac{25}{2}\%", "12.5"),
        (r"5\sqrt{2}\%", r"\sqrt{50}"),
        ("12,", "12"),
        (r"\sqrt{8},", r"2\sqrt{2}"),
        ("yes", "Yes"),
        ("True", "true"),
        ("evelyn", r"\text{Evelyn}"),
        (r"\textbf{no solution}", "No Solution."),
        (r"\mathrm{Yes}", "yes"),
        ("infinity", r"\infty"),
        (r"6.02\times10^{23}", "6.02e23"),
        (r"6.02 \cdot 10^23", r"$6.02 \times 10^{23}\text{ atoms}$"),
        (r"-10^{-7}", -1e-7),
        ("2 \N{MULTIPLICATION SIGN} 10^3", "2000"),
        ("1.5", "1 1/2"),
        (r"-1\frac{1}{2}", "-3/2"),
        (r"1\ \frac 1 2", "1.5"),
        (r"-\frac{-1}{2}", "0.5"),
        ("1½", "1.5"),
        ("\N{EN DASH}½", "-0.5"),
        ("90°", "90"),
        (r"90^\circ", "90°"),
        (r"1\,000\,000", "1000000"),
        ("1 000", "1,000"),
        ("100, 200", "100,  200"),
        (r"12\text{ cm}", r"12\text{cm}"),
        (r"\sqrt{2}\text{ cm}", r"\sqrt{2}"),
        (r"x\text{ is rational}", r"x \text{ is rational}"),
        ("0", r"0\text{ dollars}"),
        ("5 kg", "5 kg"),
        ("12 cm", "12"),
        (r"12\ \mathrm{m}", "12"),
        (r"12\mathrm{cm}", r"12\text{ cm}"),
        ("5 hours", "5 hour"),
        (r"12\text{ cm}^2", r"12\text{ cm}^{2}"),
        (r"12\text{ cm}^2", "12"),
        (r"15\text{ square units}", r"15\text{ units}^2"),
        ("2516_8", "2516_8"),
        ("2516_{8}", "2516_8"),
        ("2516", "2516_8"),
        ("5xy", "5yx"),
        ("5 dollars", "5"),
        ("5", "5 people"),
        ("5 dollars", r"5\text{ dollars}"),
        ("5 m/s", "5"),
        ("60 miles per hour", "60"),
        ("25 cm^2", r"25\text{ cm}^2"),
        ("25cm^2", "25"),
        (r"12\mathrm{ km/h}", "12"),
        (r"2\pi cm", r"2\pi"),
        (r"\sqrt{2} cm", r"\sqrt{2}"),
        ("2 m", "2m"),
        (r"10\,\mathrm{V}", "10"),
        (r"\frac{1}{2}\mathrm{J}", r"\frac{1}{2}"),
        (r"1.5\,\mathrm{eV}", "1.5"),
        ("5miles", "5"),
        ("45degrees", "45"),
        ("2lbs", "2lb"),
        (r"2\sqrt{3}cm", r"2\sqrt{3}"),
        (r"2x+3\mathrm{i}", "2x+3i"),
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
        ("[0,1]", "(0,1)"),
        (r"\{1, 2, 3\}", r"\{1, 2\}"),
        ("x=4", "3"),
        (r"\sqrt{2}", "1.4"),
        ("x+2", "x+1"),
        (r"\frac{", "3"),
        (r"\end{}", "3"),
        ("0.5", r"50\%"),
        ("on", "no"),
        ("seat", "east"),
        (r"\mathrm{on}", r"\text{no}"),
        ("yes", "no"),
        ("A", "a"),
        ("%", "50"),
        (r"9.1\times 10^{-31}", r"1.6\times10^{-19}"),
        ("0.0000012", "1.4e-6"),
        (r"10^{-8}", r"10^{-7}"),
        ("1 1/2", "11/2"),
        ("11/2", "1 1/2"),
        ("1 2", "12"),
        ("12", "1 2"),
        ("100, 200", "100200"),
        ("100200", "100, 200"),
        (r"x\text{ is irrational}", r"x\text{ is rational}"),
        (r"10\text{ PM}", r"10\text{ AM}"),
        (r"7\text{ or 8}", "7"),
        ("7", r"7\text{ or 8}"),
        (r"7\text{ or more}", "7"),
        ("5 hours", "5 minutes"),
        ("5 kg", "5 g"),
        ("5kg", "5g"),
        ("12 m", "12 km"),
        (r"12\ \mathrm{m}", r"12\ \mathrm{cm}"),
        (r"10\mathrm{AM}", r"10\mathrm{PM}"),
        (r"12\text{ cm}^2", r"12\text{ cm}^3"),
        (r"12\text{ cm}^2", r"12\text{ cm}"),
        ("2516_7", "2516_8"),
        ("2516_{10}", "2516_8"),
        ("101_2", "101_3"),
        ("5x", "5"),
        ("60t", "60"),
        ("60", "60 t"),
        ("x+3t", "x+3"),
        ("4s", "4"),
        ("2ab", "2"),
        ("2 theta", "2"),
        ("5 million", "5"),
        ("5 squared", "5"),
        ("5 factorial", "5"),
        ("10 sin", "10"),
        ("3 halves", "3"),
        ("5xyz", "5"),
        (r"3\mathrm{e}", "3"),
        ("5 dollars", "5 cents"),
        ("5 m/s", "5 km/h"),
        ("25 cm^2", r"25\text{ cm}^3"),
        (r"2x+3\mathrm{i}", "2x+3"),
    ],
)
def test_unequal_answers(answer, truth):
    assert reward(answer, truth) == 0.0


@pytest.mark.parametrize(
    ("answer", "truth", "judged_by", "correct"),
    [
        ("4", "4", "number", True),
        ("4", "5", "number", False),
        (r"\text{Evelyn}", "Evelyn", "text", True),
        ("x", "X", "text", False),
        ("seat", "east", "text", False),
        ("50", r"50\%", "number", True),
        (r"\sqrt{16}", "4", "math-verify", True),
        (r"\sqrt{17}", "4", "math-verify", False),
    ],
)
def test_verdict_says_what_was_compared_and_how(answer, truth, judged_by, correct):
    output = math_reward_fn({"ground_truth": truth}, rf"\boxed{{{answer}}}")
    assert output.is_correct is correct
    assert output.metadata == {"answer": answer, "judged_by": judged_by}


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\sum_{k=1}^{100} k", "5050"),
        (r"\prod_{k=1}^{3} k", "6"),
        (r"\int_0^1 x^2 dx", "1/3"),
        (r"\lim_{x\to 0}\frac{\sin x}{x}", "1"),
        (r"\gcd(12,18)", "6"),
        (r"\operatorname{lcm}(4,6)", "12"),
        (r"\max(3,5)", "5"),
        (r"\frac{d}{dx}x^2", "2x"),
        (r"\frac{\mathrm{d}}{\mathrm{d}x} x^2", "2x"),
        (r"123456\times 789", "97406784"),
        ("74*66", "4884"),
        ("5!", "120"),
        (r"[5]!", "120"),
        (r"\lvert 5\rvert!", "120"),
        (r"{5 \choose 2}", "10"),
        (r"\binom{5}{2}", "10"),
        (r"\dbinom{5}{2}", "10"),
        ("(2+3)!", "120"),
        ("74 \N{DOT OPERATOR} 66", "4884"),
        ("53+87", "140"),
        ("x=53+87", "x=140"),
        ("53 + 87 =", "140"),
        (r"53+87\text{ cm}", "140"),
        (r"\frac{12\cdot 5}{6}", "10"),
        (r"90^\circ - 30^\circ", "60"),
        (r"10^3 \times 5", "5000"),
        (r"\sqrt{16}+2", "6"),
        (r"\log_2 8", "3"),
        (r"\sin\frac{\pi}{6}", "1/2"),
    ],
)
def test_question_that_is_only_restated_is_wrong(answer, truth):
    output = math_reward_fn({"ground_truth": truth}, rf"\boxed{{{answer}}}")
    assert (output.reward, output.is_correct) == (0.0, False)
    assert "leaves a calculation to be done" in output.metadata["error"]


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        (r"\sqrt{2}+1", r"1+\sqrt{2}"),
        (r"\frac{6\pi}{8}", r"3\pi/4"),
        (r"\sqrt{12}", r"2\sqrt{3}"),
        ("1+x", "x+1"),
        ("3+4i", "4i+3"),
        ("2^{10}", "1024"),
        (r"x=2\times 10^3", "2000"),
        (r"2\times 10^{-3}\ \mathrm{m}", "0.002"),
        ("53+87=140", "140"),
        (r"\frac{d}{dx}x^2=2x", "2x"),
        (r"\sin\frac{\pi}{3}", r"\frac{\sqrt{3}}{2}"),
        (r"\sum_{j=1}^{100} j", r"\sum_{k=1}^{100} k"),
        (r"1+\sqrt{2}", ["7", r"\sqrt{2}+1"]),
    ],
)
def test_answer_that_leaves_no_calculation_stays_right(answer, truth):
    assert reward(answer, truth) == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["10^{10^{10}}", "9^{9^{9^{9}}}"])
def test_answer_without_end_is_wrong_and_costs_its_limit_alone(answer):
    start = time.monotonic()
    output = math_reward_fn({"ground_truth": "4"}, rf"\boxed{{{answer}}}", time_limit_seconds=0.5)
    assert (output.reward, output.is_correct) == (0.0, False)
    assert output.metadata["error"] == "The answer could not be graded in 0.5 s."
    assert time.monotonic() - start < 60  # mostly for starting a fresh child on a busy machine
    assert reward(r"\sqrt{16}", "4") == 1.0


def test_numbers_are_judged_without_another_process(monkeypatch):
    monkeypatch.setattr(math, "_grader", None)
    assert (reward("4", "4.0"), reward("4", "5")) == (1.0, 0.0)


@pytest.mark.parametrize("text", ["The answer is 4.", r"\boxed{4", "boxed{4}", r"\boxed 4", ""])
def test_without_complete_box_reward_is_zero_and_metadata_say_so(text):
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
def test_last_balanced_box_is_found(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    "task",
    [
        {},
        {"answer": "4"},
        *({"ground_truth": truth} for truth in (None, [], "", ["", None], r"\boxed{}", "$$")),
    ],
)
def test_task_without_ground_truth_is_an_error(task):
    with pytest.raises(DatasetError, match="ground_truth"):
        math_reward_fn(task, r"\boxed{}")


@pytest.mark.parametrize("truth", [{"answer": "4"}, ["4", {}], float("nan"), float("inf"), b"4"])
def test_ground_truth_that_is_neither_text_nor_number_is_error(truth):
    with pytest.raises(DatasetError, match="no answer can equal"):
        math_reward_fn({"ground_truth": truth}, r"\boxed{4}")


@pytest.mark.parametrize("answer", ["9" * 10**6, "1e999999999", "1/" + "9" * 10**6, "{" * 10**5, " " * 10**5])
def test_huge_answers_are_judged_quickly(answer):
    reward(r"\sqrt{16}", "4")  # the grading process is there
    start = time.monotonic()
    task = {"ground_truth": "4"}
    assert math_reward_fn(task, rf"\boxed{{{answer}}}", time_limit_seconds=60).reward == 0.0
    assert time.monotonic() - start < 30


def test_many_unfinished_boxes_are_judged_quickly():
    start = time.monotonic()
    output = math_reward_fn({"ground_truth": "4"}, r"\boxed{" * 4000, time_limit_seconds=60)
    assert output.reward == 0.0
    assert time.monotonic() - start < 30
