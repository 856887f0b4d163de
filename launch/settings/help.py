"""What ``--help`` prints: a command's settings, each with its default, its bound and its field's sentence."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise

from environments.bounds import Leaf, leaves
from environments.command_name import command_name
from launch.settings.compose import recipe_names
from launch.settings.tree import TrainConfig

WIDTH = 100


def help_text(command: str, summary: str, acts_on: Callable[[str], bool]) -> str:
    """The help of a command, such as "train".

    Args:
        acts_on: whether a setting, or "recipe", is one of this command's.
    """
    sections: dict[str, list[Leaf]] = {}
    for leaf in leaves(TrainConfig()):
        if acts_on(leaf.name):
            sections.setdefault(leaf.name.rpartition(".")[0], []).append(leaf)
    takes_recipe = acts_on("recipe")
    arguments = "[recipe=NAME] [setting=value ...]" if takes_recipe else "[setting=value ...]"
    return "\n".join(
        [
            *_paragraph(summary, indent=0),
            "",
            f"usage: {command_name(command)} {arguments}",
            "",
            *([f"recipes: {', '.join(recipe_names())}", ""] if takes_recipe else []),
            "Settings with their defaults, and in brackets the values that they may have:",
            *(line for name, section in sections.items() for line in _section(name, section)),
            "",
        ]
    )


def _section(name: str, section: Iterable[Leaf]) -> list[str]:
    lines: list[str] = []
    for leaf in section:
        if not lines and name:
            lines += ["", *_paragraph(f"{name}: {inspect.cleandoc(leaf.owner.__doc__ or '')}", indent=0)]
        bound = f"  ({leaf.bound})" if str(leaf.bound) else ""
        shown = f"  {leaf.name}={_as_typed(leaf.value)}{bound}"
        lines += textwrap.wrap(shown, WIDTH, subsequent_indent=" " * 6)
        lines += _paragraph(_sentences(leaf.owner.__module__)[leaf.owner.__name__, leaf.declaration.name], 6)
    return lines


def _paragraph(text: str, indent: int) -> list[str]:
    margin = " " * indent
    plain = " ".join(text.replace("``", "").split())
    return textwrap.wrap(plain, WIDTH, initial_indent=margin, subsequent_indent=margin)


def _as_typed(value: object) -> str:
    """A default as the command line takes it."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{','.join(map(_as_typed, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{_as_typed(inner)}' for key, inner in value.items())}}}"
    return str(value).lower() if isinstance(value, bool) else str(value)


@cache
def _sentences(module: str) -> dict[tuple[str, str], str]:
    """By class and field: the string below each field of the module's classes."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {
        (node.name, field.target.id): text.value.value
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for field, text in pairwise(node.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
