from __future__ import annotations

import ast

import pytest

from environments.errors import DatasetError
from environments.rewards.code.execution import PRELUDE
from environments.rewards.code.forms import playable_tests
from environments.rewards.code.reward import code_reward_fn
from environments.rewards.code.usage import Usage

IMPORT = "import pytest\nfrom unittest.mock import patch\nfrom solution import f\n"


@pytest.mark.parametrize(
    ("source", "form"),
    [
        ("def test_a():\n    yield f(2) == 4", "'test_a' yields"),
        ("class TestF:\n    def test_a(self):\n        yield from [f(2)]", "'test_a' yields"),
        ("async def test_a():\n    yield await f(2)", "'test_a' yields"),
        ("def test_a(mocker): f(mocker)", "the fixture 'mocker'"),
        ("def test_a(caplog): f(2)", "the fixture 'caplog'"),
        ("@patch('solution.helper')\ndef test_a(helper): f(2)", r"patch\('solution.helper'\) changes"),
        ("def test_a(monkeypatch): monkeypatch.setenv('A', 'b')", "monkeypatch.setenv changes"),
        ("import time\n@patch.object(time, 'sleep')\ndef test_a(_): f(2)", r"patch.object\(time\) changes"),
        ("def test_a():\n    with pytest.warns(UserWarning): f(2)", r"pytest.warns\(\) watches"),
        ("import asyncio\ndef test_a():\n    with pytest.raises(asyncio.TimeoutError):\n"
         "        asyncio.run(asyncio.wait_for(f(), 1))", "the time of a coroutine"),
        ("def test_a():\n    with pytest.raises(SystemExit): f(2)", r"pytest.raises\(SystemExit\) lets"),
        ("import inspect\ndef test_a(): assert 'for' in inspect.getsource(f)", r"getsource\(\) reads"),
        ("def test_a(): assert near(f(2), 4)", "they use 'near'"),
        ("def test_a(): assert Near(f(2), 4)", "they use 'Near'"),
        ("def test_a(): assert abs(f(2) - 4) < TOLERANCE", "they use 'TOLERANCE'"),
    ],
)  # fmt: skip
def test_tests_that_cannot_be_played_are_refused_by_name(source, form):
    with pytest.raises(DatasetError, match=form):
        playable_tests(IMPORT + source, None)


@pytest.mark.parametrize(
    "source",
    [
        "def check(candidate):\n    assert candidate(encode('a')) == 'a'",
        "def check(candidate):\n    assert near(candidate(2), 4)",
    ],
)
def test_helpers_that_only_a_solution_defines_are_refused(source):
    with pytest.raises(DatasetError, match="which they do not define"):
        playable_tests(source, "f")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("passed", "kind"),
    [("print", None), ("[object()]", "object"), ("__import__('threading').Lock()", "lock")],
)
def test_argument_that_cannot_be_passed_is_refused_by_its_type(passed, kind):
    task = {"tests": f"from solution import f\ndef test_a(): assert f({passed}) == 1"}
    program = "```python\ndef f(x): return 1\n```"
    if kind is None:
        assert code_reward_fn(task, program).reward == 1.0
    else:
        with pytest.raises(DatasetError, match=f"they pass an object of the type {kind}"):
            code_reward_fn(task, program)


@pytest.mark.slow
def test_module_that_the_sandbox_has_not_is_named():
    task = {"tests": "import nothing_of_this_name\nfrom solution import f\ndef test_a(): assert f(1) == 1"}
    with pytest.raises(DatasetError, match="need 'nothing_of_this_name', which is not installed"):
        code_reward_fn(task, "```python\ndef f(x): return 1\n```")


@pytest.mark.parametrize(
    ("source", "takes"),
    [
        ("assert math.isnan(f(1))", True),
        ("assert f(1) is np.nan", True),
        ("x = f(1)\nassert x != x", True),
        ("assert f(float('nan')) == 1", True),
        ("assert np.array_equal(f(1), [1], equal_nan=True)", True),
        ("assert f('nan') == 1", False),
        ("assert banana(1) == 1  # nan", False),
        ("'''nan'''\nassert f(1) == 'NaN'", False),
    ],
)
def test_nan_is_meant_where_the_tests_name_it(source, takes):
    assert Usage(ast.parse(source), None, ()).takes_nan is takes


@pytest.mark.parametrize(
    ("source", "makers"),
    [
        ("s = Stack()\ns.push(1)", {"Stack"}),
        ("assert Color.RED", {"Color"}),
        ("assert isinstance(f(1), Point)", {"Point"}),
        ("assert Vector(1) + Vector(2) == Vector(3)", {"Vector"}),
        ("bag = Bag(1)\nassert 1 in bag and 2 not in bag", {"Bag"}),
        ("assert Stats([1]).mean() == 1", {"Stats"}),
        ("with Timer() as t: f(1)", {"Timer"}),
        ("s = Shape(3)\nassert s.area() == 9\nassert Total([s]) == 9", {"Shape"}),
        ("s = Shape(3)\nassert s.area() == 9\nt = Total([s])\nassert 9 == t != 8", {"Shape"}),
        ("s = Shape(3)\nassert s.area() == 9\nassert 3 in Sides(s) and Sides(s) > 2", {"Shape"}),
        ("s = Shape(3)\nassert s.area() == 9\nassert s.center() == Point(0, 0)", {"Shape"}),
        ("s = Shape(3)\nassert s.area() == 9\nassert Money(3) == Money(3)", {"Shape", "Money"}),
        ("s = Shape(3)\nassert s.area() == 9\ns.move(Vector(1))", {"Shape", "Vector"}),
        ("assert F(2) == 4", set()),
        ("assert 4 in Square(2)", set()),
        ("assert SUMS(2).pop() == 4", set()),
        ("assert Square(2).issubset({4})", set()),
    ],
)
def test_class_is_told_from_a_function_by_its_use(source, makers):
    names: dict[str, object] = {}
    exec(PRELUDE, names)
    assert Usage(ast.parse(source), None, names).makers - {"Solution"} == makers
