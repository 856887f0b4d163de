"""Python files of the four layers, with their syntax trees and imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

LAYERS = ("environments", "policies", "actors", "launch")
"""From the ground up: a layer may import itself and what stands before it."""


@dataclass(frozen=True)
class Import:
    """One imported name; ``at_start`` when importing the module that holds it runs it."""

    name: str
    line: int
    at_start: bool


@dataclass(frozen=True)
class Module:
    """One source file; ``name`` is dotted, a package's ``__init__.py`` has the package's name."""

    name: str
    path: Path

    @property
    def layer(self) -> str:
        return self.name.partition(".")[0]

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @cached_property
    def imports(self) -> list[Import]:
        return list(self._imports_below(self.tree, at_start=True))

    def _imports_below(self, node: ast.AST, at_start: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, at_start) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                # `from a import b`: b may be a module, so a.b counts as imported too.
                source = self._source_of(child)
                yield Import(source, child.lineno, at_start)
                yield from (Import(f"{source}.{alias.name}", child.lineno, at_start) for alias in child.names)
            elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
                yield from self._imports_below(ast.Module(child.body, []), at_start=False)
                yield from self._imports_below(ast.Module(child.orelse, []), at_start)
            else:
                is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from self._imports_below(child, at_start and not is_function)

    def _source_of(self, node: ast.ImportFrom) -> str:
        if node.level == 0:
            return node.module or ""
        package = self.name.split(".") if self.is_package else self.name.split(".")[:-1]
        package = package[: len(package) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])


@cache
def modules_in(root: Path) -> dict[str, Module]:
    """All modules of the four layers by dotted name."""
    modules = {}
    for path in sorted(file for layer in LAYERS for file in (root / layer).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path)
    return modules


def import_graph(modules: dict[str, Module]) -> dict[str, set[str]]:
    """By module: the modules among ``modules`` that it names in an import, whenever that runs."""
    return {
        name: {each.name for each in module.imports if each.name in modules and each.name != name}
        for name, module in modules.items()
    }
