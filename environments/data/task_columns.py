"""Columns of a data set by their common names: which holds the question, and which the right answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from environments.data.dataset_files import Row
from environments.data.datasets import Dataset
from environments.errors import DatasetError

QUESTIONS = ("question", "prompt", "problem", "messages", "instruction", "query", "input")
ANSWERS = ("ground_truth", "answer", "solution", "final_answer", "expected_answer", "target", "reward_model")
FINAL_ANSWER = "####"
"""GSM8K's mark between an explanation and the number that it ends with."""

EMPTY: tuple[object, ...] = (None, "", [])
"""Values of a column that hold nothing."""


def named_columns(tasks: Dataset, source: str) -> tuple[Dataset, str]:
    """Give each task ``question`` or ``messages``, and ``ground_truth``; all its columns stay.

    The first of ``QUESTIONS`` and of ``ANSWERS`` that the first row has is taken, for all rows; upper and
    lower case are the same. A list of messages stays a conversation. Of an answer like GSM8K's, the part
    behind ``####`` is taken, and of verl's ``reward_model`` its ``ground_truth``. Data without any of
    ``ANSWERS``, such as code with ``tests``, is left to the reward function.

    Args:
        source: name of the data, for messages.

    Returns:
        The tasks, and a sentence about what was taken.

    Raises:
        DatasetError: there are no rows, or one has no question; its message lists the columns.
    """
    if not len(tasks):
        raise DatasetError(f"{source} has no rows: there is nothing to train on.")
    question = column_of(_filled(tasks[0]), QUESTIONS)
    if question is None:
        raise DatasetError(
            f"{source} has no question: its columns are {', '.join(map(str, tasks[0]))}. Name the question's "
            f"column as one of {', '.join(QUESTIONS)}, and that of the right answer as one of "
            f"{', '.join(ANSWERS)}."
        )
    answer = column_of(_filled(tasks[0]), ANSWERS)
    rows = [_named(row, question, answer, f"{source}, row {index}") for index, row in enumerate(tasks)]
    judged_by = "no column with a right answer" if answer is None else f"the right answer from {answer!r}"
    sentence = f"{source}: {len(rows)} tasks, the question from {question!r}, {judged_by}."
    return Dataset(rows, name=tasks.name, split=tasks.split), sentence


def column_of(columns: Iterable[str], names: Sequence[str]) -> str | None:
    """Return the column with the first of ``names`` that there is, be it upper or lower case."""
    by_name = {column.lower(): column for column in columns}
    return next((by_name[name] for name in names if name in by_name), None)


def marked_answer(text: str) -> str | None:
    """Return what stands behind GSM8K's mark, or None where the mark is missing."""
    _, mark, answer = text.rpartition(FINAL_ANSWER)
    return answer.strip() if mark else None


def _filled(row: Row) -> list[str]:
    return [name for name, value in row.items() if value not in EMPTY]


def _named(row: Row, question: str, answer: str | None, place: str) -> Row:
    text = row.get(question)
    if text in EMPTY:
        raise DatasetError(f"{place} has no {question!r}, where the first row has its question.")
    named = {**row, ("messages" if is_conversation(text) else "question"): text}
    if answer is not None:
        truth = row.get(answer)
        if answer == "reward_model" and isinstance(truth, Mapping):
            truth = truth.get("ground_truth")
        marked = marked_answer(truth) if isinstance(truth, str) else None
        named["ground_truth"] = truth if marked is None else marked
    return named


def is_conversation(text: object) -> bool:
    """Return whether a question is a list of messages, as chat templates take it."""
    return isinstance(text, list) and all(isinstance(each, Mapping) and "role" in each for each in text)
