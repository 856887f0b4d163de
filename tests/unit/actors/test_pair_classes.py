"""Classes of a user that rollouts cannot call are named before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from actors.gateway.function import pair_of
from environments import Dataset, SingleTurnEnvironment
from environments.errors import AgentError, ConfigError
from launch.validation.trial import check_agent
from launch.workload import Workload
from policies import GameAgent


async def later(self: Any, *args: Any, **kwargs: Any) -> None: ...


def taking(*names: str) -> Callable[..., Any]:
    """A method that takes these arguments."""
    scope: dict[str, Any] = {}
    exec(f"def method({', '.join(names)}): pass", scope)
    method: Callable[..., Any] = scope["method"]
    return method


@pytest.mark.parametrize(
    ("method", "made", "named"),
    [
        ("update_from_model", later, "update_from_model.. is async"),
        ("update_from_env", later, "update_from_env.. is async"),
        (
            "update_from_env",
            taking("self", "observation"),
            "write def update_from_env.self, observation, reward",
        ),
        ("update_from_model", taking("self"), "write def update_from_model.self, response"),
        ("reset", taking("self", "task"), "missing a required argument: 'task'"),
    ],
)
def test_agent_that_cannot_be_called_is_named(method: str, made: Any, named: str) -> None:
    agent_class = type("Mine", (GameAgent,), {method: made})
    with pytest.raises(ConfigError, match=f"Mine.*{named}"):
        pair_of(agent_class, SingleTurnEnvironment, None, {}, {})


@pytest.mark.parametrize(
    ("method", "made", "named"),
    [
        ("reset", taking("self", "task"), "write def reset.self."),
        ("step", taking("self"), "write def step.self, action"),
        ("close", later, "close.. is async"),
        ("from_dict", taking("self", "info"), "write @staticmethod and def from_dict.info"),
    ],
)
def test_environment_that_cannot_be_called_is_named(method: str, made: Any, named: str) -> None:
    env_class = type("Mine", (SingleTurnEnvironment,), {method: made})
    with pytest.raises(ConfigError, match=f"Mine.*{named}"):
        pair_of(GameAgent, env_class, None, {}, {})


def test_arguments_that_an_agent_does_not_take_are_named() -> None:
    with pytest.raises(ConfigError, match=r"agent_args=\['colour'\].*GameAgent.__init__"):
        pair_of(GameAgent, SingleTurnEnvironment, None, {"colour": 1}, {})


def try_first(agent_class: Any) -> None:
    tasks = Dataset([{"question": "?", "ground_truth": "1"}])
    workload = Workload(
        agent_class=agent_class,
        env_class=SingleTurnEnvironment,
        env_args={"reward_fn": lambda task_info, action: 0.0},
        train_dataset=tasks,
    )
    check_agent(workload, tasks)


@pytest.mark.parametrize("sampling", [{"temprature": 1}, {"max_tokens": "5"}, None])
def test_sampling_of_an_agent_that_no_engine_knows_is_named(sampling: Any) -> None:
    with pytest.raises(AgentError, match=r"raised in Mine\.sampling: TypeError"):
        try_first(type("Mine", (GameAgent,), {"sampling": sampling}))


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        (property(lambda self: None), "returned None"),
        (lambda self: [], "write @property"),
        (property(lambda self: []), "is empty: update_from_env has to add a message"),
        (property(lambda self: ["hello"]), "holds 'hello'"),
        (property(lambda self: [{"content": "hello"}]), "write {'role'|write {\"role\""),
        (property(lambda self: [{"role": "user", "content": {"question": "?"}}]), "as a content"),
    ],
)
def test_messages_that_no_model_reads_are_named(messages: Any, named: str) -> None:
    with pytest.raises(AgentError, match=f"Mine.chat_completions.*({named})"):
        try_first(type("Mine", (GameAgent,), {"chat_completions": messages}))
