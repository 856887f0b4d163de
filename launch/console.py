"""``troupe NAME``: the commands of an installed Troupe. Each is the same as ``python -m launch.NAME``."""

from __future__ import annotations

import difflib
import importlib
import os
import sys

COMMANDS = {
    "train": "train an agent",
    "evaluate": "measure a model on held-out tasks",
    "serve": "serve a policy to OpenAI clients",
    "view": "look at runs and their trajectories in the browser",
    "export": "write the trajectories of a run for other programs, or its policy to the hub",
    "play": "play one episode in the terminal, with you as the model",
    "status": "say what the parts of a run wait for, and which one holds it up",
    "scale": "change the number of rollout actors or replicas while a run goes on",
    "replay": "compute an update of a run again, as it was and with a change",
    "verify": "check by a run's folder that no rollout is lost, used twice or too old",
    "chaos": "list the processes of a run, kill or stop one, or many at random",
}


def run() -> int:
    """Run ``main`` with the arguments of the process: the program ``troupe``."""
    # As `python -m` does: the user's own module is in the working directory.
    sys.path.insert(0, os.getcwd())
    return main(sys.argv[1:])


def main(arguments: list[str]) -> int:
    """Run the command that the first argument names; return its exit status, 2 if it is unknown."""
    name = arguments[0] if arguments else "--help"
    if name in ("--help", "-h"):
        sys.stdout.write(help_text())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.3)
        hint = f"Did you mean 'troupe {near[0]}'?" if near else f"There are: {', '.join(COMMANDS)}."
        sys.stderr.write(f"There is no command {name!r}. {hint}\n")
        return 2
    status: int = importlib.import_module(f"launch.{name}").main(arguments[1:])
    return status


def help_text() -> str:
    """Text of ``troupe --help``: the commands, one a line."""
    commands = "\n".join(f"  {name:<10}{summary}" for name, summary in COMMANDS.items())
    return f"""\
Reinforcement learning for language-model agents.

usage: troupe COMMAND [ARGUMENTS ...]

{commands}

`troupe COMMAND --help` lists the settings of a command. `python -m launch.COMMAND` is the same.
"""
