r"""The reward for questions that a search answers: how much of the expected answer is in the given one?"""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from typing import Any

from environments.rewards.base import RewardOutput, lacking
from environments.rewards.math import expected_texts
from environments.rewards.reading import last_boxed
from environments.thoughts import split_thought

MIN_F1 = 0.3
"""Least share of the expected answer's words that earns anything: less is chance."""

_ALL_OR_NOTHING = {"yes", "no", "noanswer"}
_DASHES = dict.fromkeys(map(ord, "\N{MINUS SIGN}\N{EN DASH}\N{HYPHEN}"), "-")
_SPACES = "\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}"
_NUMBER_OR_PUNCTUATION = re.compile(
    r"(?P<number>(?<![\d.])(?:(?<![\w)\]])[-+])?[$€£¥]?"  # in 1939-1945 and COVID-19 there is no sign
    r"(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|(?<!\w)\.\d+)(?![.,]?\d))"  # in 4.7.1776 no decimal point
    rf"|(?P<between>(?<=\d)[{re.escape(string.punctuation)}](?=\d))|[{re.escape(string.punctuation)}]"
)
_NUMBER = re.compile(r"-?\d*\.?\d+")


def search_reward_fn(task_info: dict[str, Any], action: str) -> RewardOutput:
    r"""Reward 1 for an exact match, else the F1 of the words if that is at least ``MIN_F1``, else 0.

    Case, punctuation and articles do not count, and where several answers are expected, the best match
    does (Rajpurkar et al. 2016, "SQuAD"). An expected "yes", "no" or "noanswer" has to be
    matched exactly, as in HotpotQA. The sign and the decimal point of a number do count, and so does what
    stands between two of them, as in 3-1; the commas between its thousands do not, and where numbers are
    expected, the answer has to have one of them (Dua et al. 2019, "DROP"). Letters that
    Unicode composes in several ways are the same.

    The expected answer is ``task_info["ground_truth"]``, or where that is empty ``task_info["answer"]``: a
    text, a number, or a list of these. The answer is looked for outside of the thoughts: the last
    ``\boxed{...}``; if there is none, the last ``<answer>...</answer>``; and if there is none either, the
    last line that is not empty.
    Metadata: the extracted ``answer``, ``f1``, and ``em``, whether it is an exact match.

    Raises:
        DatasetError: the task has no expected answer, or one of another type.
    """
    truths = _ground_truths(task_info)
    answer = extracted_answer(action)
    exact = any(normalised(answer) == normalised(truth) for truth in truths)
    f1 = max(f1_score(answer, truth) for truth in truths)
    reward = 1.0 if exact else f1 if f1 >= MIN_F1 else 0.0
    return RewardOutput(reward, {"answer": answer, "f1": f1, "em": exact}, is_correct=exact)


def extracted_answer(text: str) -> str:
    """Return the answer in ``text``; empty if there is none."""
    text = split_thought(text)[1]
    boxed = last_boxed(text)
    if boxed is not None:
        return re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", boxed).strip()
    before, closing, _ = text.rpartition("</answer>")
    if closing and "<answer>" in before:
        return before.rpartition("<answer>")[2].strip()
    return text.strip().rpartition("\n")[2].strip()


def f1_score(answer: str, truth: str) -> float:
    """Return the harmonic mean of the shares of words that ``answer`` and ``truth`` have in common."""
    given, expected = normalised(answer), normalised(truth)
    if given != expected and _ALL_OR_NOTHING & {given, expected}:
        return 0.0
    given_words, expected_words = given.split(), expected.split()
    numbers = set(filter(_NUMBER.fullmatch, expected_words))
    if numbers and not numbers & set(given_words):
        return 0.0
    common = (Counter(given_words) & Counter(expected_words)).total()
    return 2 * common / (len(given_words) + len(expected_words)) if common else 0.0


def normalised(text: str) -> str:
    """Return ``text`` in lower case, without punctuation, articles and superfluous spaces.

    A number keeps its sign and its decimal point. Where nothing would be left, as of the mark "A", only the
    case changes.
    """
    text = re.sub(rf"(?<=\d)[{_SPACES}](?=\d{{3}}(?!\d))", ",", text.translate(_DASHES))
    lower = unicodedata.normalize("NFKC", text).lower()
    plain = _NUMBER_OR_PUNCTUATION.sub(_number_alone, lower)
    plain = " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split()) or lower.strip()
    if "." in plain and _NUMBER.fullmatch(plain):
        return plain.rstrip("0").rstrip(".")
    return plain


def _number_alone(found: re.Match[str]) -> str:
    if found["number"]:
        return re.sub(r"^(-?)(?=\.)", r"\g<1>0", re.sub("[,+$]", "", found[0]))
    return " " if found["between"] else ""


def _ground_truths(task_info: dict[str, Any]) -> list[str]:
    for key in ("ground_truth", "answer"):
        if texts := expected_texts(task_info.get(key)):
            return texts
    missing = "'ground_truth' and no 'answer' that says something"
    raise lacking(task_info, missing, "add the expected answer, as a text or a list of texts.")
