"""Collects the tests that a module defines, as pytest does, and runs them. Used by ``assertions``."""

from __future__ import annotations

import functools
import inspect
import io
import itertools
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from environments.rewards.code.rpc_client import UnplayableError

MARKS_OF_SKIPPED = ("skip", "skipif", "xfail")


@dataclass
class Fixture:
    """Result of ``pytest.fixture``."""

    function: Any = None
    scope: str = "function"
    params: Iterable[Any] | None = None
    autouse: bool = False
    ids: object = None
    name: str | None = None

    def __post_init__(self) -> None:
        self.params = [] if self.params is None else list(self.params)

    def __call__(self, function: Any) -> Fixture:
        self.function = function
        return self


def run_all(names: dict[str, Any]) -> None:
    """Run the tests that the module of these ``names`` defines. The first that fails raises its error."""
    fixtures = {each.name or name: each for name, each in names.items() if isinstance(each, Fixture)}
    call_hook(names.get("setup_module"), names)
    with ExitStack() as ends:
        for test in list(found_tests(names, Fixtures(fixtures, {}, ends))):
            with_skips(test)
    call_hook(names.get("teardown_module"), names)


def with_skips(test: Callable[[], object]) -> None:
    """Run a test, unless it skips itself: that is no failure, and it has asked for nothing."""
    skips = {"_pytest.outcomes": "Skipped", "unittest": "SkipTest"}
    with suppress(*(getattr(sys.modules[each], skips[each]) for each in skips if each in sys.modules)):
        test()


def finish(result: Any) -> None:
    """Wait for what a test function has returned, which has to be nothing.

    Raises:
        AssertionError: it says False.
        UnplayableError: the function yields, so that it has not begun.
    """
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise UnplayableError("a test function of theirs yields")
    if inspect.iscoroutine(result):
        import asyncio

        result = asyncio.run(result)
    if result is False:
        raise AssertionError("the test function returned False")


def finishing(method: Any) -> Callable[[], None]:
    return lambda: finish(method())


def found_tests(names: dict[str, Any], fixtures: Fixtures) -> Iterator[Callable[[], object]]:
    """The tests among ``names``: functions, methods of classes, and cases of unittest."""
    for name, value in list(names.items()):
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            hooks = names.get("setup_function"), names.get("teardown_function")
            for test in with_arguments(value, [value], fixtures):
                yield functools.partial(between, hooks, value, test)
        elif isinstance(value, type):
            yield from tests_of_class(name, value, fixtures)


def tests_of_class(name: str, kind: Any, fixtures: Fixtures) -> Iterator[Callable[[], object]]:
    """The tests of a class and of those in it, also those that it inherits."""
    if hasattr(kind, "debug") and hasattr(kind, "assertEqual"):
        import unittest

        case: Any
        for case in unittest.defaultTestLoader.loadTestsFromTestCase(kind):
            method: Any = getattr(case, case._testMethodName)
            if not isinstance(case, unittest.IsolatedAsyncioTestCase):
                setattr(case, case._testMethodName, functools.wraps(method)(finishing(method)))
            if not getattr(method, "__unittest_expecting_failure__", False):
                yield unittest.TestSuite([case]).debug
        return
    is_collected = name.startswith("Test") and getattr(kind, "__test__", True)
    if not is_collected or kind.__init__ is not object.__init__:
        return
    members = {key: None for base in reversed(kind.__mro__[:-1]) for key in vars(base)}
    call_hook(getattr(kind, "setup_class", None), kind)
    for key in members:
        member = inspect.getattr_static(kind, key)
        if isinstance(member, type):
            yield from tests_of_class(key, member, fixtures)
        elif key.startswith("test") and callable(getattr(kind, key)):
            for place in range(len(on_new_object(kind, key, fixtures)[-1])):
                yield functools.partial(play_method, kind, key, place, fixtures)
    call_hook(getattr(kind, "teardown_class", None), kind)


def on_new_object(kind: Any, key: str, fixtures: Fixtures) -> tuple[Any, Any, list[Callable[[], object]]]:
    """A new object of a test class, its method, and the tests that this is, one for each of its arguments."""
    instance = kind()
    method = getattr(instance, key)
    return instance, method, list(with_arguments(method, [kind, method], fixtures.of(instance)))


def play_method(kind: Any, key: str, place: int, fixtures: Fixtures) -> None:
    """Play a method of a test class, on an object of its own, with its arguments in this place."""
    instance, method, tests = on_new_object(kind, key, fixtures)
    hooks = getattr(instance, "setup_method", None), getattr(instance, "teardown_method", None)
    between(hooks, method, tests[place])


def between(hooks: tuple[Any, Any], function: Any, test: Callable[[], object]) -> None:
    call_hook(hooks[0], function)
    try:
        test()
    finally:
        call_hook(hooks[1], function)


def call_hook(hook: Any, tested: Any) -> None:
    """Call what pytest calls before and after tests, with or without the argument that it may take."""
    if inspect.isroutine(hook):
        takes = len(inspect.signature(hook).parameters)
        finish(hook(*[tested][:takes]))


class Fixtures(NamedTuple):
    """The fixtures of a module or a class, with what those of a wider scope have returned, and their ends."""

    known: dict[str, Fixture]
    kept: dict[str, Any]
    ends: ExitStack

    def of(self, instance: Any) -> Fixtures:
        """Return these fixtures, and those that are methods of ``instance``."""
        own = {}
        for base in reversed(type(instance).__mro__):
            for name, each in vars(base).items():
                if isinstance(each, Fixture):
                    method = each.function.__get__(instance)
                    own[each.name or name] = Fixture(method, "function", each.params, each.autouse)
        return self._replace(known={**self.known, **own})

    def needed(self, names: Iterable[str]) -> list[str]:
        """``names``, and all that these need themselves."""
        found: list[str] = []
        waiting = list(names)
        while waiting:
            name = waiting.pop(0)
            if name not in found:
                found.append(name)
                known = self.known.get(name)
                waiting += [] if known is None else parameters_of(known.function)
        return found

    def value(self, name: str, values: dict[str, Any], chosen: dict[str, Any], ends: ExitStack) -> Any:
        """The value of a fixture in one test, whose ``values`` are those that are there already."""
        known = self.known.get(name)
        store = values if known is None or known.scope == "function" else self.kept
        if name in values or name in store:
            return values[name] if name in values else store[name]
        if name == "request":
            return types.SimpleNamespace(addfinalizer=ends.callback, param=None)
        if known is None and name not in OWN_FIXTURES:
            raise UnplayableError(f"they take the fixture {name!r}, which they do not define")
        if known is None:
            store[name] = OWN_FIXTURES[name](ends)
        else:
            given = {each: self.value(each, values, chosen, ends) for each in parameters_of(known.function)}
            if "request" in given:
                given["request"].param = chosen.get(name)
            store[name] = entered(known.function(**given), ends if store is values else self.ends)
        return store[name]


def entered(made: Any, ends: ExitStack) -> Any:
    """Return what a fixture returns or yields; ``ends`` has what is to be done after the test."""
    if inspect.isgenerator(made):
        ends.callback(lambda: next(made, None))
        return next(made)
    if inspect.iscoroutine(made) or inspect.isasyncgen(made):
        import asyncio

        return asyncio.run(made if inspect.iscoroutine(made) else anext(made))
    return made


def parameters_of(function: Any) -> list[str]:
    """The names of the arguments that a test or a fixture takes from fixtures.

    Those that have a default are none, and ``mock.patch`` gives the first ones itself.
    """
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    names = [each.name for each in parameters if each.kind in kinds and each.default is each.empty]
    patchings = getattr(function, "patchings", ())
    return names[sum(not each.attribute_name and "DEFAULT" in repr(each.new) for each in patchings) :]


def with_arguments(test: Any, marked: list[Any], fixtures: Fixtures) -> Iterator[Callable[[], object]]:
    """A test as often as its marks and the parameters of its fixtures say, with all that it takes."""
    marks = [mark for each in marked for mark in marks_of(each)]
    if any(mark.name in MARKS_OF_SKIPPED and (mark.name != "skipif" or all(mark.args[:1])) for mark in marks):
        return
    rows = [list(arguments(*mark.args[:2], **mark.kwargs)) for mark in marks if mark.name == "parametrize"]
    given = {name for each in rows for row in each for name in row}
    names = [name for name in parameters_of(test) if name not in given]
    names += [name for mark in marks if mark.name == "usefixtures" for name in mark.args]
    names += [name for name, each in fixtures.known.items() if each.autouse]
    needed = [name for name in fixtures.needed(names) if name not in given]
    several = {name: fixtures.known[name].params for name in needed if name in fixtures.known}
    choices = [[{name: value} for value in values] for name, values in several.items() if values]
    for chosen in itertools.product(*choices):
        for row in itertools.product(*rows):
            keywords = {name: value for part in row for name, value in part.items()}
            params = {name: value for part in chosen for name, value in part.items()}
            yield functools.partial(play, test, keywords, params, needed, fixtures)


def marks_of(marked: Any) -> list[Any]:
    marks = getattr(marked, "pytestmark", [])
    return list(marks) if isinstance(marks, list | tuple) else [marks]


def play(
    test: Any, keywords: dict[str, Any], params: dict[str, Any], needed: list[str], fixtures: Fixtures
) -> None:
    """Play a test with its fixtures, and end these."""
    values = dict(keywords)
    with ExitStack() as ends:
        for name in needed:
            fixtures.value(name, values, params, ends)
        takes = [name for name in parameters_of(test) if name not in keywords]
        finish(test(**keywords, **{name: fixtures.value(name, values, params, ends) for name in takes}))


def arguments(
    names: str | Iterable[str], rows: Iterable[Any], indirect: object = False, ids: object = None
) -> Iterator[dict[str, Any]]:
    """The rows of a ``pytest.mark.parametrize`` as keywords."""
    if indirect:
        raise UnplayableError("they give parameters to fixtures (indirect)")
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    for row in rows:
        values = getattr(row, "values", None)  # of pytest.param
        if values is None or inspect.isroutine(values):
            values = row if len(split) > 1 else (row,)
        yield dict(zip(split, values, strict=True))


# -- pytest's own fixtures -------------------------------------------------------------------------------


class CaptureResult(NamedTuple):
    out: str
    err: str


class Captured:
    """``capsys``: what tests and the solution print."""

    def __init__(self, ends: ExitStack) -> None:
        self.streams = io.StringIO(), io.StringIO()
        ends.enter_context(redirect_stdout(self.streams[0]))
        ends.enter_context(redirect_stderr(self.streams[1]))

    def readouterr(self) -> CaptureResult:
        result = CaptureResult(*(stream.getvalue() for stream in self.streams))
        for stream in self.streams:
            stream.seek(0)
            stream.truncate()
        return result


def _monkeypatch(ends: ExitStack) -> Any:
    import pytest

    return ends.enter_context(pytest.MonkeyPatch.context())


OWN_FIXTURES: dict[str, Callable[[ExitStack], Any]] = {
    "capsys": Captured,
    "capfd": Captured,
    "monkeypatch": _monkeypatch,
    "tmp_path": lambda _: Path(tempfile.mkdtemp(dir=".")).absolute(),
    "tmpdir": lambda _: Path(tempfile.mkdtemp(dir=".")).absolute(),
}
