"""Resources that a command needs, by its settings; GPUs of this machine, where no cluster is joined."""

from __future__ import annotations

from collections import Counter

from environments.errors import ConfigError
from launch.settings.tree import TrainConfig, algorithm_of
from policies.settings import node_labels, node_resources

REMEDIES = {
    "CPU": "learner.num_workers, server.num_replicas, evaluation.num_replicas or fleet.num_actors",
    "GPU": "learner.num_workers, server.num_replicas or evaluation.num_replicas, or set learner.device=cpu",
}
"""The settings to lower where a resource is short. Others come from these:"""
NODES = "fleet.nodes, server.nodes or learner.nodes"


def num_replicas(config: TrainConfig) -> int:
    """Engines that a command starts."""
    return config.server.num_replicas + _other_replicas(config)


def most_replicas(config: TrainConfig) -> int:
    """Engines that there may be at the same time."""
    return config.server.most_replicas + _other_replicas(config)


def _other_replicas(config: TrainConfig) -> int:
    """Engines of evaluations alone, and of older versions."""
    return config.evaluation.num_replicas + len(config.server.versions)


def num_rollout_actors(config: TrainConfig) -> int:
    """Rollout actors that a command starts; evaluations with engines of their own have as many again."""
    return config.fleet.num_actors * (2 if config.evaluation.num_replicas else 1)


def num_gpus(config: TrainConfig) -> float:
    """The GPUs that learner, critic and engines reserve together."""
    return needs(config)["GPU"]


def needs(config: TrainConfig) -> dict[str, float]:
    """Sum of each resource over all actors of the run."""
    needs: Counter[str] = Counter(dict.fromkeys(REMEDIES, 0))
    for resources, _ in bundles_of(config):
        needs.update(resources)
    return dict(needs)


def bundles_of(config: TrainConfig) -> list[tuple[dict[str, float], dict[str, str]]]:
    """Resources of each actor of the run, all on one node, and that node's labels: ranks, engines, rollout
    actors.
    """
    learner, server, fleet = config.learner, config.server, config.fleet
    on_gpu = learner.device == "cuda"
    num_groups = 2 if on_gpu and algorithm_of(config).uses_critic else 1  # on CPUs policy and critic share
    rank = {"CPU": 1.0, "GPU": server.gpus_of_rank if on_gpu else 0.0}
    replica = {"GPU": server.gpus_of_engine}
    return [
        *[(rank | node_resources(learner.nodes), node_labels(learner.nodes))]
        * learner.num_workers
        * num_groups,
        *[(replica | node_resources(server.nodes), node_labels(server.nodes))] * num_replicas(config),
        *[(node_resources(fleet.nodes), node_labels(fleet.nodes))] * num_rollout_actors(config),
    ]


def check_gpus(config: TrainConfig) -> None:
    """Find GPUs that are missing before Ray is started. Raises ``ConfigError``.

    A cluster that is joined has its own: ``launch.cluster.session.check_resources`` asks it.
    """
    learner, engine = config.learner, config.server.engine
    if learner.device != "cuda" and not engine.num_gpus:
        return
    import torch

    from actors.ray_tools.connect import joins_cluster

    needed, there = num_gpus(config), torch.cuda.device_count()
    if needed > there and not joins_cluster():
        raise ConfigError(
            f"learner.device={learner.device} and server.engine.num_gpus={engine.num_gpus:g} need {needed:g} "
            f"GPU(s) in all, and torch finds {there} on this machine: set learner.device=cpu and "
            "server.engine.num_gpus=0, or join a cluster that has them (RAY_ADDRESS). Where they are here, "
            "`make install DEVICE=cuda` installs what finds them."
        )
