"""Trajectories as JSON: what runs and evaluations write, and read again without running any code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from environments.columns import unpacked
from environments.messages import Conversation, Json, MessageTable, plain_json
from environments.prefix_tree import PrefixTree
from environments.steps import Completion, Step
from environments.turns import encoded, names_of, steps_of
from environments.types import TerminationReason, Trajectory

_LATER_FIELDS = {"metrics", "is_correct", "by_reward_function", "forked_from", "num_shared_turns"}
"""Fields that files of earlier versions do not have."""
_TRAJECTORY_FIELDS = {*names_of(Trajectory)} - _LATER_FIELDS
_PACKED_FIELDS = {"prompt_ids", "completion_ids", "logprobs", "token_versions"}
"""Fields of a completion that are ``packed``; files of the earliest versions have lists there."""


def trajectory_line(trajectory: Trajectory, before: Json) -> bytes:
    """A line of ``before`` and the trajectory, whose turns are as ``Turns`` has them.

    What was sampled, judged and is learned from comes back as it was. In the task, and in what agent and
    environment put into the steps, a value that JSON does not know becomes its text.
    """
    own = (field.name for field in fields(trajectory) if field.name != "steps")
    begun = encoded(before | {name: plain_json(getattr(trajectory, name)) for name in own})
    return b'%s,"steps":%s}\n' % (begun[:-1], trajectory.columns.json())


def trajectory_from_json(values: Json) -> Trajectory:
    """The trajectory of a line that ``trajectory_line`` wrote, or an earlier version of it.

    Raises:
        LookupError, TypeError or ValueError: ``values`` are of something else.
    """
    known = {name: values[name] for name in _TRAJECTORY_FIELDS}
    known |= {name: values[name] for name in _LATER_FIELDS if name in values}
    steps = values["steps"]
    known["steps"] = steps_of(steps) if isinstance(steps, dict) else _steps_turn_by_turn(steps)
    if known["termination_reason"] is not None:
        known["termination_reason"] = TerminationReason(known["termination_reason"])
    return Trajectory(**known)


def _steps_turn_by_turn(read: Sequence[Json]) -> list[Step]:
    """The steps as earlier versions wrote them, with what each repeats of an earlier one."""
    no_messages, no_ids = MessageTable().root, PrefixTree().root
    conversations: list[Conversation] = []
    completions: list[Completion | None] = []
    steps: list[Step] = []
    for index, values in enumerate(read):
        known = {name: values[name] for name in names_of(Step)}  # a subclass may have written more
        num_messages, num_ids = values.get("num_repeated", (0, 0))
        of_messages, of_ids = values.get("repeats", (index - 1, index - 1))
        before = conversations[of_messages].first(num_messages) if num_messages else no_messages
        conversations.append(before.extended(known.pop("chat_completions")))
        repeated = completions[of_ids] if num_ids else None
        beginning = no_ids if repeated is None else repeated.tokens.part(0, num_ids)
        written = known["completion"]
        completions.append(None if written is None else _completion(written).behind(beginning))
        steps.append(Step(**known).storing(conversations[-1], completions[-1]))
    return steps


def _completion(values: Json) -> Completion:
    known: Json = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    known |= {name: unpacked(known[name]) for name in _PACKED_FIELDS if isinstance(known.get(name), str)}
    return Completion(**known)
