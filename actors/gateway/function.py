"""A rollout function as agent and environment: each of its calls of the policy is a turn.

The function runs in a thread of the rollout actor and calls the policy over HTTP, as it would any server.
So the engine plays it as it plays all others, with the same limits, retries and reasons of an end::

    function's thread             gateway's thread       main thread (run_rollout)
    POST /v1/chat/completions ->  call               ->  reset() or step() returns it: the next prompt
                                                         the policy is sampled
    the response              <-  its answer         <-  step(answer)
    return 1.0                                       ->  step() returns: done, with the reward

This module is imported in every rollout worker. It must stay light: no torch, no transformers, no Serve.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from operator import is_
from typing import Any

from actors.gateway.calls import PlayedCall, ProgramCalls, ProgramEnd, WaitingCall
from actors.gateway.client import Access, PolicyClient
from actors.gateway.entries import checked, signed
from actors.gateway.remote_program import RemoteProgram
from actors.rollouts.env_calls import check_agent_args, check_class
from actors.rollouts.rollout import CountsTokens, Pair
from environments.base import BaseEnv, Task, TaskEnvironment, check_env_args
from environments.errors import AgentError, ConfigError, EnvironmentFailure, PromptTooLongError
from environments.rewards.base import RewardOutput, is_number, is_reward, judge
from environments.thoughts import split_thought
from environments.types import Action, Completion, Message, Step, Trajectory
from policies.agents.base import BaseAgent
from policies.agents.parsers import ToolParser, get_tool_parser
from policies.gateway.answers import for_template, message_of
from policies.gateway.session import Json, PlacedCall, PolicyCall, Session
from policies.model_api.growing_text import before_stop

Reward = float | RewardOutput | Sequence[float | None]
RolloutFunction = Callable[[Task, PolicyClient], Reward | Awaitable[Reward]]
"""Solves a task with the policy that its client reaches, and returns the reward: of all, or of each call.

``None`` in the place of a call's reward leaves its answer out: nothing is learnt from it.
"""

MODULES = ("actors.gateway.server", "uvicorn.protocols.http.auto", "uvloop")
"""Modules that a process loads with its first rollout of a function."""
END_SECONDS = 30.0
"""Seconds that a function has to return its reward when a limit has ended its rollout."""


class FunctionAgent(BaseAgent):
    """Passes the calls of a rollout function on to the policy, and the answers back.

    Args:
        parser_name: how the model writes its tool calls, as for ``ToolAgent``.
    """

    wants_completion = True

    def __init__(self, parser_name: str | ToolParser | type[ToolParser] = "qwen") -> None:
        self.served_parser = get_tool_parser(parser_name).served_name
        self.reset()

    def reset(self) -> None:
        self._trajectory = Trajectory()
        self._call: Json = {"messages": [], "new": [], "tools": None, "sampling": {}, "place": {}}

    @property
    def chat_completions(self) -> list[Message]:
        return list(self._call["messages"])

    @property
    def tool_schemas(self) -> list[Json] | None:
        return self._call["tools"]

    @property
    def sampling(self) -> Json:
        return dict(self._call["sampling"])

    def update_from_env(self, observation: Any, reward: float, done: bool, info: Json, **kwargs: Any) -> None:
        self._call = observation or self._call
        for step, earned in zip(self.trajectory.steps, info.get("call_rewards", ()), strict=False):
            step.reward = earned or 0.0
            step.info |= {"left_out": True} if earned is None else {}
        unseen = info.get("unseen_calls", ())
        for number, step in enumerate(self.trajectory.steps):
            step.info.pop("unseen", None)  # its client may have come back
            step.info |= {"unseen": True} if number in unseen else {}

    def update_from_model(self, response: str, tool_calls: list[Json] | None = None, **kwargs: Any) -> Action:
        completion: Completion = kwargs["completion"]
        branch = self._call["place"]["branch"] or self._change(completion)
        num_read, num_sampled = completion.num_prompt_tokens, completion.num_completion_tokens
        action = {
            "text": response,
            "tool_calls": tool_calls or [],
            "finish_reason": completion.finish_reason,
            "usage": {
                "prompt_tokens": num_read,
                "completion_tokens": num_sampled,
                "total_tokens": num_read + num_sampled,
            },
            "policy_version": completion.policy_version,
            "branch": branch,
        }
        step = Step(
            chat_completions=[*self.chat_completions, {"role": "assistant", "content": response}],
            observation=self._call["new"],
            model_response=response,
            info={**self._call["place"], "branch": branch},
        )
        self.trajectory.steps.append(step)
        return Action(action=action)

    def _change(self, completion: Completion) -> str:
        """Reason for which a prompt does not begin with the tokens of the call that it goes on from."""
        follows = self._call["place"]["follows"]
        earlier = None if follows is None else self.trajectory.steps[follows].completion
        if earlier is None or completion.extends(earlier):
            return ""
        answers = [each["content"] for each in self._call["messages"] if each["role"] == "assistant"]
        changed = "thoughts" if any(split_thought(each)[0] for each in answers) else "answer"
        return f"{changed} changed by the template"


class FunctionEnv(TaskEnvironment, CountsTokens):
    """Runs a rollout function on a task, and makes its calls the turns of an episode.

    Args:
        rollout: the function.
        task: its first argument.
        parser_name: how the model writes its tool calls; ``FunctionAgent`` has the same.
        keeps_thoughts: False shows the policy its own answers without a thought, or a text beside a call,
            that the program has left out, as a policy in service is shown them; each of its calls is a
            sequence of its own then.
    """

    def __init__(
        self,
        rollout: RolloutFunction,
        task: Task,
        parser_name: str | ToolParser | type[ToolParser] = "qwen",
        keeps_thoughts: bool = True,
    ) -> None:
        self._rollout, self._task = rollout, task
        self._parser = get_tool_parser(parser_name)
        self._session, self._calls = Session(keeps_thoughts), ProgramCalls()
        self._program: Program | None = None
        self._waiting: WaitingCall | None = None
        self._end: ProgramEnd | None = None
        self._num_tool_calls = self._num_foreign = self._num_branches = 0
        self._name = ""
        """Name of the session, where that is not to be a new one."""
        self._recorded: PolicyCall | None = None
        """The last call that was recorded."""

    def reset(self) -> tuple[Any, Json]:
        self._program = Program(self._rollout, self._task, self._calls, self._name)
        try:
            observation, _, done, info = self._next()
        except KeyboardInterrupt as error:  # by which a rollout is interrupted at its time limit
            raise EnvironmentFailure(
                f"{_name(self._rollout)} has made no call of the policy within the time of the rollout."
            ) from error
        if done:
            raise AgentError(
                f"{_name(self._rollout)} has returned without a call of the policy, so there is nothing to "
                "learn from: let it call client.openai, or start a program with client.environment."
            )
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, Json]:
        assert self._waiting is not None
        call = self._waiting.call
        parser = self._parser.for_tools(call.tools) if call.tools else None
        text, stop = before_stop(action["text"], call.sampling.get("stop", ()))
        message = message_of(text, action["tool_calls"], parser, self._num_tool_calls)
        tool_calls = message.get("tool_calls", [])
        self._num_tool_calls += len(tool_calls)
        if call.takes_one_tool_call and tool_calls:
            message["tool_calls"] = tool_calls[:1]
        reason = action["finish_reason"]
        answer = {
            "id": str(self._session.num_calls),
            "message": message,
            "finish_reason": "tool_calls" if tool_calls and reason == "stop" else reason,
            "stop": stop,
            "usage": action["usage"],
            "policy_version": action["policy_version"],
        }
        self._num_branches += bool(action["branch"])
        self._session.answer(action["text"], for_template(message))
        self._waiting.answer.set_result(answer)
        self._waiting = None
        return self._next()

    def compute_final_reward(self) -> float | None:
        """Return the reward of a function that returns after a limit has ended its rollout."""
        if self._end is not None:  # its last step has the reward already
            return None
        self._refuse("a limit of the rollout has ended it")
        self._end = self._end or self._calls.wait_for_end(END_SECONDS)
        if self._end is None or self._end.error is not None:
            return None
        _, self._reward_output = self._judged(self._end.value)
        return self._reward_output.reward

    def compute_metrics(self) -> dict[str, float]:
        return {
            "policy_calls": float(self._session.num_calls),
            "branches": float(self._num_branches),
            "foreign_answers": float(self._num_foreign),
            "unseen_answers": float(len(self._calls.unseen())),
        }

    def close(self) -> None:
        self._refuse("the rollout has ended")
        if self._program is not None:
            self._program.end()

    def _next(self) -> tuple[Any, float, bool, Json]:
        """Wait for what the function does next: a call, or its end."""
        while isinstance(event := self._calls.next(), WaitingCall):
            placed = self._session.place(event.call)
            if not self._is_only_counted(event, placed):
                break
        assert self._program is not None
        if isinstance(event, WaitingCall):
            call = event.call
            self._waiting = event
            self._num_foreign += placed.num_foreign
            observation = {
                "messages": placed.messages,
                "new": placed.new,
                "tools": call.tools,
                "sampling": call.sampling,
                "place": {
                    "session": self._program.client.session,
                    "follows": placed.follows,
                    "branch": placed.branch,
                    "restored_answers": placed.num_restored,
                    "overruled": list(call.overruled),
                    "dropped": list(call.dropped),
                },
            }
            return observation, 0.0, False, self._unseen()
        self._end = event
        if isinstance(event.error, EnvironmentFailure | ConfigError):  # it names a fault around the program
            raise event.error
        if event.error is not None:
            name = _name(self._rollout)
            raise AgentError(f"The rollout function {name} raised {event.error!r}.") from event.error
        rewards, self._reward_output = self._judged(event.value)
        return {}, rewards[-1] or 0.0, True, {"call_rewards": rewards, **self._unseen()}

    def _is_only_counted(self, waiting: WaitingCall, placed: PlacedCall) -> bool:
        """Count the tokens of a call, where its program wants that, or shows new pictures: those that the
        policy does not read are an error of the call alone. Return whether it is answered so.
        """
        shows = any(isinstance(each.get("content"), list) for each in placed.new)
        if not waiting.is_count and not shows:
            return False
        self._waiting = waiting
        try:
            number = self.count_tokens(placed.messages, waiting.call.tools)
        except PromptTooLongError as error:
            if waiting.is_count:  # it is the program's to shorten
                waiting.answer.set_exception(error)
        except (AgentError, ConfigError) as error:
            if not shows:
                raise
            from policies.model_api.errors import InvalidRequestError  # it loads pydantic

            waiting.answer.set_exception(InvalidRequestError(str(error), param="messages"))
        else:
            if waiting.is_count:
                waiting.answer.set_result({"input_tokens": number})
        self._waiting = None
        return waiting.answer.done()

    def _unseen(self) -> Json:
        unseen = self._calls.unseen()
        return {"unseen_calls": unseen} if unseen else {}

    def _judged(self, value: Any) -> tuple[list[float | None], RewardOutput]:
        """The rewards of the calls, and the verdict on all of them."""
        num_calls = self._session.num_calls
        if is_number(value) or isinstance(value, RewardOutput):
            output = judge(lambda task_info, action: value, self._task, None)
            return [*[0.0] * (num_calls - 1), output.reward], output
        if isinstance(value, list | tuple) and all(each is None or is_reward(each) for each in value):
            if len(value) != num_calls:
                raise AgentError(
                    f"{_name(self._rollout)} returned {len(value)} rewards after {num_calls} calls of the "
                    "policy: return one for each, or one number."
                )
            earned = [None if each is None else float(each) for each in value]
            if earned.count(None) == num_calls:
                raise AgentError(f"{_name(self._rollout)} leaves all calls out: give one of them a reward.")
            total = math.fsum(filter(None, earned))
            return earned, judge(lambda task_info, action: total, self._task, None)
        raise AgentError(
            f"{_name(self._rollout)} returned {value!r}: return the reward: a finite number, a RewardOutput, "
            "a list with such a number for each call (None leaves its answer out), or LATER."
        )

    def _refuse(self, why: str) -> None:
        self._end = self._calls.refuse(why) or self._end
        if self._waiting is not None:
            if not self._waiting.answer.done():  # as it is where a time limit ends the rollout at its answer
                self._calls.fail(self._waiting)
            self._waiting = None


class RemoteEnv(FunctionEnv):
    """A rollout whose program lives on when this process dies: with another one that has its answers."""

    resumes_by = "answers"
    _rollout: RemoteProgram

    @property
    def goes_on(self) -> bool:
        """Return whether the program has begun its conversation in a rollout whose answers are gone."""
        return self._num_foreign > 0

    def snapshot(self) -> PlayedCall:
        """The call whose answer is there, and that has not been sent."""
        assert self._waiting is not None
        call, last = self._waiting.call, self._recorded
        num_repeated = 0 if last is None else sum(takewhile(bool, map(is_, call.messages, last.messages)))
        has_new_tools = last is None or call.tools != last.tools
        self._recorded = call
        new = replace(call, messages=call.messages[num_repeated:], tools=call.tools if has_new_tools else [])
        waiting, unseen = self._waiting, self._calls.unseen()
        return PlayedCall(new, num_repeated, has_new_tools, waiting.num_choices, waiting.name, unseen)

    def restore(self, snapshot: list[PlayedCall]) -> None:
        """Begin with the calls that were answered before."""
        self._recorded = self._calls.resume(snapshot)

    def kept(self, name: str, attempt: int) -> list[bytes]:
        """Begin an episode; return the entries that the session server has of it."""
        self._name, self._rollout = name, replace(self._rollout, attempt=attempt)
        if attempt > 1:
            self._calls.entries = self._rollout.entries(name)
        return checked(self._rollout.key, name, self._calls.entries)

    def keep(self, index: int, entry: bytes) -> None:
        """Have the gateway send an entry behind the next answer."""
        self._calls.entries.append(signed(self._rollout.key, self._name, index, entry))


class Program:
    """A rollout function on a task, in a thread of its own.

    Args:
        calls: takes what it asks the policy, and its end.
        name: of its session; empty for a new one.
    """

    def __init__(
        self,
        function: Callable[[Task, PolicyClient], Any],
        task: Task,
        calls: ProgramCalls,
        name: str,
    ) -> None:
        from actors.gateway.server import gateway  # it loads an HTTP server, which other pairs need not

        self._function, self._task, self._calls = function, task, calls
        self._gateway = served = gateway()
        self._key = self._gateway.open(calls)
        access = Access(
            url=self._gateway.url,
            key=self._key,
            open_to_others=lambda: served.remote_url,
            idle_seconds=calls.idle_seconds,
            session=name or secrets.token_urlsafe(12),
            serve=self._gateway.serve,
        )
        self.client = PolicyClient(access, is_async=_is_async(function))
        self._cancel: Callable[[], object] = lambda: None
        self._thread = threading.Thread(target=self._run, name="rollout function", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Close its session, end its programs, cancel it if it is a coroutine, and wait for its end."""
        self._gateway.close(self._key)
        self.client.close()
        with suppress(RuntimeError):  # its event loop has just ended
            self._cancel()
        self._thread.join()

    def _run(self) -> None:
        try:
            value = self._function(self._task, self.client)
            if inspect.isawaitable(value):
                value = asyncio.run(self._awaited(value))
        except BaseException as error:  # noqa: BLE001  # the environment raises it where it can be named
            self._calls.end(ProgramEnd(error=error))
        else:
            self._calls.end(ProgramEnd(value=value))

    async def _awaited(self, value: Awaitable[Any]) -> Any:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        try:
            return await value
        finally:
            await self.client.aclose()


def _is_async(function: Callable[..., object]) -> bool:
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _name(function: object) -> str:
    return getattr(function, "__name__", repr(function))


def pair_of(
    agent_class: type[BaseAgent] | None,
    env_class: type[BaseEnv] | None,
    rollout: RolloutFunction | None,
    agent_args: Mapping[str, Any],
    env_args: Mapping[str, Any],
) -> Pair:
    """The pair of two classes, or that of a rollout function, whose classes are those of this module.

    Raises:
        ConfigError: both are given, or neither, or the function does not take a task and a client; or
            rollouts cannot call one of the classes, or it does not take one of its arguments.
    """
    if rollout is None and agent_class is not None and env_class is not None:
        check_class("agent_class", agent_class, BaseAgent)
        check_class("env_class", env_class, BaseEnv)
        check_agent_args(agent_class, agent_args)
        check_env_args(env_class, env_args)
        return Pair(
            agent_class=agent_class, env_class=env_class, agent_args=dict(agent_args), env_args=dict(env_args)
        )
    if rollout is None or not (agent_class is None and env_class is None):
        given = {"agent_class": agent_class, "env_class": env_class, "rollout": rollout}
        shown = ", ".join(f"{name}={None if each is None else _name(each)}" for name, each in given.items())
        raise ConfigError(f"{shown}: give an agent_class and an env_class, or a rollout function alone.")
    _check_function(rollout)
    return Pair(
        agent_class=FunctionAgent,
        env_class=RemoteEnv if isinstance(rollout, RemoteProgram) else FunctionEnv,
        agent_args=dict(agent_args),
        env_args={**agent_args, **env_args, "rollout": rollout},
        more_modules=(*MODULES, rollout.__module__),
    )


def _check_function(function: Any) -> None:
    if not callable(function):
        raise ConfigError(f"rollout={function!r} is no function: write async def solve(task, client).")
    try:
        inspect.signature(function).bind({}, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"rollout={_name(function)} is called with a task and a client, and this does not fit ({error}): "
            "write async def solve(task, client)."
        ) from error
