"""What programs elsewhere notice when the driver of their training gets a SIGKILL, and is resumed at once.

    python tests/benchmarks/killed_driver.py

Programs with OpenAI's client hold conversations of several calls, one after the other: by a name of the
session server without retries, by a name with the client's own two, and at the node that plays their rollout.
One whose connection ends begins a conversation anew, by the same name. In the end each rollout has to have
been trained on once, with all of its calls.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

import httpx
import models
import openai
import repository  # noqa: F401
from killed_sessions import faults_of, is_made, wait_until
from programs import Program, free_port
from ray.util import get_node_ip_address
from report import Report

from actors.gateway.session_server import SessionServer
from actors.serving.keys import KEYS_VARIABLE
from environments import Dataset
from launch.workload import Workload

NUM_CALLS, NUM_UPDATES, NUM_GROUPS, GROUP_SIZE = 3, 2, 8, 4
RETRIES = {"name": 0, "name, two retries": 2, "node": 0}
"""Retries of the client, by the way of the program's calls."""
PROGRAMS_OF_A_WAY = 4
PORT = "TROUPE_BENCHMARK_PORT"
KEY = "a-key-of-the-programs"
HEADERS = {"authorization": f"Bearer {KEY}"}


def workload(seed: int) -> Workload:
    tasks = Dataset([{"number": number} for number in range(100)], name="killed", split="train")
    server = SessionServer(int(os.environ[PORT]), silent_seconds=60)
    return Workload(rollout=server.rollout, train_dataset=tasks, val_dataset=None)


@dataclass
class Programs:
    """Threads that are programs, until ``ended``."""

    url: str
    ended: threading.Event = field(default_factory=threading.Event)
    open: dict[str, str] = field(default_factory=dict)
    """Ways of the calls under way, by the names of their programs."""
    errors: dict[str, list[tuple[float, str]]] = field(default_factory=lambda: {way: [] for way in RETRIES})
    """Errors of calls by their ways, and when clients have raised them."""

    def live(self, way: str, number: int) -> None:
        """Hold one conversation after the other."""
        num_held = 0
        while not self.ended.is_set():
            name = f"{way.replace(', ', '-').replace(' ', '-')}-{number}-{num_held}"
            try:
                num_held += self._converse(way, name)
            except httpx.HTTPError:
                time.sleep(0.5)  # no session server is there
            except openai.APIError as error:
                self.errors[way].append(
                    (time.monotonic(), f"{type(error).__name__} {error.code or ''}".strip())
                )
                time.sleep(0.5)
            finally:
                self.open.pop(name, None)

    def _converse(self, way: str, name: str) -> int:
        """Take a task and play it; return how many were played, or have ended."""
        key = KEY if way == "node" else f"{KEY}:{name}"
        headers = {"authorization": f"Bearer {key}"}
        taken = httpx.post(f"{self.url}/sessions", headers=headers, timeout=60, trust_env=False)
        if taken.status_code != 200:
            return taken.status_code == 404
        session = taken.json()
        there = session["environment"]
        url, key = (
            (there["OPENAI_BASE_URL"], there["OPENAI_API_KEY"]) if way == "node" else (f"{self.url}/v1", key)
        )
        messages: list[Any] = []
        with openai.OpenAI(base_url=url, api_key=key, max_retries=RETRIES[way]) as client:
            for _ in range(NUM_CALLS):
                messages.append({"role": "user", "content": "What is 12+34?"})
                self.open[name] = way
                answer = client.chat.completions.create(model="m", messages=messages, max_tokens=200)
                del self.open[name]
                messages.append(answer.choices[0].message)
        result = {"reward": len(str(messages[-1].content)) % 7}
        posted = f"{self.url}/sessions/{session['id']}/reward"
        httpx.post(posted, headers=HEADERS, json=result, timeout=60, trust_env=False)
        return 1


def main() -> None:
    port = free_port()
    os.environ |= {PORT: str(port), KEYS_VARIABLE: f"programs:{KEY}", "NO_PROXY": "*"}
    programs = Programs(f"http://{get_node_ip_address()}:{port}")
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(99) as threads:
        folder = Path(temporary, "run")
        overrides = [
            "workload=killed_driver",
            f"model.path={models.tiny(Path(temporary))}",
            f"run.directory={folder}",
            f"run.num_steps={NUM_UPDATES}",
            "run.resume=true",
            "run.checkpoints.every=1",
            "algorithm.zero_signal_groups=keep",
            f"rollout.groups_per_step={NUM_GROUPS}",
            f"rollout.group_size={GROUP_SIZE}",
            f"rollout.max_steps={NUM_CALLS + 1}",
            f"fleet.num_actors={len(RETRIES) * PROGRAMS_OF_A_WAY}",
            "fleet.pairs_per_actor=6",
        ]
        try:
            program = Program(overrides)
            for way in RETRIES:
                for number in range(PROGRAMS_OF_A_WAY):
                    threads.submit(programs.live, way, number)
            wait_until(lambda: is_made(folder, 1), program)
            wait_until(lambda: {*programs.open.values()} == {*RETRIES}, program)
            os.kill(program.process.pid, SIGKILL)
            moment, were_open = time.monotonic(), Counter([*programs.open.values()])
            program.process.wait()
            program.end()
            program = Program(overrides)
            program.wait(400)
            seconds = time.monotonic() - moment
        finally:
            programs.ended.set()
            program.end()
        report = Report(
            "The driver is killed: calls that were open, and errors after it",
            ("way", "open", "errors", "seconds until the first", "and the last"),
        )
        for way, errors in programs.errors.items():
            after = [each for each in errors if each[0] > moment]
            names = Counter(name for _, name in after)
            shown = ", ".join(f"{count} {name}" for name, count in names.items())
            ends = [f"{choose(at for at, _ in after) - moment:.2f}" for choose in (min, max)] if after else []
            report.add(way, str(were_open[way]), shown, *(ends or ["", ""]))
        report.print()
        print(f"The resumed run has ended after {seconds:.0f} s.")
        faults = faults_of(folder, NUM_UPDATES, NUM_UPDATES * NUM_GROUPS, GROUP_SIZE, NUM_CALLS)
    print("\n".join(faults) or "No session is lost, and none is trained on twice.")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
