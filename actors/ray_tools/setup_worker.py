"""Starts a worker of Ray in its runtime environment, as Ray's script of this name does.

That one imports Ray, 0.4 s of CPU time, only to become a process that imports it again. What it alone can do,
such as to start a worker in a container, is left to it. A raylet runs this by its path, and knows its name.
"""

from __future__ import annotations

import json
import os
import re
import sys
from importlib.util import find_spec

CONTEXT = "--serialized-runtime-env-context="
LANGUAGE = "--language="
PLAIN = {"env_vars", "py_executable"}
"""Parts of a context that hold for all workers; the others are empty."""


def main(arguments: list[str]) -> None:
    """Become the worker of ``arguments``."""
    given = [each for each in arguments if each.startswith((CONTEXT, LANGUAGE))]
    context = json.loads(
        next((each for each in given if each.startswith(CONTEXT)), "{}").removeprefix(CONTEXT)
    )
    python = context.get("py_executable") or sys.executable
    is_plain = not any(value for name, value in context.items() if name not in PLAIN)
    if not (is_plain and f"{LANGUAGE}PYTHON" in given and os.access(python, os.X_OK)):
        ray = find_spec("ray")
        assert ray is not None and ray.origin is not None
        script = os.path.join(os.path.dirname(ray.origin), "_private", "workers", "setup_worker.py")
        os.execv(sys.executable, [sys.executable, script, *arguments])
    for name, value in (context.get("env_vars") or {}).items():
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    os.execv(python, [python, *(each for each in arguments if each not in given)])


if __name__ == "__main__":
    main(sys.argv[1:])
