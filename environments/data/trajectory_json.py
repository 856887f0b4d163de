"""Trajectories as JSON: what evaluations and checkpoints write, and read again without running any code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from environments.types import Completion, Step, TerminationReason, Trajectory

Json = dict[str, Any]

_TRAJECTORY_FIELDS = {field.name for field in fields(Trajectory)} - {"metrics"}
_STEP_FIELDS = {field.name for field in fields(Step)}


def trajectory_to_json(trajectory: Trajectory) -> Json:
    """``trajectory`` for ``json.dumps``.

    What was sampled, judged and is learned from comes back as it was. In the task, and in what agent and
    environment put into the steps, a value that JSON does not know becomes its text.
    """
    values: Json = plain_json(trajectory)
    return values


def trajectory_from_json(values: Json) -> Trajectory:
    """The trajectory that ``trajectory_to_json`` wrote.

    Raises:
        LookupError, TypeError or ValueError: ``values`` are of something else.
    """
    known = {name: values[name] for name in _TRAJECTORY_FIELDS}
    known["metrics"] = values.get("metrics", {})  # which files of earlier versions do not have
    known["steps"] = [_step(step) for step in values["steps"]]
    if known["termination_reason"] is not None:
        known["termination_reason"] = TerminationReason(known["termination_reason"])
    return Trajectory(**known)


def _step(values: Json) -> Step:
    known = {name: values[name] for name in _STEP_FIELDS}  # a subclass may have written more
    if known["completion"] is not None:
        known["completion"] = _completion(known["completion"])
    return Step(**known)


def _completion(values: Json) -> Completion:
    known: Json = {
        name: tuple(value) if isinstance(value, list) else value for name, value in dict(values).items()
    }
    return Completion(**known)


def plain_json(value: Any) -> Any:
    """The value as it will be read again: a value or key that JSON does not know becomes its text."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
