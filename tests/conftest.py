"""What the tests share: tiny models, one Ray, one policy server and a few learners, started once each.

Only tests marked ``engine`` may ask for ``ray_cluster`` and what builds on it; they run last.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

    from actors.learner_group import LearnerGroup
    from actors.policy_server import PolicyApp
    from environments.types import Message
    from policies.learning.settings import AlgorithmConfig, LearnerConfig

# Before anything imports transformers: a test that needs the network is a broken test.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

MAX_LEARNERS = 2
"""Learner groups that are kept alive for the next test."""


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what Ray has to say to itself."""
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:ray.*")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first: what is broken in the small should show before anything large is started."""
    items.sort(key=lambda item: item.get_closest_marker("engine") is not None)


# -- models --------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def demonstrations() -> list[list[Message]]:
    """Conversations of the calculator recipe."""
    from launch.recipes.calculator import workload

    return workload(0).demonstrations[:300]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, demonstrations: list[list[Message]]) -> Path:
    """A random Qwen3 whose output layer is its embedding, with its tokenizer."""
    from policies.tiny import build_model

    return build_model(tmp_path_factory.mktemp("tied"), demonstrations)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory: pytest.TempPathFactory, demonstrations: list[list[Message]]) -> Path:
    """The same with an output layer of its own."""
    from policies.tiny import build_model

    return build_model(tmp_path_factory.mktemp("untied"), demonstrations, tie_word_embeddings=False)


# -- Ray -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A Ray of the tests' own, whatever else runs on this machine."""
    import ray

    from actors.settings import RAYLET_ENVIRONMENT
    from launch.cluster import ENVIRONMENT, LOCAL_CPUS

    os.environ.update(RAYLET_ENVIRONMENT)
    # Workers have to find the test modules that their classes come from.
    variables = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ray.init(
        address="local",
        num_cpus=LOCAL_CPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": variables},
    )
    yield
    ray.shutdown()


# -- the policy server ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServedPolicy:
    """A running policy server with one replica. Its version only ever grows: other tests publish too."""

    name: str
    app: PolicyApp
    store: Any
    model_path: Path
    base_url: str | None
    """Where OpenAI clients reach it."""

    def publish(self, weights: dict[str, torch.Tensor]) -> int:
        """Have ``weights`` served; return their version once they are."""
        version = publish(self.store, weights)
        self.app.wait_for_version(version)
        return version

    def sampler(self) -> Any:
        """A ``SamplerActor`` of its own."""
        import ray

        from actors.sampling import SamplerActor, ServeSampler

        sampler = SamplerActor.remote(partial(ServeSampler, self.name, str(self.model_path)))
        ray.get(sampler.open.remote())
        return sampler


def publish(store: Any, weights: dict[str, torch.Tensor]) -> int:
    """Put ``weights`` into a store as its next version, which is returned."""
    import ray

    from policies.weights import pack

    newest = ray.get(store.newest.remote())
    version = newest.version + 1 if newest else 1
    ray.get(store.publish.remote(version, *pack(weights.items())))
    return version


@contextmanager
def serve_policy(name: str, model_path: Path, store: Any, http: bool = False) -> Iterator[ServedPolicy]:
    """Serve ``model_path`` in the block. Needs ``ray_cluster``, and Serve's proxy for ``http``."""
    from actors.policy_server import PolicyApp
    from actors.settings import ServerConfig

    port = _free_port() if http else None
    app = PolicyApp(name, str(model_path), ServerConfig(http_port=port), store)
    app.start()
    yield ServedPolicy(name, app, store, model_path, f"http://127.0.0.1:{port}/v1" if http else None)
    app.stop()


@pytest.fixture(scope="session")
def weight_store(ray_cluster: None) -> Any:
    """The store that ``policy_app`` follows."""
    from actors.weight_store import WeightStore

    return WeightStore.remote()


@pytest.fixture(scope="session")
def policy_app(weight_store: Any, tiny_model: Path) -> Iterator[ServedPolicy]:
    """``tiny_model``, served by handle and over HTTP. A test that publishes puts the old weights back.

    Serve starts its proxy with the first application only: those without HTTP have to come after this.
    """
    with serve_policy("policy", tiny_model, weight_store, http=True) as policy:
        yield policy


@pytest.fixture(scope="session")
def sampler(policy_app: ServedPolicy) -> Any:
    """A ``SamplerActor`` on ``policy_app``."""
    return policy_app.sampler()


@pytest.fixture(scope="module")
def late_policy(policy_app: ServedPolicy, untied_model: Path) -> Iterator[ServedPolicy]:
    """``untied_model``, whose server starts when version 2 is published already (seed 99)."""
    from transformers_reference import perturbed, weights_of

    from actors.weight_store import WeightStore

    store, weights = WeightStore.remote(), weights_of(untied_model)
    for seed in (98, 99):
        publish(store, perturbed(weights, seed))
    with serve_policy("late", untied_model, store) as policy:
        yield policy


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


# -- learners ------------------------------------------------------------------------------------------

MakeLearner = Callable[..., "LearnerGroup"]


@pytest.fixture(scope="session")
def make_learner(
    weight_store: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeLearner]:
    """``make_learner(learner, algorithm)``: a ``LearnerGroup`` on the weights of ``tiny_model``.

    Groups take long to start, so one with the same settings is used again: its weights are put back and
    its optimizer is a fresh one. Only the last ``MAX_LEARNERS`` groups that were asked for are alive.
    """
    from actors.learner_group import LearnerGroup
    from policies.learning.settings import AlgorithmConfig, LearnerConfig

    alive: dict[str, tuple[LearnerGroup, Path]] = {}

    def make(learner: LearnerConfig | None = None, algorithm: AlgorithmConfig | None = None) -> LearnerGroup:
        learner, algorithm = learner or LearnerConfig(), algorithm or AlgorithmConfig()
        key = repr((learner, algorithm))
        if key in alive:
            group, beginning = alive.pop(key)
            group.load(str(beginning))
            group.begin_phase(learner.optimizer, 100)
        else:
            while len(alive) >= MAX_LEARNERS:
                alive.pop(next(iter(alive)))[0].close()
            group = LearnerGroup(str(tiny_model), learner, algorithm, 100, 0, weight_store)
            beginning = tmp_path_factory.mktemp("learner")
            group.save(str(beginning))
        alive[key] = (group, beginning)  # last in line to be closed
        return group

    yield make
    for group, _ in alive.values():
        group.close()
