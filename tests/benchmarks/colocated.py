"""One machine for all: engine and learner with separate memory, and in turns (``server.colocated``).

    python tests/benchmarks/colocated.py [--cache 256] [--steps 2]

The same run of recipe=guess twice, at staleness 0: the final weights have to be equal bit for bit, and the
peak of engine and learner together (PSS, ten times a second) lower by the engine's cache. Takes about five
minutes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from operator import itemgetter
from pathlib import Path

import psutil
from programs import Program
from report import Report

from launch.health.members import role_of

LOOK_SECONDS = 0.1
ROLES = ("replica", "learner")
SHORT = ["recipe=guess", "warm_start.num_steps=10", "evaluation.num_tasks=16", "run.checkpoints.every=1000"]
LARGE_UPDATES = ["rollout.group_size=32", "learner.mini_batch_size=256", "learner.micro_batch_tokens=65536"]
"""An update has to take more than the cache, or that is what the turns save."""
WEIGHTS = "huggingface/model.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cache", type=int, default=256, help="MiB of the engine's keys and values")
    parser.add_argument("--steps", type=int, default=2, help="updates of each run")
    arguments = parser.parse_args()
    report = Report(
        f"engine and learner, {arguments.cache} MiB of cache: MB when both have the most",
        ("colocated", "both", "engine", "learner", "seconds of the updates", "optimizer steps"),
    )
    sizes = [
        f"run.num_steps={arguments.steps}",
        f"server.engine.options.kv_cache_memory_bytes={arguments.cache << 20}",
    ]
    weights, together = [], []
    with tempfile.TemporaryDirectory() as folder:
        for colocated in ("false", "true"):
            directory = Path(folder, colocated)
            own = [f"server.colocated={colocated}", f"run.directory={directory}"]
            peaks, seconds = peaks_of([*SHORT, *LARGE_UPDATES, *sizes, *own], arguments.steps)
            weights.append(next(directory.glob(f"checkpoints/*/{WEIGHTS}")).read_bytes())
            together.append(peaks["both"])
            report.add(
                colocated,
                *(f"{peaks[each] / 1e6:.0f}" for each in ("both", *ROLES)),
                f"{seconds:.1f}",
                str(num_optimizer_steps(directory)),
            )
    report.print()
    saved = (together[0] - together[1]) / (arguments.cache << 20)
    print(f"final weights: {'equal bit for bit' if weights[0] == weights[1] else 'DIFFERENT'}")
    print(f"saved at the peak: {saved:.2f} of the cache")
    if weights[0] != weights[1] or saved < 0.85:
        raise SystemExit(1)


def peaks_of(settings: Sequence[str], num_steps: int) -> tuple[dict[str, float], float]:
    """Bytes of engine, learner and both when both together had the most, and the seconds from the first
    update to the last."""
    peaks = {"both": 0.0}
    program = Program(settings)
    try:
        while program.is_alive:
            sizes = dict.fromkeys(ROLES, 0.0)
            for process in program.family():
                with suppress(psutil.Error):
                    role = role_of(" ".join(process.cmdline()))
                    if role in sizes:
                        sizes[role] += process.memory_full_info().pss
            sizes["both"] = sum(sizes.values())
            peaks = max(peaks, sizes, key=itemgetter("both"))
            time.sleep(LOOK_SECONDS)
    finally:
        program.end()
    if program.process.returncode:
        raise SystemExit("\n".join([*program.lines, f"The run failed: {' '.join(settings)}"]))
    first, last = (program.moment(f" step {step:4d}/") for step in (1, num_steps))
    return peaks, last - first


def num_optimizer_steps(directory: Path) -> int:
    """Steps of all updates of a run: without one, equal weights would mean nothing."""
    records = map(json.loads, (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return sum(int(each.get("learn/num_optimizer_steps", 0)) for each in records)


if __name__ == "__main__":
    main()
