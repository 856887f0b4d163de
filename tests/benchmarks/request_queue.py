"""The CPU milliseconds of a poll of the request queue, by replicas and requests that wait.

    python tests/benchmarks/request_queue.py

All replicas are busy and poll one after the other, each handing back and getting a few requests. The time of
the lists themselves, of what is handed out, is in it. Takes half a minute, in this process alone.
"""

from __future__ import annotations

import asyncio
import time
from statistics import median

import repository  # noqa: F401
from report import Report

from actors.sampling.request_queue import Assignment, ReplicaReport, RequestQueue
from policies.sampler import EngineStats, SamplingParams, TokenOutput, TokenRequest

SIZES = ((16, 1024), (64, 4096), (128, 16384))
"""Replicas, and requests that wait beside those that they have."""
NUM_HELD, NUM_ANSWERED, ROUNDS = 64, 2, 3
KINDS = ("single turns", "conversations", "the next version")


class Crowd:
    """Replicas that hold requests, and callers that wait."""

    def __init__(self, num_replicas: int, num_waiting: int, kind: str) -> None:
        self.queue = RequestQueue("policy", lease_seconds=600)
        self.num_replicas, self.num_waiting, self.kind = num_replicas, num_waiting, kind
        self.held: list[list[str]] = [[] for _ in range(num_replicas)]

    async def poll(self, number: int) -> Assignment:
        output = TokenOutput(token_ids=(1,), logprobs=(), finish_reason="stop", policy_version=0)
        tickets, self.held[number] = self.held[number][:NUM_ANSWERED], self.held[number][NUM_ANSWERED:]
        answers = [(ticket, output) for ticket in tickets]
        return await self.queue.poll(ReplicaReport(str(number), 0, answers, EngineStats()))

    def ask(self, count: int, min_version: int = 0) -> list[asyncio.Task[TokenOutput]]:
        name = "conversation {}" if self.kind == "conversations" else ""
        return [
            asyncio.create_task(
                self.queue.sample(TokenRequest((1,), SamplingParams(), min_version, name.format(index)))
            )
            for index in range(count)
        ]

    async def milliseconds(self) -> tuple[float, float]:
        """Median and maximum of a poll's CPU time."""
        polls = [asyncio.create_task(self.poll(number)) for number in range(self.num_replicas)]
        await asyncio.sleep(0)
        callers = self.ask(self.num_replicas * NUM_HELD)
        for number, orders in enumerate(await asyncio.gather(*polls)):
            self.held[number] = [ticket for ticket, _ in orders.requests]
        callers += self.ask(self.num_waiting, min_version=int(self.kind == "the next version"))
        while self.queue.status().num_waiting < self.num_waiting:
            await asyncio.sleep(0.1)
        seconds = []
        for _ in range(ROUNDS):
            for number in range(self.num_replicas):
                poll = asyncio.create_task(self.poll(number))
                start = time.process_time()
                await asyncio.sleep(0)  # the poll runs, and nothing else
                seconds.append(time.process_time() - start)
                poll.cancel()
                if poll.done():
                    self.held[number] += [ticket for ticket, _ in poll.result().requests]
        for each in callers:
            each.cancel()
        await asyncio.gather(*callers, return_exceptions=True)
        return 1000 * median(seconds), 1000 * max(seconds)


def main() -> None:
    columns = ("replicas", "waiting", *KINDS)
    report = Report("CPU milliseconds of a poll: median, and the most", columns)
    for num_replicas, num_waiting in SIZES:
        cells = []
        for kind in KINDS:
            typical, most = asyncio.run(Crowd(num_replicas, num_waiting, kind).milliseconds())
            cells.append(f"{typical:.2f}, {most:.2f}")
        report.add(str(num_replicas), str(num_waiting), *cells)
    report.print()


if __name__ == "__main__":
    main()
