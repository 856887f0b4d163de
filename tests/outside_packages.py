"""Environments with other people's packages, which the first test that needs one makes."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
INSTALL_SECONDS = 540
"""For which pip or npm may fetch them."""

QUIET = {"MSWEA_CONFIGURED": "1", "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1"}
"""Variables by which mini-swe-agent asks nothing at its start, and ends with its rollout."""


def environment_with(packages: Path) -> Path:
    """Return the ``bin`` of the environment with a list of packages; skip where pip cannot fetch them."""
    name = hashlib.sha256(sys.version.encode() + packages.read_bytes()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"troupe-clients-{name}"
    done = folder / "installed"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        pip = [folder / "bin" / "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        try:
            command = [*pip, "-r", packages]
            subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"pip cannot fetch {packages.name}: {error.stderr.strip().splitlines()[-1]}")
        except subprocess.TimeoutExpired:
            pytest.skip(f"pip has not fetched {packages.name} in {INSTALL_SECONDS} s")
        done.touch()
    return folder / "bin"


def npm_environment(*packages: str) -> Path:
    """Return the folder with packages of npm, which lie in its ``node_modules``; skip where npm cannot fetch
    them.
    """
    name = hashlib.sha256("".join(packages).encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"troupe-npm-{name}"
    done = folder / "installed"
    if not done.exists():
        npm = ["npm", "install", "--no-audit", "--no-fund", "--prefix", folder]
        try:
            command = [*npm, *packages]
            subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=True)
        except FileNotFoundError:
            pytest.skip("npm is not installed")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"npm cannot fetch {packages[0]}: {error.stderr.strip().splitlines()[-1]}")
        except subprocess.TimeoutExpired:
            pytest.skip(f"npm has not fetched {packages[0]} in {INSTALL_SECONDS} s")
        done.touch()
    return folder


@contextmanager
def answering_program(framework: str, log: Path) -> Iterator[Path]:
    """The socket at which a framework of ``outside_programs.py`` answers; ``log`` has its output."""
    python = environment_with(TESTS / "outside_programs.txt") / "python"
    with tempfile.TemporaryDirectory() as place, log.open("a") as output:
        socket = Path(place, "socket")
        server = subprocess.Popen(
            [python, TESTS / "outside_programs.py", framework, socket],
            env={"PATH": os.environ["PATH"], "HOME": place, **QUIET},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while not socket.exists():
                if server.poll() is not None:
                    raise RuntimeError(f"{framework} has not started: {log.read_text()}")
                time.sleep(0.2)
            yield socket
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
