"""One Ray, one policy server and a few learners, started once each for all tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from learner_samples import RESPONSE_TOKENS, MakeLearner
from machine import free_port
from served_policy import ServedPolicy, start_policy

if TYPE_CHECKING:
    from actors.learning.learner_group import LearnerGroup
    from policies.learning.settings import AlgorithmConfig, LearnerConfig


SERVE_ENVIRONMENT = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.3",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "10000",
}
"""Serve's controller goes round three times a second, not ten, and nobody reads the counts of requests: what
a session does while its tests do nothing with it is taken from the tests."""


@pytest.fixture(scope="session")
def http_port() -> int:
    return free_port()


@pytest.fixture(scope="session")
def ray_cluster(http_port: int) -> None:
    """A Ray of the tests' own, whatever else runs on this machine. It lives until ``pytest_unconfigure``.

    Serve starts with it: its proxy comes with Serve or never, and a training without a port would start it
    without one, for all tests that come after.
    """
    import ray
    from ray._private.node import Node

    from actors.ray_tools.connect import RAYLET_ENVIRONMENT
    from actors.serving.policy_app import start_serve
    from actors.settings import ServerConfig
    from launch.cluster.session import LOCAL_CPUS, RAY_ENVIRONMENT

    os.environ.update(RAYLET_ENVIRONMENT)
    # Workers have to find the test modules that their classes come from.
    variables = RAY_ENVIRONMENT | SERVE_ENVIRONMENT
    variables |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with pytest.MonkeyPatch.context() as patch:  # its processes inherit them
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(Node, "start_log_monitor", lambda _: None)  # it reads all logs, to print none of them
        ray.init(
            address="local",
            num_cpus=LOCAL_CPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    start_serve(ServerConfig(http_port=http_port))


@pytest.fixture(scope="module", autouse=True)
def light_workers(request: pytest.FixtureRequest) -> None:
    """Send what a test module defines to Ray's workers as it is: they need not import the module then."""
    from ray.cloudpickle import register_pickle_by_value

    register_pickle_by_value(request.module)


@pytest.fixture(scope="session")
def serve_port(ray_cluster: None, http_port: int) -> int:
    """The port at which Serve's proxy listens."""
    return http_port


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
def sampler(policy_app: ServedPolicy) -> Any:
    """A ``SamplerActor`` on ``policy_app``."""
    return policy_app.sampler()


@pytest.fixture(scope="module")
def make_learner(
    weight_store: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MakeLearner]:
    """``make_learner(learner, algorithm)``: a ``LearnerGroup`` on the weights of ``tiny_model``.

    Groups take long to start, so one with the same settings is used again in the file: its weights are put
    back and its optimizer is a fresh one.
    """
    from actors.learning.learner_group import LearnerGroup
    from policies.learning.algorithms import resolve
    from policies.learning.settings import AlgorithmConfig, LearnerConfig

    alive: dict[str, tuple[LearnerGroup, Path]] = {}

    def make(learner: LearnerConfig | None = None, algorithm: AlgorithmConfig | None = None) -> LearnerGroup:
        learner, algorithm = learner or LearnerConfig(), algorithm or AlgorithmConfig()
        key = repr((learner, algorithm))
        if key in alive:
            group, beginning = alive[key]
            group.load(str(beginning))
            group.begin_phase(learner.optimizer, 100)
        else:
            resolved = resolve(algorithm, RESPONSE_TOKENS, num_epochs=learner.num_epochs)
            group = LearnerGroup(str(tiny_model), learner, resolved, 100, 0, weight_store)
            beginning = tmp_path_factory.mktemp("learner")
            group.begin_save(str(beginning))()
            alive[key] = (group, beginning)
        return group

    yield make
    for group, _ in alive.values():
        group.close()
