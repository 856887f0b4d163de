"""The same GRPO by TRL and by Troupe: held-out success over the updates, with 95 % bands, in one picture.

    python tests/benchmarks/evidence/same_as_trl.py [--seeds 0,1,2] [--arms troupe,trl] [--minutes 110]

Task: the best first guess of the recipe ``guess``, the middle of a range such as 4571 to 4579, in one turn.
All runs begin with one model, which knows the recipe's demonstrations alone, most of which guess at random.
An update has 8 groups of 8 answers of at most 6 tokens, and two optimizer steps of 32 of them.

Equal in both: checkpoint, chat template, training questions, reward, temperature, float32, AdamW (rate,
betas, no decay, gradients cut to norm 1), advantages by the group's mean and deviation, clipping at 0.2, no
KL and no entropy, the mean over an optimizer step's tokens (TRL's ``bnpo``), answers that were cut learned
from. Not equal: the random numbers behind tasks, tokens and mini-batches; who samples (vLLM; transformers);
1e-6 or 1e-4 beside the deviation; a second clip, of ratios above 3 at a negative advantage, which TRL lacks.

Success is the probability, at temperature 1, of the right answer in the 100 held-out ranges: exact, by the
same function for both. TRL's own schedule and beta2 are arms of their own, together and each alone. A
finished run is kept in ``same_as_trl.json``, and a second call goes on there. A run takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import time
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import repository  # noqa: E402, F401
from learning_curve_plots import Method, Summary, by_step  # noqa: E402
from peer_trl import PACKAGES  # noqa: E402
from peers import environment_of, run_peer  # noqa: E402
from programs import run, warm_started_model  # noqa: E402
from report import Report  # noqa: E402

from environments import Dataset, SingleTurnEnvironment  # noqa: E402
from environments.disk import replaced  # noqa: E402
from environments.text_games import GuessEnvironment  # noqa: E402
from launch.recipes.guess import ENV_ARGS, Range, split_ranges  # noqa: E402
from launch.run_folder.model_paths import model_folder  # noqa: E402
from launch.workload import Workload  # noqa: E402
from policies import GameAgent  # noqa: E402

GROUPS, GROUP_SIZE, MINI_BATCH, MAX_TOKENS = 8, 8, 32, 6
UPDATES, EVERY = 15, 3
"""Policy updates of a run, and those between two measurements."""
LR, BETA2 = 1e-4, 0.95
STEPS = GROUPS * GROUP_SIZE // MINI_BATCH
"""Optimizer steps of an update."""
TROUPE = [
    "workload=evidence.same_as_trl",
    "algorithm.name=grpo",
    "algorithm.loss_aggregation=token-mean",
    "algorithm.clip_low=0.2",
    "algorithm.clip_high=0.2",
    f"rollout.groups_per_step={GROUPS}",
    f"rollout.group_size={GROUP_SIZE}",
    "rollout.max_steps=1",
    "rollout.max_prompt_tokens=64",
    f"rollout.max_response_tokens={MAX_TOKENS}",
    f"learner.mini_batch_size={MINI_BATCH}",
    f"learner.optimizer.lr={LR}",
    f"learner.verl={{optimizer: {{betas: [0.9, {BETA2}]}}}}",
    f"run.num_steps={UPDATES}",
    f"run.checkpoints={{every: {EVERY}, kept: {UPDATES}}}",
    "fleet.num_actors=16",
    "evaluation.num_tasks=1",
]
TRL = {
    "per_device_train_batch_size": MINI_BATCH,
    "steps_per_generation": STEPS,
    "loss_type": "bnpo",
    "scale_rewards": "group",
    "epsilon": 0.2,
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "constant",
    "adam_beta2": BETA2,
    "save_strategy": "steps",
    "save_steps": STEPS * EVERY,
    "save_only_model": True,
}
LINEAR, LONG = {"lr_scheduler_type": "linear"}, {"adam_beta2": 0.999}
TRL_ARMS = {"trl": TRL, "trl_own": TRL | LINEAR | LONG, "trl_linear": TRL | LINEAR, "trl_beta2": TRL | LONG}
ARMS = {
    "troupe": Method("Troupe", "#2a6fb0"),
    "trl": Method("TRL, the same settings", "#e8a33d"),
    "trl_own": Method("TRL, its own schedule and beta2", "#777777"),
    "trl_linear": Method("TRL, its own schedule (linear to 0)", "#8e5ea2"),
    "trl_beta2": Method("TRL, its own beta2 (0.999)", "#5aa469"),
}
Curve = list[tuple[int, float]]
"""Updates and held-out success after them."""


def task(game: Range) -> dict[str, str]:
    """The question of the recipe, and the guess that halves the range."""
    low, high = game
    observation, _ = GuessEnvironment(low=low, high=high, **ENV_ARGS).reset()
    return {"question": observation["question"], "answer": str((low + high) // 2)}


HELD_OUT, TRAINING = (Dataset([task(game) for game in ranges], name="halves") for ranges in split_ranges())


def is_right(task_info: dict[str, str], action: str) -> float:
    """The reward, as that of ``peer_trl``."""
    return float(action.strip() == task_info["answer"])


def workload(seed: int) -> Workload:
    """Troupe's view of the task."""
    return Workload(
        agent_class=GameAgent,
        env_class=SingleTurnEnvironment,
        env_args={"reward_fn": is_right},
        train_dataset=TRAINING,
        val_dataset=HELD_OUT,
    )


def success(model: str) -> float:
    """The mean probability of the right answer, and of its end, in the held-out ranges."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows, answers = [], []
    for each in HELD_OUT:
        messages = [{"role": "user", "content": each["question"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answers.append(tokenizer.encode(each["answer"] + tokenizer.eos_token))
        rows.append(tokenizer.encode(prompt) + answers[-1])
    length = len(answers[0])
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(model, dtype="float32")(torch.tensor(rows)).logits
    logprobs = logits[:, -length - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(answers)[..., None])
    return float(logprobs.sum((1, 2)).exp().mean())


def curve(arm: str, seed: int, model: str, folder: Path) -> Curve:
    """Train a seed of an arm in a folder of its own, which is removed, and measure it."""
    directory = folder / "run"
    shutil.rmtree(directory, ignore_errors=True)
    measured = range(EVERY, UPDATES + 1, EVERY)
    if arm in TRL_ARMS:
        job = {
            "model": model,
            "questions": [each["question"] for each in TRAINING],
            "answers": [each["answer"] for each in TRAINING],
            "groups": GROUPS,
            "group_size": GROUP_SIZE,
            "max_tokens": MAX_TOKENS,
            "lr": LR,
            "steps": STEPS * UPDATES,
            "settings": {**TRL_ARMS[arm], "seed": seed},
        }
        run_peer("trl", environment_of("trl", folder / "environment"), job, directory)
        saved = [directory / "trl" / f"checkpoint-{STEPS * update}" for update in measured]
    else:
        run([*TROUPE, f"model.path={model}", f"seed={seed}", f"run.directory={directory}"])
        saved = [directory / "checkpoints" / f"step_{update:06d}" for update in measured]
    found = [(update, success(model_folder(str(each)))) for update, each in zip(measured, saved, strict=True)]
    shutil.rmtree(directory)
    return [(0, success(model)), *found]


def report(curves: dict[str, dict[str, Curve]]) -> None:
    """Print success after some updates, its mean over all, and that of Troupe less each other arm's.

    The interval of a difference is a little wider than Welch's.
    """
    shown = (EVERY, 2 * EVERY, UPDATES)
    table = Report(
        f"held-out success, mean ± 95 % over seeds; {UPDATES} updates of {GROUPS} groups of {GROUP_SIZE}",
        ("arm", "seeds", *(f"after {update}" for update in shown), "mean", "Troupe's less this"),
    )
    means = {
        arm: Summary.of([sum(value for _, value in each[1:]) / len(each[1:]) for each in seeds.values()])
        for arm, seeds in curves.items()
    }
    for arm, seeds in curves.items():
        points, mean, gap = by_step(seeds), means[arm], ""
        if arm != "troupe" and "troupe" in means:
            margin = math.hypot(means["troupe"].margin, mean.margin)
            gap = f"{means['troupe'].mean - mean.mean:+.3f} ± {margin:.3f}"
        cells = [*(points[update] for update in shown), mean]
        figures = (f"{each.mean:.3f} ± {each.margin:.3f}" for each in cells)
        table.add(ARMS[arm].label, str(len(seeds)), *figures, gap)
    table.print()


def draw(curves: dict[str, dict[str, Curve]], path: Path) -> None:
    """The mean of each arm with its 95 % interval as a band; lines that lie on each other stay visible."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4), layout="constrained")
    axes = figure.subplots()
    for arm, seeds in curves.items():
        updates, points = zip(*by_step(seeds).items(), strict=True)
        low, high = ([each.mean + sign * each.margin for each in points] for sign in (-1, 1))
        label, color = f"{ARMS[arm].label} ({len(seeds)} seeds)", ARMS[arm].color
        style, width = ("-" if arm in ("troupe", "trl") else ":"), (4.0 if arm == "troupe" else 1.5)
        axes.plot(updates, [each.mean for each in points], style, color=color, linewidth=width, label=label)
        axes.fill_between(updates, low, high, color=color, alpha=0.2, linewidth=0)
    axes.set(xlabel="policy updates", ylabel="held-out success", ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default=",".join(map(str, range(10))), help="default: %(default)s")
    parser.add_argument("--arms", default=",".join(ARMS), help="some of: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("runs/same_as_trl"), help="of model and runs")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the JSON and the picture")
    parser.add_argument("--minutes", type=float, default=110, help="no run is begun after so many")
    arguments = parser.parse_args()
    if unknown := set(arguments.arms.split(",")) - ARMS.keys():
        parser.error(f"--arms names {', '.join(unknown)}: name some of {', '.join(ARMS)}.")
    until = time.monotonic() + 60 * arguments.minutes
    path = arguments.output / "same_as_trl.json"
    settings = {"packages": list(PACKAGES), "troupe": TROUPE, "trl": TRL}
    curves: dict[str, dict[str, Curve]] = {}
    if path.exists():
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["settings"] != settings:
            sys.exit(f"{path} holds runs of other settings: move it away, or name another --output.")
        curves = kept["curves"]
    model = model_folder(warm_started_model("guess", arguments.folder.absolute(), num_steps=250))
    for seed, arm in product(arguments.seeds.split(","), arguments.arms.split(",")):
        if seed not in curves.setdefault(arm, {}) and time.monotonic() < until:
            found = curves[arm][seed] = curve(arm, int(seed), model, arguments.folder.absolute())
            with replaced(path) as unfinished:
                unfinished.write_text(json.dumps({"settings": settings, "curves": curves}), encoding="utf-8")
            print(f"{arm}, seed {seed}: {' '.join(f'{value:.3f}' for _, value in found)}", flush=True)
    finished = {arm: curves[arm] for arm in ARMS if curves.get(arm)}
    draw(finished, arguments.output / "same_as_trl.png")
    report(finished)


if __name__ == "__main__":
    main()
