"""Self-play in Kuhn poker: exploitability over updates, of the policy and of its average.

    python tests/benchmarks/self_play.py              # a policy in a table, three seeds, without engines
    python tests/benchmarks/self_play.py RUN RUN ...  # trainings on launch.recipes.kuhn, by their rollouts

A player who knows the policy wins ``exploitability`` chips a game above the game's value against it, as the
mean of both seats. The average of a policy over updates weighs each update's move by how often the policy
itself comes to that state. Of a training, the policy of an update is the probabilities with which its
rollouts have sampled their moves; a state that none of them reached keeps those of the update before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import repository

from launch.run_folder.trajectory_log import TRAIN, kept_steps, read_kept
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig

sys.path.insert(0, str(repository.ROOT / "tests"))
from kuhn_policies import (
    STATES,
    VALUE,
    State,
    Strategy,
    Table,
    average,
    decisions,
    exploitability,
    learn,
    play,
    value,
)


def trained(seed: int, args: argparse.Namespace) -> list[dict[State, float]]:
    """The strategies before each update and after the last one."""
    policy, algorithm = Table(seed), resolve(AlgorithmConfig(name="rloo"), 64)
    strategies = [policy.strategy]
    for update in range(args.updates):
        learn(policy, play([policy], update, args.group_size), algorithm, args.lr, args.entropy_coef)
        strategies.append(policy.strategy)
    return strategies


def played_by(run: Path) -> list[dict[State, float]]:
    """The strategies of a training's updates, by the probabilities of the moves in its rollouts.

    One move's tells the other's where nearly all answers are moves: ``rollout/legal_moves`` is their share.
    """
    strategies, strategy = [], dict.fromkeys(STATES, 0.5)
    for update in kept_steps(run, TRAIN):
        for kept in read_kept(run, TRAIN, update):
            # An answer that is no move ends a game, and is not among its decisions.
            for (state, is_bet), step in zip(decisions(kept.trajectory), kept.trajectory.steps, strict=False):
                assert step.completion is not None
                likely = float(np.exp(sum(step.completion.logprobs)))
                strategy[state] = likely if is_bet else 1 - likely
        strategies.append(dict(strategy))
    return strategies


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4.0)
    parser.add_argument("--entropy-coef", type=float, default=0.0)
    args = parser.parse_args()
    for run in args.runs:
        report(str(run), played_by(run))
    for seed in args.seeds if not args.runs else ():
        report(f"seed {seed}", trained(seed, args))


def report(name: str, strategies: Sequence[Strategy]) -> None:
    start = exploitability(strategies[0])
    print(f"{name}: {start:.3f} before the first update")
    for stop in sorted({round(len(strategies) * part / 8) for part in range(1, 9)}):
        mean = average(strategies[:stop])
        now, averaged = exploitability(strategies[stop - 1]), exploitability(mean)
        print(
            f"  {stop - 1:4d} updates: {now:.3f}, averaged {averaged:.3f}, {averaged / start:.2f} of that; "
            f"the first player wins {value(mean, mean):+.3f}, {VALUE:+.3f} is best"
        )


if __name__ == "__main__":
    main()
