"""Trajectories as JSON: what runs and evaluations write, and read again without running any code.

A later turn repeats the conversation before it. That is left out before anything is converted, so the time
that a line takes and its length grow with the conversation, and not with its square.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from environments.types import Completion, Step, TerminationReason, Trajectory

Json = dict[str, Any]

_LATER_FIELDS = {"metrics", "is_correct", "by_reward_function"}
"""Fields that files of earlier versions do not have."""
_TRAJECTORY_FIELDS = {field.name for field in fields(Trajectory)} - _LATER_FIELDS
_STEP_FIELDS = {field.name for field in fields(Step)}
_PLAIN_TYPES = {str, int, float, bool, type(None)}


def trajectory_to_json(trajectory: Trajectory) -> Json:
    """``trajectory`` for ``json.dumps``, without what a step repeats of the step before it.

    ``num_repeated`` of a step says how many messages and prompt ids those are. What was sampled, judged and
    is learned from comes back as it was. In the task, and in what agent and environment put into the steps,
    a value that JSON does not know becomes its text.
    """
    steps: list[Json] = []
    messages: Sequence[object] = ()
    ids: tuple[int, ...] = ()
    for step in trajectory.steps:
        values, completion = _values(step), step.completion
        prompt_ids = () if completion is None else completion.prompt_ids
        num_messages, num_ids = (
            num_repeated(messages, step.chat_completions),
            _num_repeated_ids(ids, prompt_ids),
        )
        values["num_repeated"] = [num_messages, num_ids]
        values["chat_completions"] = step.chat_completions[num_messages:]
        if completion is not None:
            values["completion"] = {**_values(completion), "prompt_ids": prompt_ids[num_ids:]}
        messages, ids = (
            step.chat_completions,
            () if completion is None else prompt_ids + completion.completion_ids,
        )
        steps.append(values)
    json: Json = plain_json({**_values(trajectory), "steps": steps})
    return json


def trajectory_from_json(values: Json) -> Trajectory:
    """The trajectory that ``trajectory_to_json`` wrote, or an earlier version of it, which left nothing out.

    Raises:
        LookupError, TypeError or ValueError: ``values`` are of something else.
    """
    known = {name: values[name] for name in _TRAJECTORY_FIELDS}
    known |= {name: values[name] for name in _LATER_FIELDS if name in values}
    known["steps"] = _steps(values["steps"])
    if known["termination_reason"] is not None:
        known["termination_reason"] = TerminationReason(known["termination_reason"])
    return Trajectory(**known)


def num_repeated(before: Sequence[object], now: Sequence[object]) -> int:
    """Number of messages at the start of ``now`` that are those of ``before``."""
    for number, (one, other) in enumerate(zip(before, now, strict=False)):
        if not _is_same(one, other):
            return number
    return min(len(before), len(now))


def _is_same(one: object, other: object) -> bool:
    """Return whether both become the same JSON. A value of a type that JSON does not know is the same as
    none."""
    if type(one) is not type(other):
        return False
    if type(one) in _PLAIN_TYPES:
        return one == other
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(map(_is_same, one.values(), other.values()))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    return False


def _num_repeated_ids(before: tuple[int, ...], now: tuple[int, ...]) -> int:
    """Number of ids at the start of ``now`` that are those of ``before``."""
    if before == now[: len(before)]:
        return len(before)
    low, high = 0, min(len(before), len(now))
    while low < high:  # by halves: slices are compared a hundred times faster than one id after the other
        middle = (low + high + 1) // 2
        if before[low:middle] == now[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _values(value: Trajectory | Step | Completion) -> Json:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _steps(read: Sequence[Json]) -> list[Step]:
    """The steps, with what each repeats of the one before it."""
    steps: list[Step] = []
    messages: list[Any] = []
    ids: tuple[int, ...] = ()
    for values in read:
        known = {name: values[name] for name in _STEP_FIELDS}  # a subclass may have written more
        num_messages, num_ids = values.get("num_repeated", (0, 0))
        known["chat_completions"] = messages = messages[:num_messages] + known["chat_completions"]
        completion = None if known["completion"] is None else _completion(known["completion"], ids[:num_ids])
        known["completion"] = completion
        ids = () if completion is None else completion.prompt_ids + completion.completion_ids
        steps.append(Step(**known))
    return steps


def _completion(values: Json, repeated_ids: tuple[int, ...]) -> Completion:
    known: Json = {
        name: tuple(value) if isinstance(value, list) else value for name, value in dict(values).items()
    }
    return Completion(**known | {"prompt_ids": repeated_ids + known["prompt_ids"]})


def plain_json(value: Any) -> Any:
    """The value as it will be read again: a value or key that JSON does not know becomes its text."""
    if type(value) in _PLAIN_TYPES:
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        if _PLAIN_TYPES.issuperset(map(type, value)):  # ids and log-probabilities: most of what there is
            return list(value)
        return [plain_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
