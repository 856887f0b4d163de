"""Rewards that come after their rollouts: a training plays on without them, and a later one learns from them.

    python tests/benchmarks/late_rewards.py

Programs play the tasks of a real training by its session server. Every second task is judged at once; for the
others they send that the reward comes later, and send it when the run has ended, to a session server that was
started anew. Each rollout has to be trained on once, with the reward of its program and the tokens that were
sampled: in the run, or in a replay of what was judged later.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import models
import openai
import programs
from report import Report

from actors.gateway.session_server import SessionServer
from actors.serving.keys import KEYS_VARIABLE
from environments import Dataset
from environments.types import Trajectory
from launch.recipes.late_rewards import main as write_late_rollouts
from launch.run_folder.trajectory_log import TRAIN, TRAINED, kept_steps, read_kept
from launch.workload import Workload
from policies.learning.samples import training_samples

FOLDER, PORT = "TROUPE_BENCHMARK_LATE", "TROUPE_BENCHMARK_PORT"
KEY = "a-key-of-the-programs"
NUM_UPDATES, GROUPS, GROUP_SIZE, NUM_PROGRAMS = 2, 2, 4, 8


def workload(seed: int) -> Workload:
    tasks = Dataset([{"number": number} for number in range(100)], name="late", split="train")
    server = SessionServer(int(os.environ[PORT]), late_rewards=os.environ[FOLDER])
    print(f"sessions at {server.url}", flush=True)
    return Workload(rollout=server.rollout, train_dataset=tasks)


def play(url: str, is_over: threading.Event, later: dict[str, float]) -> None:
    """Play tasks until the training is over; collect the rewards of those that are judged later."""
    with httpx.Client(base_url=url, headers=authorization(), timeout=60, trust_env=False) as http:
        while not is_over.is_set():
            try:
                response = http.post("/sessions")
                if response.status_code != 200:
                    continue
                session = response.json()
                reward = float(len(answer(session)) % 2)
                is_late = session["task"]["number"] % 2
                result = {"later": True} if is_late else {"reward": reward}
                if http.post(f"/sessions/{session['id']}/reward", json=result).is_success and is_late:
                    later[session["id"]] = reward
            except (httpx.TransportError, openai.OpenAIError):
                is_over.wait(0.2)


def answer(session: dict[str, Any]) -> str:
    found = session["environment"]
    policy = openai.OpenAI(base_url=found["OPENAI_BASE_URL"], api_key=found["OPENAI_API_KEY"])
    messages: Any = [{"role": "user", "content": "What is 2+2?"}]
    response = policy.chat.completions.create(model=session["model"], messages=messages, max_tokens=8)
    return response.choices[0].message.content or ""


def authorization() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


def give(rewards: dict[str, float], folder: Path) -> None:
    """Send rewards when their run has ended, each twice: the second one is refused."""
    server = SessionServer(port=0, late_rewards=folder)
    with httpx.Client(base_url=server.url, headers=authorization(), trust_env=False) as http:
        for session, reward in rewards.items():
            sent = [http.post(f"/sessions/{session}/reward", json={"reward": reward}) for _ in range(2)]
            assert [each.status_code for each in sent] == [200, 404], sent[-1].text
    server.close()


def trained(run: Path) -> Iterator[Trajectory]:
    """Rollouts that the updates of a run have learned from."""
    for step in kept_steps(run, TRAIN):
        yield from (each.trajectory for each in read_kept(run, TRAIN, step) if each.outcome == TRAINED)


def main() -> None:
    report = Report("Rewards that come after their rollouts", ("", "rollouts", "sampled tokens", "reward"))
    os.environ[KEYS_VARIABLE] = f"programs:{KEY}"
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        late, port = root / "late_rewards", programs.free_port()
        common = [f"model.path={models.tiny(root)}", "algorithm.zero_signal_groups=keep"]
        played = [
            "workload=late_rewards",
            *common,
            f"run.directory={root / 'played'}",
            f"run.num_steps={NUM_UPDATES}",
            f"rollout.groups_per_step={GROUPS}",
            f"rollout.group_size={GROUP_SIZE}",
            "fleet.num_actors=8",
            "fleet.pairs_per_actor=8",
        ]
        program = programs.Program(played, {FOLDER: str(late), PORT: str(port)})
        is_over, later = threading.Event(), dict[str, float]()
        try:
            while not (urls := [line.split()[-1] for line in program.lines if "sessions at" in line]):
                if program.wait(0.2) is not None:
                    sys.exit("\n".join(program.lines))
            players = [
                threading.Thread(target=play, args=(urls[0], is_over, later)) for _ in range(NUM_PROGRAMS)
            ]
            for each in players:
                each.start()
            program.wait(400)
        finally:
            is_over.set()
            program.end()
        for each in players:
            each.join()
        if program.process.returncode:
            sys.exit("\n".join(program.lines))
        give(later, late)
        judged = root / "judged"
        if write_late_rollouts([str(root / "played"), str(late), str(judged), "--groups-per-step", "1"]):
            sys.exit(1)
        num_steps = len(kept_steps(judged, TRAIN))
        replay = [f"run.replay={judged}", f"run.num_steps={num_steps}", "rollout.groups_per_step=1"]
        size = f"rollout.group_size={GROUP_SIZE}"
        programs.run(
            [
                "recipe=calculator",
                *common,
                *replay,
                size,
                "stages=[reinforce]",
                "warm_start.num_steps=0",
                f"run.directory={root / 'new'}",
            ]
        )
        for name in ("played", "new"):
            rollouts = list(trained(root / name))
            tokens = sum(each.num_sampled_tokens for part in map(training_samples, rollouts) for each in part)
            total = sum(each.reward for each in rollouts)
            report.add(f"learned from in {name}", str(len(rollouts)), str(tokens), f"{total:g}")
        expected = {each.steps[-1].info["session"]: each.reward for each in trained(root / "new")}
    report.print()
    wrong = [name for name, reward in expected.items() if later.get(name) != reward]
    print(f"{len(later)} rewards came later: {len(expected)} rollouts have theirs, {len(wrong)} another one")
    sys.exit(bool(wrong or not expected))


if __name__ == "__main__":
    main()
