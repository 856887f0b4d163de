"""The syntax tree of Python source, for rewards and tools, which run in many threads of one process."""

from __future__ import annotations

import ast
import threading

_one_at_a_time = threading.RLock()
"""Python up to 3.11.7 and 3.12.0 counts the depth of all trees that it makes in one number: where the garbage
collector lets another thread begin a tree, both end with a ``SystemError`` (python/cpython#106905)."""


def parse_module(source: str) -> ast.Module:
    """The tree of a program, as from ``ast.parse``, whatever other threads parse meanwhile.

    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: as ``ast.parse``.
    """
    with _one_at_a_time:
        return ast.parse(source)


def parse_expression(source: str) -> ast.expr:
    """The tree of one expression; as ``parse_module``."""
    with _one_at_a_time:
        return ast.parse(source, mode="eval").body
