from __future__ import annotations

import pytest

from environments.errors import DatasetError
from environments.rewards.search import extracted_answer, f1_score, normalised, search_reward_fn


def judged(answer, truth):
    return search_reward_fn({"ground_truth": truth}, rf"\boxed{{{answer}}}")


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("The  Great, Moot-Bell!", "great mootbell"),
        ("an apple a day", "apple day"),
        ("Theatre", "theatre"),
        ("U.S.A.", "usa"),
        ("A", "a"),
        ("  ", ""),
    ],
)
def test_case_punctuation_articles_and_spaces_do_not_count(text, plain):
    assert normalised(text) == plain


@pytest.mark.parametrize(
    ("answer", "truth", "f1"),
    [
        ("mount ardvane", "Ardvane", 2 / 3),
        ("the the", "ardvane", 0.0),
        ("red red red blue", "red blue blue", 4 / 7),
        ("", "ardvane", 0.0),
        ("yes it is", "yes", 0.0),
        ("yes", "yes it is", 0.0),
        ("Yes.", "yes", 1.0),
        ("no", "yes", 0.0),
        ("noanswer", "noanswer given", 0.0),
    ],
)
def test_f1_counts_the_words_in_common(answer, truth, f1):
    assert f1_score(answer, truth) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("answer", "truth", "reward", "exact"),
    [
        ("The Lantern Bridge", "lantern bridge", 1.0, True),
        ("Ardvane, Mount", "Mount Ardvane", 1.0, False),
        ("Mount Ardvane", "Ardvane", 2 / 3, False),
        ("a b c d e f g h ardvane", "Ardvane", 0.0, False),  # F1 0.22 with "a" gone
        ("Quenny", ["Little Wend", "The Quenny"], 1.0, True),
        ("the river Quenny", ["Little Wend", "Quenny"], 2 / 3, False),
        ("1912", 1912, 1.0, True),
        ("B", "A", 0.0, False),
        ("", "A", 0.0, False),
    ],
)
def test_exact_match_earns_one_and_a_near_one_its_f1(answer, truth, reward, exact):
    output = judged(answer, truth)
    assert output.reward == pytest.approx(reward)
    assert (output.is_correct, output.metadata["em"]) == (exact, exact)
    assert output.metadata["answer"] == answer


def test_f1_below_the_threshold_is_still_told():
    assert judged("b c d e f g h ardvane", "Ardvane").metadata["f1"] == pytest.approx(2 / 9)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("1,500", "1500"),
        ("1500", "1,500"),
        ("1,234,567.5", 1234567.5),
        ("1\N{NARROW NO-BREAK SPACE}500", "1500"),
        ("\N{MINUS SIGN}5", -5),
        ("\N{EN DASH}5 °C", "-5 °C"),
        ("+5", "5"),
        ("3.140", "3.14"),
        ("3", 3.0),
        (".5", "0.5"),
        ("(-5)", "-5"),
        ("3.14.", "3.14"),
        ("1939\N{EN DASH}1945", "1939-1945"),
        ("COVID 19", "COVID 19."),
        ("4/7/1776", "4.7.1776"),
        ("No. 5", "No 5"),
        ("cafe\N{COMBINING ACUTE ACCENT}", "café"),
        ("CAFÉ", "cafe\N{COMBINING ACUTE ACCENT}"),
        ("Angstro\N{COMBINING DIAERESIS}m", "angström"),
        ("\N{LATIN SMALL LIGATURE FI}nch", "finch"),
        ("한국", "\u1112\u1161\u11ab\u1100\u116e\u11a8"),
    ],
)
def test_spellings_of_one_answer_match(answer, truth):
    output = judged(answer, truth)
    assert (output.reward, output.is_correct) == (1.0, True)


@pytest.mark.parametrize(
    ("answer", "truth"),
    [
        ("5", "-5"),
        ("-5", "5"),
        ("-5", 5),
        ("314", "3.14"),
        ("3.14", "314"),
        ("15", "1.5"),
        ("1.5", 15),
        ("3,14", "314"),
        ("$3.5", "-$3.5"),
        ("-$5", "$5"),
        ("31", "3-1"),
        ("130", "1:30"),
        ("12", "1/2"),
        ("-1.5", "1.5"),
        ("5 °C", "\N{MINUS SIGN}5 °C"),
        ("15 kg", "1.5 kg"),
        ("the answer is 250 metres", "-250 metres"),
        ("1.500", "1500"),
        ("cafe", "café"),
    ],
)
def test_sign_and_decimal_point_count(answer, truth):
    output = judged(answer, truth)
    assert (output.reward, output.is_correct) == (0.0, False)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"It is \boxed{Velmora}, not <answer>Harrowick</answer>.", "Velmora"),
        (r"\boxed{Harrowick} no: \boxed{\text{Velmora}}", "Velmora"),
        ("<answer>Harrowick</answer> or <answer> Velmora\n</answer>", "Velmora"),
        ("I read a lot.\nVelmora\n\n", "Velmora"),
        (r"\boxed{Harrowick}</think>Velmora", "Velmora"),
        (r"\boxed{Velmora", r"\boxed{Velmora"),
        ("<answer>Velmora", "<answer>Velmora"),
        (r"\boxed{}", ""),
        ("", ""),
    ],
)
def test_where_the_answer_is_looked_for(text, answer):
    assert extracted_answer(text) == answer


def test_expected_answer_may_be_called_answer():
    assert search_reward_fn({"answer": "Velmora"}, "Velmora").reward == 1.0
    assert search_reward_fn({"answer": "Velmora", "ground_truth": "Quenny"}, "Velmora").reward == 0.0


@pytest.mark.parametrize(
    "task", [{}, {"question": "?"}, {"ground_truth": None}, {"answer": []}, {"answer": ["", " "]}]
)
def test_task_without_an_expected_answer_is_an_error(task):
    with pytest.raises(DatasetError, match="'ground_truth'"):
        search_reward_fn(task, "Velmora")


@pytest.mark.parametrize(
    "task",
    [
        {"ground_truth": None, "answer": "Velmora"},
        {"ground_truth": "", "answer": "Velmora"},
        {"ground_truth": ["", None, "Velmora"]},
    ],
)
def test_empty_expectations_are_passed_over(task):
    assert search_reward_fn(task, "Velmora").reward == 1.0
    assert search_reward_fn(task, "").reward == 0.0


@pytest.mark.parametrize("truth", [{"target": "Velmora"}, ["Velmora", {"aliases": []}], float("nan")])
def test_expectation_that_is_neither_text_nor_number_is_error(truth):
    with pytest.raises(DatasetError, match="no answer can equal"):
        search_reward_fn({"ground_truth": truth}, "Velmora")
