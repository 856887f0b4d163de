"""The GPUs that a configuration needs and this machine has, where no cluster is joined that may have them."""

from __future__ import annotations

from environments.errors import ConfigError
from launch.settings.tree import TrainConfig


def check_gpus(config: TrainConfig) -> None:
    """Find GPUs that are missing before Ray is started. Raises ``ConfigError``.

    A cluster that is joined has its own: ``launch.cluster.session.check_resources`` asks it.
    """
    learner, engine = config.learner, config.server.engine
    if learner.device != "cuda" and not engine.num_gpus:
        return
    import torch

    from actors.ray_tools.connect import joins_cluster
    from launch.validation.resources import num_gpus

    needed, there = num_gpus(config), torch.cuda.device_count()
    if needed > there and not joins_cluster():
        raise ConfigError(
            f"learner.device={learner.device} and server.engine.num_gpus={engine.num_gpus:g} need {needed:g} "
            f"GPU(s) in all, and torch finds {there} on this machine: set learner.device=cpu and "
            "server.engine.num_gpus=0, or join a cluster that has them (RAY_ADDRESS)."
        )
