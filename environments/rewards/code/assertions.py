"""Runs the tests of a solution that are Python source, in a process that the solution cannot enter.

Used by ``driver``. The names of the solution are proxies here, see ``Remote``. All else that tests use comes
from the installed packages, and nothing from the working directory, where the solution can write.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
import inspect
import os
import signal
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from environments.rewards.code.collection import Fixture, finish, run_all
from environments.rewards.code.execution import TESTS, execute, find
from environments.rewards.code.rpc_client import OPERATORS_NUMBER, Remote, RpcClient, UnplayableError
from environments.rewards.code.script import Script
from environments.rewards.code.usage import Usage, calls_check

Pipes = tuple[IO[bytes], IO[bytes]]
"""The ends for requests and for replies."""


def keep_apart() -> None:
    """Take nothing of this process from where the solution can write, and let no signal of it be caught."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else tests might catch its KeyboardInterrupt
    sys.path[:] = [path for path in sys.path if path != os.getcwd()]
    os.environ.update(HOME="/", PYTHONSAFEPATH="1", PYTHONNOUSERSITE="1")


def run_tests(
    source: str, function: str | None, prelude: dict[str, Any], pipes: Pipes, absent: set[str]
) -> None:
    """Run the source of the tests, then ``check(candidate)`` and every test that it defines.

    Raises:
        Exception: a test has failed, or the source has an error.
        UnplayableError: it cannot be played, whatever the solution is.
    """
    usage = Usage(ast.parse(source), function, prelude)
    client = RpcClient(*pipes, usage.takes_nan, bool(usage.objects), usage.steps)
    script = Script(source, usage)
    known = names_of_solution(usage, script, client)
    if function:
        candidate = find(known, function) if function.isidentifier() else eval(function, dict(known))
        known = known | {"candidate": candidate}
    client.num_requests = 0
    client.asserted = usage.asserted_lines
    use_own_collection()
    names = {**prelude, **known, **tools_of_tests(script, client), "__name__": "__main__"}
    try:
        names = run_script(script, names)
        if function and inspect.isfunction(names.get("check")) and not calls_check(usage.tree):
            finish(names["check"](names["candidate"]))
        run_all(names)
    except ModuleNotFoundError as error:
        if error.name in absent:
            raise UnplayableError(f"they need {error.name!r}, which is not installed here") from error
        raise
    if client.swallowed is not None:
        raise client.swallowed
    if not client.num_requests and not usage.reads(known):
        raise AssertionError("the tests have asked the solution for nothing")


def run_script(script: Script, names: dict[str, Any]) -> dict[str, Any]:
    """Run the source as a script; its exit is no failure if it says so."""
    module = types.ModuleType("__main__")
    sys.modules["tests"] = module
    try:
        execute(script.source, TESTS, "__main__", names, script.playable(), module)
    except SystemExit as end:
        if end.code not in (None, 0):
            raise AssertionError(f"the tests ended themselves with {end.code!r}") from end
    return vars(module)


def use_own_collection() -> None:
    """Let the tests collect none themselves, since all are played after their script."""
    if "unittest" in sys.modules:
        unittest: Any = sys.modules["unittest"]
        unittest.main = lambda *_, **__: None
    if "pytest" in sys.modules:
        pytest: Any = sys.modules["pytest"]
        pytest.main = lambda *_, **__: 0
        pytest.fixture = Fixture


def names_of_solution(usage: Usage, script: Script, client: RpcClient) -> dict[str, Any]:
    """The names that tests have from the solution; what is Python's own or a library's is no proxy.

    Raises:
        NameError: the solution does not define what the tests are about.
    """
    module = types.ModuleType("solution")
    defined = client.load(script.definitions())
    missing = usage.tested - set(defined)
    if missing:
        raise NameError(f"the solution does not define {', '.join(sorted(missing))}")
    for name in usage.from_solution(defined):
        value = client.request(0, name)
        if type(value) is Remote:
            value.mark_("named_")
            if name in usage.makers:
                value.mark_("makes_")
        elif isinstance(value, type) and hasattr(value, "make_"):
            value.make_ = functools.partial(client.request, 0, name)
        setattr(module, name, value)
    for name, (library, attribute) in usage.libraries().items():
        # With one of its own, the solution would be its own judge; so the library has to be installed.
        value = importlib.import_module(library)
        setattr(module, name, getattr(value, attribute) if attribute else value)
    sys.modules["solution"] = module
    return vars(module)


def tools_of_tests(script: Script, client: RpcClient) -> dict[str, Any]:
    """The functions that ``Script.playable`` has the tests call."""

    def own_class(key: str, free: dict[str, Callable[[], Any]]) -> Callable[[Any], Any]:
        def known() -> dict[str, Any]:
            values = {}
            for name, value in free.items():
                with suppress(NameError):
                    values[name] = value()
            plain = (types.ModuleType, Fixture, type(builtins.print))
            return {name: value for name, value in values.items() if not isinstance(value, plain)}

        def keep(kind: Any) -> Any:
            bases = vars(kind).get("__orig_bases__", ())
            name, source = script.classes[key]
            if any(type(base) is Remote for base in bases):
                made = client.request_class(key, name, source, True, known())
                return made.mark_("named_").mark_("makes_") if type(made) is Remote else made
            client.own.classes[key] = kind
            client.sources[key] = lambda: client.request_class(key, name, source, False, known())
            return kind

        return keep

    def as_object(value: Any) -> Any:
        return value.mark_("made_") if type(value) is Remote and not value.named_ else value

    return {"__own_class__": own_class, "__object__": as_object, "__library__": Library(client)}


class Library:
    """Calls functions of libraries that read more of an object than its attributes: where the object is."""

    def __init__(self, client: RpcClient) -> None:
        self._client = client
        self._own: set[Any] = set()  # what the tests have pickled of their own
        self._made: set[Any] = set()  # what the solution has pickled of objects that the tests have made

    def __call__(self, function: Any, name: str, *arguments: Any, **keywords: Any) -> Any:
        first = arguments[0] if arguments else None
        is_pickle = getattr(function, "__module__", None) == "_pickle"
        if type(function) is Remote or not self._is_of_solution(name, first, is_pickle):
            result = function(*arguments, **keywords)
            if is_pickle and name == "dumps":
                self._own.add(result)
            return result
        if name == "seed":
            function(*arguments)
        result = self._client.request(OPERATORS_NUMBER, "library", (name, *arguments), **keywords)
        made = first.made_ if type(first) is Remote else name == "loads" and first in self._made
        if made and type(result) is bytes:
            self._made.add(result)
        return result.mark_("made_") if made and type(result) is Remote else result

    def _is_of_solution(self, name: str, first: Any, is_pickle: bool) -> bool:
        if name == "loads":  # what the solution has pickled could do anything here
            return is_pickle and first not in self._own
        return name == "seed" or (type(first) is Remote and (is_pickle or name != "dumps"))
