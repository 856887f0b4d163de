"""An environment in which the model may call tools before it answers."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping, Sequence
from typing import Any

from environments.base import Task, TaskEnvironment, required_reward_fn
from environments.errors import AgentError, ConfigError
from environments.rewards.base import UNJUDGED, RewardFunction, RewardOutput, judge
from environments.tools import NamedToolSource, ToolCall, ToolOutput, ToolSource, make_tools
from environments.tools.base import INVALID_TOOL_CALL
from environments.tools.mcp.tool import MCPServer

FINISH = "finish"
"""Name of the tool call that holds the answer, as ``{"response": text}``."""

_OPENS_MARK = re.compile(r"<|\[(?=/?think\])", re.IGNORECASE)
"""The beginnings of marks of thoughts, as which no part of a page may be taken by a judge."""

Read = ToolCall | ToolOutput
"""A call, or the error that answers it because it cannot be read."""


class ToolEnvironment(TaskEnvironment):
    """Runs tool calls until the model answers; then ``reward_fn`` judges the answer.

    An action is an answer (a text, or a ``finish`` call) or tool calls in the OpenAI shape. A call that
    cannot be run is answered by ``"Error: ..."`` under its id. If the action of step ``max_steps`` is still
    no answer, the episode ends with reward 0. Its calls are not run, since the model would never read the
    results, and they are not judged, since they are no answer.

    ``step_reward_fn``, a function or a judge, rewards each step whose calls were run. Its action is the steps
    of the episode so far as JSON, a list of ``{"calls": ..., "outputs": ...}``, of which the last one is
    judged; with ``algorithm.credit=per_step`` each step learns from what came from it on. Let ``reward_fn``
    say ``is_correct`` then: else a step's reward alone makes a success. Process rewards: Lightman et al.
    2023, "Let's Verify Step by Step".

    Metrics: ``called`` is 1 if any tool was run, else 0. ``success_when_called`` is there only where one was:
    1 if the episode's answer is a success by the reward function: ``is_correct``, else a reward above 0.
    """

    def __init__(
        self,
        task: Task | None = None,
        tools: Sequence[ToolSource] | None = None,
        tool_map: Mapping[str, NamedToolSource] | None = None,
        reward_fn: RewardFunction | None = None,
        max_steps: int = 10,
        step_reward_fn: RewardFunction | None = None,
    ) -> None:
        if max_steps < 1:
            raise ConfigError(f"max_steps={max_steps} leaves no step for an answer: use 1 and above.")
        self.task = {} if task is None else task
        self.tools = make_tools(tools, tool_map)
        for name in (FINISH, INVALID_TOOL_CALL):
            if name in self.tools:
                raise ConfigError(f"A tool is called {name!r}, as one of ToolEnvironment's own: rename it.")
        self.reward_fn = required_reward_fn(reward_fn, self)
        self.max_steps = max_steps
        self.step_reward_fn = step_reward_fn
        self._count_from_zero()

    def reset(self) -> tuple[Task, dict[str, Any]]:
        self._count_from_zero()
        return self.task, {}

    def follow_up(self, message: str) -> tuple[str, dict[str, Any]]:
        """Go on with the same tools, and as many steps as after a reset.

        The first task's reward function judges all answers.
        """
        self._count_from_zero()
        return message, {}

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        """Judge an answer, or run the calls one after another and return their outputs by call id.

        Info holds the action or the answer as ``response`` and the reward function's ``metadata``. If a
        ``finish`` call comes together with other calls, the answer counts and the others are not run.

        Raises:
            AgentError: the action is neither a text nor calls.
        """
        self.step_count += 1
        answer = answer_of(action)
        if answer is not None:
            verdict = judge(self.reward_fn, self.task, answer)
            self._reward_output = verdict
            return {}, verdict.reward, True, {"response": answer, "metadata": verdict.metadata}
        if self.step_count >= self.max_steps:
            metadata = {"error": f"No answer within max_steps={self.max_steps}."}
            return {}, 0.0, True, {"response": action, "metadata": metadata}
        outputs: dict[str, str] = {}
        for call_id, call in _calls(action):
            outputs[_free_id(call_id, outputs)] = self._run(call).to_string()
        verdict = self._step_verdict(action, outputs)
        info = {"response": action, "metadata": verdict.metadata}
        return {"tool_outputs": outputs}, verdict.reward, False, info

    def _step_verdict(self, action: Any, outputs: dict[str, str]) -> RewardOutput:
        if self.step_reward_fn is None:
            return RewardOutput(0.0)
        self._steps.append({"calls": action, "outputs": outputs})
        text = _OPENS_MARK.sub(lambda sign: f"\\u{ord(sign[0]):04x}", json.dumps(self._steps))
        return judge(self.step_reward_fn, self.task, text)

    def compute_metrics(self) -> dict[str, float]:
        if not self._called or self._reward_output is UNJUDGED:
            return {"called": float(self._called)}
        is_success = self._reward_output is not None and self._reward_output.is_success
        return {"called": 1.0, "success_when_called": float(is_success)}

    def _count_from_zero(self) -> None:
        self.step_count = 0
        self._called = False
        self._reward_output = None
        self._steps: list[dict[str, Any]] = []

    def _run(self, call: Read) -> ToolOutput:
        if isinstance(call, ToolOutput):
            return call
        if call.name == FINISH:
            return ToolOutput(FINISH, error=f'{FINISH} needs the argument "response".')
        if call.name not in self.tools:
            known = ", ".join(self.tools) or "none"
            return ToolOutput(call.name, error=f"unknown tool {call.name!r}, known: {known}.")
        self._called = True
        return self.tools[call.name](**call.arguments)


def _calls(action: Any) -> list[tuple[str, Read]]:
    """Return the calls with their ids."""
    calls = [action] if isinstance(action, dict) else action
    if not isinstance(calls, list) or not calls:
        raise AgentError(f"ToolEnvironment got the action {action!r}: pass a text, or a list of tool calls.")
    return [(_call_id(call), read_call(call)) for call in calls]


def _call_id(call: Any) -> str:
    return str(call.get("id") or "call") if isinstance(call, dict) else "call"


def read_call(call: Any) -> Read:
    """Read a call in OpenAI's shape, or the error of one that no parser could read."""
    try:
        read = ToolCall.from_openai(call)
    except ValueError as error:
        return ToolOutput(INVALID_TOOL_CALL, error=str(error))
    if read.name == INVALID_TOOL_CALL:
        return ToolOutput(INVALID_TOOL_CALL, error=str(read.arguments.get("error", "invalid tool call.")))
    return read


def answer_of(action: Any) -> str | None:
    """The answer that an action is: a text, or that of a ``finish`` call; ``None`` for other calls.

    Raises:
        AgentError: the action is neither a text nor calls.
    """
    if isinstance(action, str):
        return action
    for _, call in _calls(action):
        if isinstance(call, ToolCall) and call.name == FINISH and "response" in call.arguments:
            response = call.arguments["response"]
            return response if isinstance(response, str) else json.dumps(response)
    return None


def _free_id(call_id: str, taken: Container[str]) -> str:
    """The call's id, or where it is used twice, one like it, so that no output is lost."""
    free_id, count = call_id, 1
    while free_id in taken:
        count += 1
        free_id = f"{call_id}-{count}"
    return free_id


class MCPEnvironment(ToolEnvironment):
    """``ToolEnvironment(tools=[MCPServer(command=..., args=..., env=...)])``, in the form of rLLM v0.1.

    The agent's side is ``ToolAgent`` with the same server in its ``tools``: both share one process of it.
    """

    def __init__(
        self,
        task: Task | None = None,
        mcp_server_command: str | None = None,
        mcp_server_args: Sequence[str] | None = None,
        mcp_server_env: Mapping[str, str] | None = None,
        reward_fn: RewardFunction | None = None,
        max_steps: int = 10,
    ) -> None:
        if mcp_server_command is None:
            raise ConfigError("MCPEnvironment has no mcp_server_command: pass what starts the server.")
        server = MCPServer(command=mcp_server_command, args=mcp_server_args or (), env=mcp_server_env or {})
        super().__init__(task=task, tools=[server], reward_fn=reward_fn, max_steps=max_steps)
