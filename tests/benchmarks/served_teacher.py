"""Success of students that learn from a teacher's log-probabilities alone, from a server or its folder.

    python tests/benchmarks/served_teacher.py [--folder FOLDER] [--recipe guess] [--students 1] [--updates 20]

The teacher is the best policy of a training by rewards. ``launch.serve`` answers by it as ``policy@best``, on
a Ray of its own, beside the trainings of the students of one way: the others read its folder. Students
have other initial weights, a warm start of their own, and no reward. Success is that on the same 200 held-out
tasks. With ``--folder`` what was cut goes on.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import repository  # noqa: F401
from programs import Program, free_port, trained
from report import Report
from served_agent import wait_until_up

from launch.reporting.tracker import read_metrics
from launch.workload import load_workload
from policies.tiny import NUM_CONVERSATIONS, build_model

SUCCESS, DISTANCE = "eval/reward_mean", "learn/teacher_kl"
TASKS = "evaluation.num_tasks=200"
BEST = "checkpoints/best"


def taught_by_rewards(folder: Path, recipe: str) -> Path:
    """The run of the teacher, with its best policy."""
    settings = [f"recipe={recipe}", TASKS, "evaluation.every=10", f"run.best_metric={SUCCESS}"]
    return Path(trained(folder / "teacher", settings))


def serving(teacher: Path, address: str) -> Program:
    """A server that answers by the best policy of a run, and by its last one."""
    port = address.rpartition(":")[2]
    settings = [f"model.path={teacher}", "server.versions=[best]", f"server.http_port={port}"]
    return Program(settings, command="launch.serve")


def untrained(folder: Path, recipe: str, seed: int) -> Path:
    """A tiny model with the teacher's tokens, which are those of its demonstrations, and other weights."""
    if not folder.exists():
        demonstrations = load_workload(f"launch.recipes.{recipe}", 0).demonstrations
        build_model(folder, demonstrations[:NUM_CONVERSATIONS], seed=seed)
    return folder


def student(folder: Path, args: argparse.Namespace, seed: int, options: list[str]) -> tuple[str, ...]:
    """Train a student; return its success before and after, and its distance to the teacher in nats."""
    settings = [f"recipe={args.recipe}", f"seed={seed}", TASKS, f"run.num_steps={args.updates}"]
    settings.append(f"model.path={untrained(folder.parent / f'untrained-{seed}', args.recipe, seed)}")
    start = time.monotonic()
    trained(folder, [*settings, "algorithm.name=distillation", *options])
    seconds, records = time.monotonic() - start, list(read_metrics(folder))
    success = [record[SUCCESS] for record in records if SUCCESS in record]
    distance = [record[DISTANCE] for record in records if DISTANCE in record]
    ends = (f"{each[place]:.3f}" for each in (success, distance) for place in (0, -1))
    return (*ends, f"{seconds:.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, help="keeps the runs")
    parser.add_argument("--recipe", default="guess")
    parser.add_argument("--students", type=int, default=1, help="of each way")
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--ways", nargs="+", choices=("address", "folder"), default=["address", "folder"])
    args = parser.parse_args()
    columns = ("student", "success before", "after", "nats a token before", "after", "seconds")
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or Path(temporary)
        teacher = taught_by_rewards(folder, args.recipe)
        best = max(record[SUCCESS] for record in read_metrics(teacher) if SUCCESS in record)
        report = Report(f"{args.recipe}: students of a teacher with {best:.3f}", columns)
        for way in args.ways:
            address = f"http://127.0.0.1:{free_port()}"
            server = serving(teacher, address) if way == "address" else None
            options = [f"algorithm.options.teacher={teacher / BEST}"]
            try:
                if server is not None:
                    wait_until_up(server)
                    options = [f"algorithm.options.teacher={address}/v1"]
                    options.append("algorithm.options.teacher_model=policy@best")
                for seed in range(1, args.students + 1):
                    name = f"{way}-{seed}"
                    report.add(f"by {name}", *student(folder / name, args, seed, options))
            finally:
                if server is not None:
                    server.end()
        report.print()


if __name__ == "__main__":
    main()
