"""The agreement of a judge with labels, by the command."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from scripted_judge import judged, serving, verdict

from environments.agreement import Agreement, agreement, main
from environments.data.datasets import Dataset
from environments.rewards.group_judge import GroupJudge
from environments.rewards.judge import Judge
from environments.rewards.judge_ledger import JudgeLedger


def is_long(task_info: dict[str, Any], action: str) -> float:
    assert task_info == {"question": "Why?"}, "a judge is not shown the label"
    return float(len(action) > 3)


def rows(*labelled: tuple[str, Any]) -> Dataset:
    return Dataset({"question": "Why?", "response": text, "label": label} for text, label in labelled)


def written(folder: Path, *labelled: tuple[str, Any]) -> str:
    path = folder / "labels.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(*labelled)), encoding="utf-8")
    return str(path)


def test_command_prints_accuracy_and_kappa(tmp_path: Path, capsys: Any) -> None:
    labelled = [("long", True)] * 40 + [("no", True)] * 10 + [("long", False)] * 5 + [("no", False)] * 45
    assert main([f"{__name__}:is_long", "--labels", written(tmp_path, *labelled)]) == 0
    printed = capsys.readouterr().out
    # Chance is 0.5 * 0.45 + 0.5 * 0.55, so kappa is (0.85 - 0.5) / (1 - 0.5).
    assert "accuracy 0.850, Cohen's kappa 0.700, of 100 answers" in printed
    assert [line.split() for line in printed.splitlines() if line.startswith("label ")] == [
        ["label", "true", "40", "10"],
        ["label", "false", "5", "45"],
    ]


@pytest.mark.parametrize(
    ("counts", "kappa"), [((20, 5, 10, 15), 0.4), ((45, 15, 25, 15), 0.1304), ((25, 35, 5, 35), 0.2593)]
)
def test_kappa_is_that_of_published_tables(counts: tuple[int, ...], kappa: float) -> None:
    """Tables of Sim and Wright 2005, as Wikipedia's "Cohen's kappa" has them."""
    cells = [(True, True), (True, False), (False, True), (False, False)]
    found = Agreement(Counter(dict(zip(cells, counts, strict=True))), [])
    assert found.kappa == pytest.approx(kappa, abs=5e-5)


def test_agreement_without_two_kinds_of_labels_has_no_kappa() -> None:
    found = agreement(is_long, rows(("long", True), ("longer", "true"), ("longest", 1)), "response", "label")
    assert found.accuracy == 1.0 and math.isnan(found.kappa)


def test_answer_without_a_verdict_is_named_and_not_counted(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(body: dict[str, Any], number: int) -> str:
        answer = judged(body)["answer"]
        return "Hm." if answer == "odd" else verdict(answer == "good")

    with serving(script) as server:
        ledger = JudgeLedger(tmp_path / "judge.sqlite", max_calls=4)
        judge = Judge(server.endpoint(), {"It is good.": 1.0}, ledger=ledger, concurrency=1)
        monkeypatch.setitem(globals(), "judge", judge)
        labels = written(tmp_path, ("good", True), ("odd", True), ("bad", True), ("worse", False))
        assert main([f"{__name__}:judge", "--labels", labels]) == 1
    printed = capsys.readouterr().out
    assert "accuracy 0.500" in printed and "of 2 answers" in printed
    assert "2 without a verdict, the first one: row 1: The model 'scripted'" in printed
    assert "The ledger has 4 calls and 40 tokens." in printed


def longer_of(body: dict[str, Any], number: int) -> str:
    """Prefer the longer of two answers; of equally long ones, the first."""
    first, second = judged(body)["answers"].values()
    return verdict(1, 2) if len(first) >= len(second) else verdict(2, 1)


@pytest.mark.parametrize("compares", [True, False])
def test_pairs_are_counted_by_the_better_answer(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, compares: bool
) -> None:
    pairs = [("long", "no", True), ("no", "long", True), ("no", "long", "0"), ("one", "two", 1)]
    path = tmp_path / "pairs.jsonl"
    names = ("response", "other", "label")
    rows = [{"question": "Why?", **dict(zip(names, pair, strict=True))} for pair in pairs]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with serving(longer_of) as server:
        judge = GroupJudge(Judge(server.endpoint(), {"It is good.": 1.0}, concurrency=1))
        monkeypatch.setitem(globals(), "judge", judge if compares else is_long)
        assert main([f"{__name__}:judge", "--labels", str(path), "--other", "other"]) == 1
    printed = capsys.readouterr().out
    assert "accuracy 0.667" in printed and "of 3 answers" in printed
    assert "1 without a verdict, the first one: row 3: it finds both equally good." in printed
    # Two orders of three pairs: a pair with its answers exchanged is the same.
    assert ("The ledger has 4 calls" in printed) == compares


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--label", "good"], "Row 0 has no 'good' (its columns: question, response, label): name it with"),
        (
            ["--other", "second"],
            "Row 0 has no 'second' (its columns: question, response, label): name it with",
        ),
        (["--answer", "label"], "Row 0: label='maybe' is no text"),
        ([], "Row 0: label=maybe has to be true or false"),
    ],
)
def test_row_that_cannot_be_compared_is_named(
    tmp_path: Path, capsys: Any, arguments: list[str], sentence: str
) -> None:
    label = "maybe" if "label" not in arguments else 0.5
    sentence = sentence.replace("'maybe'", "0.5")
    labels = written(tmp_path, ("good", label))
    assert main([f"{__name__}:is_long", "--labels", labels, *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_judge_that_is_not_there_is_named(tmp_path: Path, capsys: Any) -> None:
    assert main(["math:nothing", "--labels", written(tmp_path, ("good", True))]) == 2
    assert "math has no function 'nothing'" in capsys.readouterr().err
