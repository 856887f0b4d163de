"""The script that starts Ray's workers: it starts what Ray's own starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private import node, ray_constants

from actors.ray_tools.connect import SETUP_WORKER

RAYS = Path(node.__file__).with_name("workers") / ray_constants.SETUP_WORKER_FILENAME
WORKER = "import json, os, sys; print(json.dumps([sys.argv, dict(os.environ)]))"
CONTEXT = {"command_prefix": [], "py_executable": sys.executable, "java_jars": []}


def started(script: Path, context: dict[str, Any], *arguments: str) -> Any:
    words = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
    environment = {"PATH": os.environ["PATH"], "HERE": "there"}
    command = [sys.executable, str(script), *arguments, *words, "--last"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    argv, seen = json.loads(done.stdout)
    # Of the shell between, and of an import of Ray, which the worker does itself.
    others = ("_", "SHLVL", "PWD", "OLDPWD", "RAY_CLIENT_MODE")
    return argv, {name: value for name, value in seen.items() if name not in others}


@pytest.mark.slow
@pytest.mark.parametrize(
    "context",
    [
        {"env_vars": {"ONE": "1", "TWO": "$HERE and ${HERE}${MISSING}", "PATH": "/bin:$PATH"}},
        {"override_worker_entrypoint": None},
        {"command_prefix": ["THREE=3"]},
    ],
)
def test_worker_starts_as_ray_starts_it(tmp_path: Path, context: dict[str, Any]) -> None:
    worker = tmp_path / "a worker's.py"
    worker.write_text(WORKER)
    arguments = (str(worker), "--name=it's $HERE", '--webui="')
    found = started(Path(SETUP_WORKER), CONTEXT | context, *arguments)
    assert found == started(RAYS, CONTEXT | context, *arguments)
    assert found[0] == [*arguments, "--last"]


def test_script_has_the_name_that_raylets_know() -> None:
    assert Path(SETUP_WORKER).name == "setup_worker.py" and Path(SETUP_WORKER).is_file()
