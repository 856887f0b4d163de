"""``make test``: what it does with a test that fails, one that is unsteady, and one that hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SUITE = Path(__file__).with_name("suite.py")
SETTINGS = """
[tool.pytest.ini_options]
markers = ["engine", "outside", "slow"]
"""
LIGHT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}
"""Dozens of processes start here: they load no plugin but the one that the suite needs."""
UNSTEADY = """
from pathlib import Path

import pytest


@pytest.mark.engine
@pytest.mark.parametrize("number", range({number}))
def test_needs_a_second_try(number):
    tried = Path(__file__).with_name(f"tried-{{number}}")
    before = tried.exists()
    tried.touch()
    assert before
"""


def play(folder: Path, part: str, tests: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "pyproject.toml").write_text(SETTINGS)
    (folder / "test_it.py").write_text(tests)
    command = [sys.executable, SUITE, *part.split(), *arguments]
    environment = os.environ | LIGHT
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("part", ["plain", "engine"])
def test_unsteady_test_is_played_again_and_named_in_last_lines(tmp_path, part):
    tests = UNSTEADY.format(number=2)
    done = play(tmp_path, part, tests if part == "engine" else tests.replace("@pytest.mark.engine", ""))
    assert done.returncode == 0, done.stdout
    assert f"The {part} part had a process without tests for the last 0 s." in done.stdout
    *_, title, first, second = done.stdout.splitlines()
    assert title.startswith("Unsteady:")
    assert [first.strip(), second.strip()] == [f"test_it.py::test_needs_a_second_try[{i}]" for i in (0, 1)]


def test_many_unsteady_tests_fail_the_suite(tmp_path):
    done = play(tmp_path, "engine", UNSTEADY.format(number=4))
    assert done.returncode == 1 and "Once more" not in done.stdout
    assert done.stdout.splitlines()[-1] == "The engine part failed: 4 tests, pytest's status 1."


def test_broken_test_fails_the_suite(tmp_path):
    for part, marker in (("plain", ""), ("engine", "@pytest.mark.engine\n")):
        done = play(tmp_path, part, f"import pytest\n\n{marker}def test_broken():\n    assert 1 == 2\n")
        assert done.returncode == 1 and "1 failed" in done.stdout and "Unsteady" not in done.stdout


def test_chosen_tests_alone_are_played_and_none_is_no_failure(tmp_path):
    tests = "def test_one():\n    pass\n\ndef test_two():\n    assert 0\n"
    done = play(tmp_path, "plain engine", tests, "-k", "one")
    assert done.returncode == 0 and "1 passed" in done.stdout


def test_hanging_suite_says_where_and_ends(tmp_path):
    tests = "import time\n\ndef test_hangs():\n    time.sleep(300)\n"
    done = play(tmp_path, "plain", tests, "--silence", "8")
    assert done.returncode == 1
    assert "said nothing for 8 s" in done.stdout and "in test_hangs" in done.stdout


def test_end_by_a_signal_is_said(tmp_path):
    tests = "import os, signal\n\ndef test_kills():\n    os.kill(os.getppid(), signal.SIGKILL)\n"
    done = play(tmp_path, "plain", tests)
    assert done.returncode == 1 and "status -9, and without a summary" in done.stdout


def test_crash_of_a_test_process_fails_the_suite(tmp_path):
    tests = "import os, pytest\n\n@pytest.mark.engine\ndef test_ends():\n    os._exit(0)\n"
    done = play(tmp_path, "engine", tests)
    assert done.returncode == 1 and "Once more" not in done.stdout


def test_end_without_a_summary_fails_the_suite(tmp_path):
    done = play(tmp_path, "plain", "import os\n\ndef test_ends():\n    os._exit(0)\n", "-n", "0")
    assert done.returncode == 1 and "without a summary" in done.stdout
