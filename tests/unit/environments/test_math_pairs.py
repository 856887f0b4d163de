"""The table of pairs: the verdicts in it were written by hand and committed before the reward saw them."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import pytest

from environments import math_reward_fn

DISAGREEMENTS: dict[tuple[str, str], str] = {}
"""The pairs (ground truth, answer) on which reward and table do not agree, each with the reason."""


def rows() -> list[dict[str, str]]:
    table = Path(__file__).with_name("math_pairs.tsv").read_text(encoding="utf-8")
    return list(csv.DictReader(table.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE))


def test_table_has_many_kinds_of_answers_half_of_them_wrong() -> None:
    verdicts, kinds = (Counter(row[column] for row in rows()) for column in ("verdict", "kind"))
    assert set(verdicts) == {"right", "wrong"}
    assert verdicts["wrong"] >= verdicts["right"] >= 150
    assert len(kinds) >= 12
    assert min(kinds.values()) >= 12


@pytest.mark.slow
def test_reward_agrees_with_the_table_of_pairs() -> None:
    disagreeing = {}
    for row in rows():
        output = math_reward_fn({"ground_truth": row["truth"]}, rf"So \boxed{{{row['answer']}}}")
        if output.is_correct is not (row["verdict"] == "right"):
            disagreeing[row["truth"], row["answer"]] = output.reward
    assert disagreeing.keys() == DISAGREEMENTS.keys()
    assert 1.0 not in disagreeing.values()  # no wrong answer is paid
    assert len(disagreeing) <= 0.03 * len(rows())
