"""Rejects tests that are Python source and cannot be played between two processes. Used by ``reading``."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from typing import Any

from environments.errors import DatasetError
from environments.rewards.code.collection import OWN_FIXTURES
from environments.rewards.code.execution import PRELUDE
from environments.rewards.code.usage import Function, Usage, called_names, is_test_class, last_name, root_of
from environments.sandbox.base import clip
from environments.syntax_tree import parse_module

_LONG_NUMBER = re.compile(r"\d{4301,}")  # Python parses no longer ones here; in the sandbox it does
_ELSEWHERE = "what the solution uses, which runs in another process"
_UNSEEN = dict.fromkeys(("warns", "assertWarns", "assertWarnsRegex", "catch_warnings"), "warns of")
_UNSEEN |= dict.fromkeys(("assertLogs", "assertNoLogs"), "logs")
_ENDS = {"SystemExit", "KeyboardInterrupt"}
"""Errors that no exception is: they end a process."""
_PATCHED = re.compile(r"builtins\.input|sys\.(stdin|stdout|stderr)")


@functools.lru_cache(maxsize=64)
def parsed_tests(source: str) -> ast.Module:
    """The syntax tree of tests.

    Raises:
        DatasetError: they are no Python.
    """
    try:
        return parse_module(_LONG_NUMBER.sub("0", source))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise DatasetError(f"The tests {source!r:.100} are no Python: {error}. Correct them.") from error


@functools.cache
def _prelude() -> frozenset[str]:
    names: dict[str, Any] = {}
    exec(PRELUDE, names)
    return frozenset(names)


@functools.lru_cache(maxsize=1024)
def playable_tests(source: str, function: str | None, prompt: Any = None) -> str:
    """The source of tests, with the helpers that they use and that the task's prompt defines, as HumanEval's.

    Raises:
        DatasetError: they have a form that no solution could pass, or one that it could pass by itself.
    """
    usage = Usage(parsed_tests(source), function, _prelude())
    helpers = _helpers(usage, prompt) if isinstance(prompt, str) else ""
    if helpers:
        return playable_tests(f"{helpers}\n{source}", function)
    for form in (*_yields(usage), *_fixtures(usage), *_patches(usage), *_clocks(usage), *_judges(usage)):
        raise DatasetError(f"The tests {clip(source, 100)!r} cannot be played: {form}.")
    return source


def _helpers(usage: Usage, prompt: str) -> str:
    """The definitions of ``prompt`` that tests use, without that of the function that they test."""
    try:
        tree = parse_module(prompt)
    except (SyntaxError, ValueError):
        return ""
    named = {usage.function, usage.root_of_function()}
    defined = {node.name: node for node in tree.body if isinstance(node, Function | ast.ClassDef)}
    needed = [name for name in defined if name in usage.unknown and name not in named]
    for name in needed:
        loads = {node.id for node in ast.walk(defined[name]) if isinstance(node, ast.Name)}
        needed += [each for each in defined if each in loads and each not in needed]
    if not needed:
        return ""
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    nodes = [*imports, *(node for name, node in defined.items() if name in needed)]
    return "\n".join(map(ast.unparse, nodes))


def _tests(usage: Usage) -> Iterator[Any]:
    """The test functions, and ``check``."""
    for body in [usage.tree.body, *(each.body for each in usage.every(ast.ClassDef) if is_test_class(each))]:
        for each in body:
            if isinstance(each, Function) and (each.name.startswith("test") or each.name == "check"):
                yield each


def _clocks(usage: Usage) -> Iterator[str]:
    """Tests of how long coroutines take, of which one ends before the next begins here."""
    names = usage.used | usage.attribute_names
    if {"wait_for", "timeout"} & names and "TimeoutError" in names:
        yield "they let the time of a coroutine run out, which runs in another process"
    if {"gather", "create_task", "TaskGroup"} & names and {"perf_counter", "monotonic", "time"} & names:
        yield "they measure how long coroutines take together, which run in another process"


def _yields(usage: Usage) -> Iterator[str]:
    for test in _tests(usage):
        waiting: list[ast.AST] = list(test.body)
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.Yield | ast.YieldFrom):
                yield f"the test function {test.name!r} yields, so nothing runs it. Write it without yield"
                return
            if not isinstance(node, Function | ast.Lambda | ast.ClassDef):
                waiting += ast.iter_child_nodes(node)


def _fixtures(usage: Usage) -> Iterator[str]:
    """The arguments of test functions that nothing gives them."""
    decorated = [(each, node) for node in usage.nodes for each in getattr(node, "decorator_list", ())]
    names = {getattr(node, "name", "") for each, node in decorated if "fixture" in ast.unparse(each)}
    calls = [each for each, _ in decorated if isinstance(each, ast.Call)]
    texts = [each.value for call in calls for each in ast.walk(call) if isinstance(each, ast.Constant)]
    given = {name.strip() for text in texts if isinstance(text, str) for name in text.split(",")}
    for test in _tests(usage):
        decorators_of_it = " ".join(map(ast.unparse, test.decorator_list))
        if test.name == "check" or "patch" in decorators_of_it or "given" in decorators_of_it:
            continue
        plain = test.args.args[: len(test.args.args) - len(test.args.defaults)]
        for argument in [each.arg for each in plain]:
            if argument not in names | given | OWN_FIXTURES.keys() | {"self", "cls", "request"}:
                yield f"{test.name!r} takes the fixture {argument!r}, which they do not define. Add it"


def _patches(usage: Usage) -> Iterator[str]:
    """Return what tests change in their own process, which the solution does not see."""
    for node in usage.calls:
        if not (node.args or node.keywords):
            continue
        called, first = ast.unparse(node.func), (node.args or [ast.Constant("")])[0]
        last = last_name(node.func)
        is_patch = last == "patch" or called == "monkeypatch.setattr"
        if is_patch and isinstance(first, ast.Constant) and not _PATCHED.fullmatch(str(first.value)):
            yield f"{called}({first.value!r}) changes {_ELSEWHERE}"
        on_module = called.endswith("patch.object") or called == "monkeypatch.setattr"
        if on_module and root_of(first) in usage.modules | usage.aliases and _patched(node) is None:
            yield f"{called}({ast.unparse(first)}) changes {_ELSEWHERE}"
        if last in _UNSEEN:
            yield f"{called}() watches what the solution {_UNSEEN[last]}, which runs in another process"
        ends = {each.id for each in node.args if isinstance(each, ast.Name)} & _ENDS
        if last in ("raises", "assertRaises", "assertRaisesRegex") and ends:
            yield f"{called}({', '.join(sorted(ends))}) lets the solution end its process, another one"
        of_solution = root_of(first) in usage.unknown | usage.meant | usage.aliases
        if last in ("getsource", "getsourcelines") and of_solution:
            yield f"{called}() reads the source of the solution, which is in another process"
        if called in ("monkeypatch.setenv", "monkeypatch.delenv", "monkeypatch.chdir", "os.chdir"):
            yield f"{called} changes {_ELSEWHERE}"


def _patched(node: ast.Call) -> re.Match[str] | None:
    name = ast.unparse(node.args[1]).strip("'") if len(node.args) > 1 else ""
    return _PATCHED.fullmatch(f"{ast.unparse(node.args[0])}.{name}")


def _judges(usage: Usage) -> Iterator[str]:
    """The functions that tests use, that only a solution could define, and that are not what they test."""
    if "*" in usage.imported:
        return
    called = {name for name in called_names(usage.tree) if name in usage.unknown and not name[:1].isupper()}
    others = called - usage.meant
    if not usage.function:  # then any of them may be what they test, but none that is given another's result
        others = set()
        for node in usage.calls:
            if isinstance(node.func, ast.Name) and node.func.id in usage.unknown:
                inner = {name for each in (*node.args, *node.keywords) for name in called_names(each)}
                others |= {node.func.id} - usage.meant if inner & called - {node.func.id} else set()
    for name in sorted(others | usage.unknown_constants):
        yield (
            f"they use {name!r}, which they do not define, so that a solution could judge itself by it. "
            "Define it there, or import it from solution"
        )
