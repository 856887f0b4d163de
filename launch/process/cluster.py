"""Ray: join the cluster that is there, or start one that ends with us."""

from __future__ import annotations

import logging
import os
from contextlib import suppress

import psutil
import ray

from actors.ray_tools.background import end_background_work
from actors.ray_tools.connect import connect as join_or_start
from environments.errors import ConfigError
from launch.config import TrainConfig, algorithm_of

LOCAL_CPUS = 64
"""Ray's CPUs only count: on one machine they must not keep small actors from starting."""

ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "PYTHONWARNINGS": "ignore",
}


def connect() -> bool:
    """Connect this process to Ray and return whether we started the cluster, and so may stop it.

    If this process is killed, the cluster that it started ends within seconds, but for two of Ray's own
    agents: for a minute they try to report that to the head that has died too, and then end.

    Raises:
        ConfigError: the cluster does not answer.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    return join_or_start(LOCAL_CPUS, ENVIRONMENT)


def end() -> None:
    """Stop the cluster that ``connect`` has started, to the last process.

    A worker that is still starting has not met its raylet yet, and would outlive it by many seconds.
    """
    end_background_work()
    ours: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):  # it has ended meanwhile, or its parent has not taken note of its end
            if f"{os.sep}ray{os.sep}" in " ".join(child.cmdline()):
                ours += [child, *child.children(recursive=True)]
    ray.shutdown()
    for process in ours:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(ours, timeout=5)


def check_resources(config: TrainConfig) -> None:
    """Check that the cluster can hold the run: else its actors would wait for ever.

    Raises:
        ConfigError: names what is needed, what is there, and what to lower.
    """
    there = ray.cluster_resources()
    for name, (needed, remedy) in _needs(config).items():
        if needed > there.get(name, 0):
            raise ConfigError(
                f"The run needs {needed:g} Ray {name}s and the cluster has {there.get(name, 0):g}: "
                f"add nodes, or lower {remedy}."
            )


def shortage(config: TrainConfig) -> str | None:
    """A sentence on what the run has to wait for, because others have it; ``None`` if there is room."""
    free = ray.available_resources()
    short = [
        f"{needed:g} Ray {name}s, of which {free.get(name, 0):g} are free"
        for name, (needed, _) in _needs(config).items()
        if needed > free.get(name, 0)
    ]
    if not short:
        return None
    return f"The run needs {' and '.join(short)}, and waits for the others: `ray status` shows who has them."


def num_replicas(config: TrainConfig) -> int:
    """Engines that a command starts. A replay starts none."""
    return 0 if config.run.replay else config.server.num_replicas + config.evaluation.num_replicas


def num_rollout_actors(config: TrainConfig) -> int:
    """Rollout actors that a command starts; evaluations with engines of their own have as many again."""
    return 0 if config.run.replay else config.fleet.num_actors * (2 if config.evaluation.num_replicas else 1)


def num_gpus(config: TrainConfig) -> float:
    """The GPUs that learner, critic and engines reserve together."""
    on_engines = num_replicas(config) * config.server.engine.num_gpus
    if config.learner.device != "cuda":
        return on_engines
    num_groups = 2 if algorithm_of(config).uses_critic else 1  # on CPUs policy and critic share theirs
    return on_engines + config.learner.num_workers * num_groups


def _needs(config: TrainConfig) -> dict[str, tuple[float, str]]:
    """By resource: how much, and the settings to lower."""
    cpus = (
        config.learner.num_workers
        + num_replicas(config) * config.server.num_cpus
        + num_rollout_actors(config) * config.fleet.num_cpus_per_actor
    )
    return {
        "CPU": (
            cpus,
            "learner.num_workers, server.num_replicas, evaluation.num_replicas or fleet.num_actors",
        ),
        "GPU": (
            num_gpus(config),
            "learner.num_workers, server.num_replicas or evaluation.num_replicas, or set learner.device=cpu",
        ),
    }
