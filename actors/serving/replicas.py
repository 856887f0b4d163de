"""The policy servers of a cluster and their replicas, whose number ``launch.scale`` changes by hand."""

from __future__ import annotations

import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve._private.exceptions import ExternalScalerDisabledError
from ray.serve.context import _get_global_client

from environments.errors import ConfigError

DEPLOYMENT = "PolicyServer"


def policy_servers() -> dict[str, dict[str, int]]:
    """The policy servers of the cluster that this process is connected to, by name.

    Returns:
        For each of them, how many of its replicas are in which state ("RUNNING", "STARTING", ...).
    """
    return {
        name: {str(state): number for state, number in app.deployments[DEPLOYMENT].replica_states.items()}
        for name, app in sorted(serve.status().applications.items())
        if DEPLOYMENT in app.deployments
    }


def resize(server: str, number: int) -> None:
    """Let ``server`` have ``number`` replicas from now on. They come and go in the background.

    Raises:
        ConfigError: Serve itself chooses how many there are.
    """
    # Serve offers this over HTTP only, at a dashboard, which not every cluster has.
    controller = _get_global_client()._controller
    try:
        ray.get(controller.update_deployment_replicas.remote(DeploymentID(DEPLOYMENT, server), number))
    except RayTaskError as error:
        if isinstance(error.cause, ExternalScalerDisabledError):
            raise ConfigError(
                f"--replicas {number}: Serve chooses the number of replicas of {server}, between "
                "server.num_replicas and server.max_replicas. Without server.max_replicas it is yours."
            ) from error
        raise
