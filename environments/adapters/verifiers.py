"""PrimeIntellect's verifiers environments: the v1 API, which is the only one since release 0.4.

In verifiers an environment runs the whole episode and calls a model. Here the agent is that model: the
episode is a coroutine, which stands still at each model call until ``step`` brings the answer. Tasks, tool
servers, stop conditions, limits and rewards are verifiers' own.
"""

from __future__ import annotations

import asyncio
import functools
import json
from types import ModuleType
from typing import Any

from environments.adapters import foreign
from environments.adapters.verifiers_episode import AgentAsModel, ModelCall, check_limits, play
from environments.base import WorldEnvironment
from environments.data.datasets import Dataset
from environments.errors import AgentError, ConfigError, DatasetError, EnvironmentFailure, TroupeError

_OLD_API = (
    " This package seems to be written for the API before verifiers 0.4 (import verifiers as vf, and a "
    "function load_environment), which is gone: install a version of the package for verifiers.v1."
)


class VerifiersEnvironment(WorldEnvironment):
    """A task of a verifiers environment.

    ``config`` is verifiers' own environment configuration, as a dict or just a taskset's id:
    ``{"taskset": {"id": "gsm8k"}, "agent": {"max_turns": 4}}``. ``data`` is the task's data. Both are in
    the tasks that ``verifiers_tasks`` makes.

    An observation is the conversation to be answered, ``{"messages": [...], "tools": [...]}`` in OpenAI's
    shape, for ``MessagesAgent``; its ``"question"`` is the text that is new in it, for agents that read
    only this. An action is the answer: an assistant message, or its text.

    The reward comes with the last step: verifiers' own, for one seat, and its mean where the environment
    lets that seat play several times, as best-of-n does. The agent plays all seats, except those whose
    configuration names a ``client``, and is rewarded for the one that verifiers calls trainable. Where it
    would be several, as in a game against itself, ``reset`` raises a ConfigError: one side wins what the
    other loses, and a trajectory has one reward. Give the others a client; change seats from task to task.

    Runtimes are local subprocesses unless the configuration says otherwise. ``timeout_seconds`` limits the
    time between two model calls. Where there is an HTTP proxy, tool servers are only reached with
    ``NO_PROXY=127.0.0.1``.
    """

    remedy = "Take tasks that verifiers_tasks makes."

    def __init__(
        self, config: dict[str, Any] | str, data: dict[str, Any], timeout_seconds: float = 300.0
    ) -> None:
        self._world, task_class = _world(_canonical(config))
        self._task = _task(task_class, data, self._world.taskset.config.task)
        self._timeout_seconds = timeout_seconds
        self._runner = asyncio.Runner()
        self._model = AgentAsModel()
        self._episode: asyncio.Task[Any] | None = None
        self._call: ModelCall | None = None

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Begin the episode, up to its first model call."""
        if self._episode is not None:
            self._runner.run(self._stop())
        self._model = AgentAsModel()
        episode = play(self._world, self._task, self._model)
        self._episode = self._runner.get_loop().create_task(episode)
        observation, _, done, info = self._runner.run(self._next())
        if done:
            raise EnvironmentFailure(f"The verifiers episode ended before it called the model: {info}.")
        return observation, {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        """Answer the model call that the episode waits for. At the end, info holds each trace's scores."""
        if self._call is None:
            raise EnvironmentFailure("This verifiers episode is over or not begun: call reset() first.")
        message = {"role": "assistant", "content": action} if isinstance(action, str) else action
        if not isinstance(message, dict) or message.get("role") != "assistant":
            raise AgentError(f"The action {action!r} is neither a text nor an assistant message.")
        self._call.answer.set_result(message)
        self._call = None
        return self._runner.run(self._next())

    def close(self) -> None:
        """End the episode, its tool servers and its files."""
        try:
            if self._episode is not None:
                self._runner.run(self._stop())
        finally:
            self._runner.close()

    async def _next(self) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        """Let the episode go on until it calls the model or ends."""
        assert self._episode is not None
        calling = asyncio.create_task(self._model.calls.get())
        try:
            await asyncio.wait(
                {calling, self._episode}, timeout=self._timeout_seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if calling.done():
                self._call = calling.result()
                return _observation(self._call), 0.0, False, {}
            if self._episode.done():
                return _ending(_result(self._episode))
        finally:
            calling.cancel()
        raise EnvironmentFailure(
            f"The verifiers episode neither ended nor called the model in {self._timeout_seconds} seconds."
        )

    async def _stop(self) -> None:
        assert self._episode is not None
        episode, self._episode, self._call = self._episode, None, None
        if episode.cancel():  # it was not over
            await asyncio.wait({episode}, timeout=self._timeout_seconds)
            if not episode.done():
                raise EnvironmentFailure(f"The verifiers episode did not stop in {self._timeout_seconds} s.")
            failure = None if episode.cancelled() else episode.exception()
            if failure is not None:
                raise EnvironmentFailure(f"verifiers failed while it stopped: {failure}") from failure


def verifiers_tasks(config: dict[str, Any] | str, num_tasks: int | None = None) -> Dataset:
    """Return the tasks of a verifiers environment, all of them or the first ``num_tasks``.

    Raises:
        ConfigError: there is no such taskset, the configuration is invalid, or the taskset is infinite
            and ``num_tasks`` is not given.
    """
    world, _ = _world(_canonical(config))
    if num_tasks is None and not world.taskset.bounded:
        raise ConfigError(f"The taskset of {config!r} is infinite: say how many with num_tasks.")
    try:
        tasks = list(world.taskset if num_tasks is None else world.taskset.take(num_tasks))
    except Exception as error:
        raise ConfigError(f"verifiers cannot load the tasks of {config!r}: {_described(error)}") from error
    rows = []
    for task in tasks:
        data = task.data.model_dump(mode="json", exclude_none=True)
        rows.append({"question": task.data.prompt_text, "config": config, "data": data})
    return Dataset(rows, name=world.config.env_id)


def _observation(call: ModelCall) -> dict[str, Any]:
    messages = call.body["messages"]
    answered = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=-1)
    news = "\n\n".join(str(message["content"]) for message in messages[answered + 1 :])
    return {"messages": messages, "tools": call.body.get("tools", []), "question": news}


def _result(episode: asyncio.Task[Any]) -> Any:
    """The finished episode; an exception of the environment becomes an EnvironmentFailure."""
    try:
        return episode.result()
    except TroupeError:
        raise
    except Exception as error:
        raise EnvironmentFailure(f"The verifiers episode failed: {_described(error)}") from error


def _described(error: BaseException) -> str:
    """The exception, or the first of a group: seats that play side by side fail in one."""
    if isinstance(error, BaseExceptionGroup):
        return _described(error.exceptions[0])
    return f"{type(error).__name__}: {error}"


def _ending(episode: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
    played = [trace for trace in episode.traces if trace.agent.trainable]
    if not played:
        raise EnvironmentFailure("The verifiers episode ended without a trainable trace.")
    for trace in played:
        if not trace.ok:
            error = trace.last_error
            reason = f": {error.type}: {error.message}" if error else "."
            raise EnvironmentFailure(f"verifiers failed{reason}")
    scores = [
        {
            "agent": trace.agent.name,
            "reward": float(trace.reward),
            "rewards": {name: float(reward.value) for name, reward in trace.rewards.items()},
            "metrics": dict(trace.metrics),
            "stop": trace.stop_condition,
        }
        for trace in played
    ]
    return {}, sum(float(trace.reward) for trace in played) / len(played), True, {"traces": scores}


def _task(task_class: Any, data: dict[str, Any], config: Any) -> Any:
    try:
        return task_class(task_class.data_type().model_validate(data), config)
    except ValueError as error:
        raise DatasetError(f"The task's data are none of a {task_class.__name__}: {error}") from error


def _canonical(config: dict[str, Any] | str) -> str:
    return json.dumps({"taskset": {"id": config}} if isinstance(config, str) else config, sort_keys=True)


@functools.lru_cache(maxsize=16)
def _world(config: str) -> tuple[Any, Any]:
    """The environment of verifiers and the class of its tasks, loaded once per process."""
    vf = foreign("verifiers.v1", "verifiers")
    agents = foreign("verifiers.v1.configs.agent", "verifiers")
    try:
        settings = vf.resolve_env_config(json.loads(config))
        # verifiers' defaults are a sandbox that its makers host, and a harness that runs shell commands.
        chat = vf.harness_config_type("null")(id="null")
        ours = {}
        for name, seat in agents.agent_config_fields(settings).items():
            update = {} if "runtime" in seat.model_fields_set else {"runtime": vf.SubprocessConfig()}
            if seat.client is None or seat.harness is None:
                update["harness"] = chat
            ours[name] = seat.model_copy(update=update)
        world = vf.load_environment(settings.model_copy(update=ours))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        hint = _OLD_API if _is_of_old_api(error) else ""
        raise ConfigError(f"verifiers cannot load the environment {config}: {error}{hint}") from error
    check_limits(world.config)
    return world, type(world.taskset).task_type()


def _is_of_old_api(error: BaseException | None) -> bool:
    """Return whether a package looks for something in ``verifiers`` itself, or exports nothing to its
    loader."""
    match error:
        case None:
            return False
        case AttributeError(obj=ModuleType(__name__="verifiers")):
            return True
        case ImportError(name=str(name)) if name.partition(".")[0] == "verifiers":
            return True
    return "defines no `__all__`" in str(error) or _is_of_old_api(error.__cause__)
