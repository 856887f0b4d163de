"""Runs the tests of a solution that are Python source, in a process that the solution cannot enter.

Used by ``driver``. The names of the solution are proxies here, see ``remote``. All else that tests use comes
from the installed packages, and nothing from the working directory, where the solution can write.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import itertools
import os
import signal
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from environments.rewards.code.execution import TESTS, execute, find
from environments.rewards.code.remote import NAMES, Line, Remote

ALIASES = {"np": "numpy", "pd": "pandas"}
STANDARD_NAMES = {"Decimal": "decimal", "Fraction": "fractions", "timedelta": "datetime", "deepcopy": "copy"}
"""Names of libraries that tests use, and leave it to the solution to import."""


def keep_apart() -> None:
    """Take nothing of this process from where the solution can write, and let no signal of it be caught."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else tests might catch its KeyboardInterrupt
    sys.path[:] = [path for path in sys.path if path != os.getcwd()]
    os.environ.update(HOME="/", PYTHONSAFEPATH="1", PYTHONNOUSERSITE="1")


def run_tests(source: str, function: str | None, prelude: dict[str, Any], line: Line) -> None:
    """Run the source of the tests, then ``check(candidate)`` and every test that it defines.

    Raises:
        Exception: a test has failed, or the source has an error.
    """
    tree = ast.parse(source, TESTS)
    known = names_of_solution(tree, function, prelude, line)
    if function:
        candidate = find(known, function) if function.isidentifier() else eval(function, dict(known))
        known = known | {"candidate": candidate}
    names = execute(source, TESTS, "tests", {**prelude, **known, "__name__": "tests"})
    if function and isinstance(names.get("check"), types.FunctionType) and not calls_check(tree):
        names["check"](names["candidate"])
    for test in list(found_tests(names)):
        test()


def calls_check(tree: ast.Module) -> bool:
    """Whether the tests call their ``check`` themselves, as ``check(Solution().twoSum)``."""
    return any(isinstance(node, ast.Expr) and "check" in called_names(node) for node in tree.body)


def names_of_solution(
    tree: ast.Module, function: str | None, prelude: dict[str, Any], line: Line
) -> dict[str, Any]:
    """The names that tests have from the solution; what is Python's own or a library's is no proxy."""
    module = types.ModuleType("solution")
    meant = meant_names(tree, function, prelude)
    for name in line.ask(0, NAMES):
        # With an `abs` or an `isclose` of its own, a solution would be its own judge.
        if name in meant or not (name in prelude or hasattr(builtins, name) or name[:2] == "__"):
            library = None if name in meant else library_of(name, tree)
            value = line.ask(0, name) if library is None else library
            if isinstance(value, Remote) and name[:1].isupper():
                value.is_class_ = True
            setattr(module, name, value)
    sys.modules["solution"] = module
    return vars(module)


def library_of(name: str, tree: ast.Module) -> Any:
    """The module, or its object, that tests mean by a name that they do not import; None for a solution's.

    Raises:
        ImportError: it is not installed. With one of its own, the solution would be its own judge.
    """
    uses = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id == name]
    if not uses:
        return None
    if name in STANDARD_NAMES:
        return getattr(importlib.import_module(STANDARD_NAMES[name]), name)
    owners = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    if name in ALIASES or (name in sys.stdlib_module_names and all(use in owners for use in uses)):
        return importlib.import_module(
            ALIASES.get(name, name)
        )  # used as a module, so neither called nor passed
    return None


def meant_names(tree: ast.Module, function: str | None, prelude: dict[str, Any]) -> set[str]:
    """The names by which tests mean the solution, also where a builtin or the prelude has the same.

    The one that the task says, and those that the tests import; else, where they use no name that is the
    solution's for certain, the first name that they call, as in ``assert sum(10, 15) == 25``.
    """
    nodes = list(ast.walk(tree))
    imports = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module == "solution"]
    meant = {alias.name for node in imports for alias in node.names} | ({function} if function else set())
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    if meant or used - stored - prelude.keys() - vars(builtins).keys():
        return meant
    return set([name for name in called_names(tree) if name not in stored][:1])


def called_names(node: ast.AST) -> Iterator[str]:
    """The names that ``node`` calls, in the order in which Python would: arguments before their function."""
    for child in ast.iter_child_nodes(node):
        yield from called_names(child)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield node.func.id


def found_tests(names: dict[str, Any]) -> Iterator[Callable[[], object]]:
    """The tests that a module defines: functions, methods of classes, and cases of unittest."""
    for name, value in names.items():
        if isinstance(value, types.FunctionType) and name.startswith("test"):
            yield from with_parameters(value)
        elif isinstance(value, type) and hasattr(value, "debug"):
            import unittest

            yield unittest.defaultTestLoader.loadTestsFromTestCase(value).debug
        elif isinstance(value, type) and name.startswith("Test"):
            for method in [method for method in vars(value) if method.startswith("test")]:
                instance = value()
                if hasattr(instance, "setup_method"):
                    yield instance.setup_method
                yield from with_parameters(getattr(instance, method))


def with_parameters(test: Callable[..., Any]) -> Iterator[Callable[[], object]]:
    """A test as often as its ``pytest.mark.parametrize`` says."""
    marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "parametrize"]
    for chosen in itertools.product(*(list(arguments(*mark.args[:2])) for mark in marks)):
        keywords = {name: value for part in chosen for name, value in part.items()}
        yield functools.partial(test, **keywords)


def arguments(names: str | Iterable[str], rows: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """The rows of a ``pytest.mark.parametrize`` as keywords."""
    split = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    for row in rows:
        values = getattr(row, "values", None)  # of pytest.param
        if values is None or inspect.isroutine(values):
            values = row if len(split) > 1 else (row,)
        yield dict(zip(split, values, strict=True))
