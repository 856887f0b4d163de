"""What the tests share: tiny models, one Ray, one policy server and a few learners, started once each.

Only tests marked ``engine`` may ask for ``ray_cluster`` and what builds on it; they run last.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

if TYPE_CHECKING:
    import torch

    from actors.learning.learner_group import LearnerGroup
    from actors.serving.policy_app import PolicyApp
    from actors.settings import ServerConfig
    from environments.types import Message
    from policies.learning.settings import AlgorithmConfig, LearnerConfig
    from policies.learning.verl.learner import VerlLearner

# Before anything imports transformers: a test that needs the network is a broken test.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Else most calls of Ray start a cluster where there is none, and its end takes the tests' process along.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

MAX_LEARNERS = 2
"""Learner groups that are kept alive for the next test."""


_exit_status = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Leave out what Ray has to say to itself."""
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:ray.*")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keep how the tests came out, for the end."""
    session.config.stash[_exit_status] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Kill the processes of ``ray_cluster``, servers and learners too, and then end at once.

    An end in good order has tests of its own. Ray's would come before the summary, and where a thread asks
    Ray for something meanwhile, Ray ends this process without a word.
    """
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
        return
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash.get(_exit_status, 1))


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
def ray_cluster() -> None:
    """A Ray of the tests' own, whatever else runs on this machine. It lives until ``pytest_unconfigure``."""
    import ray

    from actors.ray_tools.connect import RAYLET_ENVIRONMENT
    from launch.cluster.session import ENVIRONMENT, LOCAL_CPUS

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


# -- the policy server ---------------------------------------------------------------------------------


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
        self.app.wait_for_version(version)
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

    newest, transport = ray.get([store.newest.remote(), store.transport.remote()])
    version = newest.version + 1 if newest else 1
    location = transport.publish(version, weights.items(), rank=0)
    ray.get(store.publish.remote(version, location))
    return version


def start_policy(name: str, model_path: Path, store: Any, config: ServerConfig) -> ServedPolicy:
    """Serve ``model_path``. Needs ``serve_port``, also where ``config.http_port`` is not set."""
    from actors.serving.policy_app import PolicyApp

    app = PolicyApp(name, str(model_path), config, store)
    app.start()
    base_url = None if config.http_port is None else f"http://127.0.0.1:{config.http_port}/v1"
    return ServedPolicy(name, app, store, model_path, base_url)


@contextmanager
def serve_policy(name: str, model_path: Path, store: Any, config: ServerConfig) -> Iterator[ServedPolicy]:
    """``start_policy``, and its end after the block."""
    policy = start_policy(name, model_path, store, config)
    yield policy
    policy.app.stop()


@pytest.fixture(scope="session")
def serve_port(ray_cluster: None) -> int:
    """Where Serve's proxy listens. It starts with Serve or never: so before any application."""
    from actors.serving.policy_app import start_serve
    from actors.settings import ServerConfig

    port = free_port()
    start_serve(ServerConfig(http_port=port))
    return port


@pytest.fixture(scope="session")
def weight_store(ray_cluster: None) -> Any:
    """The store that ``policy_app`` follows."""
    from actors.weights.store import WeightStore

    return WeightStore.remote()


@pytest.fixture(scope="session")
def policy_app(serve_port: int, weight_store: Any, tiny_model: Path) -> ServedPolicy:
    """``tiny_model``, served by vLLM, by handle and over HTTP.

    A test that publishes puts the old weights back.
    """
    from actors.settings import ServerConfig

    return start_policy("policy", tiny_model, weight_store, ServerConfig(http_port=serve_port))


@pytest.fixture(scope="session")
def scripted_policy(serve_port: int, tiny_model: Path) -> ServedPolicy:
    """Two replicas that need no model: their engine is ``scripted_engine.ScriptedEngine``.

    It says ``1`` a thousand times. ``test_unresponsive_replicas`` stops and kills the replicas, so it comes
    after all others that ask for them, by its name.
    """
    from actors.settings import ServerConfig
    from actors.weights.store import WeightStore
    from policies.settings import EngineConfig

    options = {"replies": ["1" * 1000], "seconds_per_token": 0.005}
    engine = EngineConfig(name="scripted_engine:ScriptedEngine", options=options)
    config = ServerConfig(num_replicas=2, engine=engine)
    return start_policy("scripted", tiny_model, WeightStore.remote(), config)


@pytest.fixture(scope="session")
def sampler(policy_app: ServedPolicy) -> Any:
    """A ``SamplerActor`` on ``policy_app``."""
    return policy_app.sampler()


def wait_until(condition: Callable[[], bool], seconds: float = 240) -> None:
    """Return when ``condition`` holds; fail after ``seconds``: many, for a busy machine stalls."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not happen in {seconds:g} s"
        time.sleep(0.05)


def free_port() -> int:
    """A port on which no program listens. Connections of other programs begin at ports above these, so that
    none of them takes it before it is used."""
    while True:
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", random.SystemRandom().randrange(20_000, 32_768)))
            return int(free.getsockname()[1])


# -- learners ------------------------------------------------------------------------------------------

MakeLearner = Callable[..., "LearnerGroup"]
MakeRank = Callable[..., Any]

RESPONSE_TOKENS = 160
"""Most tokens of a response in the tests of the learner."""


@pytest.fixture(scope="module")
def make_learner(
    weight_store: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeLearner]:
    """``make_learner(learner, algorithm)``: a ``LearnerGroup`` on the weights of ``tiny_model``.

    Groups take long to start, so one with the same settings is used again in the file: its weights are put
    back and its optimizer is a fresh one. Only the last ``MAX_LEARNERS`` that were asked for are alive.
    """
    from actors.learning.learner_group import LearnerGroup
    from policies.learning.algorithms import resolve
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
            resolved = resolve(algorithm, RESPONSE_TOKENS, num_epochs=learner.num_epochs)
            group = LearnerGroup(str(tiny_model), learner, resolved, 100, 0, weight_store)
            beginning = tmp_path_factory.mktemp("learner")
            group.save(str(beginning))
        alive[key] = (group, beginning)  # last in line to be closed
        return group

    yield make
    for group, _ in alive.values():
        group.close()


@pytest.fixture(scope="session")
def verl_on_cpu() -> None:
    """After this, tests may import ``policies.learning.verl_*``."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl's, about engines that are not installed
        patch.setenv("VERL_PLATFORM", "cpu")
        import policies.learning.verl.config  # noqa: F401


@pytest.fixture(scope="session")
def process_group(verl_on_cpu: None) -> Iterator[None]:
    """A process group of this process alone, in which a rank of the learner lives without Ray."""
    import torch.distributed as dist

    with pytest.MonkeyPatch.context() as patch:
        _be_the_only_rank(patch)
        dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def make_rank(process_group: None, tiny_model: Path) -> MakeRank:
    """``make_rank(learner, algorithm, seed, model)``: a learner of one rank in this process, in 0.5 s."""
    from policies.learning.algorithms import resolve
    from policies.learning.settings import AlgorithmConfig, LearnerConfig
    from policies.learning.verl.learner import VerlLearner

    def make(
        learner: LearnerConfig | None = None,
        algorithm: AlgorithmConfig | None = None,
        seed: int = 0,
        model: Path = tiny_model,
    ) -> VerlLearner:
        learner, algorithm = learner or LearnerConfig(), algorithm or AlgorithmConfig()
        resolved = resolve(algorithm, RESPONSE_TOKENS, num_epochs=learner.num_epochs)
        with pytest.MonkeyPatch.context() as patch:
            _be_the_only_rank(patch)
            return VerlLearner(str(model), learner, resolved, 100, seed)

    return make


@pytest.fixture(scope="session")
def make_critic_rank(process_group: None, tiny_model: Path) -> MakeRank:
    """``make_critic_rank(learner, seed, model)``: a critic of one rank in this process."""
    from policies.learning.settings import LearnerConfig
    from policies.learning.verl.critic import VerlCritic

    def make(learner: LearnerConfig | None = None, seed: int = 0, model: Path = tiny_model) -> VerlCritic:
        with pytest.MonkeyPatch.context() as patch:
            _be_the_only_rank(patch)
            return VerlCritic(str(model), learner or LearnerConfig(), 100, seed)

    return make


def _be_the_only_rank(patch: pytest.MonkeyPatch) -> None:
    """Set the variables that a worker group sets. Not for long: Ray's workers would inherit them."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"MASTER_PORT": str(free_port())}).items():
        patch.setenv(name, value)
