"""A policy server with real replicas, for as long as a test or a session needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from machine import wait_until

if TYPE_CHECKING:
    import torch

    from actors.serving.policy_app import PolicyApp
    from actors.settings import ServerConfig


@dataclass(frozen=True)
class ServedPolicy:
    """A running policy server. Its version only ever grows: other tests publish too."""

    name: str
    app: PolicyApp
    store: Any
    model_path: Path
    base_url: str | None
    """Where OpenAI clients reach it."""

    def publish(self, weights: dict[str, torch.Tensor]) -> int:
        """Have ``weights`` served; return their version once they are."""
        version = publish(self.store, weights)
        wait_for_version(self.name, version)
        return version

    def sampler(self) -> Any:
        """A ``SamplerActor`` of its own."""
        import ray

        from actors.sampling.sampler_actor import SamplerActor
        from actors.sampling.serve_sampler import ServeSampler

        sampler = SamplerActor.remote(partial(ServeSampler, self.name, str(self.model_path)))
        ray.get(sampler.open.remote())
        return sampler


def publish(store: Any, weights: dict[str, torch.Tensor]) -> int:
    """Put ``weights`` into a store as its next version, which is returned."""
    import ray

    from policies.engines.weights import pack

    newest, transport = ray.get([store.newest.remote(), store.transport.remote()])
    version = newest.version + 1 if newest else 1
    pieces = [ray.put(each) for each in transport.publish(version, pack(weights.items()), rank=0)]
    ray.get(store.publish.remote(version, pieces))
    return version


def wait_for_version(name: str, version: int) -> None:
    """Return when every running replica of the server serves ``version`` or a newer one."""
    from ray import serve

    def all_serve_it() -> bool:
        states = serve.get_app_handle(name).broadcast("health").results()
        return all(each["policy_version"] >= version for each in states)

    wait_until(all_serve_it)


def start_policy(name: str, model_path: Path, store: Any, config: ServerConfig) -> ServedPolicy:
    """Serve ``model_path``. Needs ``ray_cluster``."""
    from actors.serving.policy_app import PolicyApp
    from actors.settings import ServedModel

    app = PolicyApp(name, ServedModel(path=str(model_path)), config, store)
    app.start()
    base_url = None if config.http_port is None else f"http://127.0.0.1:{config.http_port}/v1"
    return ServedPolicy(name, app, store, model_path, base_url)


@contextmanager
def serve_policy(name: str, model_path: Path, store: Any, config: ServerConfig) -> Iterator[ServedPolicy]:
    """``start_policy``, and its end after the block."""
    policy = start_policy(name, model_path, store, config)
    try:
        yield policy
    finally:
        policy.app.stop()
