"""Number of CPU threads of learner and engines, where the settings leave it open."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from launch.settings.tree import TrainConfig
from policies.engines.base import engine_class

SMALL_MODEL_BYTES = 40_000_000
"""A model with smaller files, of some ten million parameters at most, is faster with one thread."""


def with_threads(config: TrainConfig, model_path: str) -> TrainConfig:
    """The configuration with ``learner.num_threads`` and the engines' own decided.

    The cores of this machine are divided by the ranks, and by the replicas. Ranks and replicas take turns,
    unless rollouts go on while the learner learns: then each side has half of the cores.
    """
    learner, engine = config.learner, config.server.engine
    num_cores = len(os.sched_getaffinity(0))
    if is_small(model_path):
        num_cores = 1
    elif config.rollout.max_staleness or config.evaluation.num_replicas:
        num_cores //= 2
    if learner.num_threads is None:
        learner = replace(learner, num_threads=max(1, num_cores // max(1, learner.num_workers)))
    num_engines = max(1, config.server.most_replicas + len(config.server.versions))
    if engine.num_threads is None and "num_threads" in engine_class(engine).settings:
        engine = replace(engine, options=engine.options | {"num_threads": max(1, num_cores // num_engines)})
    return replace(config, learner=learner, server=replace(config.server, engine=engine))


def is_small(model_path: str) -> bool:
    """Return whether one thread computes a model best. One on the hub, of unknown size, is large."""
    weights = list(Path(model_path).glob("*.safetensors"))
    return bool(weights) and sum(file.stat().st_size for file in weights) < SMALL_MODEL_BYTES
