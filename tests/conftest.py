"""Tiny models and learners in this process, made once each for all tests."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from inspect import iscoroutinefunction, signature
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import psutil
import pytest
from learner_samples import RESPONSE_TOKENS, MakeRank
from machine import free_port

if TYPE_CHECKING:
    from whole_batches import WholeBatches

    from environments.types import Message
    from policies.learning.settings import AlgorithmConfig, LearnerConfig

# Before anything imports transformers: a test that needs the network is a broken test.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# Else most calls of Ray start a cluster where there is none, and its end takes the tests' process along.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs the tests behind it
hypothesis.settings.register_profile("busy", deadline=None)  # a generated test may be slow on a busy machine
hypothesis.settings.load_profile("busy")

ENGINE = Path(__file__).with_name("engine")
"""Tests that start Ray, vLLM or verl."""
_exit_status = pytest.StashKey[int]()


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


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect the tests without collecting garbage, which would be looked for a dozen times in vain."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in a loop of its own, for two minutes at most."""
    if not iscoroutinefunction(pyfuncitem.obj):
        return None
    names = signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    asyncio.run(asyncio.wait_for(test, 120))
    return True


LONGEST = ("test_train_on_ray.py", "test_verl_learner.py", "test_model_families.py", "test_vllm_parsers.py")
"""Go first of their part: as one of the last, each would keep a single process busy."""


def _place(item: pytest.Item) -> tuple[bool, bool]:
    starts_engines = item.get_closest_marker("engine") is not None
    return starts_engines, item.path.name not in LONGEST


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what lies in ``engine/``, and put it last: what is broken in the small should show before."""
    for item in items:
        if ENGINE in item.path.parents:
            item.add_marker("engine")
    items.sort(key=_place)


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


# -- learners ------------------------------------------------------------------------------------------


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
    from whole_batches import WholeBatches

    from policies.learning.algorithms import resolve
    from policies.learning.settings import AlgorithmConfig, LearnerConfig
    from policies.learning.verl.learner import VerlLearner

    def make(
        learner: LearnerConfig | None = None,
        algorithm: AlgorithmConfig | None = None,
        seed: int = 0,
        model: Path = tiny_model,
    ) -> WholeBatches:
        learner, algorithm = learner or LearnerConfig(), algorithm or AlgorithmConfig()
        resolved = resolve(algorithm, RESPONSE_TOKENS, num_epochs=learner.num_epochs)
        with pytest.MonkeyPatch.context() as patch:
            _be_the_only_rank(patch)
            return WholeBatches(VerlLearner(str(model), learner, resolved, 100, seed))

    return make


@pytest.fixture(scope="session")
def make_critic_rank(process_group: None, tiny_model: Path) -> MakeRank:
    """``make_critic_rank(learner, seed, model)``: a critic of one rank in this process."""
    from whole_batches import WholeBatches

    from policies.learning.settings import LearnerConfig
    from policies.learning.verl.critic import VerlCritic

    def make(learner: LearnerConfig | None = None, seed: int = 0, model: Path = tiny_model) -> WholeBatches:
        with pytest.MonkeyPatch.context() as patch:
            _be_the_only_rank(patch)
            return WholeBatches(VerlCritic(str(model), learner or LearnerConfig(), 100, seed))

    return make


def _be_the_only_rank(patch: pytest.MonkeyPatch) -> None:
    """Set the variables that a worker group sets. Not for long: Ray's workers would inherit them."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (variables | {"MASTER_PORT": str(free_port())}).items():
        patch.setenv(name, value)
