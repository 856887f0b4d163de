"""Questions that take two searches, in the shape of HotpotQA, and the passages that answer them.

The country in them, Aldermere, does not exist, so no model knows an answer beforehand. The texts are in
``aldermere/``: under each question stand its answer and the titles of the two passages that are needed; above
each passage stands its title.
"""

from __future__ import annotations

from importlib.resources import files

from environments.data.datasets import Dataset, Row


def search_questions() -> Dataset:
    """Return the tasks: "id", "question", "answer", "type" (bridge or comparison) and "supporting_facts"."""
    questions = [("bridge", block) for block in _blocks("bridge")]
    questions += [("comparison", block) for block in _blocks("comparison")]
    tasks = [_task(f"question-{n}", *question) for n, question in enumerate(questions)]
    return Dataset(tasks, name="aldermere")


def search_passages() -> list[Row]:
    """Return the corpus: rows with "id", "title" and "text"."""
    return [
        {"id": f"passage-{number}", "title": block[0], "text": " ".join(block[1:])}
        for number, block in enumerate(_blocks("passages"))
    ]


def _blocks(name: str) -> list[list[str]]:
    text = (files("environments.data") / "aldermere" / f"{name}.txt").read_text(encoding="utf-8")
    return [block.splitlines() for block in text.strip().split("\n\n")]


def _task(task_id: str, kind: str, block: list[str]) -> Row:
    question, facts = block
    answer, *titles = facts.split(" | ")
    return {"id": task_id, "question": question, "answer": answer, "type": kind, "supporting_facts": titles}
