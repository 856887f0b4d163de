"""Learns with torchao's AdamW of eight bits, saves, goes on, and writes what came of it to ``result.json``.

python tests/outside_torchao.py MODEL_FOLDER FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "VERL_PLATFORM": "cpu"}

from learner_samples import RESPONSE_TOKENS, batches, with_random_columns
from machine import free_port

os.environ["MASTER_PORT"] = str(free_port())

from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig
from policies.learning.verl.fields import check_fields

SMALL = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}
OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=2)


def rank(model: str, optimizer: dict[str, str]) -> Any:
    from whole_batches import WholeBatches

    from policies.learning.verl.learner import VerlLearner

    config = LearnerConfig(optimizer=OPTIMIZER, verl={"optimizer": optimizer})
    algorithm = resolve(AlgorithmConfig(), RESPONSE_TOKENS)
    check_fields(config, algorithm)
    made = WholeBatches(VerlLearner(model, config, algorithm, 100, 0))
    made.begin_phase(OPTIMIZER, 100)
    return made


def update(learner: Any) -> dict[str, float]:
    given = [TrainBatch(samples=with_random_columns(each.samples)) for each in batches(1)]
    metrics: dict[str, float] = learner.update(given).metrics
    return metrics


def moment_bytes(learner: Any) -> int:
    """Memory of all moments."""
    moments = [
        getattr(each, "to_local", lambda each=each: each)()
        for values in learner.engine.optimizer.state.values()
        for name, each in values.items()
        if name != "step"
    ]
    return sum(
        sum(getattr(each, part).nbytes for part in each.tensor_attrs)
        if hasattr(each, "tensor_attrs")
        else each.nbytes
        for each in moments
    )


def largest_difference(one: Any, other: Any) -> float:
    theirs = dict(other.weights())
    return max(float((tensor - theirs[name]).abs().max()) for name, tensor in one.weights())


def main() -> None:
    model, folder = sys.argv[1:]
    small, plain = rank(model, SMALL), rank(model, {})
    for _ in range(4):
        update(small)
        update(plain)
    result = {
        "bytes": [moment_bytes(small), moment_bytes(plain)],
        "differs_from_float32": largest_difference(small, plain),
    }
    small.begin_save(folder)()
    resumed = rank(model, SMALL)
    resumed.load(folder)
    result |= {"differs_when_loaded": largest_difference(small, resumed), "loaded": moment_bytes(resumed)}
    metrics = [update(small), update(resumed)]
    result |= {"differs_after_another": largest_difference(small, resumed)}
    result |= {"lr": [each["learn/lr"] for each in metrics]}
    Path(folder, "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
