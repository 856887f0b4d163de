"""Checks the return values of ``reset``, ``step`` and the other methods, for rollouts and ``check``.

A fault breaks a rollout or falsifies its reward; a doubtful value works, but may surprise.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import textwrap
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any

from environments.messages import is_part, plain_json
from environments.rewards.base import MAX_REWARD, is_bool, is_number, is_reward

IS_ASYNC = (
    "is async, but it is called without await: write def instead of async def, and asyncio.run(...) around "
    "each await."
)
MESSAGE = '{"role": "user", "content": text}'
MAPPING, CONTENT = (dict, Mapping), (str, list, type(None))  # all messages are checked before every turn


def reset_faults(result: Any, method: str = "reset()") -> list[str]:
    """The faults of the return value of ``reset`` or ``follow_up``, which has to be (observation, info)."""
    if not isinstance(result, tuple) or len(result) != 2:
        return other_faults(method, result, "write return observation, info (info may be {})")
    return _info_faults(method, result[1])


def step_faults(result: Any) -> list[str]:
    """The faults of the return value of ``step``, which has to be (observation, reward, done, info).

    The reward may be any real number up to ``MAX_REWARD``, a bool or one of numpy's too; done an integer or
    numpy's bool.
    """
    if isinstance(result, tuple) and len(result) == 5:
        return [
            "step() returned 5 values, as Gymnasium's do: write "
            "return observation, reward, terminated or truncated, info."
        ]
    if not isinstance(result, tuple) or len(result) != 4:
        return other_faults("step()", result, "write return observation, reward, done, info")
    _, reward, done, info = result
    faults = _info_faults("step()", info)
    faults += _reward_faults("step()", reward)
    if not isinstance(done, Integral) and not is_bool(done):
        faults.append(
            f"step() returned {kind_of(done)} as done, its third value: it has to be True or False."
        )
    return faults


def final_reward_faults(reward: Any) -> list[str]:
    """The faults of the return value of ``compute_final_reward``, which has to be a reward or None."""
    method = "compute_final_reward()"
    return async_faults(method, reward) or ([] if reward is None else _reward_faults(method, reward))


def is_correct_faults(is_correct: Any) -> list[str]:
    """The faults of the return value of ``is_correct``, which has to be true, false (numpy's too) or None."""
    if is_correct is None or is_bool(is_correct):
        return []
    return other_faults("is_correct()", is_correct, "it has to be True, False or None")


def metrics_faults(metrics: Any) -> list[str]:
    """The faults of the return value of ``compute_metrics``, which has to hold finite numbers by name."""
    method = "compute_metrics()"
    if not isinstance(metrics, Mapping):
        return other_faults(method, metrics, "it has to be a dict of numbers by name")
    faults = []
    for name, value in metrics.items():
        if not (isinstance(name, str) and re.fullmatch(r"\w+", name)):
            faults.append(f"{method} names a metric {name!r}: use letters, digits and underscores.")
        if not isinstance(value, Real) or not math.isfinite(value):
            faults.append(
                f"{method} returned {kind_of(value)} as {name!r}: it has to be a finite number. Leave it out "
                "where it does not apply."
            )
    return faults


def other_faults(method: str, result: Any, right: str) -> list[str]:
    """The fault of a return value of another kind than the ``right`` one."""
    return async_faults(method, result) or [f"{method} returned {kind_of(result)}: {right}."]


def async_faults(method: str, result: Any) -> list[str]:
    """Return whether ``method`` was written with ``async def``, so that calling it has done nothing yet."""
    if not inspect.iscoroutine(result):
        return []
    result.close()  # else Python warns that it was never awaited
    return [f"{method} {IS_ASYNC}"]


def messages_faults(messages: Any) -> list[str]:
    """The faults of an agent's ``chat_completions``, which have to be at least one chat message."""
    if inspect.ismethod(messages):
        return ["chat_completions is a method: write @property above its def."]
    if not isinstance(messages, list | tuple):
        return other_faults("chat_completions", messages, "it has to be a list of messages")
    if not messages:
        return ["chat_completions is empty: update_from_env has to add a message for the model to answer."]
    for message in messages:
        if not isinstance(message, MAPPING) or not isinstance(message.get("role"), str):
            return [f"chat_completions holds {kind_of(message)}: write {MESSAGE}."]
        content, is_needed = message.get("content"), message["role"] != "assistant"  # which may call tools
        if not isinstance(content, CONTENT) or (content is None and is_needed):
            return [f"chat_completions holds {kind_of(content)} as a content: write {MESSAGE}."]
    return []


def _reward_faults(method: str, reward: Any) -> list[str]:
    if not is_number(reward):
        return [f"{method} returned {kind_of(reward)} as reward: it has to be a number."]
    if not is_reward(reward):
        return [
            f"{method} returned the reward {reward}: it has to be finite, and at most {MAX_REWARD:g} above "
            "or below 0, or it spoils its whole group."
        ]
    return []


def _info_faults(method: str, info: Any) -> list[str]:
    if isinstance(info, dict):
        return []
    return [f"{method} returned {kind_of(info)} as info: it has to be a dict."]


def opening_doubts(observation: Any) -> list[str]:
    """The doubts about the first observation, which is the first message of the conversation."""
    if observation is None or (isinstance(observation, str | dict) and not observation):
        return ["reset() returned an empty observation: the model is asked nothing."]
    return observation_doubts("reset()", observation)


def observation_doubts(method: str, observation: Any) -> list[str]:
    """Return whether it keeps to the convention of ``BaseEnv``, though an agent of one's own may know
    another."""
    match observation:
        case None | {"question": str()}:
            return []
        case _ if _is_content(observation):
            return []
        case {"tool_outputs": dict(outputs)} if all(map(_is_content, outputs.values())):
            return []
        case dict() if not observation:
            return []
    # Numbers alike: a report has each sentence once.
    kind = "a number" if type(observation) in (int, float) else kind_of(observation)
    return [
        f"{method} returned {kind} as observation. The agents of policies.agents read a "
        'text, parts of a message, {"question": text} or {"tool_outputs": {call_id: text}}: return one of '
        "these, unless your own agent reads yours."
    ]


def _is_content(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and bool(value) and all(map(is_part, value)))


def json_doubts(method: str, observation: Any, info: dict[str, Any]) -> list[str]:
    """Return whether observation and info can be kept in a file of trajectories."""
    doubts = []
    for name, value in {"observation": observation, "info": info}.items():
        try:
            json.dumps(value, default=_number)
        except (TypeError, ValueError) as error:
            doubts.append(f"{method} returned an {name} that cannot be saved as JSON: {error}.")
    return doubts


def _number(value: Any) -> Any:
    plain = plain_json(value)
    if isinstance(plain, str):
        raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
    return plain


def kind_of(value: Any) -> str:
    """A description of a wrong value, for a message."""
    if isinstance(value, tuple):
        return f"{len(value)} values"
    if isinstance(value, dict):
        return f"a dict with the keys {list(value)}"
    if value is None or isinstance(value, str | int | float):
        return short(repr(value))
    return f"an object of type {type(value).__qualname__}"


def short(text: str) -> str:
    """Return at most 200 characters of a text, on one line."""
    return textwrap.shorten(text, 200, placeholder=" ...")


def comparable(value: Any) -> str:
    """A text that is the same for equal values, and for objects of unknown content if their types are."""
    try:
        return json.dumps(value, default=lambda other: type(other).__qualname__)
    except (TypeError, ValueError):
        return type(value).__qualname__
