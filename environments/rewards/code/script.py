"""Prepares the source of tests, so that the classes that they define are known at both ends of the pipe.

Used by ``assertions``.
"""

from __future__ import annotations

import ast
import builtins
from functools import cached_property
from typing import Any

from environments.rewards.code.program import LIBRARY
from environments.rewards.code.usage import Function, Usage, last_name, loads, stored_names


class Script:
    """The source of tests as it is run."""

    def __init__(self, source: str, usage: Usage) -> None:
        self.source = source
        self.usage = usage

    @cached_property
    def classes(self) -> dict[str, tuple[str, str]]:
        """Names and sources of the classes that the tests define for themselves, by their keys."""
        own = self.usage.own_classes
        return {key: (own[key].name, f"{self._imports}\n{ast.unparse(own[key])}") for key in own}

    @cached_property
    def _imports(self) -> str:
        """Return what the tests import anywhere; those from the future first, as Python wants it."""
        nodes = [node for node in self.usage.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        lines = [ast.unparse(node) for node in nodes]
        lines = [line for line in lines if not line.split()[1].startswith(("solution", "pytest", "unittest"))]
        return "\n".join([*sorted(lines, key=lambda line: "__future__" not in line), _PRELUDE])

    def definitions(self) -> list[Any]:
        """Key, name and source of the classes that a solution can know before it runs, as a ``ListNode``."""
        by_name: dict[str, ast.stmt] = {}
        for node in self.usage.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                by_name[node.name] = node
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                by_name[node.targets[0].id] = node
        found = []
        for key, node in self.usage.own_classes.items():
            if by_name.get(node.name) is node and not self.usage.unknown & self.usage.meant & _loads(node):
                needed = [node.name]
                for name in needed:
                    used = _loads(by_name[name])
                    needed += [each for each in by_name if each in used and each not in needed]
                parts = [ast.unparse(each) for name, each in by_name.items() if name in needed]
                found.append([key, node.name, "\n".join([self._imports, *parts])])
        return found

    def playable(self) -> ast.Module:
        """The tests, so that the classes that they define and the objects that they use are known as such.

        They call ``__own_class__``, ``__object__`` and ``__library__``.
        """
        tree = _Playable(self.usage).visit(ast.parse(self.source))
        return ast.fix_missing_locations(tree)


_PRELUDE = "from typing import *\nfrom collections import *"


class _Playable(ast.NodeTransformer):
    def __init__(self, usage: Usage) -> None:
        self.usage = usage
        places = [(node.lineno, node.col_offset) for node in usage.own_classes.values()]
        self.keys = dict(zip(places, usage.own_classes, strict=True))

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        key = self.keys.get((node.lineno, node.col_offset))
        known = vars(builtins).keys() | self.usage.prelude | self.usage.modules
        free = sorted(_loads(node) - stored_names(list(ast.walk(node))) - known)
        self.generic_visit(node)
        if key is not None:
            names = ", ".join(f"{name!r}: lambda: {name}" for name in free)
            node.decorator_list.insert(0, ast.parse(f"__own_class__({key!r}, {{{names}}})", mode="eval").body)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        if any(ast.unparse(target) in self.usage.objects for target in node.targets):
            node.value = _call("__object__", node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = last_name(node.func)
        if name in LIBRARY and ((node.args and name != "type") or len(node.args) == 1):
            node.args[:0] = [node.func, ast.Constant(name)]
            node.func = ast.Name("__library__", ast.Load())
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "__class__" and isinstance(node.ctx, ast.Load):
            return _call("__library__", ast.Name("type", ast.Load()), ast.Constant("type"), node.value)
        return node


def _call(name: str, *arguments: ast.expr) -> ast.expr:
    return ast.Call(ast.Name(name, ast.Load()), [*arguments], [])


def _loads(node: ast.AST) -> set[str]:
    return {each.id for each in loads(ast.walk(node))}
