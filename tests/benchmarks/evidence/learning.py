"""What a sceptic asks to be shown: that retrieval over several turns is learned, and that reinforcement gets
beyond its demonstrations. Runs, pictures and tables.

    python tests/benchmarks/evidence/learning.py [--recipes renamed_search] [--seeds 0,1,2] [--publish]

``renamed_search``: the two-search questions of the shipped corpus, in worlds where numbers of their own
stand for its names. ``possible_guesses``: demonstrations that find the number in 0.802 of the games, and none
of which knows the best way.

Beside reinforcement stands the imitation of the same demonstrations for twice as many steps. Runs are kept,
gone on with, drawn and published as by ``learning_curves.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from learning_curves import Recipe, main

METHODS = ("reinforce", "imitation")
SEARCH = (
    "workload=evidence.renamed_search",
    "algorithm.clip_high=0.28",
    "rollout.max_steps=3",
    "rollout.max_prompt_tokens=128",
    "rollout.max_response_tokens=384",
    "rollout.max_turn_tokens=64",
    "learner.mini_batch_size=16",
    "learner.optimizer={lr: 5.0e-4, warmup_steps: 3, min_lr_ratio: 0.2}",
    "server.engine.max_model_tokens=512",
)
ACTORS = ("fleet.num_actors=32", "fleet.pairs_per_actor=8")
RECIPES = {
    "renamed_search": Recipe(
        num_updates=20,
        num_evaluations=3,
        stages=("warm_start",),
        methods=METHODS,
        warm_start_steps=900,
        settings=(*SEARCH, *ACTORS, "warm_start={num_steps: 900, batch_size: 16}"),
    ),
    "possible_guesses": Recipe(
        num_updates=60,
        num_evaluations=3,
        stages=("warm_start",),
        methods=METHODS,
        warm_start_steps=250,
        settings=("recipe=guess", "workload=evidence.possible_guesses", *ACTORS),
    ),
}

if __name__ == "__main__":
    main(RECIPES, __doc__, default=",".join(RECIPES), page="tests/benchmarks/README.md")
