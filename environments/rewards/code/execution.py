"""Runs the source of a solution, or of its tests, as a module. Used by ``driver`` and ``assertions``."""

from __future__ import annotations

import ast
import linecache
import sys
import types
from collections.abc import Callable
from typing import Any

SOLUTION = "solution.py"
TESTS = "tests.py"

# Names that solutions of the public sets use without importing them.
PRELUDE = """\
import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
del pow  # math's hides Python's own, which is exact and takes a modulus
"""


def execute(
    source: str,
    file: str,
    name: str,
    names: dict[str, Any],
    tree: ast.Module | None = None,
    module: types.ModuleType | None = None,
) -> dict[str, Any]:
    """Run ``source`` as the module ``name``, in which ``names`` are known; return all that it knows then.

    ``tree`` is run in its place, and in ``module``, where they are given.
    """
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = module or types.ModuleType(name)
    sys.modules[name] = module
    vars(module).update(names)
    sys.setrecursionlimit(10_000)  # as judges of programming contests allow
    exec(compile(tree or source, file, "exec"), vars(module))
    return vars(module)


def own_names(solution: str, prelude: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The names that a solution defines. Those of ``given`` are the tests' own, and known to it."""
    known = {**prelude, **given}
    names = execute(solution, SOLUTION, "solution", known)
    bound = bound_names(ast.parse(solution))
    return {name: value for name, value in names.items() if value is not known.get(name) or name in bound}


def bound_names(tree: ast.Module) -> set[str]:
    """The names that a module itself imports, or defines with the value of another name."""
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    bound = {alias.asname or alias.name for node in imports for alias in node.names}
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return bound | {each.id for node in assigned for each in node.targets if isinstance(each, ast.Name)}


def find(names: dict[str, Any], function: str) -> Callable[..., Any]:
    """The function of that name, or the method of a ``Solution``."""
    if function in names:
        return names[function]
    if "Solution" in names and hasattr(names["Solution"], function):
        return getattr(names["Solution"](), function)
    raise NameError(f"the solution has no function {function!r}")
