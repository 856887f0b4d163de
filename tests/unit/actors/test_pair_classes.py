"""Classes of a user that rollouts cannot call are named before anything starts."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any

import pydantic
import pytest

from actors.gateway.function import pair_of
from actors.rollouts.env_calls import check_sent
from environments import Dataset, SingleTurnEnvironment
from environments.errors import AgentError, ConfigError
from launch.validation.trial import check_agent
from launch.workload import Workload
from policies import BaseAgent, GameAgent


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


def given(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator as those of settings and locks: it passes one argument more."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, None, *args, **kwargs)

    return wrapper


class Given(GameAgent):
    @given
    def __init__(self, lock: None, colour: int = 1) -> None:
        super().__init__()

    @given
    def reset(self, lock: None) -> None:
        super().reset()

    @given
    def update_from_model(self, lock: None, response: str, **kwargs: Any) -> Any:
        return super().update_from_model(response, **kwargs)


@functools.wraps(GameAgent, updated=())
class Wrapped(Given):
    """A class whose decorator shows the head of another one."""


class OfAliases(pydantic.BaseModel, BaseAgent):
    model_config = pydantic.ConfigDict(populate_by_name=True)
    colour: int = pydantic.Field(1, alias="hue")

    reset = update_from_env = update_from_model = lambda self, *args, **kwargs: None


class OfC(dict[str, Any], GameAgent):
    """Python does not know which arguments a dict takes."""


@BaseAgent.register
class Passing:
    """It has no method of its own."""

    def __init__(self, **given: Any) -> None:
        self._agent = GameAgent()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)


class GivenEnv(SingleTurnEnvironment):
    @given
    def step(self, lock: None, action: Any) -> Any:
        return super().step(action)


class MadeByC(SingleTurnEnvironment):
    from_dict = staticmethod(type)


@pytest.mark.parametrize("agent_class", [Given, Wrapped, OfAliases, OfC, Passing])
@pytest.mark.parametrize("env_class", [GivenEnv, MadeByC])
def test_head_that_is_not_known_is_no_fault(agent_class: Any, env_class: Any) -> None:
    pair = pair_of(agent_class, env_class, None, {"colour": 2}, {})
    assert isinstance(pair.make_agent(), BaseAgent)


def test_arguments_that_an_agent_does_not_take_are_named() -> None:
    with pytest.raises(ConfigError, match=r"agent_args=\['colour'\].*GameAgent.__init__"):
        pair_of(GameAgent, SingleTurnEnvironment, None, {"colour": 1}, {})


def try_first(agent_class: Any, **more: Any) -> None:
    tasks = Dataset([{"question": "?", "ground_truth": "1", **more}])
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
        (property(lambda self: [{"role": "user"}]), "holds None as a content"),
    ],
)
def test_messages_that_no_model_reads_are_named(messages: Any, named: str) -> None:
    with pytest.raises(AgentError, match=f"Mine.chat_completions.*({named})"):
        try_first(type("Mine", (GameAgent,), {"chat_completions": messages}))


def test_what_no_process_can_be_sent_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^task=.*lock.* cannot be sent to a rollout actor"):
        try_first(GameAgent, lock=threading.Lock())
    for client in (threading.Lock(), ctypes.pointer(ctypes.c_int())):
        with pytest.raises(ConfigError, match=r"^env_args\['client'\]=.* cannot be sent"):
            check_sent({}, {"client": client})
