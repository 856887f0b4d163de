"""Which process saturates first, by pairs, replicas and nodes: the real classes in a simulated cluster.

    python tests/benchmarks/scaling.py [--pairs 64,10000] [--replicas 4,128] [--nodes 2,200]
        [--rows .github/scaling.json] [--plot .github/scaling.png]

The fleet, its slots, sampling actors, queues, directory, the workers of the replicas, stream, choice of
groups and credit are the real ones. Prompts are rendered and encoded; there are 20 requests a second and
replica, and a publish after each update. The CPU time of each process is measured over three updates: its
own code, and pickle for what travels. Ray's own work at each call is not in it (``fleet_calls.py`` has both
for the fleet, ``throughput.py`` for all), nor are collections of Python's garbage. The fleet has no parts
here.

Sizes are left out at which a pair would have less than 0.2 seconds for a turn. ``--rows`` keeps the others as
they are measured: tables and plot are of all that it has, and none is measured again.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from report import Report
from repository import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from simulated_system import (
    DELIVERED,
    DIRECTORY,
    DRIVER,
    FLEET,
    SAMPLER,
    STREAM,
    TRAINED,
    CountingLoop,
    Size,
    System,
    Usage,
    simulated_system,
)
from transformers import PreTrainedTokenizerBase

from policies.chat import ChatRenderer, load_tokenizer
from policies.tiny import build_tokenizer

REQUESTS = 20.0
"""Of a replica, in a second."""
LEAST_TURN_SECONDS = 0.2
GROUP_SIZE = 8
OF_A_REQUEST = {"sample", "poll", "record_turn"}
"""Methods whose cost is one of requests; that of all others is one of rollouts."""
CENTRAL = (FLEET, SAMPLER, DIRECTORY, STREAM, DRIVER)
QUESTION = "A question of some words, as an environment asks it. " * 3
REPLY = "A reply of some words, as a model gives them. " * 8


@dataclass
class Measured:
    """The costs of one size, in CPU seconds."""

    pairs: int
    replicas: int
    nodes: int
    start: float
    """Of the fleet, for the start of all pairs."""
    usage: Usage

    turns: int

    def share(self, role: str) -> float:
        """Share of a core that a process of the role takes on average, at the rate of requests."""
        usage, rate = self.usage, REQUESTS * self.replicas
        if role == DIRECTORY:
            seconds = sum(used for (of, _), used in usage.cpu.items() if of == role) / usage.seconds
        else:
            of_requests = sum(usage.cpu[role, method] for method in OF_A_REQUEST)
            request = of_requests / usage.calls[SAMPLER, "sample"] + self.of_a_rollout(role) / self.turns
            seconds = request * rate
        return seconds / usage.num_processes[role]

    def of_a_rollout(self, role: str) -> float:
        """CPU seconds for a rollout, of what is not for its requests."""
        seconds = (
            used for (of, method), used in self.usage.cpu.items() if of == role and method not in OF_A_REQUEST
        )
        # The first updates train on rollouts that have piled up: more than end meanwhile.
        return sum(seconds) / self.usage.calls[(DRIVER, TRAINED) if role == DRIVER else (STREAM, DELIVERED)]

    def row(self) -> Row:
        """The row of both tables."""
        usage = self.usage
        num_requests = usage.calls[SAMPLER, "sample"]
        costs = (
            f"{1e6 * self.start / self.pairs:.0f}",
            f"{1e6 * self.of_a_rollout(FLEET):.0f}",
            self.micro(FLEET, "record_turn"),
            self.micro(SAMPLER, "sample"),
            self.micro(SAMPLER, "poll"),
            f"{usage.calls[SAMPLER, 'poll'] / num_requests:.2f}",
            self.micro(DIRECTORY, "samplers_of"),
            *(f"{1e6 * self.of_a_rollout(role):.0f}" for role in (STREAM, DRIVER)),
        )
        shares = {role: self.share(role) for role in CENTRAL}
        return Row(self.pairs, self.replicas, self.nodes, self.turns, os.getloadavg()[0], costs, shares)

    def micro(self, role: str, method: str) -> str:
        """Microseconds of a call of ``method``."""
        count = self.usage.calls[role, method]
        return f"{1e6 * self.usage.cpu[role, method] / count:.0f}" if count else "-"


@dataclass(frozen=True)
class Row:
    """A size in the tables."""

    pairs: int
    replicas: int
    nodes: int
    turns: int
    load: float
    """Average of the machine when it was measured."""
    costs: Sequence[str]
    shares: Mapping[str, float]

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Arguments of ``simulate``."""
        return self.pairs, self.replicas, self.nodes, self.turns

    def saturation(self) -> str:
        """The process that saturates first, and at how many replicas, if all grows with their number."""
        role = max(self.shares, key=self.shares.__getitem__)
        return f"{role}, {self.replicas / self.shares[role]:.0f}"


async def measured(
    loop: CountingLoop, size: Size, renderer: ChatRenderer, reply: tuple[int, ...]
) -> tuple[float, Usage]:
    """CPU seconds of the fleet for its start, and the usage of three updates that come after the first."""
    with simulated_system(
        loop, lambda: System(size, renderer=renderer, reply=reply, question=QUESTION)
    ) as system:
        await system.fleet.resize.remote(size.num_pairs)
        while (await system.fleet.status.remote()).num_ready < size.num_pairs:
            await asyncio.sleep(1)
        start = sum(system.fleet.cpu.values())
        training = system.driver.run(system.driver.target.train)
        before = await usage_after(1, system, training)
        gc.disable()  # a collection walks over the objects of all processes, and is counted in one
        usage = (await usage_after(4, system, training)).since(before)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        gc.enable()
        return start, usage


async def usage_after(number: int, system: System, training: asyncio.Task[None]) -> Usage:
    """Usage until so many updates are made."""
    while len(system.driver.target.updates) < number:
        await asyncio.sleep(0.05)
        if training.done():
            training.result()
    return system.usage()


def simulate(
    pairs: int, replicas: int, nodes: int, turns: int, tokenizer: PreTrainedTokenizerBase
) -> Measured:
    """Measure one size."""
    renderer = ChatRenderer(tokenizer)
    reply = (*tokenizer.encode(REPLY, add_special_tokens=False), tokenizer.eos_token_id)
    size = Size(
        pairs,
        replicas,
        nodes,
        num_turns=turns,
        turn_seconds=pairs / replicas / REQUESTS,
        groups_per_step=max(8, pairs // 24),
        group_size=GROUP_SIZE,
        max_staleness=3,
        num_updates=10,  # it ends before: the last updates have fewer rollouts in play
    )
    loop = CountingLoop()
    asyncio.set_event_loop(loop)
    try:
        start, usage = loop.run_until_complete(measured(loop, size, renderer, reply))
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return Measured(pairs, replicas, nodes, start, usage, turns)


def draw(rows: Sequence[Row], path: Path) -> None:
    """A panel for each number of nodes: the share of a core by replicas, of each process."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = sorted({each.nodes for each in rows})
    figure, axes = plt.subplots(1, len(panels), sharey=True, squeeze=False, figsize=(3.8 * len(panels), 3.6))
    for nodes, panel in zip(panels, axes[0], strict=True):
        most = {each.replicas: each for each in sorted(rows, key=lambda e: e.pairs) if each.nodes == nodes}
        for role in CENTRAL:
            shares = [max(1e-4, most[number].shares[role]) for number in sorted(most)]
            panel.loglog(sorted(most), shares, marker="o", label=role)
        panel.axhline(1.0, ls="--", color="#777777")
        panel.axhline(0.5, ls=":", color="#777777")
        panel.set_xticks(sorted(most), [str(each) for each in sorted(most)])
        panel.set_xticks([], minor=True)
        panel.set_xlabel(f"replicas, on {nodes} nodes")
    axes[0][0].set_ylabel("share of a core")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--pairs", default="64,512,2048,10000")
    parser.add_argument("--replicas", default="4,32,128")
    parser.add_argument("--nodes", default="2,32,200")
    parser.add_argument("--turns", type=int, default=4, help="of a rollout")
    parser.add_argument("--rows", type=Path, help="file of the sizes that were measured before, and of these")
    parser.add_argument("--plot", type=Path, help="draw the shares into this file")
    arguments = parser.parse_args()
    numbers = [
        [int(each) for each in text.split(",")]
        for text in (arguments.pairs, arguments.replicas, arguments.nodes)
    ]
    costs = Report(
        f"CPU microseconds by what is done; rollouts of {arguments.turns} turns",
        (
            "pairs x replicas x nodes",
            *("fleet: start of a pair", "rollout", "turn", "sampling: request", "poll", "polls a request"),
            *("directory: report", "stream: rollout", "driver: rollout"),
        ),
    )
    shares = Report(
        f"Share of a core of each, at {REQUESTS:g} requests a second and replica",
        ("pairs x replicas x nodes", *CENTRAL, "first to saturate, at replicas", "load average"),
    )
    rows = []
    if arguments.rows and arguments.rows.exists():
        rows = [Row(**each) for each in json.loads(arguments.rows.read_text(encoding="utf-8"))]
    with tempfile.TemporaryDirectory() as folder:
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": REPLY}]
        build_tokenizer([messages]).save_pretrained(folder)
        tokenizer = load_tokenizer(folder)
        for size in itertools.product(*numbers, [arguments.turns]):
            pairs, replicas, *_ = size
            if pairs / replicas / REQUESTS < LEAST_TURN_SECONDS or size in {each.size for each in rows}:
                continue
            rows.append(simulate(*size, tokenizer).row())
            print(*size, sep=" x ", flush=True)
            if arguments.rows:
                text = json.dumps([asdict(each) for each in rows], indent=1)
                arguments.rows.write_text(text, encoding="utf-8")
    rows = [each for each in rows if each.turns == arguments.turns]
    for row in sorted(rows, key=lambda each: each.size):
        name = f"{row.pairs} x {row.replicas} x {row.nodes}"
        costs.add(name, *row.costs)
        shares.add(name, *(f"{row.shares[of]:.3f}" for of in CENTRAL), row.saturation(), f"{row.load:.1f}")
    costs.print()
    shares.print()
    if arguments.plot:
        draw(rows, arguments.plot)


if __name__ == "__main__":
    main()
