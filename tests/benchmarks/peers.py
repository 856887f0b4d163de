"""Seconds of a GRPO step, beside those of other trainers on the same machine.

    python tests/benchmarks/peers.py [--peers trl] [--model smollm2-135m-instruct] [--rounds 5] [--updates 12]

Single-turn answers of the tiny model, or of another: 8 groups of 8, at most 48 tokens each, one optimizer
step. The arms take turns, each as a program of its own: Troupe in turns (``max_staleness=0``), Troupe with
rollouts beside the learner (1), and each peer. The first two steps of a program do not count. A peer is a
file of this folder, ``peer_NAME.py``, whose packages are installed into an environment of its own; see
``peer_trl.py``. Takes about a quarter of an hour with the tiny model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import models
import repository  # noqa: F401
from programs import HERE, run
from report import Report

from environments import Dataset, SingleTurnEnvironment
from launch.reporting.tracker import read_metrics
from launch.workload import Workload
from policies import GameAgent

GROUPS, GROUP_SIZE, MAX_TOKENS, LR = 8, 8, 48, 1e-5
NOT_COUNTED = 2
"""First steps of a program, in which it still starts."""
QUESTIONS = [f"What is {a}+{b}?" for a in range(10, 40) for b in range(10, 40)]
RUN = [
    "workload=peers",
    f"rollout.groups_per_step={GROUPS}",
    f"rollout.group_size={GROUP_SIZE}",
    "rollout.max_steps=1",
    "rollout.max_prompt_tokens=64",
    f"rollout.max_response_tokens={MAX_TOKENS}",
    f"learner.mini_batch_size={GROUPS * GROUP_SIZE}",
    f"learner.optimizer.lr={LR}",
    "evaluation.num_tasks=1",
    "run.checkpoints.every=1000",
]


def has_odd_length(task_info: dict[str, str], action: str) -> float:
    """A reward in which the members of a group differ, and which costs nothing."""
    return float(len(action) % 2)


def workload(seed: int) -> Workload:
    """The questions, each answered in a single turn."""
    tasks = Dataset([{"question": question} for question in QUESTIONS], name="sums")
    return Workload(
        agent_class=GameAgent,
        env_class=SingleTurnEnvironment,
        env_args={"reward_fn": has_odd_length},
        train_dataset=tasks,
        val_dataset=tasks,
    )


def troupe_seconds(
    model: str, folder: Path, num_updates: int, staleness: int, options: Sequence[str]
) -> list[float]:
    """Seconds of the updates of one run."""
    overrides = [f"model.path={model}", f"run.directory={folder}", f"run.num_steps={num_updates}"]
    run([*RUN, *overrides, f"rollout.max_staleness={staleness}", *options], {"RAY_worker_niceness": "0"})
    updates = [each["time/step"] for each in read_metrics(folder) if "learn/loss" in each]
    return updates[NOT_COUNTED:]


def environment_of(peer: str, folder: Path) -> Path:
    """The interpreter of a fresh environment with the peer's packages; others are borrowed from this one."""
    venv.create(folder)
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    wanted = importlib.import_module(f"peer_{peer}").PACKAGES
    python = folder / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        str(python),
        "install",
        "-q",
    ]
    subprocess.run([*pip, "--no-deps", *wanted], check=True)
    return python


def peer_seconds(peer: str, python: Path, model: str, folder: Path, num_updates: int) -> list[float]:
    """Seconds of the steps of one program of a peer."""
    job = {
        "model": model,
        "questions": QUESTIONS,
        "groups": GROUPS,
        "group_size": GROUP_SIZE,
        "max_tokens": MAX_TOKENS,
        "lr": LR,
        "steps": num_updates,
    }
    return run_peer(peer, python, job, folder)[NOT_COUNTED - 1 :]  # between two steps


def run_peer(peer: str, python: Path, job: dict[str, Any], folder: Path) -> list[float]:
    """Run a program of a peer to its end, in a new folder; return the seconds between its steps."""
    folder.mkdir(parents=True)
    job = {**job, "seconds": str(folder / "seconds.json")}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    done = subprocess.run(
        [str(python), str(HERE / f"peer_{peer}.py"), str(folder / "job.json")],
        capture_output=True,
        text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nThe peer {peer} failed with status {done.returncode}.")
    seconds: list[float] = json.loads((folder / "seconds.json").read_text(encoding="utf-8"))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--peers", default="trl", help="names of files peer_NAME.py, with commas between")
    parser.add_argument("--model", default=models.TINY, help=f"{models.TINY}, or one that model.path takes")
    parser.add_argument("--rounds", type=int, default=5, help="programs of each arm")
    parser.add_argument("--updates", type=int, default=12, help="of each program")
    parser.add_argument("overrides", nargs="*", help="settings of Troupe's runs, such as fleet.num_actors=32")
    arguments = parser.parse_args()
    peers = [name for name in arguments.peers.split(",") if name]
    report = Report(
        f"a GRPO step of {GROUPS * GROUP_SIZE} single-turn answers of at most {MAX_TOKENS} tokens, model "
        f"{arguments.model}: median of {arguments.rounds} programs",
        ("arm", "seconds", *[f"of {peer}" for peer in peers], "all rounds"),
    )
    arms: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = models.chosen(arguments.model, folder)
        pythons = {peer: environment_of(peer, folder / f"environment-{peer}") for peer in peers}
        for number in range(arguments.rounds):
            for peer, python in pythons.items():
                seconds = peer_seconds(peer, python, model, folder / f"{peer}-{number}", arguments.updates)
                arms.setdefault(peer, []).append(statistics.median(seconds))
            for staleness in (0, 1):
                seconds = troupe_seconds(
                    model, folder / f"{staleness}-{number}", arguments.updates, staleness, arguments.overrides
                )
                arms.setdefault(f"troupe, max_staleness={staleness}", []).append(statistics.median(seconds))
            print({name: f"{each[-1]:.2f}" for name, each in arms.items()}, flush=True)
    for name, each in arms.items():
        ratios = [
            statistics.median(one / other for one, other in zip(each, arms[peer], strict=True))
            for peer in peers
        ]
        listed = " ".join(f"{seconds:.2f}" for seconds in each)
        report.add(name, f"{statistics.median(each):.2f}", *[f"{ratio:.2f}" for ratio in ratios], listed)
    report.print()


if __name__ == "__main__":
    main()
