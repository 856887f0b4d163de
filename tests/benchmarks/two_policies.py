"""Kuhn poker between two policies that learn: one plays the first seat, the other one the second.

    python tests/benchmarks/two_policies.py [--seeds 0 1 2]     # policies in tables, without engines
    python tests/benchmarks/two_policies.py --real [--updates 4]   # two tiny models, on Ray, vLLM and verl

In an equilibrium the first player loses 1/18 of a chip in a game, and nobody gains by another strategy: the
exploitability, which ``self_play.py`` explains, is 0. Here it is that of both policies together.

With ``--real`` each policy has a learner, a weight store and a policy server of its own. The run is made a
second time, ended in its middle and resumed: its weights have to be those of the first, number by number.
The farthest token is the one whose log-probability differs most between the learner and the engine that has
sampled it: from the second update on the weights of the policies differ, and a turn of the other one would.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import repository
from programs import run
from self_play import report

from environments.types import Trajectory
from launch.recipes import kuhn
from launch.reporting.tracker import read_metrics
from launch.run_folder.trajectory_log import TRAIN, kept_steps, read_kept
from launch.workload import Workload
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig

sys.path.insert(0, str(repository.ROOT / "tests"))
from kuhn_policies import FIRST, State, Table, learn, play

FARTHEST = "rollout_logprob_diff_max"
RUN = ["recipe=kuhn", "workload=two_policies", "fleet.num_actors=2"]


def workload(seed: int) -> Workload:
    """The recipe's game, of which each seat has a policy that bears its name."""
    return replace(kuhn.workload(seed), agent_args={"policies": {seat: seat for seat in kuhn.SEATS}})


def trained(seed: int, args: argparse.Namespace) -> list[dict[State, float]]:
    """The strategies before each update and after the last one: those of both policies, each in its seat."""
    first, second = (Table(2 * seed + number, name) for number, name in enumerate(kuhn.SEATS))
    algorithm, strategies = resolve(AlgorithmConfig(name="rloo"), 64), []
    for update in range(args.updates + 1):
        strategies.append({**second.strategy, **{state: first.strategy[state] for state in FIRST}})
        if update < args.updates:
            groups = play([first, second], update, args.group_size)
            for policy in (first, second):
                learn(policy, groups, algorithm, args.lr, 0.0)
    return strategies


def train(folder: Path, num_updates: int, *overrides: str) -> None:
    run([*RUN, f"run.directory={folder}", f"run.num_steps={num_updates}", *overrides])


def played(folder: Path) -> Iterator[Trajectory]:
    for step in kept_steps(folder, TRAIN):
        yield from (kept.trajectory for kept in read_kept(folder, TRAIN, step))


def weights(folder: Path, policy: str) -> str:
    """Digest of a policy's newest weights."""
    file = folder / "checkpoints" / "latest" / policy / "huggingface" / "model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


def show(folder: Path, num_updates: int) -> None:
    """Print what the two learners of a run have had, and what has become of their weights."""
    turns = Counter(
        (step.seat, step.completion.policy)
        for each in played(folder)
        for step in each.steps
        if step.completion is not None
    )
    print("turns by seat and policy: ", ", ".join(f"{seat}/{by} {turns[seat, by]}" for seat, by in turns))
    for record in read_metrics(folder):
        if "learn/num_optimizer_steps" in record:
            for name in kuhn.SEATS:
                norm, distance = (record[f"learn/{name}/{each}"] for each in ("grad_norm", FARTHEST))
                print(f"update {record['step']} of {name}: gradient {norm:.3f}, farthest {distance:.1e}")
    for policy in kuhn.SEATS:
        print(f"weights of {policy}: {weights(folder, policy)} after {num_updates} updates")


def real(num_updates: int) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        whole, resumed = Path(temporary, "whole"), Path(temporary, "resumed")
        train(whole, num_updates)
        show(whole, num_updates)
        train(resumed, num_updates // 2)
        for policy in kuhn.SEATS:
            print(f"weights of {policy}: {weights(resumed, policy)} after {num_updates // 2} updates")
        train(resumed, num_updates, "run.resume=true")
        is_same = all(weights(whole, each) == weights(resumed, each) for each in kuhn.SEATS)
        print(f"resumed after {num_updates // 2} updates: {'equal' if is_same else 'OTHER'} weights")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--real", action="store_true", help="train two tiny models")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4.0)
    args = parser.parse_args()
    args.updates = args.updates or (4 if args.real else 240)
    if args.real:
        real(args.updates)
    for seed in args.seeds if not args.real else ():
        report(f"seed {seed}", trained(seed, args))


if __name__ == "__main__":
    main()
