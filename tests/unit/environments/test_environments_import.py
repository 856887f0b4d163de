"""Rollout actors and command lines import ``environments`` first: it has to stay light."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import pkgutil, sys
before = set(sys.modules)
import environments
for module in pkgutil.walk_packages(environments.__path__, "environments."):
    __import__(module.name)
loaded = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(loaded - set(sys.stdlib_module_names) - {"environments"}))
"""


def test_every_module_imports_only_the_standard_library():
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []


def test_all_public_names_exist():
    import environments

    assert all(hasattr(environments, name) for name in environments.__all__)
