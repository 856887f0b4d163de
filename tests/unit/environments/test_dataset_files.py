from __future__ import annotations

import datetime
import decimal
import json
import tracemalloc

import pytest

from environments.data.dataset_files import plain_rows, read_rows, write_rows
from environments.errors import DatasetError

ROWS = [{"question": "Zoë, \u2028 or?", "n": 7, "deep": {"list": [1.5, None, True]}}, {"n": 8}]
LONG = f'{{"id": {"1" * 5000}}}'
DEEP = "[" * 200_000


def write(path, text):
    path.write_text(text, encoding="utf-8", newline="")
    return path


def test_json_and_json_lines_keep_types(tmp_path):
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    assert list(read_rows(write(tmp_path / "a.json", json.dumps(ROWS, ensure_ascii=False)))) == ROWS
    assert list(read_rows(write(tmp_path / "a.jsonl", lines))) == ROWS
    assert list(read_rows(write(tmp_path / "A.JSONL", "\ufeff" + lines.rstrip()))) == ROWS


def test_csv_values_are_texts(tmp_path):
    path = write(tmp_path / "a.csv", '\ufeffquestion,n\r\n"Two, or\nthree?",007\r\n\r\n,\r\n')
    assert list(read_rows(path)) == [{"question": "Two, or\nthree?", "n": "007"}, {"question": "", "n": ""}]


def test_blank_line_is_no_row(tmp_path):
    lines = write(tmp_path / "a.jsonl", '{"id": 0}\n\n{"id": 1}\n \r\n\n')
    assert list(read_rows(lines)) == [{"id": 0}, {"id": 1}]
    column = write(tmp_path / "a.csv", 'q\n\na\n""\n\n')
    assert list(read_rows(column)) == [{"q": "a"}, {"q": ""}]


def test_csv_field_may_be_long(tmp_path):
    assert list(read_rows(write(tmp_path / "a.csv", f"q\n{'x' * 200_000}\n"))) == [{"q": "x" * 200_000}]


def test_parquet_keeps_types(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    when = datetime.datetime(2025, 7, 2, 12, 30, tzinfo=datetime.UTC)
    table = pyarrow.table({"n": [7, None], "tests": [[{"in": "1"}], []], "when": [when, None]})
    parquet.write_table(table, tmp_path / "a.parquet")
    rows = list(plain_rows(read_rows(tmp_path / "a.parquet")))
    assert rows == [
        {"n": 7, "tests": [{"in": "1"}], "when": "2025-07-02T12:30:00+00:00"},
        {"n": None, "tests": [], "when": None},
    ]


def parquet_of(rows, path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_parquet_rows_of_different_shapes_come_back_as_written(tmp_path):
    call = {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"x": [1, None]}}]}
    city, day = {"type": "string"}, {"type": "string", "enum": ["today", None]}
    rows = [
        {"tests": [{"input": "1", "output": "1"}, {"functional": "assert f(1) == 2"}], "n": None},
        {"tests": [{"functional": "assert f(2) == 3", "metadata": {"func_name": "f"}}], "n": 1},
        {"tests": [], "messages": [{"role": "user", "content": "q"}, call], "n": None},
        {"tools": [{"name": "a", "properties": {"city": city}}, {"name": "b", "properties": {"day": day}}]},
    ]
    columns = {key: None for row in rows for key in row}
    read = list(plain_rows(read_rows(parquet_of([columns | row for row in rows], tmp_path / "a.parquet"))))
    assert read == [columns | row for row in rows]


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (
            {"tests": [{"input": "1", "output": "1"}, {"input": "2", "output": None}]},
            r"'tests'\[1\].*'output'",
        ),
        ({"ground_truth": {"inputs": [[1]], "outputs": None}}, "'ground_truth' .*'outputs'"),
        ({"reward_model": {"ground_truth": [{"input": None, "output": "1"}]}}, r"'reward_model'.*'input'"),
    ],
)
def test_null_that_may_belong_to_test_is_named_by_column_and_row(row, where, tmp_path):
    name = next(iter(row))
    path = parquet_of([{name: None}, row], tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match=rf"a\.parquet, row 1, column {where}.*JSON"):
        list(read_rows(path))
    write_rows(tmp_path / "a.jsonl", [row])
    assert list(read_rows(tmp_path / "a.jsonl")) == [row]


def test_null_beside_input_is_left_out_where_nothing_is_tested(tmp_path):
    path = parquet_of([{"steps": [{"input": "ls", "output": None}]}], tmp_path / "a.parquet")
    assert list(read_rows(path)) == [{"steps": [{"input": "ls"}]}]


@pytest.mark.parametrize("name", ["a.txt", "a", "a.jsonl.gz"])
def test_unknown_extension_is_an_error_that_lists_the_known(name, tmp_path):
    path = write(tmp_path / name, "{}")
    with pytest.raises(DatasetError, match=r"names no known format. Known: .json, .jsonl, .csv, .parquet"):
        read_rows(path)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", '{"id": 0}\n{"id": 1}\n', "name it .jsonl"),
        ("a.json", '{"id": 0}', "holds a dict: it has to be a list"),
        ("a.jsonl", '{"id": 0}\n{"id"\n', "line 2 is no JSON"),
        ("a.jsonl", "[1]\n", "line 1 is no JSON object"),
        ("a.csv", "", "at least one is needed"),
        ("a.csv", "a,b,a\n1,2,3\n", "no name twice"),
        ("a.csv", "a,b\n1,2\n1,2,3\n", r"line 3 has 3 fields, but there are 2 columns \(a, b\)"),
        ("a.csv", "a,b\n1\n", "line 2 has 1 fields"),
        ("a.csv", 'a\n"open\n', "is no CSV"),
        pytest.param("a.jsonl", f'{{"id": 0}}\n{LONG}', "line 2 is no JSON that can be read: Exc", id="long"),
        pytest.param("a.json", f"[{LONG}]", "is no JSON that can be read: Exceeds", id="long in a list"),
        pytest.param("a.jsonl", '{"id": 0}\n' + DEEP, "line 2 is nested too deeply", id="deep"),
        pytest.param("a.json", DEEP, "is nested too deeply", id="deep in a list"),
        ("a.parquet", "no parquet", "cannot be read as parquet"),
    ],
)
def test_file_that_is_not_what_it_says_is_named(name, text, sentence, tmp_path):
    path = write(tmp_path / name, text)
    with pytest.raises(DatasetError, match=sentence) as caught:
        list(read_rows(path))
    assert str(path) in str(caught.value)


def test_file_in_another_encoding_is_named(tmp_path):
    (tmp_path / "a.csv").write_bytes("question\nZoë\n".encode("latin-1"))
    with pytest.raises(DatasetError, match=r"a.csv is not UTF-8"):
        list(read_rows(tmp_path / "a.csv"))


def test_two_parquet_columns_of_one_name_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table([[1], [2]], names=["a", "a"]), tmp_path / "a.parquet")
    with pytest.raises(DatasetError, match="no name twice"):
        list(read_rows(tmp_path / "a.parquet"))


def test_what_has_one_obvious_json_form_is_converted():
    numpy = pytest.importorskip("numpy")
    row = {
        "number": numpy.int64(3),
        "single": numpy.float32(0.5),
        "flag": numpy.bool_(True),
        "array": numpy.array([[1, 2], [3, 4]]),
        "texts": numpy.array(["a", "b"], dtype=object),
        "tuple": (1, (2,)),
        "day": datetime.date(2025, 7, 2),
        "moment": datetime.datetime(2025, 7, 2, 12, 30),
        "exact": numpy.array(["2025-07-02T12:30:00.000000000", "NaT"], dtype="datetime64[ns]"),
    }
    plain = {
        "number": 3,
        "single": 0.5,
        "flag": True,
        "array": [[1, 2], [3, 4]],
        "texts": ["a", "b"],
        "tuple": [1, [2]],
        "day": "2025-07-02",
        "moment": "2025-07-02T12:30:00",
        "exact": ["2025-07-02T12:30:00", None],
    }
    assert list(plain_rows([row])) == [plain]
    assert json.loads(json.dumps(plain)) == plain


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (b"bytes", r"Row 1\['v'\] is a builtins.bytes"),
        ([{"x": decimal.Decimal(1)}], r"Row 1\['v'\]\[0\]\['x'\] is a decimal.Decimal"),
        (datetime.timedelta(1), "datetime.timedelta"),
        ({1, 2}, "builtins.set"),
        (float("nan"), r"Row 1\['v'\] is nan, .*use None"),
        (float("-inf"), "is -inf"),
        pytest.param(10**4300, r"Row 1\['v'\] is too long a number", id="long"),
        ({1: 2}, r"Row 1\['v'\] is a dict with the key 1"),
    ],
)
def test_what_has_none_is_refused_by_row_key_and_type(value, sentence):
    with pytest.raises(DatasetError, match=sentence):
        list(plain_rows([{}, {"v": value}]))


def test_longest_number_that_is_taken_is_read_again(tmp_path):
    rows = [{"n": 2**14_280 - 1, "m": -(2**14_280) + 1}]
    write_rows(tmp_path / "a.jsonl", plain_rows(rows))
    assert list(read_rows(tmp_path / "a.jsonl")) == rows


def test_row_within_itself_is_refused():
    row = {}
    row["row"] = row
    with pytest.raises(DatasetError, match="Row 0 is nested too deeply, or contains itself"):
        list(plain_rows([row]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_large_file_is_streamed(name, tmp_path):
    text, count = "x" * 1000, 6000
    if name == "a.parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        texts = [f"{index}{text}" for index in range(count)]
        parquet.write_table(pyarrow.table({"q": texts}), tmp_path / name, row_group_size=2000)
        del texts
    elif name == "a.csv":
        write(tmp_path / name, "q\n" + f"{text}\n" * count)
    else:
        write(tmp_path / name, (json.dumps({"q": text}) + "\n") * count)
    tracemalloc.start()
    write_rows(tmp_path / "b.jsonl", plain_rows(read_rows(tmp_path / name)))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "b.jsonl").stat().st_size > count * len(text)
    assert peak < 3e6, "the rows take 6 MB at once"
