"""Many clients at once: statuses, memory, and how long a request on the side takes meanwhile.

    python tests/benchmarks/crowd.py [--connections 500] [--while-training]

One replica with the tiny model, of ``launch.serve`` or of a training that goes on meanwhile. All clients
connect at the same time and ask for an answer of 256 tokens; another program asks for ``/health`` all the
while, ten times a second. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import httpx
import repository  # noqa: F401
from programs import Program, free_port
from report import Report

from launch.health.members import role_of
from launch.recipes.calculator import workload
from policies.tiny import build_model

MAX_TOKENS = 256
LOOK_SECONDS = 0.1
START_SECONDS = 300.0


def ask_all(url: str, number: int, answers: Any) -> None:
    """One request of each of ``number`` connections; their statuses and seconds go into ``answers``."""

    async def ask(http: httpx.AsyncClient) -> tuple[int, float]:
        start = time.monotonic()
        body = {"model": "policy", "prompt": "1", "max_tokens": MAX_TOKENS}
        reply = await http.post(f"{url}/v1/completions", json=body)
        return reply.status_code, time.monotonic() - start

    async def talk() -> list[tuple[int, float]]:
        limits = httpx.Limits(max_connections=number)
        async with httpx.AsyncClient(timeout=300, limits=limits) as http:
            return await asyncio.gather(*(ask(http) for _ in range(number)))

    answers.put(asyncio.run(talk()))


def ask_on_the_side(url: str, done: Event, seconds: Any) -> None:
    """How long ``/health`` takes, again and again until ``done``."""
    taken = []
    with httpx.Client(timeout=60) as http:
        while not done.is_set():
            start = time.monotonic()
            http.get(f"{url}/health").raise_for_status()
            taken.append(time.monotonic() - start)
            time.sleep(LOOK_SECONDS)
    seconds.put(taken)


def replica_bytes(program: Program) -> int:
    """Memory of the replica's process."""
    for process in program.family():
        if process.is_running() and role_of(" ".join(process.cmdline())) == "replica":
            return int(process.memory_info().rss)
    raise SystemExit("There is no replica.")


def measure(url: str, number: int) -> tuple[list[tuple[int, float]], list[float]]:
    """The answers of all connections, and the seconds of the requests on the side."""
    spawn = multiprocessing.get_context("spawn")
    answers, seconds, done = spawn.Queue(), spawn.Queue(), spawn.Event()
    side = spawn.Process(target=ask_on_the_side, args=(url, done, seconds))
    crowd = spawn.Process(target=ask_all, args=(url, number, answers))
    side.start()
    time.sleep(3)  # it is asking
    crowd.start()
    found = answers.get(timeout=300)
    done.set()
    taken = seconds.get(timeout=60)
    for process in (crowd, side):
        process.join()
    return found, taken


def row(
    name: str, found: Sequence[tuple[int, float]], taken: Sequence[float], memory: str
) -> tuple[str, ...]:
    """Cells of the table."""
    statuses = Counter(status for status, _ in found)
    listed = " ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))
    slowest = max(seconds for _, seconds in found)
    beside = sorted(taken)
    return (
        name,
        listed,
        f"{slowest:.1f}",
        f"{beside[len(beside) // 2]:.3f}",
        f"{beside[-1]:.2f}",
        memory,
    )


def server(folder: Path, port: str) -> Program:
    """``launch.serve`` with a random model."""
    model = build_model(folder, workload(0).demonstrations[:300])
    settings = [f"model.path={model}", port, "server.engine.max_model_tokens=512"]
    return Program(settings, command="launch.serve")


def training(folder: Path, port: str) -> Program:
    """The calculator recipe, after a short warm start; it has no end of its own."""
    settings = ["recipe=calculator", "warm_start.num_steps=50", "run.num_steps=1000", port]
    return Program([*settings, "evaluation.num_tasks=1", f"run.directory={folder}/run"])


def is_up(url: str) -> bool:
    """Whether the server answers."""
    with suppress(httpx.HTTPError):
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    return False


def wait_until(reached: Callable[[], bool], program: Program) -> None:
    """Return when ``reached``; end this program with what ``program`` has said if it ends or is too slow."""
    deadline = time.monotonic() + START_SECONDS
    while not reached():
        if not program.is_alive or time.monotonic() > deadline:
            raise SystemExit("\n".join([*program.lines, "The program did not go on."]))
        time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--connections", type=int, default=500, help="clients at once")
    parser.add_argument("--while-training", action="store_true", help="ask a training, not launch.serve")
    arguments = parser.parse_args()
    report = Report(
        "connections at once, one replica",
        ("connections", "statuses", "last answer, s", "/health p50, s", "most, s", "replica, MB", "updates"),
    )
    url = f"http://127.0.0.1:{free_port()}"
    with tempfile.TemporaryDirectory() as temporary:
        port = f"server.http_port={url.rsplit(':', 1)[1]}"
        program = (training if arguments.while_training else server)(Path(temporary), port)
        try:
            wait_until(lambda: is_up(url), program)
            if arguments.while_training:
                wait_until(lambda: program.num_steps() >= 2, program)
            for number in (1, arguments.connections, arguments.connections):
                before, updates = replica_bytes(program), program.num_steps()
                found, taken = measure(url, number)
                memory = f"{before / 1e6:.0f} to {replica_bytes(program) / 1e6:.0f}"
                report.add(*row(str(number), found, taken, memory), str(program.num_steps() - updates))
            if arguments.while_training:
                updates = program.num_steps()
                wait_until(lambda: program.num_steps() >= updates + 2, program)
        finally:
            program.end()
    report.print()


if __name__ == "__main__":
    main()
