"""The Serve application that ``serve deploy`` and KubeRay's RayService build from a Serve config file."""

# Without `from __future__ import annotations`: Serve reads the type of build's argument, and not its name.
from dataclasses import replace

from pydantic import BaseModel
from ray.serve import Application

from actors.serving.keys import KEYS_VARIABLE, read_keys
from actors.serving.policy_app import policy_application
from environments.errors import ConfigError
from launch import serve
from launch.cluster.threads import with_threads
from launch.settings.compose import named_settings
from launch.settings.tree import TrainConfig, without_training
from launch.validation.serving import DEFAULT_PORT


class Arguments(BaseModel, extra="forbid"):
    """``args`` of the application in the Serve config file."""

    settings: list[str]
    """Settings as on the command line of ``launch.serve``; model.path is one of them."""


def build(arguments: Arguments) -> Application:
    """The policy server that ``launch.serve`` runs with the same settings, but for agents.

    Serve calls this in a task that ends when the application is built. So the application has no actors of a
    program: its replicas serve the model that they start from, and nobody publishes weights to them.

    Raises:
        ConfigError: a setting is wrong or has no effect here; an agent is asked for; there is no key.
    """
    config = serve.COMMAND.configuration(arguments.settings)
    _check_deployable(config, arguments.settings)
    # There is an endpoint, so its keys count. Where it listens is up to the Serve config file.
    config = replace(config, server=replace(config.server, http_port=DEFAULT_PORT))
    serve.check_serving(config)
    server, model, pinned = serve.with_models(config)
    config = with_threads(without_training(replace(config, server=server)), model.path)
    return policy_application(model, config.server, pinned=pinned)


def _check_deployable(config: TrainConfig, settings: list[str]) -> None:
    """Raise ``ConfigError`` for what only ``launch.serve`` can do, and for an endpoint without a key."""
    if config.workload is not None:
        raise ConfigError(
            f"workload={config.workload} asks for its agent, and `serve deploy` serves a policy alone: an "
            "agent's actors need a program that lives on. Leave recipe and workload out, or add "
            "workload=null; or serve the agent by `ray job submit -- python -m launch.serve`."
        )
    if config.model.path is None:
        raise ConfigError(
            "model.path is not set: name a run, a checkpoint or a Hugging Face folder that all nodes reach "
            "by the same path, such as model.path=/shared/runs/a."
        )
    for setting in sorted({"server.http_host", "server.http_port"}.intersection(named_settings(settings))):
        raise ConfigError(f"{setting} has no effect here: set http_options of the Serve config file.")
    if not read_keys(config.server.access.keys_file):
        raise ConfigError(
            f"There is no key, and Serve may listen on any address: set {KEYS_VARIABLE}=name:key in the "
            "environment in which Ray starts on the nodes, or server.access.keys_file."
        )
