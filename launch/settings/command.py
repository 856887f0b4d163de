"""Commands with settings: their ``--help``, overrides and exit status."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

from environments.bounds import Leaf, leaves
from environments.command_name import command_name
from environments.errors import ConfigError, TroupeError
from launch.health.interrupt import Interrupts
from launch.settings.compose import compose, named_settings, recipe_names
from launch.settings.tree import TrainConfig

WIDTH = 100
"""Characters of a line of help."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command and the settings that it acts on: it lists these, and takes no others.

    A recipe may hold settings of all commands; those that are not this command's are left alone.
    """

    name: str
    """Name, as in ``troupe serve``."""
    summary: str | None
    """Head of its help."""
    work: Callable[[TrainConfig], None]
    """Function that does the work."""
    settings: tuple[str, ...]
    """The settings that it acts on, or whole sections of them; "recipe" if it takes one."""
    left_out: Mapping[str, str] = field(default_factory=dict)
    """Settings that a user may expect here and that have no effect, with the remedy of each."""

    @Interrupts().installed()
    def run(self, arguments: list[str]) -> int:
        """Do the work with the configuration of ``arguments``.

        Returns:
            The exit status: 0 done, 2 for invalid settings or a failure with its reason, 130 for Ctrl-C and
            SIGTERM.
        """
        if "--help" in arguments or "-h" in arguments:
            sys.stdout.write(self.help_text())
            return 0
        try:
            self.work(self.configuration(arguments))
        except TroupeError as error:
            sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
            return 2
        except KeyboardInterrupt:
            return 130
        return 0

    def help_text(self) -> str:
        """The help: its settings, each with its default, its bound and its field's sentence."""
        sections: dict[str, list[Leaf]] = {}
        for leaf in leaves(TrainConfig()):
            if self.acts_on(leaf.name):
                sections.setdefault(leaf.name.rpartition(".")[0], []).append(leaf)
        takes_recipe = self.acts_on("recipe")
        arguments = "[recipe=NAME] [setting=value ...]" if takes_recipe else "[setting=value ...]"
        return "\n".join(
            [
                *_paragraph(self.summary or "", indent=0),
                "",
                f"usage: {command_name(self.name)} {arguments}",
                "",
                *([f"recipes: {', '.join(recipe_names())}", ""] if takes_recipe else []),
                "Settings with their defaults, and in brackets the values that they may have:",
                *(line for name, section in sections.items() for line in _section(name, section)),
                "",
            ]
        )

    def configuration(self, arguments: list[str]) -> TrainConfig:
        """Configuration that ``arguments`` set.

        Raises:
            ConfigError: a setting is invalid, or has no effect on this command.
        """
        named = named_settings(arguments)
        config = compose(arguments)  # before the next check: what does not exist has no command
        for setting in named:
            if not self.acts_on(setting):
                others = f"It is for training, which is {command_name('train')}."
                remedy = next(
                    (each for name, each in self.left_out.items() if _is_within(setting, [name])), others
                )
                raise ConfigError(
                    f"{setting} has no effect on launch.{self.name}: leave it out. {remedy} "
                    f"`{command_name(self.name)} --help` lists its settings."
                )
        return config

    def acts_on(self, setting: str) -> bool:
        """Return whether ``setting`` has an effect on this command."""
        return _is_within(setting, self.settings) and not _is_within(setting, self.left_out)


def _is_within(setting: str, names: Collection[str]) -> bool:
    """Return whether ``setting`` is one of ``names``, or in a section that is."""
    return any(setting == name or setting.startswith(f"{name}.") for name in names)


# -- help ---------------------------------------------------------------------------------------------


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
    """Strings below the fields of the module's classes, by class and field."""
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
