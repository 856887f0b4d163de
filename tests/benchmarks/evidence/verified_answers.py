"""SmolLM2 by a verifier: pass@1 and pass@8 after GRPO, expert iteration and SFT at equal rollouts.

    python tests/benchmarks/evidence/verified_answers.py [--only grpo,sft] [--seeds 0,1] [--minutes 90]

The task is ``lcm`` of reasoning-gym, the least common multiple of two numbers from 2 to 24, judged by its own
verifier. Half of the pairs of numbers are spared, 100 of them are the held-out tasks; those of the others are
trained on, in an order by the seed. The model is shown two solved examples, which are in neither part.

All methods have the same number of rollouts, by the same model at temperature 1, and the same optimizer:
``grpo`` and ``expert_iteration`` sample 64 by each of their versions; ``sft`` samples all by the first model,
and learns those that are right in five passes. All three are stages of the library in one process
(``one_process.py``). A held-out question is answered 8 times, with the same draws after each run; pass@k is
the unbiased estimate, its interval a bootstrap over the questions.

A finished run is kept in ``verified_answers.json``, an unfinished one in its folder, and a second call goes
on there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import repository  # noqa: E402, F401
from learning_curve_plots import Method  # noqa: E402
from report import Report  # noqa: E402

from environments import Dataset  # noqa: E402
from environments.adapters.reasoning_gym import ReasoningGymEnvironment, reasoning_gym_tasks  # noqa: E402
from environments.disk import replaced  # noqa: E402
from environments.pass_at_k import pass_at_k  # noqa: E402
from launch.run_folder.model_paths import model_folder  # noqa: E402
from launch.settings.compose import compose  # noqa: E402
from launch.validation.settings import check_training_settings  # noqa: E402
from launch.workload import Workload  # noqa: E402
from policies import GameAgent  # noqa: E402

UPDATES, GROUPS, GROUP_SIZE = 20, 8, 8
PASSES = 5
"""Over the first model's successes: about as many optimizer steps as there are updates."""
EVERY = 5
"""Updates after which the state of a run is kept."""
TIMES = 8
"""Answers to each held-out question."""
KS = (1, 8)
NUM_HELD_OUT = 100
DRAWS = 2_000
"""Samples of the bootstrap."""
TASK: dict[str, Any] = {"name": "lcm", "min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 24}
EXAMPLES = [["4, 8", "8"], ["5, 15", "15"]]
LR = 2e-5
SETTINGS = [
    "workload=evidence.verified_answers",
    "model.path=smollm2-135m-instruct",
    "algorithm.name=grpo",
    "algorithm.clip_high=0.28",
    f"rollout.group_size={GROUP_SIZE}",
    "rollout.max_steps=1",
    "rollout.max_prompt_tokens=128",
    "rollout.max_response_tokens=16",
    "learner.mini_batch_size=32",
    "learner.micro_batch_tokens=1024",
    f"learner.optimizer={{lr: {LR}, warmup_steps: 0, min_lr_ratio: 1.0}}",
    f"expert_iteration.optimizer={{lr: {LR}, warmup_steps: 0, min_lr_ratio: 1.0}}",
    "learner.num_threads=1",
    "server.engine.max_model_tokens=160",
    "server.engine.options={max_num_seqs: 64, max_num_batched_tokens: 1024, block_size: 32}",
]
IMITATE = "stages=[expert_iteration]"
OWN_SETTINGS = {
    "grpo": ["stages=[reinforce]", f"run.num_steps={UPDATES}", f"rollout.groups_per_step={GROUPS}"],
    "expert_iteration": [
        IMITATE,
        f"expert_iteration.num_steps={UPDATES}",
        f"rollout.groups_per_step={GROUPS}",
    ],
    "sft": [
        IMITATE,
        "expert_iteration.num_steps=1",
        f"expert_iteration.num_epochs={PASSES}",
        f"rollout.groups_per_step={UPDATES * GROUPS}",
    ],
}
METHODS = {
    "before": Method("before", "#777777"),
    "grpo": Method("GRPO", "#2a6fb0"),
    "expert_iteration": Method("expert iteration", "#e8a33d"),
    "sft": Method("SFT on the first model's successes", "#5aa469"),
}
Kept = dict[str, dict[str, Any]]
"""Finished runs by their names."""


class ShownAgent(GameAgent):
    """Shows solved examples before the question."""

    def __init__(self) -> None:
        super().__init__("Reply with the answer alone.")

    def reset(self) -> None:
        super().reset()
        for numbers, answer in EXAMPLES:
            question = f"Find the Least Common Multiple (LCM) of these numbers: {numbers}"
            self.messages.append({"role": "user", "content": question})
            self.messages.append({"role": "assistant", "content": answer})


def numbers_of(question: str) -> tuple[int, ...]:
    """The numbers of a question, in order of their size."""
    return tuple(sorted(int(each) for each in question.rpartition(":")[2].split(",")))


def split_tasks() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The held-out tasks, of numbers that no other has, and those for training, as often as they come."""
    tasks = reasoning_gym_tasks(num_tasks=3_000, **TASK)
    shown = {numbers_of(numbers) for numbers, _ in EXAMPLES}
    pairs = sorted({numbers_of(task["question"]) for task in tasks} - shown)
    spared = set(random.Random(0).sample(pairs, len(pairs) // 2))
    held_out: dict[tuple[int, ...], dict[str, Any]] = {}
    training = []
    for task in tasks:
        numbers = numbers_of(task["question"])
        if numbers in spared:
            held_out.setdefault(numbers, task)
        elif numbers not in shown:
            training.append(task)
    return list(held_out.values())[:NUM_HELD_OUT], training


def workload(seed: int) -> Workload:
    """The tasks, in an order by the seed."""
    held_out, training = split_tasks()
    random.Random(seed).shuffle(training)
    return Workload(
        agent_class=ShownAgent,
        env_class=ReasoningGymEnvironment,
        train_dataset=Dataset(training),
        val_dataset=Dataset(held_out),
    )


class Trainings:
    """Makes the runs, all of them with one engine."""

    def __init__(self, folder: Path) -> None:
        import one_process

        self._parts, self._folder, config = one_process, folder, compose(SETTINGS)
        self._model = model_folder(config.model.path)
        limits, engine = config.rollout.limits(), config.server.engine
        self._player = one_process.Player(self._model, workload(0), limits, engine)
        self._requests = [
            one_process.request(f"held-out {index}", str(number), task, seed=0)
            for index, task in enumerate(workload(0).held_out[""])
            for number in range(TIMES)
        ]

    def successes(self) -> list[int]:
        """Right answers to each held-out question, by the weights that were loaded last."""
        right = [each.succeeded for each in self._player.play(self._requests)]
        return [sum(right[first : first + TIMES]) for first in range(0, len(right), TIMES)]

    def make(self, method: str, seed: int) -> dict[str, Any]:
        """Make a run, or go on with it; ``before`` makes no update."""
        start, rewards = time.process_time(), []
        folder = self._folder / f"{method}_{seed}"
        if method != "before":
            config = compose([*SETTINGS, *OWN_SETTINGS[method], f"seed={seed}"])
            check_training_settings(config)
            kept = self._parts.Kept(folder, EVERY)
            for reward in self._parts.train(config, workload(seed), self._model, self._player, kept):
                rewards.append(round(reward, 3))
                print(f"{method}, seed {seed}: {len(rewards)} updates, reward {reward:.3f}", flush=True)
        successes = self.successes()
        shutil.rmtree(folder, ignore_errors=True)
        seconds = round(time.process_time() - start)  # of this call, where it has gone on with a run
        return {"successes": successes, "rewards": rewards, "cpu_seconds": seconds}


def passed(runs: Sequence[Sequence[int]], k: int) -> list[float]:
    """pass@k of each question, as its mean over runs."""
    return [
        statistics.fmean(pass_at_k(TIMES, right, k) for right in each) for each in zip(*runs, strict=True)
    ]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean over questions, and its 95 % interval by the bootstrap."""
    rng = random.Random(0)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(DRAWS))
    return statistics.fmean(values), means[DRAWS // 40], means[-DRAWS // 40]


def finished(kept: Kept) -> Iterator[tuple[str, list[list[int]]]]:
    """Methods with the successes of their finished runs."""
    for method in METHODS:
        if runs := [run["successes"] for name, run in kept.items() if name.partition(",")[0] == method]:
            yield method, runs


def report(kept: Kept) -> None:
    """Print pass@k of each method, and what is more than that of ``grpo``."""
    columns = [f"pass@{k}{what}" for what in ("", " less GRPO's") for k in KS]
    table = Report(
        f"{NUM_HELD_OUT} held-out questions, {UPDATES * GROUPS * GROUP_SIZE} rollouts a run: mean, 95 %",
        ("method", "seeds", *columns),
    )
    found = dict(finished(kept))
    for method, runs in found.items():
        cells = [interval(passed(runs, k)) for k in KS]
        if "grpo" in found and method != "grpo":
            pairs = [zip(passed(runs, k), passed(found["grpo"], k), strict=True) for k in KS]
            cells += [interval([own - other for own, other in each]) for each in pairs]
        figures = [f"{mean:.3f} ({low:.3f} to {high:.3f})" for mean, low, high in cells]
        table.add(METHODS[method].label, str(len(runs)), *figures, *[""] * (len(columns) - len(figures)))
    table.print()


def draw(kept: Kept, path: Path) -> None:
    """pass@k of each method with its interval; seeds as dots beside it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    panels = figure.subplots(1, len(KS), sharey=True)
    found = dict(finished(kept))
    for axes, k in zip(panels, KS, strict=True):
        for place, (method, runs) in enumerate(found.items()):
            mean, low, high = interval(passed(runs, k))
            color = METHODS[method].color
            axes.errorbar(mean, place, xerr=[[mean - low], [high - mean]], fmt="o", color=color, capsize=3)
            seeds = [statistics.fmean(passed([run], k)) for run in runs]
            axes.plot(seeds, [place + 0.2] * len(runs), ".", color=color, alpha=0.5)
        axes.set_title(f"pass@{k}")
        axes.grid(alpha=0.3)
        axes.set_xlabel(f"of {NUM_HELD_OUT} held-out questions")
    panels[0].set_yticks(range(len(found)), [METHODS[method].label for method in found])
    panels[0].invert_yaxis()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default=",".join(OWN_SETTINGS), help="some of: %(default)s")
    parser.add_argument("--seeds", default="0,1", help="default: %(default)s")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/verified_answers"), help="of unfinished runs"
    )
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the JSON and the picture")
    parser.add_argument("--minutes", type=float, default=90, help="no run is begun after so many")
    arguments = parser.parse_args()
    until = time.monotonic() + 60 * arguments.minutes
    path = arguments.output / "verified_answers.json"
    settings = {"task": TASK, "examples": EXAMPLES, "all": SETTINGS, **OWN_SETTINGS}
    kept: Kept = {}
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["settings"] != settings:
            sys.exit(f"{path} holds runs of other settings: move it away, or name another --output.")
        kept = content["runs"]
    wanted = [("before", 0), *product(arguments.only.split(","), map(int, arguments.seeds.split(",")))]
    trainings = None
    for method, seed in sorted(wanted, key=lambda each: each[1]):  # a seed of all before the next one
        name = f"{method}, seed {seed}"
        if name in kept or time.monotonic() > until:
            continue
        trainings = trainings or Trainings(arguments.folder.absolute())
        kept[name] = trainings.make(method, seed) | {"load": round(os.getloadavg()[0], 1)}
        with replaced(path) as unfinished:
            unfinished.write_text(json.dumps({"settings": settings, "runs": kept}), encoding="utf-8")
        draw(kept, arguments.output / "verified_answers.png")
    report(kept)
    sys.stdout.flush()
    os._exit(0)  # the engine's thread has no end


if __name__ == "__main__":
    main()
