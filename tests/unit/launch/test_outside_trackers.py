"""wandb, mlflow and trackio for real, each in an environment of its own, without a key."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from outside_packages import environment_with

pytestmark = pytest.mark.outside

TESTS = Path(__file__).resolve().parents[2]
KEYS = ("WANDB", "MLFLOW", "TRACKIO", "HF_", "HUGGING")


@contextmanager
def proxy() -> Iterator[tuple[str, list[bytes]]]:
    """The address of a proxy that answers nobody, and the first words of all who have called it."""
    called: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def take_note() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # closed
                    return
                with connection:
                    called.append(connection.recv(200))

        threading.Thread(target=take_note, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", called
        server.shutdown(socket.SHUT_RDWR)


def run(python: Path, address: str, folder: Path, *arguments: str | Path) -> Any:
    """What a Python program leaves in ``result.json``; all that it would send goes to ``address``."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(KEYS)}
    variables |= dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), address)
    variables |= {"NO_PROXY": "127.0.0.1,localhost", "HOME": str(folder.parent)}
    done = subprocess.run(
        [python, *arguments],
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,  # whoever is asked for an account here cannot answer
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_tracker_holds_metrics_of_resumed_run(name: str, tmp_path: Path) -> None:
    python = environment_with(TESTS / f"outside_{name}.txt") / "python"
    program, folder = TESTS / "outside_trackers.py", tmp_path / "run"
    folder.mkdir()
    with proxy() as (address, called):
        connected = run(python, address, folder, program, "record", name, folder)
        found = run(python, address, folder, program, "read", name, folder)
        assert (connected, called) == ([], []), "nothing is sent out"
        sends = "import urllib.request as u; u.urlopen('http://example.invalid', timeout=20)"
        with pytest.raises(AssertionError, match="urlopen"):
            run(python, address, folder, "-c", sends)
        assert called, "else the proxy would not have noticed"
    assert found == {
        "runs": 1,
        "seed": 7,
        "rollout/reward_mean": [[step, step / 8] for step in range(1, 7)],
        "eval/reward_mean": [[1, 0.25]],
    }
