"""A recipe in bfloat16 beside float32, of engine and learner alike: what it learns, how far they differ.

    python tests/benchmarks/precision.py [--recipe guess] [--warm-start 250] [--updates 10] [--seeds 0,1,2]
        [--dtypes float32,bfloat16] [--folder runs/precision]

All runs begin with one model, which has learned from the recipe's demonstrations in float32; without a warm
start (of smollm2: 0) with the recipe's. A run takes a minute or two, and is not made again if the folder has
it: the command may be given part by part, and its table is of all runs that are there.

Success is on held-out tasks, before the first update and after the last. The difference is that of the
log-probabilities of engine and learner under the same weights, in nats a token, as a mean over the updates;
corrected is what importance weights leave of it, since they are cut. Memory is that of engine and learner
(PSS) when both together have the most.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from statistics import fmean

import repository  # noqa: F401
from colocated import ROLES, peaks_of
from programs import warm_started_model
from report import Report

from launch.reporting.metrics import FRESH_MISMATCH, FRESH_MISMATCH_MAX
from launch.reporting.tracker import read_metrics

MEASURED = "measured.json"
SUCCESS = "eval/reward_mean"
CORRECTED = "learn/corrected_logprob_diff_mean"
SHARE = "learn/weight_effective_fraction"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--recipe", default="guess")
    parser.add_argument("--warm-start", type=int, default=250, help="steps on the demonstrations")
    parser.add_argument("--updates", type=int, default=10)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    parser.add_argument("--folder", type=Path, default=Path("runs/precision"))
    parser.add_argument("overrides", nargs="*", help="settings for all runs, such as fleet.num_actors=8")
    arguments = parser.parse_args()
    report = Report(
        f"precision: recipe={arguments.recipe}, {arguments.updates} updates",
        (
            *("dtype", "seed", "success before", "after", "difference", "largest", "corrected"),
            *("effective share", "alarms", "engine MB", "learner MB", "seconds of the updates"),
        ),
    )
    shared = []
    if arguments.warm_start:
        model = warm_started_model(arguments.recipe, arguments.folder, arguments.warm_start)
        shared = [f"model.path={model}", "warm_start.num_steps=0"]
    for seed in arguments.seeds.split(","):
        for dtype in arguments.dtypes.split(","):
            directory = arguments.folder / arguments.recipe / f"{dtype}-{seed}"
            if not (directory / MEASURED).exists():
                shutil.rmtree(directory, ignore_errors=True)
                settings = [f"recipe={arguments.recipe}", f"seed={seed}", f"run.directory={directory}"]
                settings += [f"learner.dtype={dtype}", f"server.engine.options.dtype={dtype}"]
                settings += [f"run.num_steps={arguments.updates}", *shared, *arguments.overrides]
                peaks, seconds = peaks_of(settings, arguments.updates)
                (directory / MEASURED).write_text(json.dumps({"peaks": peaks, "seconds": seconds}))
    for directory in sorted((arguments.folder / arguments.recipe).iterdir()):
        if (directory / MEASURED).exists():
            report.add(*directory.name.split("-"), *_row(directory))
    report.print()


def _row(directory: Path) -> list[str]:
    """Cells of a finished run."""
    measured, records = json.loads((directory / MEASURED).read_text()), read_metrics(directory)
    values = {
        name: [each[name] for each in records if name in each]
        for name in (SUCCESS, FRESH_MISMATCH, FRESH_MISMATCH_MAX, CORRECTED, SHARE, "learn/alarms")
    }
    return [
        f"{values[SUCCESS][0]:.3f}",
        f"{values[SUCCESS][-1]:.3f}",
        f"{fmean(values[FRESH_MISMATCH]):.2g}",
        f"{max(values[FRESH_MISMATCH_MAX]):.2g}",
        *(f"{fmean(each):.2g}" if each else "-" for each in (values[CORRECTED], values[SHARE])),
        f"{sum(values['learn/alarms']):.0f}",
        *(f"{measured['peaks'][role] / 1e6:.0f}" for role in ROLES),
        f"{measured['seconds']:.0f}",
    ]


if __name__ == "__main__":
    main()
