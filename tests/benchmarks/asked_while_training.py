"""A client that asks five questions a second while a training publishes: errors, versions, times, throughput.

    python tests/benchmarks/asked_while_training.py [--rate 5] [--updates 14]

The calculator recipe trains twice, once with the client and once without, and then the trained policy is
served to the client alone. Every answer is greedy and comes with its token ids and the version that
sampled each of them. Afterwards transformers, with the weights of the checkpoint of that version, has to
say the same tokens: of an answer in whose middle new weights came, those before. Takes about eight
minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import repository
from programs import Program, free_port
from report import Report

from launch.reporting.tracker import read_metrics
from launch.run_folder.checkpoint import CheckpointFolder

sys.path.insert(0, str(repository.ROOT / "tests"))
from transformers_reference import greedy, load

MAX_TOKENS = 24
START_SECONDS = 300.0
ALONE_SECONDS = 60.0
"""How long the client asks the server that has nothing else to do."""
RUN = [
    "recipe=calculator",
    "warm_start.num_steps=100",
    "run.checkpoints.every=1",
    "run.checkpoints.kept=999",
    "evaluation.num_tasks=1",
]


@dataclass(frozen=True)
class Answer:
    """What a client has got."""

    status: int
    seconds: float
    body: dict[str, Any]


class Client:
    """Asks ``rate`` questions a second, however long the answers take."""

    def __init__(self, url: str, rate: float) -> None:
        self._url, self._rate = url, rate
        self.answers: list[Answer] = []

    @property
    def good(self) -> list[Answer]:
        """Answers with status 200."""
        return [each for each in self.answers if each.status == 200]

    @property
    def bad(self) -> list[Answer]:
        """Errors, and what did not come."""
        return [each for each in self.answers if each.status != 200]

    def percentile(self, share: float) -> float:
        """Seconds that an answer took."""
        seconds = sorted(each.seconds for each in self.good)
        return seconds[min(len(seconds) - 1, int(share * len(seconds)))]

    def row(self) -> tuple[str, ...]:
        """Its cells of the table."""
        versions = {each for answer in self.good for each in answer.body["choices"][0]["token_versions"]}
        times = [f"{self.percentile(share):.2f}" for share in (0.5, 0.99)]
        return (str(len(self.answers)), str(len(self.bad)), str(len(versions)), *times)

    def ask_while(self, program: Program, num_updates: int | None) -> None:
        """Ask until the program has made so many updates; without a number, for ``ALONE_SECONDS``."""
        end = time.monotonic() + ALONE_SECONDS

        def goes_on() -> bool:
            if num_updates is None:
                return time.monotonic() < end
            return program.is_alive and program.num_steps() < num_updates

        asyncio.run(self._ask(goes_on))

    async def _ask(self, goes_on: Any) -> None:
        async with httpx.AsyncClient(timeout=120) as http:
            open_requests, start = set(), time.monotonic()
            for number in itertools.count():
                if not goes_on():
                    break
                open_requests.add(asyncio.create_task(self._one(http, number)))
                await asyncio.sleep(max(0.0, start + (number + 1) / self._rate - time.monotonic()))
            await asyncio.gather(*open_requests)

    async def _one(self, http: httpx.AsyncClient, number: int) -> None:
        question = f"What is {10 + number % 89}{'+*'[number % 2]}{99 - number % 83}?"
        request = {
            "model": "policy",
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "return_token_ids": True,
        }
        start = time.monotonic()
        try:
            reply = await http.post(f"{self._url}/v1/chat/completions", json=request)
            answer = Answer(reply.status_code, time.monotonic() - start, reply.json())
        except (httpx.HTTPError, ValueError) as error:
            answer = Answer(0, time.monotonic() - start, {"error": repr(error)})
        self.answers.append(answer)


def wait_until_healthy(program: Program, url: str) -> None:
    """Return when the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while program.is_alive and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("\n".join([*program.lines, "The server did not start."]))


def num_wrong(answers: Sequence[Answer], directory: Path) -> tuple[int, int]:
    """How many answers transformers would not have given, and how many of all were given by two versions."""
    from transformers.utils.logging import disable_progress_bar

    models = {0: directory / "model"}
    for checkpoint in sorted((directory / "checkpoints").glob("step_*")):
        models[CheckpointFolder.progress(checkpoint).version] = checkpoint / "huggingface"
    disable_progress_bar()
    loaded: dict[int, Any] = {}
    wrong = mixed = 0
    for answer in answers:
        (choice,) = answer.body["choices"]
        versions = choice["token_versions"]
        first = versions[0]
        mixed += len(set(versions)) > 1
        if first not in loaded:
            loaded[first] = load(models[first])
        said = tuple(choice["token_ids"][: versions.count(first)])
        expected = greedy(loaded[first], answer.body["prompt_token_ids"], len(said))
        wrong += said != tuple(expected)
    return wrong, mixed


def train(folder: Path, url: str, num_updates: int, client: Client | None) -> float:
    """Train once, asked by ``client`` if there is one; return the mean seconds of an update."""
    port = url.rsplit(":", 1)[1]
    overrides = [*RUN, f"run.num_steps={num_updates}", f"run.directory={folder}"]
    program = Program([*overrides, f"server.http_port={port}"])
    try:
        if client is not None:
            wait_until_healthy(program, url)
            client.ask_while(program, num_updates - 1)
        if program.wait(1800) != 0:
            raise SystemExit("\n".join([*program.lines, "The run failed."]))
    finally:
        program.end()
    seconds = [each["time/step"] for each in read_metrics(folder) if "time/step" in each]
    return statistics.fmean(seconds[:-1])  # the client is gone in the last one


def ask_alone(model: Path, url: str, client: Client) -> None:
    """Serve what was trained to ``client``."""
    program = Program(
        [f"model.path={model}", f"server.http_port={url.rsplit(':', 1)[1]}"], command="launch.serve"
    )
    try:
        wait_until_healthy(program, url)
        client.ask_while(program, None)
    finally:
        program.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rate", type=float, default=5.0, help="questions a second")
    parser.add_argument("--updates", type=int, default=14, help="of the training")
    arguments = parser.parse_args()
    report = Report(
        f"{arguments.rate:g} questions a second, {arguments.updates} updates",
        ("client", "seconds an update", "answers", "errors", "versions", "p50", "p99"),
    )
    url = f"http://127.0.0.1:{free_port()}"
    busy, alone = Client(url, arguments.rate), Client(url, arguments.rate)
    with tempfile.TemporaryDirectory() as temporary:
        trained = Path(temporary) / "asked"
        asked = train(trained, url, arguments.updates, busy)
        undisturbed = train(Path(temporary) / "not-asked", url, arguments.updates, None)
        ask_alone(trained, url, alone)
        wrong, mixed = num_wrong(busy.good, trained)
    report.add("while it trains", f"{asked:.2f}", *busy.row())
    report.add("none", f"{undisturbed:.2f}", "", "", "", "", "")
    report.add("alone with the server", "", *alone.row())
    report.print()
    for each in (*busy.bad, *alone.bad):
        print(f"{each.status}: {each.body}")
    print(f"answers that differ from transformers: {wrong} of {len(busy.good)}; by two versions: {mixed}")
    print(f"seconds of an update, with over without the client: {asked / undisturbed:.2f}")
    ratios = [f"{busy.percentile(share) / alone.percentile(share):.2f}" for share in (0.5, 0.99)]
    print(f"p50 and p99 while it trains, over alone: {ratios[0]}, {ratios[1]}")


if __name__ == "__main__":
    main()
