from __future__ import annotations

import json
import os
import pickle
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from environments import Dataset, DatasetRegistry
from environments.errors import ConfigError, DatasetError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TROUPE_HOME", str(tmp_path))
    return tmp_path


def rows(n):
    return [{"id": i} for i in range(n)]


def test_dataset_is_a_sequence():
    dataset = Dataset(rows(4), name="n", split="s")
    assert len(dataset) == 4
    assert dataset[1] == {"id": 1}
    assert dataset[-1] == {"id": 3}
    assert list(dataset) == dataset.get_data() == rows(4)
    with pytest.raises(IndexError):
        dataset[4]


def test_slice_is_a_dataset_of_the_same_name():
    part = Dataset(rows(4), name="n", split="s")[1:3]
    assert isinstance(part, Dataset)
    assert (list(part), part.name, part.split) == ([{"id": 1}, {"id": 2}], "n", "s")


def test_changing_the_list_of_get_data_leaves_the_dataset_alone():
    dataset = Dataset(rows(2))
    dataset.get_data().clear()
    assert len(dataset) == 2


def test_repeat_puts_copies_next_to_each_other():
    assert [row["id"] for row in Dataset(rows(2)).repeat(n=3)] == [0, 0, 0, 1, 1, 1]


def test_repeated_rows_are_independent_of_each_other():
    dataset = Dataset([{"list": [1], "key": "old"}])
    repeated = dataset.repeat(2)
    repeated[0]["list"].append(2)
    repeated[0]["key"] = "new"
    assert repeated[1] == dataset[0] == {"list": [1], "key": "old"}


@pytest.mark.parametrize("n", [0, -1])
def test_repeat_needs_at_least_one(n):
    with pytest.raises(ValueError, match=f"n={n}"):
        Dataset(rows(1)).repeat(n)


@pytest.mark.parametrize(("test_size", "number"), [(10, 10), (0.2, 10), (1, 1)])
def test_split_has_every_row_once(test_size: float, number: int) -> None:
    parts = Dataset(rows(50)).train_test_split(test_size, seed=3)
    assert [len(parts[name]) for name in ("train", "test")] == [50 - number, number]
    assert sorted(row["id"] for part in parts.values() for row in part) == list(range(50))
    assert list(parts["test"]) == list(Dataset(rows(50)).train_test_split(test_size, seed=3)["test"])
    assert list(parts["test"]) != list(Dataset(rows(50)).train_test_split(test_size, seed=4)["test"])


@pytest.mark.parametrize("test_size", [0, 50, 0.001, 0.999])
def test_split_leaves_no_part_empty(test_size: float) -> None:
    with pytest.raises(ValueError, match=f"test_size={test_size} of 50 rows"):
        Dataset(rows(50)).train_test_split(test_size)


def test_shuffle_depends_only_on_the_seed_and_loses_nothing():
    dataset = Dataset(rows(50))
    assert list(dataset.shuffle(1)) == list(dataset.shuffle(1)) != list(dataset.shuffle(2))
    assert sorted(row["id"] for row in dataset.shuffle(1)) == list(range(50))
    assert list(dataset) == rows(50)


def test_select_keeps_the_order_of_the_indices():
    assert list(Dataset(rows(4)).select([3, 0, 3])) == [{"id": 3}, {"id": 0}, {"id": 3}]


def test_row_that_is_no_dict_is_named():
    with pytest.raises(DatasetError, match="Row 1 is 'text'"):
        Dataset([{}, "text"])


def test_what_is_registered_is_loaded():
    data = [{"q": "Zoë\u2028 \ud800", "n": 1.5, "deep": {"list": [1, None, True]}}, {}]
    registered = DatasetRegistry.register_dataset("math", data, "train")
    loaded = DatasetRegistry.load_dataset("math", "train")
    assert list(registered) == list(loaded) == data
    assert (loaded.name, loaded.split) == ("math", "train")


def test_registering_returns_what_will_be_loaded():
    assert list(DatasetRegistry.register_dataset("d", [{"t": (1, 2)}])) == [{"t": [1, 2]}]


def test_whatever_yields_dicts_can_be_registered():
    assert len(DatasetRegistry.register_dataset("a", Dataset(rows(2)))) == 2
    assert len(DatasetRegistry.register_dataset("b", (row for row in rows(3)))) == 3


@pytest.mark.slow
def test_hugging_face_dataset_is_registered_as_written():
    hugging_face = pytest.importorskip("datasets")
    written = [{"tests": [{"input": "1", "output": "1"}, {"functional": "assert True"}], "n": None}]
    arrow = hugging_face.Dataset.from_list(written)
    assert list(DatasetRegistry.register_dataset("d", arrow)) == written
    unclear = hugging_face.Dataset.from_list([{"tests": [{"input": "1", "output": None}]}])
    with pytest.raises(DatasetError, match=r"The data for 'd', row 0, column 'tests'\[0\]"):
        DatasetRegistry.register_dataset("d", unclear)
    listed = [{"tests": [{"input": "1", "output": None}]}]
    assert list(DatasetRegistry.register_dataset("d", listed)) == listed


def test_hugging_face_dataset_is_registered_split_by_split():
    hugging_face = pytest.importorskip("datasets")
    both = hugging_face.DatasetDict(
        train=hugging_face.Dataset.from_list(rows(3)), test=hugging_face.Dataset.from_list([{"q": None}])
    )
    assert list(DatasetRegistry.register_dataset("d", both["train"], "train")) == rows(3)
    assert list(DatasetRegistry.register_dataset("d", both["test"].with_format("numpy"), "test")) == [
        {"q": None}
    ]
    with pytest.raises(
        DatasetError, match=r"keys 'train', 'test'.*register_dataset\('d', data\[split\], split\)"
    ):
        DatasetRegistry.register_dataset("d", both)


def test_file_is_registered_by_its_path(tmp_path):
    path = tmp_path / "tasks.csv"
    path.write_text("question,answer\n1+1,2\n")
    for name in (path, str(path)):
        registered = DatasetRegistry.register_dataset("sums", name, "train")
        assert list(registered) == [{"question": "1+1", "answer": "2"}]
    with pytest.raises(DatasetError, match=r"no file .*none.json"):
        DatasetRegistry.register_dataset("none", tmp_path / "none.json")
    assert DatasetRegistry.get_dataset_names() == ["sums"]


def test_split_can_be_registered_from_its_own_file(home):
    DatasetRegistry.register_dataset("d", rows(5))
    path = DatasetRegistry.load_dataset("d").get_data_path()
    assert path == str(home / "datasets/d/default.jsonl")
    assert list(DatasetRegistry.register_dataset("d", path)) == rows(5)


def test_dataset_knows_its_file_and_a_selection_does_not(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text('[{"id": 0}, {"id": 1}]')
    dataset = Dataset.load_data(path)
    assert (list(dataset), dataset.get_data_path(), dataset.name) == (rows(2), str(path), None)
    assert dataset.shuffle(0).get_data_path() is Dataset(rows(2)).get_data_path() is None


def test_dataset_travels_with_its_rows(home):
    DatasetRegistry.register_dataset("d", rows(3), "train")
    sent = pickle.dumps(DatasetRegistry.load_dataset("d", "train"))
    DatasetRegistry.remove_dataset("d")
    received = pickle.loads(sent)
    assert (list(received), received.name, received.split) == (rows(3), "d", "train")


def test_one_jsonl_file_per_split_is_the_whole_storage(home):
    DatasetRegistry.register_dataset("d", rows(2), "test")
    files = [path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()]
    assert files == ["datasets/d/test.jsonl"]
    assert (home / files[0]).read_text() == '{"id": 0}\n{"id": 1}\n'


def test_home_is_the_users_unless_it_is_set(tmp_path, monkeypatch):
    monkeypatch.delenv("TROUPE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    DatasetRegistry.register_dataset("d", rows(1))
    assert (tmp_path / "me/.troupe/datasets/d/default.jsonl").is_file()


def test_home_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TROUPE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"file/datasets/n cannot be written to .*: set TROUPE_HOME to a"):
        DatasetRegistry.register_dataset("n", rows(1))


@pytest.mark.slow
def test_relative_home_travels_with_the_working_directory(tmp_path, monkeypatch):
    here, there = tmp_path / "driver", tmp_path / "unpacked_on_another_node"
    here.mkdir()
    monkeypatch.setenv("TROUPE_HOME", ".troupe")
    monkeypatch.chdir(here)
    DatasetRegistry.register_dataset("corpus", rows(3))
    here.rename(there)  # as Ray copies it; os.getcwd() of this process follows
    program = "from environments import DatasetRegistry; print(len(DatasetRegistry.load_dataset('corpus')))"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", program]
    there_it_is = subprocess.run(run, cwd=there, env=environment, capture_output=True, text=True)
    elsewhere = subprocess.run(run, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert there_it_is.stdout == "3\n", there_it_is.stderr
    assert f"Known in {tmp_path}/.troupe/datasets on host {platform.node()}: none" in elsewhere.stderr
    assert "send it with the job" in elsewhere.stderr


def test_listing_and_removing():
    for name, split in [("b", "test"), ("b", "train"), ("a", "default")]:
        DatasetRegistry.register_dataset(name, rows(1), split)
    assert DatasetRegistry.get_dataset_names() == ["a", "b"]
    assert DatasetRegistry.get_dataset_splits("b") == ["test", "train"]
    assert DatasetRegistry.dataset_exists("b")
    assert DatasetRegistry.dataset_exists("b", "test")
    assert not DatasetRegistry.dataset_exists("b", "validation")
    assert not DatasetRegistry.dataset_exists("c")

    assert DatasetRegistry.remove_dataset_split("b", "test")
    assert not DatasetRegistry.remove_dataset_split("b", "test")
    assert DatasetRegistry.get_dataset_splits("b") == ["train"]
    assert DatasetRegistry.remove_dataset("b")
    assert not DatasetRegistry.remove_dataset("b")
    assert DatasetRegistry.get_dataset_names() == ["a"]


def test_dataset_whose_last_split_is_gone_does_not_exist():
    DatasetRegistry.register_dataset("d", rows(1))
    DatasetRegistry.remove_dataset_split("d", "default")
    assert DatasetRegistry.get_dataset_names() == []
    assert not DatasetRegistry.dataset_exists("d")


def test_unknown_dataset_or_split_is_an_error_that_guesses():
    with pytest.raises(DatasetError, match=r"Known in .*: none\."):
        DatasetRegistry.load_dataset("hotpotqa")
    DatasetRegistry.register_dataset("hotpotqa", rows(1), "train")
    DatasetRegistry.register_dataset("aime", rows(1), "test")
    with pytest.raises(DatasetError, match=r"'hotpotq'.*Did you mean 'hotpotqa'\?.*: aime, hotpotqa\."):
        DatasetRegistry.load_dataset("hotpotq", "train")
    with pytest.raises(DatasetError, match=r"split of 'hotpotqa': 'trian'.*'train'"):
        DatasetRegistry.load_dataset("hotpotqa", "trian")
    with pytest.raises(DatasetError, match="'gsm'"):
        DatasetRegistry.get_dataset_splits("gsm")


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "a b", ".hidden", "a\n", "ä", "a" * 201])
def test_names_that_are_no_file_names_are_refused(name, home):
    (home / "x.jsonl").write_text("{}\n")
    for attempt in (
        lambda: DatasetRegistry.register_dataset(name, rows(1)),
        lambda: DatasetRegistry.register_dataset("d", rows(1), name),
        lambda: DatasetRegistry.load_dataset(name),
        lambda: DatasetRegistry.dataset_exists(name),
        lambda: DatasetRegistry.remove_dataset(name),
    ):
        with pytest.raises(DatasetError, match="cannot name"):
            attempt()


def test_longest_name_is_that_of_a_file():
    assert len(DatasetRegistry.register_dataset("d" * 200, rows(1), "s" * 200)) == 1


@pytest.mark.parametrize("bad", ["text", {"object": object()}, {("tuple", "key"): 1}])
def test_row_that_cannot_be_stored_is_named_and_old_data_stay(bad, home):
    DatasetRegistry.register_dataset("d", rows(2))
    with pytest.raises(DatasetError, match="Row 1"):
        DatasetRegistry.register_dataset("d", [{}, bad])
    assert list(DatasetRegistry.load_dataset("d")) == rows(2)
    assert [path.name for path in (home / "datasets/d").iterdir()] == ["default.jsonl"]


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_crash_before_the_replacement_leaves_the_old_data(moment, home, monkeypatch):
    DatasetRegistry.register_dataset("d", rows(2))

    def crash(*args):
        raise OSError("the disk is gone")

    with monkeypatch.context() as patch:
        patch.setattr(os, moment, crash)
        with pytest.raises(OSError, match="disk is gone"):
            DatasetRegistry.register_dataset("d", rows(9))
    assert list(DatasetRegistry.load_dataset("d")) == rows(2)
    assert [path.name for path in (home / "datasets/d").iterdir()] == ["default.jsonl"]


def test_what_a_killed_writer_leaves_behind_is_no_split(home):
    DatasetRegistry.register_dataset("d", rows(2))
    (home / "datasets/d/.default.0123.unfinished").write_text('{"id": ')
    (home / "datasets/e").mkdir()
    assert DatasetRegistry.get_dataset_names() == ["d"]
    assert DatasetRegistry.get_dataset_splits("d") == ["default"]


WRITER = """
import sys
from environments import DatasetRegistry
size = int(sys.argv[1])
for _ in range(20):
    DatasetRegistry.register_dataset("d", [{"size": size}] * size)
"""


@pytest.mark.slow
def test_readers_see_whole_files_while_several_processes_write(home):
    DatasetRegistry.register_dataset("d", rows(1))
    whole = [rows(1), [{"size": 50}] * 50, [{"size": 900}] * 900]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, size], env=environment, cwd=home)
        for size in ("50", "900")
    ]
    seen = []
    while any(writer.poll() is None for writer in writers):
        data = DatasetRegistry.load_dataset("d").get_data()
        seen.append(whole.index(data))  # raises for anything that nobody wrote
    assert [writer.returncode for writer in writers] == [0, 0]
    assert seen
    assert DatasetRegistry.load_dataset("d").get_data() in whole[1:]
    assert [path.name for path in (home / "datasets/d").iterdir()] == ["default.jsonl"]


def test_dataset_removed_during_a_write_gets_that_split():
    def slow_rows():
        yield {"id": 0}
        assert DatasetRegistry.remove_dataset("d")
        yield {"id": 1}

    DatasetRegistry.register_dataset("d", rows(1), "old")
    DatasetRegistry.register_dataset("d", slow_rows(), "new")
    assert DatasetRegistry.get_dataset_splits("d") == ["new"]
    assert list(DatasetRegistry.load_dataset("d", "new")) == rows(2)


@pytest.mark.parametrize("line", ['{"id": ', "[1]"])
def test_damaged_line_is_named(line, home):
    DatasetRegistry.register_dataset("d", rows(1))
    path = home / "datasets/d/default.jsonl"
    path.write_text(json.dumps({"id": 0}) + "\n" + line + "\n")
    with pytest.raises(DatasetError, match=r"default.jsonl, line 2"):
        DatasetRegistry.load_dataset("d")


def test_missing_dataset_says_how_to_ask_for_it_first():
    with pytest.raises(DatasetError, match=r"DatasetRegistry\.dataset_exists\(name, split\)"):
        DatasetRegistry.load_dataset("not_there_yet", "test")


def test_table_of_pandas_is_registered_row_by_row():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"question": ["a", "b"], "answer": [1, 2]})
    rows = DatasetRegistry.register_dataset("from_pandas", table)
    assert rows.get_data() == [{"question": "a", "answer": 1}, {"question": "b", "answer": 2}]
