"""Commands with settings: their ``--help``, overrides and exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from environments.command_name import command_name
from environments.errors import ConfigError, TroupeError
from launch.settings.compose import compose, named_settings
from launch.settings.help import help_text
from launch.settings.tree import TrainConfig


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

    def run(self, arguments: list[str]) -> int:
        """Do the work with the configuration of ``arguments``.

        Returns:
            The exit status: 0 done, 2 for invalid settings or a failure with its reason, 130 for Ctrl-C.
        """
        if "--help" in arguments or "-h" in arguments:
            sys.stdout.write(help_text(self.name, self.summary or "", self.acts_on))
            return 0
        try:
            self.work(self.configuration(arguments))
        except TroupeError as error:
            sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
            return 2
        except KeyboardInterrupt:
            return 130
        return 0

    def configuration(self, arguments: list[str]) -> TrainConfig:
        """Configuration that ``arguments`` set.

        Raises:
            ConfigError: a setting is invalid, or has no effect on this command.
        """
        named = named_settings(arguments)
        config = compose(arguments)  # before the next check: what does not exist has no command
        for setting in named:
            self._check_acts_on(setting)
        return config

    def acts_on(self, setting: str) -> bool:
        """Return whether ``setting`` has an effect on this command."""
        return _is_within(setting, self.settings) and not _is_within(setting, self.left_out)

    def _check_acts_on(self, setting: str) -> None:
        if self.acts_on(setting):
            return
        remedy = next(
            (self.left_out[name] for name in self.left_out if _is_within(setting, [name])),
            f"It is for training, which is {command_name('train')}.",
        )
        raise ConfigError(
            f"{setting} has no effect on launch.{self.name}: leave it out. {remedy} "
            f"`{command_name(self.name)} --help` lists its settings."
        )


def _is_within(setting: str, names: Collection[str]) -> bool:
    """Return whether ``setting`` is one of ``names``, or in a section that is."""
    return any(setting == name or setting.startswith(f"{name}.") for name in names)
