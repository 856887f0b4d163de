"""Known data sets, prepared from files with the columns that they really have; the rows are invented."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from shown_programs import COLLECT, COMMANDS, MIGRATION, ROOT, TRAIN, text_of

from environments import DatasetRegistry, math_reward_fn, search_reward_fn
from environments.data.prepare import CORPUS, SETS, SOURCES, main, prepare
from environments.errors import DatasetError
from environments.tools.retrieval import LocalRetrievalTool
from launch.recipes.task_file import workload_of
from launch.settings.compose import compose

Rows = Sequence[Mapping[str, Any]]

H4 = [
    {
        "id": number,
        "problem": f"Find {number} + 200.",
        "solution": f"It is $\\boxed{{{number + 200}}}$.",
        "answer": str(number + 200),
        "url": "https://example.org",
        "year": "2024",
    }
    for number in (60, 61)
]
CAPITALS = [{"ID": "2024-I-1", "Problem": "Find 60 + 200.", "Solution": "It is 260.", "Answer": 260}]
GSM8K = [{"question": "Ann has 3 bags of 14 apples. How many?", "answer": "3*14=<<3*14=42>>42\n#### 42"}]
MATH = [
    {
        "problem": "Halve $1$.",
        "level": "Level 1",
        "type": "Algebra",
        "solution": r"So $\boxed{\frac{1}{2}}$.",
    },
    {"problem": "Add $1+1$.", "level": "Level 1", "type": "Algebra", "solution": r"So it is $\boxed 2$."},
]
MATH500 = [
    {
        "problem": "Add $1+1$.",
        "solution": r"It is $\boxed{2}$.",
        "answer": "2",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    }
]
AIME2025 = [{"problem": "Find 7 + 8.", "answer": "15", "id": "0"}]
DEEPSCALER = [{"problem": "Add $1+1$.", "answer": "2", "solution": "Count."}]
NQ_OPEN = [{"question": "who built the mill", "answer": ["Ada Stone", "A. Stone"]}]
TITLES = ["The Mill", "Ada Stone"]
SENTENCES = [["The mill stands in Lund.", " Ada Stone built it."], ["Ada Stone was born in Oslo."]]
HOTPOT: dict[str, Any] = {
    "id": "5a1",
    "question": "Where was the builder of the mill born?",
    "answer": "Oslo",
    "type": "bridge",
    "level": "medium",
    "supporting_facts": {"title": TITLES, "sent_id": [1, 0]},
    "context": {"title": TITLES, "sentences": SENTENCES},
}
HOTPOT_OF_SITE = {
    "_id": "5a1",
    **{name: HOTPOT[name] for name in ("answer", "question", "type", "level")},
    "supporting_facts": [["The Mill", 1], ["Ada Stone", 0]],
    "context": [[title, texts] for title, texts in zip(TITLES, SENTENCES, strict=True)],
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TROUPE_HOME", str(tmp_path / "home"))


def written(path: Path, rows: Rows) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        path.write_text(json.dumps(rows) if path.suffix == ".json" else lines)
    return path


def prepared(name: str, *places: object, status: int = 0) -> None:
    assert main([name, "--from", *map(str, places)]) == status


@pytest.mark.parametrize(
    ("name", "file", "rows", "split", "truths"),
    [
        ("aime2024", "train-00000-of-00001.parquet", H4, "test", ["260", "261"]),
        ("aime2024", "aime_2024_problems.csv", CAPITALS, "test", ["260"]),
        ("aime2024", "aime_2024_problems.parquet", CAPITALS, "test", [260]),
        ("aime2025", "test.jsonl", AIME2025, "test", ["15"]),
        ("deepscaler_math", "deepscaler.json", DEEPSCALER, "train", ["2"]),
        ("gsm8k", "gsm8k_test.jsonl", GSM8K, "test", ["42"]),
        ("math", "train-00000-of-00001.parquet", MATH, "train", [r"\frac{1}{2}", "2"]),
        ("math500", "test.jsonl", MATH500, "test", ["2"]),
        ("natural_questions", "validation-00000-of-00001.parquet", NQ_OPEN, "test", [NQ_OPEN[0]["answer"]]),
        ("hotpotqa", "hotpot_dev_distractor_v1.json", [HOTPOT_OF_SITE], "test", ["Oslo"]),
    ],
)
def test_file_of_real_columns_is_registered(
    tmp_path: Path, name: str, file: str, rows: Rows, split: str, truths: list[object]
) -> None:
    prepared(name, written(tmp_path / file, rows))
    tasks = DatasetRegistry.load_dataset(name, split)
    assert [task["ground_truth"] for task in tasks] == truths
    column = next(key for key in rows[0] if key.lower() in ("question", "problem"))
    assert [task["question"] for task in tasks] == [row[column] for row in rows]
    assert {task["data_source"] for task in tasks} == {name}
    assert set(tasks[0]) == {*rows[0], "question", "ground_truth", "data_source"} - {"context"}
    judge = search_reward_fn if name in ("natural_questions", "hotpotqa") else math_reward_fn
    answer = truths[0][0] if isinstance(truths[0], list) else truths[0]
    assert judge(task_info=tasks[0], action=f"\\boxed{{{answer}}}").reward == 1.0
    assert judge(task_info=tasks[0], action="\\boxed{wrong}").reward == 0.0


def copy_of_hub(folder: Path) -> Path:
    """A folder in the shape of a repository of the hub, with files that are no rows of it."""
    written(folder / "main" / "train-00000-of-00002.parquet", GSM8K)
    written(folder / "main" / "train-00001-of-00002.parquet", GSM8K)
    written(folder / "main" / "test-00000-of-00001.parquet", GSM8K)
    written(folder / "main" / "infos.jsonl", [{"size": 1}])
    written(folder / "socratic" / "train-00000-of-00001.parquet", [{"other": 1}])
    written(folder / "main" / ".cache" / "train.jsonl", [{"other": 1}])
    return folder


def test_folder_has_a_file_or_several_per_split(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared("gsm8k", copy_of_hub(tmp_path / "gsm8k"))
    assert [len(DatasetRegistry.load_dataset("gsm8k", split)) for split in ("train", "test")] == [2, 1]
    shown = capsys.readouterr().out
    for text in (
        "gsm8k/train: 2 tasks, columns question, answer, ground_truth, data_source.",
        "gsm8k/test: 1 tasks",
        f"Not used, as their names fit no split: {tmp_path / 'gsm8k' / 'main' / 'infos.jsonl'}.",
        '"ground_truth": "42"',
    ):
        assert text in shown
    (settings,) = re.findall(r"^Train: .*train (dataset=.*)$", shown, re.MULTILINE)
    workload = workload_of(compose(["run.directory=unused", *settings.split()]))
    assert (len(workload.train_dataset), len(workload.val_dataset or ())) == (2, 1)


def test_test_set_is_shown_with_its_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepared("aime2024", written(tmp_path / "train.jsonl", H4))
    shown = capsys.readouterr().out
    (settings,) = re.findall(r"^Evaluate: .*evaluate (dataset=.*)$", shown, re.MULTILINE)
    assert len(workload_of(compose(["run.directory=unused", *settings.split()])).train_dataset) == 2


def test_what_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trimmed = {name: HOTPOT[name] for name in ("question", "answer")}
    prepared("hotpotqa", written(tmp_path / "train.jsonl", [trimmed]))
    shown = capsys.readouterr().out
    assert "Nothing found for hotpotqa/test.\n" in shown and "held_out" not in shown
    assert "No search_corpus: the rows have no passages in 'context'." in shown


def test_hub_is_read_by_the_package_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    written(tmp_path / "hub" / "train.jsonl", [HOTPOT, HOTPOT])
    written(tmp_path / "hub" / "validation.jsonl", [HOTPOT])
    prepared("hotpotqa", f"hub:{tmp_path / 'hub'}")
    assert [len(DatasetRegistry.load_dataset("hotpotqa", split)) for split in ("train", "test")] == [2, 1]
    task = DatasetRegistry.load_dataset("hotpotqa", "test")[0]
    assert task == {
        **{key: value for key, value in HOTPOT.items() if key != "context"},
        "ground_truth": "Oslo",
        "data_source": "hotpotqa",
    }


@pytest.mark.parametrize("row", [HOTPOT, HOTPOT_OF_SITE], ids=["hub", "site"])
def test_passages_of_hotpotqa_become_the_corpus(tmp_path: Path, row: dict[str, Any]) -> None:
    prepared("hotpotqa", written(tmp_path / "hotpot_train_v1.1.json", [row, row]))
    assert LocalRetrievalTool.corpus == CORPUS
    assert list(DatasetRegistry.load_dataset(CORPUS)) == [
        {"id": "hotpotqa-1", "title": "The Mill", "text": "The mill stands in Lund. Ada Stone built it."},
        {"id": "hotpotqa-2", "title": "Ada Stone", "text": "Ada Stone was born in Oslo."},
    ]


def test_corpus_of_ones_own_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    DatasetRegistry.register_dataset(CORPUS, [{"text": "mine"}])
    prepared("hotpotqa", written(tmp_path / "train.jsonl", [HOTPOT]))
    assert list(DatasetRegistry.load_dataset(CORPUS)) == [{"text": "mine"}]
    assert "search_corpus is registered already and was left as it is." in capsys.readouterr().out


def prepare_hotpotqa_combined(folder: Path) -> None:
    for split in ("train", "validation"):
        written(folder / "hotpotqa" / "distractor" / f"{split}-00000-of-00001.parquet", [HOTPOT])
        written(folder / "nq" / f"{split}-00000-of-00001.parquet", NQ_OPEN)
    prepared("hotpotqa_combined", folder / "hotpotqa", folder / "nq")


def test_combined_set_has_the_columns_of_both_sources(tmp_path: Path) -> None:
    prepare_hotpotqa_combined(tmp_path)
    for split in ("train", "test"):
        tasks = DatasetRegistry.load_dataset("hotpotqa_combined", split)
        assert [(task["data_source"], task["ground_truth"]) for task in tasks] == [
            ("hotpotqa", "Oslo"),
            ("natural_questions", ["Ada Stone", "A. Stone"]),
        ]
        assert all(task["question"] for task in tasks)


def test_unreadable_row_is_an_error_or_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lacking = [{"question": "", "answer": "#### 1"}, {"question": "And?", "answer": "forty-two"}]
    path = written(tmp_path / "train.jsonl", [*GSM8K, *lacking])
    prepared("gsm8k", path, status=2)
    reasons = (
        f"{path}, row 1 has no question in 'question'; {path}, row 2 has no answer behind '####' in 'answer'"
    )
    assert capsys.readouterr().err == (
        f"DatasetError: 2 rows cannot be read: {reasons}. Correct them, or leave them out with --leave-out.\n"
    )
    assert not DatasetRegistry.dataset_exists("gsm8k")
    prepared("gsm8k", path, "--leave-out")
    assert len(DatasetRegistry.load_dataset("gsm8k", "train")) == 1
    assert f"Rows left out: 2 ({reasons})." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "place", "message"),
    [
        (
            "amie2024",
            ".",
            "Unknown data set: 'amie2024'. Did you mean 'aime2024'? There are: aime2024, aime2025",
        ),
        ("gsm8k", "nowhere", "There is no file or folder"),
        ("gsm8k", "problems.jsonl", "Name each file for its split, such as train.jsonl"),
        ("gsm8k", "empty", "has no file that can be read, and gsm8k needs train and test"),
        ("gsm8k", "none_train.jsonl", "gsm8k/train has no rows: "),
        ("gsm8k", "train.txt", "names no known format"),
        (
            "math500",
            "problems.jsonl",
            "row 0 has the columns question, reply: math500 needs a question in one",
        ),
        ("hotpotqa_combined", "train.jsonl", "the right answer in answer. Rename the columns."),
        ("gsm8k", "hub:{}/empty", "Put its files into a folder and pass --from FOLDER."),
    ],
)
def test_wrong_place_is_named_with_its_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, place: str, message: str
) -> None:
    for file in ("problems.jsonl", "train.jsonl", "train.txt"):
        written(tmp_path / file, [{"question": "What?", "reply": "42"}])
    written(tmp_path / "none_train.jsonl", [])
    (tmp_path / "empty").mkdir()
    where = place.format(tmp_path) if place.startswith("hub:") else str(tmp_path / place)
    prepared(name, where, status=2)
    assert message in capsys.readouterr().err
    assert DatasetRegistry.get_dataset_names() == []


def run_up_to(program: str, end: str, shown: str, folder: Path) -> list[int]:
    """Numbers that a program of the reference's page prints where it would begin to play or to train."""
    assert program.count(end) == 1
    (folder / "program.py").write_text(program.replace(end, f"print('numbers', {shown})"))
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (line,) = re.findall(r"^numbers (.*)$", done.stdout, re.MULTILINE)
    return [int(number) for number in line.split()]


@pytest.mark.slow
def test_reference_program_collects_on_prepared_tasks(tmp_path: Path, tiny_model: Path) -> None:
    prepared("aime2024", written(tmp_path / "aime.parquet", H4))
    model = tmp_path / "Qwen" / "Qwen3-4B"
    model.parent.mkdir()
    model.symlink_to(tiny_model)
    end = "results = asyncio.run(engine.execute_tasks(tasks))\ncompute_pass_at_k(results)\n"
    assert run_up_to(COLLECT, end, "len(tasks)", tmp_path) == [16]


@pytest.mark.slow
def test_reference_program_trains_on_prepared_tasks(tmp_path: Path) -> None:
    prepare_hotpotqa_combined(tmp_path)
    shown = (
        "len(trainer.workload.train_dataset), len(trainer.workload.val_dataset), "
        "len(LocalRetrievalTool()(query='Ada Stone', top_k=2).metadata['ids'])"
    )
    assert run_up_to(TRAIN, "trainer.train()", shown, tmp_path) == [2, 2, 2]


def test_versions_of_one_split_are_not_put_together(tmp_path: Path) -> None:
    """GSM8K's own repository has each task twice, with and without questions about its steps."""
    for name in ("train.jsonl", "train_socratic.jsonl", "test.jsonl"):
        written(tmp_path / name, GSM8K)
    with pytest.raises(DatasetError, match=r"gsm8k/train.* train\.jsonl, train_socratic\.jsonl\. Name those"):
        prepare("gsm8k", [str(tmp_path)])


def test_sources_of_a_set_have_the_same_splits_and_reward() -> None:
    for names in SETS.values():
        assert len({tuple(SOURCES[name].splits) for name in names}) == 1
        assert len({SOURCES[name].reward for name in names}) == 1


def test_pages_name_the_sets_that_there_are() -> None:
    page = text_of(COMMANDS)
    (names,) = re.findall(r"^There are (`aime2024`.*?)\. The command", page, re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", names) == sorted(SETS)
    used = re.findall(r"environments\.data\.prepare (\w+) --from", page + text_of(MIGRATION))
    assert len(used) >= 6 and set(used) <= set(SETS)
