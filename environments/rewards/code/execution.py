"""Runs the source of a solution, or of its tests, as a module. Used by ``driver`` and ``assertions``."""

from __future__ import annotations

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


def execute(source: str, file: str, name: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run ``source`` as the module ``name``, in which ``names`` are known; return all that it knows then."""
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module = types.ModuleType(name)
    sys.modules[name] = module
    vars(module).update(names)
    sys.setrecursionlimit(10_000)  # as judges of programming contests allow
    exec(compile(source, file, "exec"), vars(module))
    return vars(module)


def own_names(solution: str, prelude: dict[str, Any]) -> dict[str, Any]:
    """The names that a solution defines."""
    names = execute(solution, SOLUTION, "solution", prelude)
    return {name: value for name, value in names.items() if value is not prelude.get(name)}


def find(names: dict[str, Any], function: str) -> Callable[..., Any]:
    """The function of that name, or the method of a ``Solution``."""
    if function in names:
        return names[function]
    if "Solution" in names and hasattr(names["Solution"], function):
        return getattr(names["Solution"](), function)
    raise NameError(f"the solution has no function {function!r}")
