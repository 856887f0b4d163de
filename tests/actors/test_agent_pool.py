"""Trained agents that answer clients, over the real server with a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import RayTaskError
from scripted_engine import ScriptedEngine  # noqa: F401  # so that a replica can import it too

from actors.rollouts.agent_pool import AgentPool
from actors.rollouts.rollout import RolloutLimits
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.policy_server import PolicyApp
from actors.settings import FleetConfig, ServerConfig
from actors.weights.store import WeightStore
from environments.types import TerminationReason
from launch.recipes.calculator import task_from_message, workload
from policies.sampler import SamplingParams
from policies.settings import EngineConfig

pytestmark = pytest.mark.engine

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "12+34"}}\n</tool_call>'


def no_task(message: str) -> dict[str, Any]:
    raise KeyError(message)


@pytest.fixture(scope="module")
def app(serve_port: int, tiny_model: Path) -> Iterator[PolicyApp]:
    """A server whose engine calls the calculator and then says 46, in turns."""
    engine = EngineConfig(name="scripted_engine:ScriptedEngine", options={"replies": [CALL, "\\boxed{46}"]})
    app = PolicyApp("agents", str(tiny_model), ServerConfig(engine=engine), WeightStore.remote())
    app.start()
    yield app
    app.stop()


def pool(app: PolicyApp, model: Path, make_task: Any = task_from_message) -> ray.actor.ActorHandle:
    sampler = partial(ServeSampler, app.name, str(model))
    actor = AgentPool.remote(workload(0).pair, make_task, sampler, RolloutLimits(), FleetConfig(num_actors=1))
    ray.get(actor.open.remote())
    return actor


def test_a_message_is_answered_by_an_episode_with_tools(app: PolicyApp, tiny_model: Path) -> None:
    agents = pool(app, tiny_model)
    params = SamplingParams(temperature=0)
    # One after the other: the engine's script has no memory of who asks.
    for _ in range(2):
        trajectory = ray.get(agents.play.remote("What is 12+34?", params), timeout=60)
        assert trajectory.termination_reason is TerminationReason.ENV_DONE
        assert [step.model_response for step in trajectory.steps] == [CALL, "\\boxed{46}"]
        assert "46" in str(trajectory.steps[1].chat_completions)
    ray.kill(agents)


def test_a_message_that_makes_no_task_is_an_error(app: PolicyApp, tiny_model: Path) -> None:
    agents = pool(app, tiny_model, no_task)
    with pytest.raises(RayTaskError, match="task_from_message failed: KeyError"):
        ray.get(agents.play.remote("What is 12+34?", SamplingParams()), timeout=60)
    ray.kill(agents)
