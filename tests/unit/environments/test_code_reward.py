from __future__ import annotations

import json
import time

import pytest
from machine import cpu_seconds

from environments.errors import DatasetError
from environments.rewards.code.reward import (
    CodeTest,
    code_reward_fn,
    last_code_block,
    read_tests,
    run_tests,
    same_output,
    same_value,
)
from environments.sandbox.base import DEFAULT_LIMITS
from environments.sandbox.local import LocalSandbox

SUM_TESTS = [{"input": "1 2\n", "output": "3\n"}, {"input": "5 5", "output": "10"}]
ADD = "def add(a, b):\n    return a + b\n"


def answer(code):
    return f"<think>```python\nwrong\n```</think>Here it is:\n```python\n{code}\n```\nDone."


def verdict(code, **task):
    return code_reward_fn(task, answer(code))


def error_of(output):
    return output.metadata["failures"][0]["error"]


# --- what is judged


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        "a, b = map(int, input().split())\nprint(a + b)",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "print(sum(map(int, open(0).read().split())))",
        "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
        "import threading\ndef main():\n    print(sum(map(int, input().split())))\n"
        "threading.Thread(target=main).start()",
        "import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)",
    ],
)
def test_program_that_prints_what_is_expected_passes(program):
    output = verdict(program, tests=SUM_TESTS)
    assert (output.reward, output.is_correct) == (1.0, True)
    assert output.metadata == {"num_tests": 2, "num_passed": 2, "failures": []}


def test_verdict_shows_the_test_that_failed():
    output = verdict("a, b = map(int, input().split())\nprint(a * b - a)", tests=SUM_TESTS)
    assert (output.reward, output.is_correct) == (0.0, False)
    first = {"input": "1 2\n", "expected": "3\n", "got": "1\n", "error": None, "public": True}
    assert output.metadata["failures"][0] == first


@pytest.mark.slow
def test_one_failing_test_of_several_costs_reward_but_is_counted():
    output = verdict("print(3)", tests=SUM_TESTS)
    assert (output.reward, output.metadata["num_passed"]) == (0.0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        {"tests": {"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"}},
        {"ground_truth": json.dumps({"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"})},
        {
            "tests": [{"input": "1\n2", "output": "3", "testtype": "functional"}],
            "metadata": '{"func_name": "add"}',
        },
        {
            "ground_truth": json.dumps(
                [
                    {
                        "input": "1\n2",
                        "output": "3",
                        "testtype": "functional",
                        "metadata": {"func_name": "add"},
                    }
                ]
            )
        },
        {"tests": "assert add(1, 2) == 3"},
        {"tests": {"functional": "assert add(1, 2) == 3\nassert add(b=1, a=1) == 2"}},
        {"ground_truth": ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"]},
        {"tests": "def check(candidate):\n    assert candidate(1, 2) == 3\n", "entry_point": "add"},
        {"tests": "from solution import add\n\ndef test_add():\n    assert add((1,), (2,)) == (1, 2)\n"},
    ],
)
def test_shapes_of_public_sets_are_understood(task):
    assert verdict(ADD, **task).metadata["failures"] == []
    assert verdict(ADD.replace("+", "+ a +"), **task).reward == 0.0


@pytest.mark.slow
def test_inputs_and_outputs_without_a_function_are_for_programs():
    task = {"tests": {"inputs": ["1 2", ["3", "4"]], "outputs": ["3", "7\n"]}}
    assert verdict("import sys\nprint(sum(map(int, sys.stdin.read().split())))", **task).reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [dict, lambda tests: [tests], json.dumps])
def test_two_lists_of_equal_length_are_a_test_in_each_place(wrap):
    columns = {"input": ["1 2\n", "3 4\n"], "output": ["3\n", "7\n"]}
    output = verdict("a, b = map(int, input().split())\nprint(a + b)", tests=wrap(columns))
    assert (output.reward, output.metadata["num_tests"]) == (1.0, 2)


def test_all_tests_of_two_private_lists_are_private():
    tests = {"input": ["1 2\n", "3 4\n"], "output": ["3\n", "7\n"], "private": True}
    failures = verdict("print(0)", tests=tests).metadata["failures"]
    assert [failure["public"] for failure in failures] == [False, False]


def test_lists_of_other_lengths_are_the_lines_of_one_test():
    output = verdict("print(int(input()) + int(input()))", tests=[{"input": ["3", "4"], "output": ["7"]}])
    assert (output.reward, output.metadata["num_tests"]) == (1.0, 1)


@pytest.mark.slow
def test_method_of_a_solution_is_found():
    code = "class Solution:\n    def twice(self, xs: List[int]):\n        return tuple(2 * x for x in xs)"
    assert verdict(code, tests={"inputs": [[[1, 2]]], "outputs": [[2, 4]], "fn_name": "twice"}).reward == 1.0
    check = "def check(candidate):\n    assert candidate([1]) == (2,)"
    assert verdict(code, tests=check, entry_point="Solution().twice").reward == 1.0
    assert verdict(code, tests=check, entry_point="twice").reward == 1.0


LEETCODE = """
def check(candidate):
    assert candidate(nums=[2, 7, 11, 15], target=9) == [0, 1]
    assert candidate(nums=[3, 3], target=6) == [0, 1]

check(Solution().twoSum)
"""


@pytest.mark.slow
@pytest.mark.parametrize("tests", [LEETCODE, {"functional": LEETCODE}, [LEETCODE]])
def test_tests_may_call_their_check_themselves(tests):
    code = (
        "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n"
        "        return next([i, j] for j in range(len(nums)) for i in range(j) if nums[i] + nums[j] == {})"
    )
    assert verdict(code.format("target"), tests=tests).metadata["failures"] == []
    assert verdict(code.format("target + 1"), tests=tests).reward == 0.0


@pytest.mark.slow
def test_assertions_may_use_classes_errors_and_changed_arguments():
    code = """
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise IndexError("empty")
        return self.items.pop()
    def __len__(self): return len(self.items)
def order(items): items.sort()
def count(): yield from (1, 2)
"""
    tests = """
from solution import count  # and not that of itertools
stack = Stack()
stack.push(3)
assert len(stack) == 1 and stack.items == [3] and stack.pop() == 3
try:
    stack.pop()
except IndexError as error:
    assert str(error) == "empty"
else:
    raise AssertionError
items = [3, 1]
order(items)
assert items == [1, 3] and list(count()) == [1, 2]
"""
    assert verdict(code, tests=tests).metadata["failures"] == []


SUBCLASSES = """
from fractions import Fraction
from decimal import Decimal
from enum import IntEnum
class Color(IntEnum):
    RED = 1
Point = namedtuple("Point", "x y")
class Row(list):
    def total(self): return sum(self)
def counter(): return Counter("aab")
def grouped():
    groups = defaultdict(list)
    groups["a"].append(deque([1]))
    return groups
def ordered(): return OrderedDict(a=1)
def point(): return Point(1, Point(2, 3))
def red(): return [Color.RED]
def row(): return Row([1, 2])
def queue(items): return deque(items, maxlen=2)
def half(): return {Fraction(1, 2), Decimal("0.5")}
def data(): return bytearray(b"ab")
def number():
    import numpy
    return numpy.int64(3), numpy.float64(0.5), numpy.bool_(True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        "assert counter() == {'a': 2, 'b': 1} and counter().most_common(1) == [('a', 2)]",
        "assert grouped() == {'a': [deque([1])]} and isinstance(grouped(), dict)",
        "assert ordered() == {'a': 1} == OrderedDict(a=1) == ordered()",
        "assert point() == (1, (2, 3)) and (1, (2, 3)) == point() and point().y.x == 2",
        "assert {point(): 1} == {(1, (2, 3)): 1} and point() != (1, (2, 4)) and point() != [1, (2, 3)]",
        "assert red() == [1] and red()[0].name == 'RED'",
        "assert row() == [1, 2] and row().total() == 3 and row() is not row()",
        "made = Row([1, 2])\nassert made.total() == 3 and len(made) == 2 and list(made) == [1, 2]",
        "assert queue([1, 2, 3]) == deque([2, 3]) == queue(deque([2, 3]))",
        "from fractions import Fraction\nassert half() == {Fraction(1, 2)} and sum(half()) == 0.5",
        "assert data() == b'ab' == data() and data() == bytearray(b'ab')",
        "assert number() == (3, 0.5, True) and isinstance(number()[0], int)",
    ],
)
def test_assertions_take_a_subclass_of_a_builtin_for_what_it_is(test):
    assert verdict(SUBCLASSES, tests=test).metadata["failures"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "expected"),
    [("counter", {"a": 2, "b": 1}), ("point", [1, [2, 3]]), ("red", [1]), ("number", [3, 0.5, True])],
)
def test_call_may_return_a_subclass_of_a_built_in_type(function, expected):
    tests = {"inputs": [[]], "outputs": [[expected]], "fn_name": function}
    assert verdict(SUBCLASSES, tests=tests).metadata["failures"] == []


VECTOR = """
class Broken(Exception):
    pass
class TooLong(Broken):
    def __init__(self, length): self.length = length
    def __str__(self): return f"{self.length} is too long"
class Vector:
    def __init__(self, *items): self.items = list(items)
    def __add__(self, other): return Vector(*map(operator.add, self.items, other.items))
    def __mul__(self, other): return sum(map(operator.mul, self.items, other.items))
    def __neg__(self): return Vector(*(-item for item in self.items))
    def __abs__(self): return sqrt(self * self)
    def __lt__(self, other): return abs(self) < abs(other)
    def __eq__(self, other): return self.items == other.items
    def __hash__(self): return hash(tuple(self.items))
    def __bool__(self): return any(self.items)
    def __len__(self): return len(self.items)
    def __getitem__(self, key): return self.items[key]
    def __setitem__(self, key, item): self.items[key] = item
    def __repr__(self): return f"Vector{tuple(self.items)}"
    def grow(self):
        if len(self) > 2: raise TooLong(len(self))
        if not self: raise KeyError("zero")
class Grade(int):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        "assert Vector(1, 2) + Vector(3, 4) == Vector(4, 6) != Vector(4, 7)",
        "assert Vector(1, 2) * Vector(3, 4) == 11 and -Vector(1) == Vector(-1) and abs(Vector(3, 4)) == 5",
        "assert sorted([Vector(2), Vector(1)]) == [Vector(1), Vector(2)] and Vector(2) > Vector(1)",
        "assert Vector(0, 1) and not Vector(0, 0) and bool(Vector()) is False",
        "assert {Vector(1): 2}[Vector(1)] == 2 and len({Vector(1), Vector(1)}) == 1",
        "v = Vector(1, 2)\nv[0] = 5\nassert v[0] == 5 and list(v) == [5, 2] and len(v) == 2 and 2 in v",
        "assert repr(Vector(1, 2)) == str(Vector(1, 2)) == f'{Vector(1, 2)}' == 'Vector(1, 2)'",
        "assert Grade(3) + 1 == 4 and 5 - Grade(3) == 2 and Grade(3) < 4 and [7, 8][Grade(1)] == 8",
        "try: Vector(1, 2, 3).grow()\nexcept TooLong as error: assert str(error) == '3 is too long'\n"
        "else: assert False",
        "try: Vector(1, 2, 3).grow()\nexcept KeyError: assert False\nexcept Broken: pass\nelse: assert False",
        "try: Vector(0).grow()\nexcept KeyError as error: assert error.args == ('zero',)\nelse: assert False",
        "assert issubclass(TooLong, Broken) and issubclass(Broken, Exception)",
    ],
)
def test_assertions_may_use_operators_and_errors_of_the_solution(test):
    assert verdict(VECTOR, tests=test).metadata["failures"] == []


@pytest.mark.slow
def test_large_input_and_output_go_through():
    numbers = "\n".join(map(str, range(60_000)))
    tests = [{"input": numbers, "output": "1799970000"}, {"input": numbers, "output": f"{numbers}\n"}]
    total = verdict("print(sum(map(int, open('/dev/stdin'))))", tests=tests)
    assert total.metadata["num_passed"] == 1
    assert verdict("import sys\nprint(sys.stdin.read())", tests=tests[1:]).reward == 1.0


@pytest.mark.slow
def test_solution_and_its_tests_have_pow_that_takes_modulus():
    code = "def f(a, b): return pow(a, b, 1000) + pow(10, 18)"
    call = {"inputs": [[2, 10]], "outputs": [[24 + 10**18]], "fn_name": "f"}
    assert verdict(code, tests=call).is_correct
    assert verdict(code, tests="assert f(2, 10) == pow(2, 10, 1000) + 10**18").is_correct


@pytest.mark.slow
def test_many_errors_on_side_cost_nothing_and_last_is_shown():
    code = "import sys\nfor n in range(9000): print('x' * 100, n, file=sys.stderr)\n"
    tests = [{"input": "", "output": "done"}]
    assert verdict(f"{code}print('done')", tests=tests).is_correct
    assert "ZeroDivisionError" in error_of(verdict(f"{code}1 / 0", tests=tests))[-100:]


def test_all_tests_together_have_as_much_cpu_time_as_time():
    asked = []

    class Asked(LocalSandbox):
        def run(self, source, stdin="", limits=DEFAULT_LIMITS):
            asked.append(limits)
            return super().run(source, stdin, limits)

    tests = [CodeTest("stdin", "", "1")]
    assert run_tests("print(1)", tests, total_seconds=90.5, sandbox=Asked("best-effort")) == [None]
    assert [(limits.timeout_seconds, limits.cpu_seconds) for limits in asked] == [(90.5, 91)]


# --- what goes wrong costs its test and nothing else


@pytest.mark.slow
def test_hang_costs_its_own_time_and_others_are_still_judged():
    tests = [CodeTest("stdin", str(n), str(n)) for n in range(4)]
    begin = time.monotonic()
    failures = run_tests("n = int(input())\nwhile n == 1: pass\nprint(n)", tests, test_seconds=3)
    assert [failure is None for failure in failures] == [True, False, True, True]
    assert failures[1].error == "time limit of 3 s exceeded"
    assert time.monotonic() - begin < 30


@pytest.mark.slow
def test_tests_that_were_not_reached_in_time_are_told():
    tests = [CodeTest("stdin", "", "")] * 4
    failures = run_tests("import time\ntime.sleep(9)", tests, test_seconds=0.6, total_seconds=1.2)
    assert failures[0].error == "time limit of 0.6 s exceeded"
    assert failures[-1].error == "not run: all tests together took more than 1.2 s"


@pytest.mark.slow
def test_program_that_changes_its_process_group_is_still_ended():
    tests = [CodeTest("stdin", "", "a")] * 2
    code = "import os, time\nos.setpgid(0, os.getpgid(os.getppid()))\ntime.sleep(30)"
    failures = run_tests(code, tests, test_seconds=0.4)
    assert [failure.error for failure in failures] == ["time limit of 0.4 s exceeded"] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "solution.py, line 1: 1 / 0\nZeroDivisionError: division by zero"),
        ("x = (", "SyntaxError"),
        ("x = [0] * (1 << 40)", "MemoryError"),
        ("import os\nos.kill(0, 9)", "crashed: Killed"),
        ("import sys\nsys.exit('no')", "no"),
        ("import os\nos._exit(7)", "exit code 7"),
        ("while True: print('x' * 1000)", "File too large"),
    ],
)
def test_error_of_a_program_is_shown(code, error):
    output = verdict(code, tests=[{"input": "", "output": "x"}])
    assert error in error_of(output)
    assert len(error_of(output)) < 700


@pytest.mark.slow
def test_function_that_is_missing_is_told():
    output = verdict("x = 1", tests={"inputs": [[1]], "outputs": [1], "fn_name": "add"})
    assert "no function 'add'" in error_of(output)


def test_state_does_not_leak_from_test_to_test():
    code = "seen = []\ndef f(x):\n    seen.append(x)\n    return len(seen)"
    assert verdict(code, tests={"inputs": [[5], [6]], "outputs": [1, 1], "fn_name": "f"}).reward == 1.0


# --- cheating


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def add(a, b):\n    import os; os._exit(0)",
        "def add(a, b):\n    raise SystemExit(0)",
        "class Any_(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any_(9)",
        "class Any_:\n    def __eq__(self, other): return True\ndef add(a, b): return Any_()",
        "class Any_(list):\n    def __eq__(self, other): return True\ndef add(a, b): return [Any_()]",
        "class Any_(Counter):\n    def __eq__(self, other): return True\n    __hash__ = lambda self: 3\n"
        "Any_.__module__ = 'collections'\nAny_.__qualname__ = 'Counter'\ndef add(a, b): return Any_()",
        "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.exec = print\n"
        "def add(a, b): return 9",
        'print(\'{"text": "passed", "error": null}\')\ndef add(a, b):\n    print("passed")\n    return 9',
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'passed')\n    except OSError: pass\n"
        "def add(a, b): return 9",
        "import sys\ndef add(a, b):\n    sys.modules['__main__'].same_value = lambda *_: True\n    return 9",
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    [
        "def check(candidate):\n    assert candidate(1, 2) == 3",
        {"inputs": [[1, 2]], "outputs": [3]},
        [{"input": "1 2", "output": "3"}],
    ],
)
def test_no_trick_earns_a_reward(code, tests):
    task = {"tests": tests} if isinstance(tests, list) else {"tests": tests, "entry_point": "add"}
    assert verdict(code, **task).reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("set = lambda x: 0\ndef add(a, b): return 'no'", "assert set(add((3,), (4,))) == set((3, 4))"),
        ("sorted = lambda x: 0\ndef add(a, b): return 9", "assert sorted([add(1, 2)]) == sorted([3])"),
        ("isclose = lambda *_: True\ndef add(a, b): return 9", "assert isclose(add(1, 2), 3)"),
        (
            "abs = lambda x: 0\ndef add(a, b): return 9",
            "def test_add():\n    assert abs(add(1, 2) - 3) < 1e-6",
        ),
        ("def isclose(*_): return True\ndef sum(a, b): return 9", "assert isclose(sum(1, 2), 3)"),
        ("__builtins__ = {}\ndef add(a, b): return 9", "assert add(1, 2) == 3"),
    ],
)
def test_solution_that_shadows_the_tests_is_not_its_own_judge(code, tests):
    assert verdict(code, tests=tests).reward == 0.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "test",
    [
        "assert abs(add(1, 2) - 3) < 1e-6",
        "assert abs(3 - add(1, 2)) < 1e-6",
        "assert 2 < add(1, 2) < 4",
        "assert not add(1, 2) ^ 3",
        "assert add(1, 2) / 3 == 1",
        "assert add(1, 2) == 3",
        "assert 3 == add(1, 2)",
        "assert add(1, 2) in [3]",
    ],
)
def test_object_that_says_yes_to_everything_passes_no_test(test):
    names = ("sub", "rsub", "xor", "rxor", "truediv", "rtruediv", "lt", "gt", "le", "ge", "eq", "abs")
    methods = "".join(f"    __{name}__ = lambda self, *_: self\n" for name in names)
    falsy = "    __bool__ = lambda self: False\n" if "not" in test else ""
    code = f"class Any_:\n{methods}{falsy}def add(a, b): return Any_()"
    assert verdict(code, tests=test).reward == 0.0


@pytest.mark.slow
def test_candidate_is_not_judged_by_what_the_solution_shadows():
    check = "def check(candidate):\n    assert abs(candidate(1, 2) - 3) < 1e-6"
    cheat = "abs = lambda x: 0\ndef add(a, b): return 9"
    assert verdict(cheat, tests=check, entry_point="add").reward == 0.0
    assert verdict(ADD, tests=check, entry_point="add").reward == 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [
        {"tests": "assert sum(1, 2) == 3"},
        {"tests": "assert sorted([sum(1, 2)]) == [3]"},
        {"tests": "expected = 3\nassert isclose(sum(1, 2), expected)"},
        {"tests": "from solution import sum\n\ndef test_it():\n    assert max(sum(1, 2), 0) == 3"},
        {"tests": "def check(candidate):\n    assert candidate(1, 2) == sum(1, 2)", "entry_point": "sum"},
        {"tests": {"inputs": [[1, 2]], "outputs": [3], "fn_name": "sum"}},
    ],
)
def test_function_under_test_may_have_the_name_of_a_builtin(task):
    assert verdict("def sum(a, b):\n    return a + b", **task).metadata["failures"] == []


SEARCH = """
import gc, glob, os, re, sys
def found(texts):
    return {int(number) for text in texts for number in re.findall(r"add\\(1, 2\\) == (\\d+)", text)}
def texts():
    frame = sys._getframe()
    while frame:
        yield repr(frame.f_locals)
        frame = frame.f_back
    yield from (repr(thing) for thing in gc.get_objects() if type(thing) in (dict, list, tuple))
    for path in glob.glob("/proc/[0-9]*/fd/*") + glob.glob("/proc/self/fd/*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            yield os.pread(descriptor, 1 << 20, 0).decode("utf-8", "replace")
        except OSError:
            pass
def memory():
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as file:
        for line in maps:
            begin, end = (int(number, 16) for number in line.split()[0].split("-"))
            if "[heap]" in line or (len(line.split()) == 5 and "rw" in line):
                try:
                    file.seek(begin)
                    yield file.read(end - begin).decode("latin-1")
                except (OSError, MemoryError):
                    pass
def add(a, b):
    seen = found(texts())
    try:
        seen |= found(memory())
    except OSError:
        pass
    return min(seen, default=0)
"""


@pytest.mark.slow
def test_solution_finds_its_assertions_in_no_memory_or_file():
    tests = [CodeTest("call", "[1, 2]", 6243, "add"), CodeTest("assert", "assert add(1, 2) == 6243")]
    assert [failure is None for failure in run_tests(SEARCH, tests)] == [False, False]
    assert run_tests(ADD.replace("a + b", "6243"), tests) == [None, None]


@pytest.mark.slow
def test_solution_does_not_learn_how_long_expected_output_is():
    limit = "resource.getrlimit(resource.RLIMIT_FSIZE)[0]"
    code = f"import resource\nprint({{4: 'NO', 6: 'YES'}}.get({limit} % 65536))"
    assert verdict(code, tests=[{"input": "", "output": word} for word in ("YES", "NO")]).reward == 0.0


# --- reading the answer


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```", "a\n"),
        ("```py\na\n```\ntext\n```Python\nb\n\nc\n```", "b\n\nc\n"),
        ("```python\na\n```\n```bash\nrun\n```", "a\n"),
        ("  ```python\na\n  ```", "a\n"),
        ("1. So:\n   ```python\n   if a:\n       b\n  c\n\n   ```", "if a:\n    b\nc\n\n"),
        ("```python\na\n```\nIt prints:\n```\n3\n```", "a\n"),
        ("```\na\n```\n```\nb\n```", "b\n"),
        ("```python\na", None),
        ("```bash\na\n```", None),
        ("```bash\na\n```\n```\nb\n```", "b\n"),
        ("```python\nunfinished\n```python\na\n```", "a\n"),
        ("a", None),
        ("", None),
    ],
)
def test_last_closed_block_of_python_counts(text, code):
    assert last_code_block(text) == code


def test_answer_without_code_gets_nothing_and_is_told_why():
    output = code_reward_fn({"tests": SUM_TESTS}, "```python\nprint(3)\n```</think>I give up.")
    assert (output.reward, output.is_correct, output.metadata["num_tests"]) == (0.0, False, 2)
    assert "```python" in output.metadata["error"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "answer",
    ["```python\n" * 50_000, "```" + " " * 200_000, " " * 200_000 + "```\n" + "```" * 50_000],
    ids=["fences", "spaces", "both"],
)
def test_answer_of_many_fences_is_read_quickly(answer):
    assert cpu_seconds(lambda: last_code_block(answer)) < 2


# --- comparing


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("1 2\n3\n", "1 2 \n3\n\n", True),
        ("0.3333333333", "0.333333333", True),
        ("1.0", "1", True),
        ("1000000000001", "1000000000002", False),
        ("1000000500.0", "1000000007", False),
        ("1000000007.0", "1000000007", True),
        ("0.9999999999", "1", True),
        ("1e9", "1000000000", True),
        ("1e9", "1000000001", False),
        ("1" * 400 + ".0", "1" * 400, True),
        ("1" * 5000 + ".0", "1" * 4999 + "2", False),
        ("1000000500", "1000000007.0", True),
        ("0.33", "0.34", False),
        ("1 2", "1\n2", False),
        ("yes", "YES", False),
        ("", "0", False),
        ("nan", "nan", True),
        ("a 1.0", "a 1", True),
        ("a", "a b", False),
        ("1" * 500 + ".5", "2" * 500, False),
    ],
)
def test_outputs_are_compared_by_line_and_numbers_by_value(got, expected, same):
    assert same_output(got, expected) is same


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ([1, [2.0000000001, None]], [1, [2, None]], True),
        ({"a": 1}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        (1, 2, False),
        ("1", 1, False),
        ([1], [1, 2], False),
        (10**400, 1.5, False),
        (1.5, 10**400, False),
        (1000000500.0, 1000000007, False),
        (1000000500, 1000000007, False),
        (2.9999999999, 3, True),
        (float("inf"), 3, False),
        (float("nan"), 3, False),
        (1.0, "1.0", False),
    ],
)
def test_values_are_compared_as_plain_data(got, expected, same):
    assert same_value(got, expected) is same


# --- tasks that cannot be judged


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "its keys: none"),
        ({"tests": [], "question": "?"}, "its keys: question, tests"),
        ({"tests": 3}, "unknown shape"),
        ({"tests": {"cases": []}}, r"unknown shape \(\['cases'\]\).*inputs"),
        ({"tests": [{"input": "1", "output": "1", "testtype": "functional"}]}, "func_name"),
        ({"tests": {"inputs": [1], "outputs": []}}, "1 inputs but 0 outputs"),
        ({"tests": "def check(candidate): pass"}, "entry_point"),
        ({"tests": "assert add(1, 2 == 3"}, r"assert add\(1, 2 == 3.*no Python"),
        ({"tests": {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}}, "no JSON"),
    ],
)
def test_task_without_usable_tests_is_an_error(task, message):
    with pytest.raises(DatasetError, match=message):
        read_tests(task)
