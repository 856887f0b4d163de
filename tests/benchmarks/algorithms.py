"""Every algorithm trains the guess recipe upward from one prepared model: held-out success before and after.

    python tests/benchmarks/algorithms.py [--only ppo,gspo] [--steps 10]

All start from the same model, which has only seen the recipe's demonstrations. Takes about 20 minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import repository  # noqa: F401
from programs import run, warm_started_model
from report import Report

from launch.reporting.tracker import read_metrics

RUN = [
    "recipe=guess",
    "warm_start.num_steps=0",
    "run.checkpoints.every=1000",
    "evaluation.num_tasks=200",
    "algorithm.clip_high=null",  # the recipe's is for GRPO: each has its paper's
    "fleet.num_actors=16",
]
ALGORITHMS: dict[str, list[str]] = {
    "grpo": [],
    "grpo with LoRA": ["learner.lora.rank=16", "learner.optimizer.lr=5e-3"],
    "dr_grpo": [],
    "dapo": [],
    "gspo": [],
    "cispo": [],
    "rloo": [],
    "reinforce_plus_plus": [],
    "reinforce_plus_plus_baseline": [],
    "remax": [],
    "opo": [],
    "gpg": [],
    "ppo": ["learner.critic.lr=1e-3"],
}
"""By name, with what it needs besides its defaults on a model this small."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(ALGORITHMS), help="some of: %(default)s")
    parser.add_argument("--steps", type=int, default=10, help="updates of each")
    parser.add_argument("--folder", type=Path, help="keep the runs here; default: a temporary folder")
    parser.add_argument("--least", type=float, default=0.05, help="what each has to gain")
    arguments = parser.parse_args()
    report = Report(
        f"algorithms: guess recipe, {arguments.steps} updates, success on 200 held-out games",
        ("algorithm", "before", "after", "gain", "loss", "grad norm", "entropy", "seconds per update"),
    )
    failed = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        model = warm_started_model("guess", folder, num_steps=250)
        for name in arguments.only.split(","):
            directory = folder / name.replace(" ", "-")
            settings = [f"algorithm.name={name.partition(' ')[0]}", *ALGORITHMS[name]]
            places = [f"model.path={model}", f"run.directory={directory}"]
            run([*RUN, *places, *settings, f"run.num_steps={arguments.steps}"])
            gain = _add(report, name, directory)
            print(f"{name}: {gain:+.3f}", flush=True)
            if gain < arguments.least:
                failed.append(name)
    report.print()
    print(f"did not gain {arguments.least}: {', '.join(failed)}" if failed else "all have learned")
    sys.exit(bool(failed))


def _add(report: Report, name: str, directory: Path) -> float:
    """A row for the run in ``directory``; returns what was gained."""
    records = read_metrics(directory)
    scores = [each["eval/reward_mean"] for each in records if "eval/reward_mean" in each]
    updates = [each for each in records if "time/step" in each]

    def mean(metric: str) -> str:
        values = [each[metric] for each in updates if metric in each]
        return f"{sum(values) / len(values):.3f}" if values else "-"

    figures = [mean(metric) for metric in ("learn/loss", "learn/grad_norm", "learn/entropy", "time/step")]
    report.add(name, f"{scores[0]:.3f}", f"{scores[-1]:.3f}", f"{scores[-1] - scores[0]:+.3f}", *figures)
    return float(scores[-1] - scores[0])


if __name__ == "__main__":
    main()
