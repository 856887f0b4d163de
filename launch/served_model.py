"""A model behind the policy server, for as long as a block lasts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import ray

from actors.ray_tools.placement import beside_driver
from actors.rollouts.agent_pool import AgentPool
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.policy_app import PolicyApp
from actors.settings import PinnedVersion
from actors.weights.store import WeightStore
from launch.config import TrainConfig, without_training
from launch.process import cluster
from launch.process.interrupt import Interrupts
from launch.run_folder.model_paths import policy_version
from launch.training.threads import with_threads
from launch.workload import Workload
from policies.openai.agent_frontend import PREFIX


@contextmanager
def policy_app(
    config: TrainConfig,
    model_path: str,
    workload: Workload | None = None,
    pinned: Sequence[PinnedVersion] = (),
) -> Iterator[tuple[PolicyApp, Interrupts]]:
    """The application that serves ``model_path``, to be started in the block; it ends with it.

    With ``workload`` it serves its agent too, and beside the model the versions in ``pinned``.

    A checkpoint is served under the version that its run has published it as, any other model as version 0.

    SIGINT and SIGTERM raise ``KeyboardInterrupt`` in the block;
    ``Interrupts.raise_if_interrupted`` raises it again where a library has swallowed it.

    Raises:
        ConfigError: the cluster cannot hold the replicas, or the checkpoint is damaged.
    """
    config = without_training(config)
    server = with_threads(config, model_path).server
    version = policy_version(model_path)
    started_ray = cluster.connect()
    app: PolicyApp | None = None
    try:
        interrupts = Interrupts()
        with interrupts.installed():  # after Ray, which puts a handler of its own in the place of SIGTERM's
            cluster.check_resources(config)
            store = WeightStore.options(**beside_driver()).remote()  # type: ignore[attr-defined]
            name = f"policy-{uuid.uuid4().hex[:8]}"
            app = PolicyApp(
                name,
                model_path,
                server,
                store,
                chat_template_kwargs=config.model.chat_template_kwargs,
                version=version,
                agents={} if workload is None else agents(config, workload, name, model_path),
                pinned=pinned,
            )
            yield app, interrupts
    finally:
        if app is not None:
            app.end_conversations()
        if started_ray:
            cluster.end()
        elif app is not None:
            app.stop()
            ray.kill(store)


def agents(
    config: TrainConfig, workload: Workload, app_name: str, model_path: str
) -> dict[str, ray.actor.ActorHandle]:
    """The pool of the workload's agent, by the name under which clients ask for it: agent/calculator."""
    assert config.workload is not None and workload.task_from_message is not None
    pool = AgentPool.options(**beside_driver()).remote(  # type: ignore[attr-defined]
        workload.pair,
        workload.task_from_message,
        partial(ServeSampler, app_name, model_path, config.model.chat_template_kwargs),
        config.rollout.limits(),
        config.fleet,
        workload.description,
        config.server.agents,
    )
    return {PREFIX + config.workload.rpartition(".")[2]: pool}
