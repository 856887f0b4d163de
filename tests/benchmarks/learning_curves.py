"""What reinforcement learns in each recipe, beside two baselines: runs, plots and tables.

    python tests/benchmarks/learning_curves.py [--recipes guess] [--methods sft] [--seeds 0,1,2] [--publish]

For each recipe and seed it runs reinforcement as the recipe has it, expert iteration with as many rollouts,
and a third: supervised learning on the successful demonstrations alone or, where the model is a pretrained
one, reinforcement of LoRA's weights. A run that is finished is not run again, and one that was interrupted
goes on from its last checkpoint: the command may be given part by part. A run takes five minutes on two quiet
cores, with a pretrained model 10 to 25. Then it draws what is there: for each recipe a plot, and a JSON
file with all its values, which says for each run its commit, its seconds and its memory.
``--publish`` writes them into .github/, and the table into launch/recipes/README.md. Runs of .github/ that
the folder does not have are drawn too, so that a few runs can be added or made anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import repository
from learning_curve_plots import Method, Runs, draw, table
from memory_watch import MemoryWatch
from programs import run
from readme_tables import PUBLISHED, write_measured

from launch.reporting.metrics import is_standard
from launch.reporting.tracker import read_metrics


@dataclass(frozen=True)
class Recipe:
    """What is run of a recipe."""

    num_updates: int
    num_evaluations: int
    """While it learns, besides the one before the first update."""
    stages: tuple[str, ...]
    """Before reinforcement or expert iteration."""
    methods: tuple[str, ...]
    warm_start_steps: int = 0
    """As in the recipe. Supervised learning as a baseline gets twice as many."""
    settings: tuple[str, ...] = ()
    """In the place of ``recipe=NAME``."""


TINY = ("reinforce", "expert_iteration", "sft")
PRETRAINED = ("reinforce", "lora", "expert_iteration")
RECIPES = {
    "calculator": Recipe(30, 3, ("warm_start",), TINY, warm_start_steps=350),
    "guess": Recipe(30, 3, ("warm_start",), TINY, warm_start_steps=250),
    "smollm2": Recipe(10, 1, (), PRETRAINED),
    "word_problems": Recipe(28, 2, (), PRETRAINED),
}
METHODS = {
    "reinforce": Method("reinforcement", "#2a6fb0"),
    "lora": Method("reinforcement with LoRA", "#8e5ea2"),
    "expert_iteration": Method("expert iteration, as many rollouts", "#e8a33d"),
    "sft": Method("supervised learning on successful demonstrations", "#5aa469"),
    "imitation": Method("supervised learning on all demonstrations, twice as many steps", "#5aa469"),
}
LORA = ("learner.lora.rank=16", "learner.optimizer.lr=2e-4")
FINISHED = "finished.json"


def main(
    recipes: Mapping[str, Recipe] = RECIPES,
    about: str | None = __doc__,
    default: str = "calculator,guess",
    page: str = "launch/recipes/README.md",
) -> None:
    """Run what the command line names of ``recipes``, and report it; ``page`` shows the tables."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipes", default=default, help=f"some of: {','.join(recipes)}")
    parser.add_argument("--methods", default=",".join(METHODS), help="some of: %(default)s")
    parser.add_argument("--seeds", default="0,1,2", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("runs/learning_curves"), help="of the runs")
    parser.add_argument("--updates", type=int, help="default: as many as the recipe has")
    parser.add_argument("--publish", action="store_true", help="write what README shows")
    parser.add_argument("overrides", nargs="*", help="settings for all runs, such as fleet.num_actors=8")
    arguments = parser.parse_args()
    for recipe in arguments.recipes.split(","):
        folder = arguments.folder / recipe
        for seed in arguments.seeds.split(","):
            for method in arguments.methods.split(","):
                if method not in recipes[recipe].methods:
                    continue
                settings = overrides(recipe, recipes[recipe], method, arguments.updates)
                run_once([*settings, f"seed={seed}", *arguments.overrides], folder / method / f"seed-{seed}")
        report(recipe, folder, repository.ROOT / page if arguments.publish else None)


def overrides(recipe: str, about: Recipe, method: str, num_updates: int | None) -> list[str]:
    """What a run is told, besides its seed and folder."""
    num_updates = num_updates or about.num_updates
    every = max(1, num_updates // about.num_evaluations)
    settings = [*(about.settings or [f"recipe={recipe}"]), f"evaluation.every={every}"]
    settings.append(f"run.checkpoints.every={every}")
    if method in ("sft", "imitation"):
        settings += ["stages=[warm_start]", f"warm_start.num_steps={2 * about.warm_start_steps}"]
        return settings if method == "imitation" else [*settings, f"workload=successful_{recipe}"]
    if method == "expert_iteration":
        stages = ",".join([*about.stages, "expert_iteration"])
        return [*settings, f"stages=[{stages}]", f"expert_iteration.num_steps={num_updates}"]
    settings.append(f"run.num_steps={num_updates}")
    return [*settings, *LORA] if method == "lora" else settings


def run_once(settings: Sequence[str], directory: Path) -> None:
    """Run a training to its end, unless that was done before; note with which commit."""
    if (directory / FINISHED).exists():
        return
    print(f"{directory}: {' '.join(settings)}", flush=True)
    commit, start = _commit(), time.monotonic()
    with MemoryWatch() as memory:
        run([*settings, f"run.directory={directory}", "run.resume=true"])
    about = {
        "commit": commit,
        "seconds": round(time.monotonic() - start),
        "peak_gigabytes": round(memory.peak_bytes / 1e9, 2),
        "settings": settings,
    }
    print(f"{about['seconds']} s, {about['peak_gigabytes']} GB at its peak", flush=True)
    (directory / FINISHED).write_text(json.dumps(about))


def report(recipe: str, folder: Path, page: Path | None) -> None:
    """Draw and tabulate the finished runs of a recipe; with a ``page``, where README shows it."""
    runs, about = read_runs(folder)
    if not runs:
        return
    add_published(runs, about, recipe)
    target = PUBLISHED if page else folder.parent
    values = {"recipe": recipe, "runs": about, "metrics": runs}
    (target / f"{recipe}.json").write_text(json.dumps(values, indent=1) + "\n")
    draw(runs, METHODS, target / f"{recipe}.png")
    rows = table(runs, METHODS)
    print(f"\n{recipe}\n\n{rows}", flush=True)
    if page:
        write_measured(page, recipe, rows)


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
    values = json.loads(path.read_text())
    for run_name in values["runs"].keys() - about.keys():
        about[run_name] = values["runs"][run_name]
        method, seed = run_name.split("/")
        for metric, points in values["metrics"][method].items():
            if seed in points:
                runs.setdefault(method, {}).setdefault(metric, {})[seed] = points[seed]


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
