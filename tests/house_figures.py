"""Figures of the source: sizes, splinters and loose types, by layer and in all.

python tests/house_figures.py [FOLDER ...]    of this checkout, or of others beside each other
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from source_tree import LAYERS, Module, import_graph, modules_in

FORMS = {"BaseModel", "Body", "Part", "TypedDict", "Enum", "StrEnum", "IntEnum"}
"""Bases of classes whose fields are those of a request body, or the names of choices."""
SETTINGS = ("Config", "Settings", "Options", "Params")
"""Ends of the names of classes whose fields are settings."""
SPLINTER_LINES = 110
"""Modules with fewer lines whose only reader stands beside them are counted as splinters."""
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.COMMENT,
    tokenize.ENDMARKER,
}


def classes(module: Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef))


def lines_of(node: ast.ClassDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def is_form(module: Module, node: ast.ClassDef) -> bool:
    """Whether a class has the form of settings, of a request body or of a choice: fields, and no state."""
    if {"settings", "config"} & set(re.split(r"[._]", module.name)) or node.name.endswith(SETTINGS):
        return True
    beside = {each.name: each for each in classes(module)}
    bases = [ast.unparse(each).partition("[")[0].rpartition(".")[2] for each in node.bases]
    return any(base in FORMS or (base in beside and is_form(module, beside[base])) for base in bases)


def attributes(module: Module, node: ast.ClassDef) -> set[str]:
    """Names that a class holds or that its methods set on ``self``; none of a form."""
    if is_form(module, node):
        return set()
    fields = {
        target.id
        for statement in node.body
        if isinstance(statement, ast.Assign | ast.AnnAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Name) and not target.id.isupper() and not target.id.startswith("__")
    }
    own = {
        each.attr
        for each in ast.walk(node)
        if isinstance(each, ast.Attribute)
        and isinstance(each.ctx, ast.Store)
        and ast.unparse(each.value) == "self"
    }
    return fields | own


def public_methods(node: ast.ClassDef) -> set[str]:
    return {
        each.name
        for each in node.body
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("_")
    }


def splinters(modules: dict[str, Module], max_lines: int) -> list[str]:
    """Modules of fewer lines than ``max_lines`` whose only reader stands in the same folder."""
    readers: dict[str, list[str]] = {}
    for name, imported in import_graph(modules).items():
        for each in imported:
            readers.setdefault(each, []).append(name)
    return sorted(
        name
        for name, module in modules.items()
        if not module.is_package
        and len(module.text.splitlines()) < max_lines
        and [modules[each].path.parent for each in readers.get(name, [])] == [module.path.parent]
    )


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Texts that stand as statements of their own: of modules, classes, functions and values."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value


def lines_of_code(module: Module) -> int:
    """Number of lines that hold more than a comment or a docstring."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        if token.type not in LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    documented = {
        line for each in docstrings(module.tree) for line in range(each.lineno, (each.end_lineno or 0) + 1)
    }
    return len(lines - documented)


def names(module: Module, name: str) -> int:
    """Number of places where ``name`` stands, but in imports."""
    return sum(isinstance(node, ast.Name) and node.id == name for node in ast.walk(module.tree))


def calls(module: Module, *functions: str) -> int:
    return sum(
        isinstance(node, ast.Call) and ast.unparse(node.func) in functions for node in ast.walk(module.tree)
    )


def object_types(module: Module) -> int:
    """Number of places where ``object`` is a type, and neither made nor derived from."""
    made = sum(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("object", "object.__new__", "object.__setattr__")
        for node in ast.walk(module.tree)
    )
    return names(module, "object") - made


FIGURES: dict[str, Callable[[Module], int]] = {
    "lines": lambda module: len(module.text.splitlines()),
    "lines of code": lines_of_code,
    "`Any`": lambda module: names(module, "Any"),
    "`object` as a type": object_types,
    "`isinstance`": lambda module: calls(module, "isinstance"),
    "class patterns": lambda module: sum(isinstance(node, ast.MatchClass) for node in ast.walk(module.tree)),
    "`cast`": lambda module: calls(module, "cast", "typing.cast"),
    "`type: ignore`": lambda module: module.text.count("# type: ignore"),
}
"""Figures that add up over modules."""


def largest(modules: Iterable[Module], size: Callable[[Module, ast.ClassDef], int]) -> str:
    """The greatest size of a class, and its name."""
    most, name = max(
        ((size(each, node), node.name) for each in modules for node in classes(each)), default=(0, "-")
    )
    return f"{most} {name}"


def figures(root: Path, layer: str = "") -> dict[str, str]:
    """All figures of a layer, or of the whole source below ``root``."""
    everything = modules_in(root)
    modules = [each for each in everything.values() if layer in ("", each.layer)]
    found = {name: str(sum(map(count, modules))) for name, count in FIGURES.items()}
    found["modules"] = str(len(modules))
    found["splinters"] = str(
        sum(everything[each] in modules for each in splinters(everything, SPLINTER_LINES))
    )
    found["largest class, lines"] = largest(modules, lambda _, node: lines_of(node))
    found["largest class, attributes"] = largest(modules, lambda module, node: len(attributes(module, node)))
    found["largest class, public methods"] = largest(modules, lambda _, node: len(public_methods(node)))
    return found


def main(folders: list[str]) -> None:
    """Print a table of each folder's figures."""
    for root in map(Path, folders or [str(Path(__file__).resolve().parents[1])]):
        columns = {layer or "all": figures(root, layer) for layer in (*LAYERS, "")}
        print(f"\n| {root.resolve().name} | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}")
        for name in columns["all"]:
            print(f"| {name} | {' | '.join(column[name] for column in columns.values())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
