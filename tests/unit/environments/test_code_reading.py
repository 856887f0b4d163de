from __future__ import annotations

import base64
import json
import os
import pickle
import zlib

import pytest

from environments.errors import DatasetError
from environments.rewards.code.large_json import read_json, write_json
from environments.rewards.code.reading import pickled_text, read_tests
from environments.rewards.code.reward import code_reward_fn, run_tests


def packed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def answer(code):
    return f"```python\n{code}\n```"


# --- public sets


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_private_tests_of_live_code_bench_are_read(protocol):
    text = json.dumps([{"input": "é\n", "output": "1", "testtype": "stdin"}], ensure_ascii=False)
    tests = read_tests(
        {
            "public_test_cases": '[{"input": "a", "output": "0", "testtype": "stdin"}]',
            "private_test_cases": packed(pickle.dumps(text, protocol)),
        }
    )
    assert [(test.input, test.expected, test.public) for test in tests] == [
        ("a", "0", True),
        ("é\n", "1", False),
    ]


class Runs:
    def __reduce__(self):
        return os.mkdir, ("made by a pickle",)


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (packed(pickle.dumps(Runs())), "makes something else than a text"),
        (packed(pickle.dumps(["a"])), "makes something else than a text"),
        (packed(pickle.dumps("a")[:-1] + pickle.dumps("b")[2:]), "no pickled text"),
        (packed(b"no pickle"), "no pickled text"),
        (base64.b64encode(b"not compressed").decode(), "no pickled text"),
        ("not base64!", "no pickled text"),
    ],
)
def test_pickle_that_is_no_text_is_refused_and_not_run(encoded, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DatasetError, match=message):
        read_tests({"private_test_cases": encoded})
    assert list(tmp_path.iterdir()) == []


def test_pickled_text_is_returned_as_it_was():
    assert pickled_text(packed(pickle.dumps("[1]"))) == "[1]"


@pytest.mark.parametrize("wrap", [json.dumps, lambda tests: tests])
def test_column_of_apps_is_read(wrap):
    calls = read_tests({"input_output": wrap({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"})})
    assert [(test.kind, test.input, test.expected, test.function) for test in calls] == [
        ("call", "[1, 2]", 3, "add")
    ]
    programs = read_tests({"input_output": wrap({"inputs": ["1\n"], "outputs": ["2\n"]})})
    assert [(test.kind, test.input, test.expected) for test in programs] == [("stdin", "1\n", "2\n")]


def test_empty_column_of_apps_is_no_test():
    with pytest.raises(DatasetError, match="no tests"):
        read_tests({"input_output": ""})


@pytest.mark.parametrize(
    ("given", "calls"),
    [
        ([{"input": [2], "output": 4}], ["[2]"]),
        ([{"input": [[1], [2]], "output": [1, 2]}], ["[[1], [2]]"]),
        ({"input": [[2], [3]], "output": [4, 9]}, ["[2]", "[3]"]),
        ({"input": [2, 3], "output": [4, 9]}, ["[2, 3]"]),
        ([{"input": "2\n3", "output": "4"}], ["[2, 3]"]),
        ([{"input": {"x": 2}, "output": 4}], ['{"x": 2}']),
    ],
)
def test_cases_beside_the_name_of_a_function_are_calls(given, calls):
    tests = read_tests({"tests": given, "fn_name": "f"})
    assert [(test.kind, test.input) for test in tests] == [("call", call) for call in calls]


def test_row_that_only_imports_is_part_of_the_others():
    rows = [
        "from decimal import Decimal",
        "# numbers",
        "assert f(Decimal(1)) == 2",
        {"input": "1", "output": "2"},
    ]
    first, second = read_tests({"tests": rows})
    assert first.input == "from decimal import Decimal\n# numbers\nassert f(Decimal(1)) == 2"
    assert second.kind == "stdin"
    assert len(read_tests({"tests": ["import math"]})) == 1, "nobody passes it"


def test_case_of_standard_input_stays_beside_a_function_name():
    tests = read_tests({"tests": [{"input": "2", "output": "4", "testtype": "stdin"}], "fn_name": "f"})
    assert [test.kind for test in tests] == ["stdin"]


def test_input_that_is_no_list_of_arguments_is_refused():
    with pytest.raises(DatasetError, match="The input 2 of a call is no list of arguments"):
        read_tests({"tests": [{"input": 2, "output": 4}], "fn_name": "f"})


# --- long numbers


def test_json_of_integers_of_any_length_is_written_and_read():
    long = 10**6000
    for value in (long, -long, [1, {"a": [long, "x", None, True]}], {}, 7, 1.5):
        assert (read_json(write_json(value)) == value) is True
    assert write_json({"a": (long, 1)}) == '{"a": [1' + "0" * 6000 + ", 1]}"


@pytest.mark.slow
def test_long_number_that_is_wrong_fails_and_is_shown():
    output = code_reward_fn(
        {"tests": [{"input": [6000], "output": 10**6000}], "fn_name": "f"},
        answer("def f(n): return 10 ** n + 1"),
    )
    (failure,) = output.metadata["failures"]
    assert (output.reward, failure["error"]) == (0.0, None)
    assert failure["expected"].startswith("1000") and failure["got"].startswith("1000")


@pytest.mark.slow
def test_long_number_may_stand_in_assertions():
    tests = f"assert f(5000) == 1{'0' * 5000}"
    assert code_reward_fn({"tests": tests}, answer("def f(n): return 10 ** n")).reward == 1.0
    assert code_reward_fn({"tests": tests}, answer("def f(n): return 10 ** n + 1")).reward == 0.0


# --- checkers

PAIR = (
    "def check(input, output, expected):\n"
    "    a, b = map(int, output.split())\n    return a + b == int(input)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("printed", "reward"), [("3 7", 1.0), ("5 5", 1.0), ("5 6", 0.0), ("ten", 0.0), ("", 0.0), ("True", 0.0)]
)
def test_checker_says_which_outputs_are_right(printed, reward):
    task = {"tests": [{"input": "10", "output": "4 6"}], "checker": PAIR}
    assert code_reward_fn(task, answer(f"print({printed!r})")).reward == reward


@pytest.mark.slow
def test_checker_judges_calls_by_their_arguments_and_result():
    checker = (
        "def check(input, output, expected):\n    (xs,) = input\n    return xs[output] == max(xs) == expected"
    )
    task = {"tests": [{"input": [[3, 5, 5]], "output": 5}], "fn_name": "f", "checker": checker}
    assert code_reward_fn(task, answer("def f(xs): return len(xs) - 1")).reward == 1.0
    wrong = code_reward_fn(task, answer("def f(xs): return 0"))
    assert wrong.metadata["failures"][0]["error"] == "the checker does not accept it"


def test_checker_runs_apart_from_the_program():
    program = (
        "import builtins, os\nbuiltins.int = lambda text: 5\n"
        "open('json.py', 'w').write('raise SystemExit')\n"
        "for fd in range(1, 9):\n    try: os.write(fd, b'{\"verdicts\": [true]}')\n    except OSError: pass"
    )
    task = {"tests": [{"input": "10", "output": "4 6"}], "checker": PAIR}
    assert code_reward_fn(task, answer(program)).reward == 0.0


@pytest.mark.slow
def test_checker_that_hangs_or_prints_accepts_nothing():
    tests = read_tests(
        {
            "tests": [{"input": "1", "output": "1"}],
            "checker": "def check(*_):\n    print('{\"verdicts\": [true]}')\n    while True: pass",
        }
    )
    (failure,) = run_tests("print(1)", tests, total_seconds=6)
    assert failure.error.startswith("the checker came to no verdict")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"checker": "def check(input output): pass"}, "is no Python"),
        ({"checker": "def verify(a, b, c): return True"}, "defines no function check"),
        ({"checker": "import nothing_of_this_name\ndef check(a, b, c): return True"}, "cannot be run"),
        ({"checker": PAIR, "tests": "assert f(2) == 4"}, "are assertions"),
    ],
)
def test_checker_that_cannot_judge_is_an_error_of_the_data(more, message):
    task = {"tests": [{"input": "1", "output": "1"}], **more}
    with pytest.raises(DatasetError, match=message):
        code_reward_fn(task, answer("print(1)"))
