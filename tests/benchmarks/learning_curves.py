"""What reinforcement learns in each recipe, beside two baselines: runs, plots and tables.

    python tests/benchmarks/learning_curves.py [--recipes guess] [--methods sft] [--seeds 0,1,2] [--publish]

For each recipe and seed it runs reinforcement as the recipe has it, expert iteration with as many rollouts,
and supervised learning on the successful demonstrations alone. A run that is finished is not run again, and
one that was interrupted goes on from its last checkpoint: the command may be given part by part. Each run
takes about three minutes on two quiet cores. Then it draws what is there: for each recipe a plot, and a JSON
file with all its values, which says for each run its commit.
``--publish`` writes them into .github/, and the table into launch/recipes/README.md. Runs of .github/ that
the folder does not have are drawn too, so that a few runs can be added or made anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import repository
from learning_curve_plots import Method, Runs, draw, table
from programs import run

from launch.reporting.metrics import is_standard
from launch.reporting.tracker import read_metrics

RECIPES = ("calculator", "guess")
NUM_UPDATES = 30
WARM_START_STEPS = {"calculator": 350, "guess": 250}
"""As in the recipes. Supervised learning as a baseline gets twice as many."""

METHODS = {
    "reinforce": Method("reinforcement", "#2a6fb0"),
    "expert_iteration": Method("expert iteration, as many rollouts", "#e8a33d"),
    "sft": Method("supervised learning on successful demonstrations", "#5aa469"),
}
PUBLISHED = repository.ROOT / ".github"
FINISHED = "finished.json"
RESULTS = "<!-- measured: {} -->"
RESULTS_END = "<!-- end -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="some of: %(default)s")
    parser.add_argument("--methods", default=",".join(METHODS), help="some of: %(default)s")
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning_curves"), help="of the runs")
    parser.add_argument("--updates", type=int, default=NUM_UPDATES, help="default: %(default)s")
    parser.add_argument("--publish", action="store_true", help="write what README shows")
    parser.add_argument("overrides", nargs="*", help="settings for all runs, such as fleet.num_actors=8")
    arguments = parser.parse_args()
    for recipe in arguments.recipes.split(","):
        for seed in arguments.seeds.split(","):
            for method in arguments.methods.split(","):
                directory = arguments.folder / recipe / method / f"seed-{seed}"
                settings = overrides(recipe, method, arguments.updates)
                run_once([*settings, f"seed={seed}", *arguments.overrides], directory)
        report(recipe, arguments.folder / recipe, arguments.publish)


def overrides(recipe: str, method: str, num_updates: int) -> list[str]:
    """What a run is told, besides its seed and folder."""
    every = max(1, num_updates // 3)
    settings = [f"recipe={recipe}", f"evaluation.every={every}", f"run.checkpoint_every={every}"]
    if method == "sft":
        steps = f"warm_start.num_steps={2 * WARM_START_STEPS[recipe]}"
        return [*settings, f"workload=successful_{recipe}", "stages=[warm_start]", steps]
    if method == "expert_iteration":
        steps = f"expert_iteration.num_steps={num_updates}"
        return [*settings, "stages=[warm_start,expert_iteration]", steps]
    return [*settings, f"run.num_steps={num_updates}"]


def run_once(settings: Sequence[str], directory: Path) -> None:
    """Run a training to its end, unless that was done before; note with which commit."""
    if (directory / FINISHED).exists():
        return
    print(f"{directory}: {' '.join(settings)}", flush=True)
    commit, start = _commit(), time.monotonic()
    run([*settings, f"run.directory={directory}", "run.resume=true"])
    seconds = round(time.monotonic() - start)
    (directory / FINISHED).write_text(
        json.dumps({"commit": commit, "seconds": seconds, "settings": settings})
    )


def report(recipe: str, folder: Path, publish: bool) -> None:
    """Draw and tabulate the finished runs of a recipe."""
    runs, about = read_runs(folder)
    if not runs:
        return
    add_published(runs, about, recipe)
    target = PUBLISHED if publish else folder.parent
    values = {"recipe": recipe, "runs": about, "metrics": runs}
    (target / f"{recipe}.json").write_text(json.dumps(values, indent=1) + "\n")
    draw(runs, METHODS, target / f"{recipe}.png")
    rows = table(runs, METHODS)
    print(f"\n{recipe}\n\n{rows}", flush=True)
    if publish:
        write_between(repository.ROOT / "launch/recipes/README.md", RESULTS.format(recipe), RESULTS_END, rows)


def read_runs(folder: Path) -> tuple[Runs, dict[str, Any]]:
    """By method, metric and seed the (step, value) pairs of finished runs, and what is known of each run."""
    runs: Runs = {}
    about: dict[str, Any] = {}
    for method in METHODS:
        for finished in sorted(folder.glob(f"{method}/*/{FINISHED}")):
            seed = finished.parent.name
            about[f"{method}/{seed}"] = json.loads(finished.read_text())
            for record in read_metrics(finished.parent):
                for name, value in record.items():
                    if _is_shown(name):
                        points = runs.setdefault(method, {}).setdefault(name, {}).setdefault(seed, [])
                        points.append((record["step"], value))
    return runs, about


def add_published(runs: Runs, about: dict[str, Any], recipe: str) -> None:
    """Add the runs in .github/ that are not among these."""
    path = PUBLISHED / f"{recipe}.json"
    if not path.exists():
        return
    published = json.loads(path.read_text())
    for run_name in published["runs"].keys() - about.keys():
        about[run_name] = published["runs"][run_name]
        method, seed = run_name.split("/")
        for metric, points in published["metrics"][method].items():
            if seed in points:
                runs.setdefault(method, {}).setdefault(metric, {})[seed] = points[seed]


def write_between(path: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between the line ``begin`` and the next line ``end``."""
    before, _, rest = path.read_text().partition(f"{begin}\n")
    if not rest:
        raise SystemExit(f"{path} has no line {begin!r}: add it, and {end!r} below it.")
    _, _, after = rest.partition(f"{end}\n")
    path.write_text(f"{before}{begin}\n{text}\n{end}\n{after}")


def _is_shown(name: str) -> bool:
    """Whether a metric is the reward, or one that the environment names."""
    kind, _, metric = name.partition("/")
    named = not is_standard(f"rollout/{metric}")
    return kind in ("rollout", "eval") and (metric == "reward_mean" or named)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
