"""What 64 programs elsewhere notice when the driver of their training gets a SIGKILL, and is resumed at once.

    python tests/benchmarks/killed_driver.py

Each holds one conversation after the other by names of the session server, with OpenAI's client and none of
its retries. In the second update all stop in the middle, and go on in the moment of the kill. In the end each
rollout has to have been trained on once, and no program may have had an error.
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
from itertools import count
from pathlib import Path
from signal import SIGKILL
from typing import Any

import httpx
import models
import openai
import repository  # noqa: F401
from killed_sessions import faults_of, wait_until
from programs import Program, free_port
from ray.util import get_node_ip_address

from actors.gateway.session_server import SessionServer
from actors.serving.keys import KEYS_VARIABLE
from environments import Dataset
from launch.workload import Workload

NUM_PROGRAMS, NUM_CALLS, NUM_UPDATES, GROUP_SIZE = 64, 3, 2, 8
CALLS_SECONDS = 0.1
"""Seconds from the moment at which all programs go on until the kill: their calls are under way."""
PORT = "TROUPE_BENCHMARK_PORT"
KEY = "a-key-of-the-programs"


def workload(seed: int) -> Workload:
    tasks = Dataset([{"number": number} for number in range(100)], name="killed", split="train")
    server = SessionServer(int(os.environ[PORT]), silent_seconds=60)
    return Workload(rollout=server.rollout, train_dataset=tasks, val_dataset=None)


@dataclass
class Programs:
    """Threads that are programs, until ``ended``."""

    url: str
    ended: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    """Those that have begun their second update wait for it in the middle of their conversation."""
    held: list[str] = field(default_factory=list)
    """Names of the conversations that have come to their end."""
    waiting: set[str] = field(default_factory=set)
    """Names of the conversations that wait for ``go_on``."""
    open: set[str] = field(default_factory=set)
    """Names of the conversations with a call under way."""
    answered: list[float] = field(default_factory=list)
    """When calls were answered."""
    errors: list[str] = field(default_factory=list)

    def live(self, number: int) -> None:
        """Hold one conversation after the other."""
        for conversation in count():
            if self.ended.is_set():
                break
            try:
                self._converse(f"{number}-{conversation}")
            except httpx.HTTPError:
                time.sleep(0.5)  # the training has not begun, or has ended
            except openai.APIError as error:
                self.errors.append(f"{type(error).__name__}: {error}")

    def _converse(self, name: str) -> None:
        """Take a task and play it, if there is one."""
        headers = {"authorization": f"Bearer {KEY}:{name}"}
        with (
            httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False) as http,
            openai.OpenAI(base_url=f"{self.url}/v1", api_key=f"{KEY}:{name}", max_retries=0) as client,
        ):
            if http.post("/sessions").status_code != 200:
                return
            messages: list[Any] = []
            for number in range(NUM_CALLS):
                if number == 1 and len(self.held) >= NUM_PROGRAMS and not self.go_on.is_set():
                    self.waiting.add(name)
                    self.go_on.wait()
                messages.append({"role": "user", "content": "What is 12+34?"})
                self.open.add(name)
                answer = client.chat.completions.create(model="m", messages=messages, max_tokens=200)
                self.open.discard(name)
                self.answered.append(time.monotonic())
                messages.append(answer.choices[0].message)
            result = {"reward": len(str(messages[-1].content)) % 7}
            http.post(f"/sessions/{name}/reward", json=result).raise_for_status()
        self.held.append(name)


def main() -> None:
    port = free_port()
    os.environ |= {PORT: str(port), KEYS_VARIABLE: f"programs:{KEY}", "NO_PROXY": "*"}
    programs = Programs(f"http://{get_node_ip_address()}:{port}")
    num_groups = NUM_PROGRAMS // GROUP_SIZE
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(NUM_PROGRAMS) as threads:
        folder = Path(temporary, "run")
        overrides = [
            "workload=killed_driver",
            f"model.path={models.tiny(Path(temporary))}",
            f"run.directory={folder}",
            f"run.num_steps={NUM_UPDATES}",
            "run.resume=true",
            "run.checkpoints.every=1",
            "algorithm.zero_signal_groups=keep",
            f"rollout.groups_per_step={num_groups}",
            f"rollout.group_size={GROUP_SIZE}",
            f"rollout.max_steps={NUM_CALLS + 1}",
            "rollout.max_staleness=0",
            "rollout.max_response_tokens=1024",  # the first prompt of a resumed run is a conversation
            "server.engine.max_model_tokens=1536",
            f"fleet.num_actors={NUM_PROGRAMS}",
            "fleet.pairs_per_actor=16",
        ]
        program = Program(overrides)
        try:
            for number in range(NUM_PROGRAMS):
                threads.submit(programs.live, number)
            wait_until(lambda: len(programs.waiting) == NUM_PROGRAMS, program)
            programs.go_on.set()
            time.sleep(CALLS_SECONDS)
            os.kill(program.process.pid, SIGKILL)
            moment, num_open = time.monotonic(), len(programs.open)
            program.process.wait()
            program, killed = Program(overrides), program
            program.wait(400)
            seconds, num_left = time.monotonic() - moment, killed.end()
        finally:
            programs.ended.set()
            programs.go_on.set()
            program.end()
        waited = min(at for at in programs.answered if at > moment + 2.0) - moment
        print(f"Killed with {num_open} calls open of {NUM_PROGRAMS} conversations in their middle.")
        print(f"The next answer came after {waited:.1f} s, the resumed run's end after {seconds:.0f} s.")
        print(f"Errors of programs: {Counter(programs.errors) or 'none'}; processes left: {num_left}.")
        faults = faults_of(folder, NUM_UPDATES, NUM_UPDATES * num_groups, GROUP_SIZE, range(1, NUM_CALLS + 1))
    print("\n".join(faults) or "No session is lost, and none is trained on twice.")
    sys.exit(bool(faults or programs.errors))


if __name__ == "__main__":
    main()
