"""The policy server as a Ray Serve application: its settings as Serve has them, its start and its end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.serve.exceptions import RayServeException

from actors.ray_tools.calls import get_or_raise, own_errors
from actors.ray_tools.connect import job_environment
from actors.sampling.directory import start_directory
from actors.served_agents.recorder import opened_recordings
from actors.serving.autoscaling import autoscaling
from actors.serving.intake import PROXY_ENVIRONMENT
from actors.serving.keys import access_keys
from actors.serving.pinned import PinnedPolicy
from actors.serving.policy_server import LOGGING, REPLICA_ENVIRONMENT, PolicyServer
from actors.settings import ServedModel, ServerConfig
from actors.timing import CONVERSATIONS_END_SECONDS, REPLICA_END_SECONDS
from actors.weights.turns import take_turn
from environments.errors import PartLostError, SamplerError
from policies.engines.base import engine_class
from policies.settings import node_labels, node_resources

SCALED_DOWN_SECONDS = 60.0
"""Seconds that a replica being scaled down may finish its answers."""
PARTS_CHECK_SECONDS = 30.0
"""Seconds that ``check`` waits for an answer."""


def start_serve(config: ServerConfig) -> None:
    """Start Serve, with the address that outsiders are to have, unless it runs already.

    Not by two threads at once: the second one would fail.
    """
    if config.http_port is None:
        serve.start(proxy_location="Disabled")
    else:
        http_options = {"host": config.http_host, "port": config.http_port}
        serve.start(
            http_options=http_options,
            logging_config=LOGGING,
            controller_options={"runtime_env": {"env_vars": PROXY_ENVIRONMENT}},
        )


def policy_application(
    model: ServedModel,
    config: ServerConfig,
    store: ray.actor.ActorHandle | None = None,
    directories: Mapping[str, ray.actor.ActorHandle] | None = None,
    agents: Mapping[str, ray.actor.ActorHandle] | None = None,
    pinned: Sequence[ServedModel] = (),
) -> serve.Application:
    """The policy server as Serve runs it: for ``PolicyApp``, and for ``serve deploy``.

    Args:
        store: the ``WeightStore`` that the replicas follow; without one they serve ``model`` only.
        directories: where sampling actors add themselves, by the ``policy`` of each model that samples for
            them; the first model's also has other actors that its replicas share. A store comes with them.

    The others, and what is raised, are those of ``PolicyApp``.
    """
    engine = engine_class(config.engine)
    engine.check_config(config.engine, config.adapters)
    keys = access_keys(config)
    if config.recording.folder is not None:  # absolute: a replica may work in another folder
        folder = os.path.abspath(config.recording.folder)
        config = replace(config, recording=replace(config.recording, folder=folder))
        opened_recordings(config.recording)
    largest, grace_seconds = config.most_replicas, REPLICA_END_SECONDS
    number: dict[str, Any] = {"num_replicas": largest}
    if config.max_replicas is not None:
        grace_seconds = SCALED_DOWN_SECONDS
        number = {"autoscaling_config": autoscaling(config.num_replicas, largest, config.tokens_per_replica)}
    reserved = node_resources(config.nodes)
    options: dict[str, Any] = {
        "ray_actor_options": {
            "num_cpus": reserved.pop("CPU", 0.0),
            "num_gpus": config.gpus_of_engine,
            "resources": reserved,
            "label_selector": node_labels(config.nodes),
            # Serve gives replicas the variables of the job that has started it, which may be another one.
            "runtime_env": {
                "env_vars": {
                    **job_environment(),
                    **engine.environment(config.engine),
                    **REPLICA_ENVIRONMENT,
                }
            },
        },
        "logging_config": LOGGING,
        "graceful_shutdown_timeout_s": grace_seconds,
        "graceful_shutdown_wait_loop_s": 0.2,
        "health_check_period_s": 5,
        "health_check_timeout_s": 10,  # three in a row and Serve replaces it: a stopped process too
    }
    directories = directories or {}
    without_adapters = replace(config, adapters={})
    others: dict[str, tuple[ServedModel, serve.Application]] = {}
    for each in pinned:  # Serve tells deployments apart by their names
        own_options = options | {"name": each.name.replace("@", "-")}
        arguments = each, without_adapters, store, directories.get(each.policy)
        others[each.name] = each, _bind(PinnedPolicy, own_options, *arguments)
    return _bind(
        PolicyServer,
        number | options,
        *(model, config, store, directories.get(model.policy), keys, dict(agents or {}), others),
    )


def _bind(deployment: Any, options: Mapping[str, Any], *arguments: object) -> serve.Application:
    """Bind the arguments of replicas to ``deployment``, which ``serve.deployment`` has made of a class."""
    return deployment.options(**options).bind(*arguments)


class PolicyApp:
    """The policy server as one Serve application of this program, which owns what the replicas follow.

    Args:
        name: of the application; unique in the cluster.
        model: that the engines start from.
        store: the ``WeightStore`` that the replicas follow.
        agents: an ``AgentPool`` by the name that clients use, which begins with "agent/".
        pinned: versions that are served beside it, each by an engine of its own.

    Raises:
        ConfigError: ``config.engine`` names no engine, or has settings that this engine cannot act on; or
            the address may not be served without a key.
    """

    def __init__(
        self,
        name: str,
        model: ServedModel,
        config: ServerConfig,
        store: ray.actor.ActorHandle,
        agents: Mapping[str, ray.actor.ActorHandle] | None = None,
        pinned: Sequence[ServedModel] = (),
    ) -> None:
        self.name, self.agents = name, dict(agents or {})
        sampled = [model, *(pinned if agents else ())]
        self._directories = {each.policy: start_directory(name + each.policy) for each in sampled}
        self._bound = policy_application(model, config, store, self._directories, self.agents, pinned)
        self._config, self._store = config, store

    def start(self) -> None:
        """Deploy and wait until all replicas, and agents if there are any, are ready.

        Raises:
            TroupeError: what has kept a replica from starting.
        """
        config = self._config
        start_serve(config)
        route = None if config.http_port is None else "/"
        try:
            # Serve lets launch.scale set the number of replicas where it does not choose it itself.
            by_hand = config.max_replicas is None
            serve.run(self._bound, name=self.name, route_prefix=route, external_scaler_enabled=by_hand)
        except (RuntimeError, RayServeException) as error:
            self.check_replicas()  # whose own words say more than Serve's
            raise SamplerError(f"The policy server did not start: {error}") from error
        with own_errors():
            ray.get([pool.open.remote() for pool in self.agents.values()])

    def wake(self) -> None:
        """Begin the turn of the engines, where they share their devices with a learner."""
        if self._config.colocated:
            take_turn(self._store, asleep=False)

    def check_replicas(self) -> None:
        """Raise the error that replicas have reported, if there was one: see ``WeightStore.report``."""
        with own_errors():
            get_or_raise([self._store.check_followers.remote()], "The weight store")

    def check(self) -> None:
        """Raise the error of a part without which clients get no answer.

        Raises:
            PartLostError: the weight store has died, or the actor of an agent.
            The error that replicas have reported, or that has ended an agent.
        """
        parts = [self._store.check_followers.remote()]
        parts += [pool.check.remote() for pool in self.agents.values()]
        try:
            with own_errors():
                ray.get(parts, timeout=PARTS_CHECK_SECONDS)
        except GetTimeoutError:  # it is busy: the next check finds it
            return
        except RayActorError as error:
            raise PartLostError(f"Clients get no answers any more: {error}") from error

    def end_conversations(self) -> None:
        """Close the environments that wait for a client's next message. Agents answer nothing afterwards."""
        with suppress(RayError):  # a pool has died, or never started
            ray.get([pool.end.remote() for pool in self.agents.values()], timeout=CONVERSATIONS_END_SECONDS)

    def stop(self) -> None:
        """Take this application down, if it was ever up; Serve itself, and other applications, stay."""
        self.end_conversations()
        with suppress(RayServeException):  # no Serve
            serve.delete(self.name)
        for actor in (*self._directories.values(), *self.agents.values()):
            ray.kill(actor)
