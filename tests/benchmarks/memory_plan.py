"""Memory of whole runs by plan (``launch.train --plan``) beside what they take at their peak.

    python tests/benchmarks/memory_plan.py [--only "smollm2-lora" ...]

Runs of three updates, tiny and SmolLM2-135M, full and LoRA, on one and two ranks: beside the third's peak lie
two versions of the weights. Twice a second the pages of all processes of a run are added up, those that
several have in common once (PSS). The parts are pages that a process has for itself (USS): those that Ray's
object store shares are the plan's weights on their way. Four of the runs have set the constants of the plan,
the others check it. Takes about half an hour and 13 GB.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import psutil
import repository  # noqa: F401
from memory_watch import LOOK_SECONDS
from programs import Program
from report import Report

from launch.health.members import role_of
from launch.settings.compose import compose
from launch.validation.memory_plan import GB, processes, shape_of

ROLES = {"learner": "learner rank", "replica": "replica"}
"""Roles of processes, and their names in the plan."""
SHORT = ["run.num_steps=3", "evaluation.num_tasks=4"]
TWO_GROUPS = ["rollout.groups_per_step=2", "learner.mini_batch_size=16"]
TINY = ["recipe=calculator", "warm_start.num_steps=5", "fleet.num_actors=16", *SHORT, *TWO_GROUPS]
SMOLLM2 = ["recipe=smollm2", "fleet.pairs_per_actor=16", *SHORT]
LORA = ["learner.lora.rank=16", "learner.optimizer.lr=2e-4"]
SMOLLM2_LORA = ["recipe=smollm2", *LORA, *SHORT, *TWO_GROUPS]
HALVED = "server.engine.options.dtype=bfloat16"
TWO = ["learner.num_workers=2"]
SETTING = {
    "tiny": TINY,
    "smollm2": SMOLLM2,
    "smollm2-lora": SMOLLM2_LORA,
    "tiny-lora-2": [*TINY, *LORA, *TWO],
}
"""Runs that have set the constants. Others check them:"""
CHECKING = {
    "tiny-lora": [*TINY, *LORA, "fleet.num_actors=8"],
    "smollm2-2": [*SMOLLM2, *TWO],
    "smollm2-lora-2": [*SMOLLM2_LORA, *TWO],
    "smollm2-8gb": [*SMOLLM2_LORA, "fleet.pairs_per_actor=16", HALVED],
    "smollm2-bf16": [*SMOLLM2, HALVED, "learner.dtype=bfloat16"],
    "words": ["recipe=word_problems", "fleet.pairs_per_actor=16", "learner.micro_batch_tokens=1200", *SHORT],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    runs = SETTING | CHECKING
    parser.add_argument("--only", nargs="+", choices=list(runs), default=list(runs))
    report = Report(
        "memory: peaks in GB, planned and measured; and of a rank and a replica alone",
        ("run", "sets", "planned", "measured", "ratio", "rank planned", "rank", "replica planned", "replica"),
    )
    for name in parser.parse_args().only:
        config = compose(runs[name])
        rows = processes(config, shape_of(config))
        planned = sum(row.count * row.bytes for row in rows)
        measured, own = peaks(runs[name])
        parts = [
            f"{size / GB:.2f}"
            for role, process in ROLES.items()
            for size in (next(row.bytes for row in rows if row.name == process), own[role])
        ]
        ratio = f"{planned / measured:.2f}"
        sets = "yes" if name in SETTING else "no"
        report.add(name, sets, f"{planned / GB:.2f}", f"{measured / GB:.2f}", ratio, *parts)
    report.print()


def peaks(settings: Sequence[str]) -> tuple[float, Counter[str]]:
    """Peak bytes of a run's processes together, and by role those of the largest process alone."""
    together, own = 0.0, Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        program = Program([*settings, f"run.directory={folder}"])
        try:
            while program.is_alive:
                sizes = 0.0
                for process in [psutil.Process(program.process.pid), *program.family()]:
                    with suppress(psutil.Error):
                        memory = process.memory_full_info()
                        sizes += memory.pss
                        role = role_of(" ".join(process.cmdline())) or ""
                        own[role] = max(own[role], memory.uss)
                together = max(together, sizes)
                time.sleep(LOOK_SECONDS)
        finally:
            program.end()
    if program.process.returncode:
        raise SystemExit("\n".join([*program.lines, f"The run failed: {' '.join(settings)}"]))
    return together, own


if __name__ == "__main__":
    main()
