"""A model behind the policy server, for as long as a block lasts."""

from __future__ import annotations

import os
import pickle
import socket
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import ray

from actors.ray_tools.placement import beside_driver, start_actor
from actors.sampling.serve_sampler import ServeSampler
from actors.served_agents.pool import AgentPool
from actors.served_agents.recorder import AnswerRecorder, opened_recordings
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel
from actors.weights.store import WeightStore
from launch.cluster import session
from launch.cluster.threads import with_threads
from launch.cluster.turns import Turn
from launch.health.interrupt import Interrupts
from launch.settings.tree import TrainConfig, without_training
from launch.workload import Workload
from policies.agent_api.frontend import PREFIX
from policies.chat import load_tokenizer


@contextmanager
def policy_app(
    config: TrainConfig,
    model: ServedModel,
    workload: Workload | None = None,
    pinned: Sequence[ServedModel] = (),
) -> Iterator[tuple[PolicyApp, Callable[[], None]]]:
    """The application that serves ``model``, and the function that starts it; it ends with the block.

    With ``workload`` it serves its agent too, and beside the model the versions in ``pinned``. On a cluster
    that others use, the block begins when it is this program's turn to start.

    SIGINT and SIGTERM raise ``KeyboardInterrupt`` in the block;
    ``Interrupts.raise_if_interrupted`` raises it again where a library has swallowed it.

    Raises:
        ConfigError: the cluster cannot hold the replicas, its Serve cannot have the address, or the
            checkpoint is damaged.
    """
    config = without_training(config)
    server = with_threads(config, model.path).server
    interrupts = Interrupts()
    with (
        session.connected() as started_ray,
        ExitStack() as ending,
        interrupts.installed(),  # after Ray, which puts a handler of its own in the place of SIGTERM's
        ExitStack() as turn,
    ):
        session.check_resources(config)
        if not started_ray:
            turn.callback(_turn(config, model.path).end)
        store = start_actor(WeightStore, **beside_driver())
        name = f"policy-{uuid.uuid4().hex[:8]}"
        served_agents = {} if workload is None else agents(config, workload, name, model, pinned)
        app = PolicyApp(name, model, server, store, agents=served_agents, pinned=pinned)
        if not started_ray:
            ending.callback(ray.kill, store)
            ending.callback(app.stop)
        ending.callback(app.end_conversations)

        def start() -> None:
            app.start()
            turn.close()
            interrupts.raise_if_interrupted()

        yield app, start


def _turn(config: TrainConfig, model_path: str) -> Turn:
    program = f"the server of {model_path} (process {os.getpid()} on {socket.gethostname()})"
    return session.start_turn(config, program, lambda _: None, partial(print, flush=True))


def agents(
    config: TrainConfig,
    workload: Workload,
    app_name: str,
    model: ServedModel,
    pinned: Sequence[ServedModel],
) -> dict[str, ray.actor.ActorHandle]:
    """The pool of the workload's agent, by its model name for clients: agent/calculator.

    ``model`` samples for it, or one of ``pinned`` while that is on trial.
    """
    assert config.workload is not None and workload.task_from_message is not None
    name = PREFIX + config.workload.rpartition(".")[2]
    recordings = opened_recordings(config.server.recording)
    apps = {each.policy: app_name + each.policy for each in (model, *pinned)}
    policies = {each.name: each.policy for each in pinned}
    pool = start_actor(
        AgentPool,
        workload.pair,
        workload.task_from_message,
        partial(ServeSampler, apps, pickle.dumps(load_tokenizer(model.path)), model.chat_template_kwargs),
        config.rollout.limits(),
        config.fleet,
        workload.description,
        config.server.agents,
        None if recordings is None else AnswerRecorder(recordings, name, policies),
        **beside_driver(),
    )
    return {name: pool}
