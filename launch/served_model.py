"""A model behind the policy server, for as long as a block lasts."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from actors.ray_tools.placement import beside_driver
from actors.serving.policy_server import PolicyApp
from actors.weights.store import WeightStore
from launch.config import TrainConfig, without_training
from launch.process import cluster
from launch.process.interrupt import Interrupts
from launch.run_folder.model_paths import policy_version
from launch.training.threads import with_threads


@contextmanager
def policy_app(config: TrainConfig, model_path: str) -> Iterator[tuple[PolicyApp, Interrupts]]:
    """The application that serves ``model_path``, to be started in the block; it ends with it.

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
            app = PolicyApp(
                f"policy-{uuid.uuid4().hex[:8]}",
                model_path,
                server,
                store,
                chat_template_kwargs=config.model.chat_template_kwargs,
                version=version,
            )
            yield app, interrupts
    finally:
        if started_ray:
            cluster.end()
        elif app is not None:
            app.stop()
