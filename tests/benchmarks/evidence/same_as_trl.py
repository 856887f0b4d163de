"""The same GRPO by TRL and by Troupe: held-out success over the updates, with 95 % bands, in one picture.

    python tests/benchmarks/evidence/same_as_trl.py [--model NAME] [--seeds 0,1,2] [--arms troupe,trl]

``tiny``: the best first guess of the recipe ``guess``, the middle of a range such as 4571 to 4579, in one
turn. All runs begin with one model, which knows the recipe's demonstrations alone, most of which guess at
random. An update has 8 groups of 8 answers of at most 6 tokens, and two optimizer steps of 32 of them.
``smollm2-135m-instruct`` writes the call of a calculator, the first turn of its recipe, after one example.
An update is that of the recipe, one optimizer step of 4 groups of 8, at a rate with which the rise takes ten
of them. Troupe's learner and engine are in one process (``one_process.py``).

Equal in both: checkpoint, chat template, training questions, reward, temperature, float32, AdamW (rate,
betas, no decay, gradients cut to norm 1), advantages by the group's mean and deviation, clipping at 0.2, no
KL and no entropy, the mean over an optimizer step's tokens (TRL's ``bnpo``, over parts of a step ``dapo``),
answers that were cut learned from; of SmolLM2 the order of the questions too. Not equal: the random numbers
behind tokens and mini-batches, and of ``tiny`` behind that order; who samples (vLLM; transformers); 1e-6 or
1e-4 beside the deviation; a second clip, of ratios above 3 at a negative advantage, which TRL lacks.

Success is the probability, at temperature 1, of the right answer to the held-out questions: exact, by the
same function for both. TRL's own schedule and beta2 are arms of their own, together and each alone. A
finished run is kept in ``same_as_trl.json``, and a second call goes on there. A run takes about a minute, of
SmolLM2 three to seven of one core and 5 GB.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

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
from launch.recipes.calculator import split_problems  # noqa: E402
from launch.recipes.guess import ENV_ARGS, Range, split_ranges  # noqa: E402
from launch.run_folder.model_paths import model_folder  # noqa: E402
from launch.settings.compose import compose  # noqa: E402
from launch.workload import Workload  # noqa: E402
from policies import GameAgent  # noqa: E402

SMOLLM2 = "smollm2-135m-instruct"
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


def called(problem: dict[str, str]) -> dict[str, str]:
    """A question of the calculator, and the call that answers it."""
    expression = problem["question"].removeprefix("What is ").removesuffix("?")
    return {"question": problem["question"], "answer": f"calculator({expression})"}


def is_right(task_info: dict[str, str], action: str) -> float:
    """The reward, as that of ``peer_trl``."""
    return float(action.strip() == task_info["answer"])


class ShownAgent(GameAgent):
    """Shows a solved example before the question."""

    def reset(self) -> None:
        super().reset()
        self.messages += [
            {"role": "system", "content": "Use the calculator."},
            {"role": "user", "content": "What is 41*31?"},
            {"role": "assistant", "content": "calculator(41*31)"},
        ]


class Comparison(NamedTuple):
    """The questions of a model, and its settings: all of Troupe's, and those of TRL beside its arm's."""

    held_out: Dataset
    training: Dataset
    agent: type[GameAgent]
    troupe: list[str]
    trl: dict[str, Any]


CALLS_HELD_OUT, CALLS = (Dataset([called(each) for each in part], name="calls") for part in split_problems())
COMPARISONS = {
    "tiny": Comparison(HELD_OUT, TRAINING, GameAgent, TROUPE, {}),
    SMOLLM2: Comparison(
        CALLS_HELD_OUT[:50],
        CALLS,
        ShownAgent,
        [
            *TROUPE,
            "rollout.groups_per_step=4",
            "rollout.max_response_tokens=12",
            "learner.optimizer.lr=3e-6",
            "stages=[reinforce]",
            "learner={num_threads: 1, micro_batch_tokens: 1024}",
            "server.engine.max_model_tokens=96",
            "server.engine.options={max_num_seqs: 32, max_num_batched_tokens: 512, block_size: 32}",
            "run={num_steps: 10, checkpoints: {every: 2}}",
        ],
        {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4, "steps_per_generation": 4}
        | {"loss_type": "dapo", "save_steps": 2, "shuffle_dataset": False},
    ),
}


def workload(seed: int, name: str = "tiny") -> Workload:
    """Troupe's view of the task."""
    compared = COMPARISONS[name]
    return Workload(
        agent_class=compared.agent,
        env_class=SingleTurnEnvironment,
        env_args={"reward_fn": is_right},
        train_dataset=compared.training.shuffle(seed),
        val_dataset=compared.held_out,
    )


def success(model: str, name: str) -> float:
    """The mean probability of the right answer, and of its end, to the held-out questions."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows, answers = [], []
    for each in COMPARISONS[name].held_out:
        messages = [*COMPARISONS[name].agent().messages, {"role": "user", "content": each["question"]}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        answers.append(tokenizer.encode(each["answer"] + tokenizer.eos_token))
        rows.append(tokenizer.encode(prompt) + answers[-1])
    length = len(answers[0])
    with torch.inference_mode():
        policy = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
        logits = policy(torch.tensor(rows), logits_to_keep=length + 1).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(answers)[..., None])
    return float(logprobs.sum((1, 2)).exp().mean())


@cache
def engine(model: str) -> Any:
    """The engine of all runs of SmolLM2."""
    import one_process

    config = compose(COMPARISONS[SMOLLM2].troupe)
    return one_process.Player(model, workload(0, SMOLLM2), config.rollout.limits(), config.server.engine)


def versions(name: str, arm: str, seed: int, model: str, folder: Path) -> Iterator[tuple[int, Path]]:
    """Train a seed of an arm in a folder of its own; the updates at which it is measured, and its policy."""
    compared, directory = COMPARISONS[name], folder / f"{name}_{arm}_{seed}"
    shutil.rmtree(directory, ignore_errors=True)
    overrides = [*compared.troupe, f"model.path={model}", f"seed={seed}", f"run.directory={directory}"]
    config, training = compose(overrides), compared.training.shuffle(seed)
    every, groups = config.run.checkpoints["every"], config.rollout.groups_per_step
    steps, measured = groups * GROUP_SIZE // MINI_BATCH, range(every, config.run.num_steps + 1, every)
    if arm in TRL_ARMS:
        job = {
            "model": model,
            "shown": compared.agent().messages,
            "questions": [each["question"] for each in training],
            "answers": [each["answer"] for each in training],
            "groups": groups,
            "group_size": GROUP_SIZE,
            "max_tokens": config.rollout.max_response_tokens,
            "lr": config.learner.optimizer.lr,
            "steps": steps * measured[-1],
            "settings": {**TRL_ARMS[arm], **compared.trl, "seed": seed},
        }
        run_peer("trl", environment_of("trl", folder / "environment"), job, directory)
        yield from ((each, directory / "trl" / f"checkpoint-{steps * each}") for each in measured)
    elif name == SMOLLM2:
        import one_process

        kept = one_process.Kept(directory, every)
        rewards = one_process.train(config, workload(seed, name), model, engine(model), kept)
        for update, reward in enumerate(rewards, 1):
            print(f"{name}, {arm}, seed {seed}: update {update}, reward {reward:.3f}", flush=True)
            if update in measured:
                yield update, directory / str(update)
    else:
        run(overrides)
        yield from ((each, directory / "checkpoints" / f"step_{each:06d}") for each in measured)
    shutil.rmtree(directory)


def report(name: str, curves: dict[str, dict[str, Curve]]) -> None:
    """Print success after some updates, its mean over all, and that of Troupe less each other arm's.

    The interval of a difference is a little wider than Welch's.
    """
    steps = sorted({update for seeds in curves.values() for each in seeds.values() for update, _ in each})
    table = Report(
        f"{name}: held-out success, mean ± 95 % over seeds",
        ("arm", "seeds", *(f"after {update}" for update in steps), "mean", "Troupe's less this"),
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
        figures = (f"{each.mean:.3f} ± {each.margin:.3f}" for each in [*points.values(), mean])
        table.add(ARMS[arm].label, str(len(seeds)), *figures, gap)
    table.print()


def draw(kept: dict[str, dict[str, Any]], path: Path) -> None:
    """The mean of each arm with its 95 % interval as a band; lines that lie on each other stay visible."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * len(kept), 4), layout="constrained")
    panels = figure.subplots(1, len(kept), sharey=True, squeeze=False)[0]
    for axes, (name, found) in zip(panels, kept.items(), strict=True):
        for arm, seeds in found["curves"].items():
            updates, points = zip(*by_step(seeds).items(), strict=True)
            low, high = ([each.mean + sign * each.margin for each in points] for sign in (-1, 1))
            label, color = f"{ARMS[arm].label} ({len(seeds)} seeds)", ARMS[arm].color
            style, width = ("-" if arm in ("troupe", "trl") else ":"), (4.0 if arm == "troupe" else 1.5)
            means = [each.mean for each in points]
            axes.plot(updates, means, style, color=color, linewidth=width, label=label)
            axes.fill_between(updates, low, high, color=color, alpha=0.2, linewidth=0)
        axes.set(title=name, xlabel="policy updates", ylabel="held-out success", ylim=(0, 1.03))
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=COMPARISONS, default="tiny", help="default: %(default)s")
    parser.add_argument("--seeds", default=",".join(map(str, range(10))), help="default: %(default)s")
    parser.add_argument("--arms", default=",".join(ARMS), help="some of: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("runs/same_as_trl"), help="of model and runs")
    parser.add_argument("--output", type=Path, default=HERE, help="folder of the JSON and the picture")
    parser.add_argument("--minutes", type=float, default=110, help="no run is begun after so many")
    arguments = parser.parse_args()
    if unknown := set(arguments.arms.split(",")) - ARMS.keys():
        parser.error(f"--arms names {', '.join(unknown)}: name some of {', '.join(ARMS)}.")
    until = time.monotonic() + 60 * arguments.minutes
    name, path, folder = arguments.model, arguments.output / "same_as_trl.json", arguments.folder.absolute()
    compared = COMPARISONS[name]
    settings = {"packages": list(PACKAGES), "troupe": compared.troupe, "trl": TRL | compared.trl}
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if kept.setdefault(name, {"settings": settings, "curves": {}})["settings"] != settings:
        sys.exit(f"{path} holds runs of other settings: move it away, or name another --output.")
    curves = kept[name]["curves"]
    model = model_folder(name if name == SMOLLM2 else warm_started_model("guess", folder, num_steps=250))
    for seed, arm in product(arguments.seeds.split(","), arguments.arms.split(",")):
        if seed not in curves.get(arm, {}) and time.monotonic() < until:
            trained = versions(name, arm, int(seed), model, folder)
            found = [(update, success(model_folder(str(each)), name)) for update, each in trained]
            curves.setdefault(arm, {})[seed] = [(0, success(model, name)), *found]
            with replaced(path) as unfinished:
                unfinished.write_text(json.dumps(kept), encoding="utf-8")
            figures = " ".join(f"{value:.3f}" for _, value in found)
            print(f"{name}, {arm}, seed {seed}: {figures}", flush=True)
    draw(kept, arguments.output / "same_as_trl.png")
    for each, found in kept.items():
        report(each, found["curves"])
    sys.stdout.flush()
    os._exit(0)  # an engine's thread has no end


if __name__ == "__main__":
    main()
