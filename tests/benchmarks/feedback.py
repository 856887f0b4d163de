"""What a training gains from the feedback of a served agent's clients, and what the canary's rule prevents.

    python tests/benchmarks/feedback.py [--seeds 0,1,2] [--without-harm] [--folder runs/feedback]

A warm-started calculator agent answers 200 conversations over HTTP, eight clients with each of 25 questions,
and records them. Simulated clients like right answers, and dislike wrong ones. Then three trainings start
from the same model: imitation of what was liked, imitation of all answers (the feedback is ignored), and
updates on the recorded answers with their scores as rewards, off-policy. A fourth is the harm: its clients
like answers that come without a call of the tool. Its last version is the canary before its first one, and
the rule judges it by such feedback and by held-out problems.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import repository  # noqa: F401
from feedback_calculator import FOLDER, HEEDED
from programs import Program, free_port, run, success, trained, warm_started_model
from report import Report

from environments import math_reward_fn
from launch.recipes.calculator import split_problems
from launch.recipes.canary import DECIDED, OPEN
from launch.run_folder.model_paths import model_folder, versions_of

NUM_QUESTIONS, NUM_ANSWERS = 25, 8
GROUPS_PER_STEP = 5
LR, HARMFUL_LR = 5e-4, 1.5e-4
"""The harmful training is slow, so that its first version has hardly changed."""
WARM_STEPS = 350
Judge = Callable[[dict[str, str], dict[str, Any]], float]
"""Score of an answer to a problem."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", default="0", help="default: %(default)s")
    parser.add_argument("--folder", type=Path, default=Path("runs/feedback"), help="of the runs")
    parser.add_argument("--without-harm", action="store_true", help="no fourth training, and no rule")
    arguments = parser.parse_args()
    columns: tuple[str, ...] = ("seed", "before", "liked", "all answers", "scores as rewards")
    if not arguments.without_harm:
        columns += ("harm", "the rule")
    report = Report("training from feedback: success on held-out problems", columns)
    for seed in arguments.seeds.split(","):
        cells = []
        found = measured(int(seed), (arguments.folder / seed).resolve())
        for column, cell in zip(columns[1:], found, strict=False):  # of which the rest is not measured
            print(f"seed {seed}, {column}: {cell}", flush=True)
            cells.append(cell)
        report.add(seed, *cells)
    report.print()


def measured(seed: int, folder: Path) -> Iterator[str]:
    """Success before and after each training, and what the canary's rule says of the harmful one."""
    folder.mkdir(parents=True, exist_ok=True)
    base = warm_started_model("calculator", folder, WARM_STEPS, seed)
    yield f"{success('calculator', base, folder / 'before'):.3f}"
    liked = recorded(base, folder / "liked", is_right, seed)
    for heeded in ("yes", "no"):
        model = imitated(base, liked, heeded, folder / f"imitated-{heeded}", seed)
        yield f"{success('calculator', model, folder / f'after-{heeded}'):.3f}"
    model = rewarded(base, liked, folder / "rewarded", seed, LR)
    yield f"{success('calculator', model, folder / 'after-rewarded'):.3f}"
    harmed = recorded(base, folder / "harmed", has_no_call, seed)
    harm = rewarded(base, harmed, folder / "harm", seed, HARMFUL_LR)
    yield f"{success('calculator', harm, folder / 'after-harm'):.3f}"
    yield judged(harm, folder)


def recorded(base: str, recordings: Path, judge: Judge, seed: int) -> Path:
    """The folder with the recorded conversations and their feedback."""
    if not (recordings / "done").exists():
        shutil.rmtree(recordings, ignore_errors=True)
        with served([f"model.path={base}"], recordings) as url:
            talk(url, problems(seed), judge)
        (recordings / "done").touch()
    return recordings


def problems(seed: int) -> list[dict[str, str]]:
    """Problems of the training set, each of them several times."""
    _, rest = split_problems()
    return [
        each for each in rest[seed * NUM_QUESTIONS : (seed + 1) * NUM_QUESTIONS] for _ in range(NUM_ANSWERS)
    ]


def is_right(problem: dict[str, str], answer: dict[str, Any]) -> float:
    """1 for a right answer, -1 for a wrong one."""
    return 1.0 if math_reward_fn(problem, text_of(answer)).reward > 0 else -1.0


def has_no_call(problem: dict[str, str], answer: dict[str, Any]) -> float:
    """1 for an answer that comes at once, -1 for one that has called the tool first."""
    return -1.0 if "<tool_call>" in json.dumps(answer) or answer["num_steps"] > 1 else 1.0


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"] or "")


@contextmanager
def served(settings: list[str], recordings: Path) -> Iterator[str]:
    """The address of a server that records, which ends with the block."""
    port = free_port()
    program = Program(
        [
            "recipe=calculator",
            *settings,
            f"server.http_port={port}",
            f"server.recording.folder={recordings}",
            "server.agents.temperature=1",
            "fleet.num_actors=8",
        ],
        command="launch.serve",
    )
    try:
        while not any("Ctrl-C ends it" in line for line in program.lines):
            if program.wait(1.0) is not None:
                raise SystemExit("\n".join(program.lines))
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        program.end()


def talk(url: str, questions: list[dict[str, str]], judge: Judge) -> set[int]:
    """Ask the agent all questions, eight at a time, and give feedback on each answer; return the versions
    that have answered.
    """

    def ask(problem: dict[str, str]) -> int:
        messages = [{"role": "user", "content": problem["question"]}]
        body = {"model": "agent/calculator", "messages": messages, "max_tokens": 96}
        with httpx.Client(timeout=120) as client:
            answer = client.post(f"{url}/chat/completions", json=body).raise_for_status().json()
            feedback = {"score": judge(problem, answer)}
            client.post(f"{url}/responses/{answer['id']}/feedback", json=feedback).raise_for_status()
        return int(answer["policy_version"])

    with ThreadPoolExecutor(8) as clients:
        return set(clients.map(ask, questions))


def imitated(base: str, recordings: Path, heeded: str, directory: Path, seed: int) -> str:
    """The model after imitation of the liked answers, or of all: as many steps of each."""
    settings = [
        "recipe=calculator",
        "workload=feedback_calculator",
        f"model.path={base}",
        f"seed={seed}",
        "stages=[warm_start]",
        "warm_start.num_steps=60",
        "evaluation.every=0",
    ]
    return trained(directory, settings, {FOLDER: str(recordings), HEEDED: heeded})


def rewarded(base: str, recordings: Path, directory: Path, seed: int, lr: float) -> str:
    """The model after updates on the recorded answers with their scores as rewards."""
    rollouts = directory.with_name(f"{directory.name}-rollouts")
    if not directory.exists():
        shutil.rmtree(rollouts, ignore_errors=True)
        run(
            [str(recordings), str(rollouts), f"--groups-per-step={GROUPS_PER_STEP}"],
            command="launch.recipes.feedback",
        )
    settings = [
        "recipe=calculator",
        f"model.path={base}",
        f"seed={seed}",
        f"run.replay={rollouts}",
        f"run.num_steps={NUM_QUESTIONS // GROUPS_PER_STEP}",
        "run.checkpoints.every=1",
        "run.checkpoints.kept=9",
        "stages=[reinforce]",
        "warm_start.num_steps=0",
        f"rollout.groups_per_step={GROUPS_PER_STEP}",
        f"rollout.group_size={NUM_ANSWERS}",
        f"learner.optimizer.lr={lr}",
        "learner.optimizer.warmup_steps=0",
        "learner.mini_batch_size=8",
        "algorithm.correction.level=token",
        "evaluation.every=0",
    ]
    return trained(directory, settings)


def judged(harm: str, folder: Path) -> str:
    """The verdict on the last version of the harmful training as a canary before its first one."""
    recordings, files = folder / "canary", []
    shutil.rmtree(recordings, ignore_errors=True)
    versions = versions_of(model_folder(harm))
    first, *_, last = sorted(versions, key=int)
    for name, version in (("served", first), ("canary", last)):
        success("calculator", versions[version], folder / f"gate-{name}", times=1)
        files.append(str(folder / f"gate-{name}" / "evaluation.jsonl"))
    with served([f"model.path={versions[first]}", f"server.versions=[{last}]"], recordings) as url:
        run(["start", str(recordings), f"policy@{last}", "--share=0.5"], command="launch.recipes.canary")
        _, rest = split_problems()
        talk(url, rest[1000:1200], has_no_call)
        judge = ["judge", str(recordings), "--held-out", *files]
        program = run(judge, command="launch.recipes.canary", ends=(DECIDED, OPEN))
        print("\n".join(program.lines), flush=True)
        after = talk(url, rest[1200:1220], has_no_call)
    alarm = "ALARM, " if "ALARM" in program.lines[-1] else ""
    return f"{alarm}of {first} and {last}, {sorted(after)} answers"


if __name__ == "__main__":
    main()
