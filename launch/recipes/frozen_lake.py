"""Walk over a frozen lake to the goal, on maps never seen before. Needs Gymnasium, of the extra 'worlds'."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from itertools import count

from environments import Dataset
from environments.adapters.gymnasium import FrozenLakeEnvironment, frozen_lake_map
from launch.recipes.demonstration import Demonstration, Demonstrations, demonstrate
from launch.workload import Workload
from policies import GameAgent

SIZE, ICE, MAX_STEPS = 4, 0.8, 10
NUM_TRAIN, NUM_TEST, NUM_DEMONSTRATIONS = 1000, 200, 2000
EXPERT_SHARE = 0.3
"""Share of the demonstrations that take the shortest way; the others walk at random."""

ENV_ARGS = {"max_steps": MAX_STEPS}
Script = tuple[int, list[str] | None]
"""The seed of a map, and the moves of a walk at random over it."""
MOVES = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}


def workload(seed: int) -> Workload:
    """The held-out maps are the same for every seed; demonstrations walk over maps of the training."""
    rng = random.Random(seed)
    held_out, rest = split_maps()
    return Workload(
        agent_class=GameAgent,
        env_class=FrozenLakeEnvironment,
        train_dataset=_tasks("train", rest),
        val_dataset=_tasks("test", held_out),
        env_args=ENV_ARGS,
        demonstrations=Demonstrations(
            _play, [_script(rng.choice(rest), rng) for _ in range(NUM_DEMONSTRATIONS)]
        ),
    )


def split_maps() -> tuple[list[int], list[int]]:
    """The seeds of the held-out maps, and of those of the training: no two of them draw the same map."""
    seeds: dict[tuple[str, ...], int] = {}
    for seed in count():  # two of three seeds draw a map that is there already
        seeds.setdefault(tuple(frozen_lake_map(SIZE, ICE, seed)), seed)
        if len(seeds) == NUM_TRAIN + NUM_TEST:
            break
    distinct = list(seeds.values())
    random.Random(0).shuffle(distinct)  # maps of much ice are drawn early
    return distinct[:NUM_TEST], distinct[NUM_TEST:]


def shortest_way(lake: Sequence[str]) -> list[str]:
    """The moves from the start, at the top left, to the goal of a map in Gymnasium's letters."""
    waiting = deque([((0, 0), list[str]())])
    seen = {(0, 0)}
    while waiting:
        (row, column), moves = waiting.popleft()
        if lake[row][column] == "G":
            return moves
        for name, (down, right) in MOVES.items():
            cell = row + down, column + right
            inside = 0 <= cell[0] < len(lake) and 0 <= cell[1] < len(lake)
            if inside and cell not in seen and lake[cell[0]][cell[1]] != "H":
                seen.add(cell)
                waiting.append((cell, [*moves, name]))
    raise ValueError(f"There is no way to the goal of {list(lake)}.")


def _tasks(split: str, seeds: Sequence[int]) -> Dataset:
    rows = [{"size": SIZE, "p": ICE, "seed": seed} for seed in seeds]
    return Dataset(rows, name="frozen_lake", split=split)


def _script(map_seed: int, rng: random.Random) -> Script:
    expert = rng.random() < EXPERT_SHARE
    return map_seed, None if expert else rng.choices(list(MOVES), k=MAX_STEPS)


def _play(script: Script) -> Demonstration:
    map_seed, walk = script
    env = FrozenLakeEnvironment.from_dict({"size": SIZE, "p": ICE, "seed": map_seed, **ENV_ARGS})
    return demonstrate(GameAgent(), env, walk or shortest_way(env.map))
