"""Troupe as somebody else has it: installed from its wheel, used in a folder of their own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import urllib.error
import urllib.request
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from head_node import PORTS
from machine import free_port, wait_until
from openai import AuthenticationError, OpenAI, PermissionDeniedError
from openai.types.chat import ChatCompletion
from shown_programs import SHOP

from launch.reporting.tracker import read_metrics

pytestmark = pytest.mark.outside

ROOT = Path(__file__).resolve().parents[3]
LAYERS = ("environments", "policies", "actors", "launch")
LEFT_OUT = {"launch/install/pins.py", "launch/install/Dockerfile"}
"""These need the repository, which a wheel does not have."""

NOTED = """

from pathlib import Path

import environments


def noted(task_info, action):
    Path(NOTES, "agent-was-in").write_text(__file__)
    Path(NOTES, "troupe-was-in").write_text(environments.__file__)
    return math_reward_fn(task_info, action)


NOTES = {notes!r}
ENV_ARGS["reward_fn"] = noted
"""
"""Makes the workload of the guide say where it and the library have been found."""
SMALL = [
    "workload=my_workload",
    "run.num_steps=2",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    "rollout.max_response_tokens=96",
    "rollout.max_prompt_tokens=128",
    "server.engine.max_model_tokens=256",
    "fleet.num_actors=2",
    "evaluation.num_tasks=2",
    "learner.mini_batch_size=4",
    "algorithm.zero_signal_groups=keep",
]


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A program in ``cwd`` that knows nothing of this checkout."""
    return subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=foreign_environment() | environment,
        capture_output=True,
        text=True,
        timeout=900,
    )


def foreign_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools would leave folders in this checkout, and pack what lies in them."""
    source = tmp_path_factory.mktemp("source")
    for name in LAYERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "-q", "--no-index"]
    built = run(*pip, "--no-deps", "--no-build-isolation", "-w", source / "dist", source, cwd=source)
    assert built.returncode == 0, built.stderr
    (path,) = (source / "dist").iterdir()
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of a fresh environment with the wheel in it. The packages that it needs are borrowed."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", folder / "bin" / "python"]
    done = run(*pip, "install", "-q", "--no-index", "--no-deps", wheel, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A folder with nothing but somebody's own ``my_workload.py``, the one that a guide shows."""
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "my_workload.py").write_text(SHOP + NOTED.format(notes=str(tmp_path)))
    return folder


def test_wheel_holds_files_of_layers_and_nothing_else(wheel: Path) -> None:
    tracked = {
        str(path.relative_to(ROOT))
        for layer in LAYERS
        for path in (ROOT / layer).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and path.name != "README.md"
    }
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == tracked - LEFT_OUT


def test_installed_command_knows_its_recipes_in_any_folder(installed: Path, foreign: Path) -> None:
    helped = run(installed / "troupe", "train", "--help", cwd=foreign)
    assert "recipes: calculator, " in helped.stdout, helped.stderr
    # The recipe and the module are found before the error that is meant.
    for choice in ("recipe=calculator", "workload=my_workload"):
        refused = run(installed / "troupe", "train", choice, "rollout.group_size=1", cwd=foreign)
        assert (refused.returncode, "rollout.group_size=1" in refused.stderr) == (2, True), refused.stderr


def test_submitted_job_trains_what_is_in_its_working_directory(
    installed: Path, foreign: Path, dashboard: str
) -> None:
    directory = foreign.parent / "run"
    done = run_job(installed, foreign, dashboard, "train", *SMALL, f"run.directory={directory}")
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [each["step"] for each in read_metrics(directory) if "learn/loss" in each]
    assert steps == [1, 2]
    assert_played(notes=foreign.parent, installed=installed)


def test_submitted_job_evaluates_its_working_directory(
    installed: Path, foreign: Path, dashboard: str, tiny_model: Path
) -> None:
    of_rollouts = [each for each in SMALL if each.startswith(("workload", "rollout.max", "server", "fleet"))]
    chosen = [f"model.path={tiny_model}", f"run.directory={foreign.parent}", "evaluation.num_tasks=2"]
    done = run_job(installed, foreign, dashboard, "evaluate", *of_rollouts, *chosen)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "problems 2, samples 2" in done.stdout and "pass@1 " in done.stdout
    assert_played(notes=foreign.parent, installed=installed)


def test_submitted_job_serves_a_model_until_it_is_stopped(
    installed: Path, foreign: Path, dashboard: str, tiny_model: Path
) -> None:
    port = free_port()
    chosen = [f"model.path={tiny_model}", f"server.http_port={port}", "fleet.num_actors=1"]
    short = ["rollout.max_turn_tokens=16", "rollout.max_steps=1"]
    options = ["--no-wait", "--submission-id=serving"]
    command = [installed / "troupe", "serve", "recipe=calculator", *chosen, *short]
    # As trainings and evaluations leave it behind, those of the tests above too.
    without_address = "from ray import serve; serve.start(proxy_location='Disabled')"
    leave = ["--address", dashboard, "--", installed / "python", "-c", shlex.quote(without_address)]
    left = ray_cli(installed, "job", "submit", *leave, cwd=foreign)
    assert left.returncode == 0, left.stdout + left.stderr
    done = ray_cli(installed, "job", "submit", "--address", dashboard, *options, "--", *command, cwd=foreign)
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        wait_until(lambda: is_served(dashboard, "serving"), seconds=400)
        for model in ("policy", "agent/calculator"):
            assert reply(port, model).usage.completion_tokens > 0
    finally:
        ray_cli(installed, "job", "stop", "--address", dashboard, "serving", cwd=foreign)
        print(log_of_job(dashboard, "serving"))
    wait_until(lambda: health(port) != 200)


def test_serve_deploy_serves_the_policy_of_the_shipped_file(
    installed: Path, foreign: Path, dashboard: str, tiny_model: Path
) -> None:
    (shipped,) = installed.parent.glob("lib/python*/site-packages/launch/cluster/serve.yaml")
    port, file = free_port(), foreign / "serve.yaml"
    text = shipped.read_text(encoding="utf-8")
    for there, here in (("model.path=/shared/runs/a", f"model.path={tiny_model}"), ("8000", str(port))):
        assert text.count(there) == 1
        text = text.replace(there, here)
    file.write_text(text, encoding="utf-8")
    end_serve(installed, dashboard, foreign)
    done = serve_cli(installed, "deploy", "--address", dashboard, file, cwd=foreign)
    assert done.returncode == 0, done.stdout + done.stderr
    try:
        wait_until(lambda: health(port) == 200, seconds=400)
        assert reply(port, "policy", Host="troupe-serve-svc").usage.completion_tokens > 0
        with pytest.raises(PermissionDeniedError, match=r"server\.access\.hosts"):
            reply(port, "policy", Host="elsewhere")
        with pytest.raises(AuthenticationError):
            reply(port, "policy", Authorization="Bearer wrong")
    finally:
        status = serve_cli(installed, "status", "--address", dashboard, cwd=foreign)
        end_serve(installed, dashboard, foreign)
    assert "RUNNING" in status.stdout, status.stdout + status.stderr
    wait_until(lambda: health(port) is None)


def run_job(installed: Path, folder: Path, dashboard: str, *command: str) -> subprocess.CompletedProcess[str]:
    """``troupe ...`` as a job with ``folder`` as its working directory, from outside of the cluster."""
    job = ["--address", dashboard, "--working-dir", ".", "--", installed / "troupe", *command]
    return ray_cli(installed, "job", "submit", *job, cwd=folder)


def ray_cli(installed: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(installed / "python", *RAY, *arguments, cwd=cwd, RAY_AUTH_MODE="disabled")


def serve_cli(installed: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run(installed / "python", *SERVE, *arguments, cwd=cwd, RAY_AUTH_MODE="disabled")


def end_serve(installed: Path, dashboard: str, folder: Path) -> None:
    """A cluster's Serve stays, with the address of the command that has started it, or with none."""
    done = serve_cli(installed, "shutdown", "-y", "--address", dashboard, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    wait_until(lambda: not answer_of(dashboard, "serve/applications/")["controller_info"].get("node_id"))


def is_served(dashboard: str, job: str) -> bool:
    """Whether a job of ``launch.serve`` can be asked; fails where it has ended instead."""
    said = log_of_job(dashboard, job)
    assert answer_of(dashboard, f"jobs/{job}")["status"] in ("PENDING", "RUNNING"), said
    return "Ctrl-C ends it." in said


def log_of_job(dashboard: str, name: str) -> str:
    return str(answer_of(dashboard, f"jobs/{name}/logs")["logs"])


def answer_of(dashboard: str, question: str) -> dict[str, Any]:
    """What the dashboard knows of its cluster."""
    with urllib.request.urlopen(f"{dashboard}/api/{question}", timeout=180) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def health(port: int) -> int | None:
    """The HTTP status of the policy server; ``None`` where nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def reply(port: int, model: str, **headers: str) -> ChatCompletion:
    """A short answer of the policy server."""
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0, timeout=180)
    question = {"role": "user", "content": "What is 12+34?"}
    limit = {} if model.startswith("agent/") else {"max_tokens": 4}
    return client.chat.completions.create(model=model, messages=[question], extra_headers=headers, **limit)


def assert_played(notes: Path, installed: Path) -> None:
    """The agent and the library were those of the stranger's folder and environment."""
    assert Path((notes / "agent-was-in").read_text()).name == "my_workload.py"
    assert Path((notes / "troupe-was-in").read_text()).is_relative_to(installed.parent)


@pytest.fixture(scope="module")
def dashboard(installed: Path) -> Iterator[str]:
    """Where jobs are submitted to: of a cluster of its own, as ``ray start --head`` makes it."""
    ports = {name: str(free_port()) for name in PORTS}
    options = [f"--{name}={port}" for name, port in ports.items()]
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # tmp_path is too long for its sockets
        start = [
            installed / "python",
            "-m",
            "ray.scripts.scripts",
            "start",
            "--head",
            "--block",
            "--num-cpus=4",
        ]
        log = Path(folder) / "head.log"
        with log.open("w") as output:
            head = subprocess.Popen(
                [*map(str, start), *options, f"--temp-dir={folder}/ray"],
                cwd=folder,  # jobs without a folder of their own work there, and not in this checkout
                env=foreign_environment() | AS_ON_NODES | {"RAY_TMPDIR": folder},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(lambda: answers(int(ports["dashboard-port"])) or head.poll() is not None)
            assert head.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{ports['dashboard-port']}"
        finally:
            head.send_signal(signal.SIGTERM)
            head.wait(timeout=180)


RAY, SERVE = ("-m", "ray.scripts.scripts"), ("-m", "ray.serve.scripts")
"""The commands ``ray`` and ``serve``: their own programs are in the environment of the borrowed packages."""
KEY = "a-key-of-the-tests-0123"
AS_ON_NODES = {"RAY_AUTH_MODE": "disabled", "TROUPE_API_KEYS": f"tester:{KEY}"}
"""Variables of the environment in which Ray starts."""


def answers(port: int) -> bool:
    """Whether something listens on ``port``."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
