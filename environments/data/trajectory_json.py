"""Trajectories as JSON: what runs and evaluations write, and read again without running any code.

A later turn repeats the conversation before it. That is left out before anything is converted, so the time
that a line takes and its length grow with the conversation, and not with its square. It comes back shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from environments.columns import packed, stored, unpacked
from environments.messages import PLAIN_TYPES, Conversation, MessageTable
from environments.prefix_tree import PrefixTree, Repeats
from environments.types import Completion, Step, TerminationReason, Trajectory, share

Json = dict[str, Any]

_LATER_FIELDS = {"metrics", "is_correct", "by_reward_function", "forked_from", "num_shared_turns"}
"""Fields that files of earlier versions do not have."""
_TRAJECTORY_FIELDS = {field.name for field in fields(Trajectory)} - _LATER_FIELDS
_STEP_FIELDS = {field.name for field in fields(Step)}
_NAMES = {each: tuple(field.name for field in fields(each)) for each in (Trajectory, Step, Completion)}
_PACKED_FIELDS = {"prompt_ids", "completion_ids", "logprobs", "token_versions"}
"""Fields of a completion that are ``packed``; files of earlier versions have lists there."""


def trajectory_to_json(trajectory: Trajectory) -> Json:
    """``trajectory`` for ``json.dumps``, without what a step repeats of an earlier one.

    ``num_repeated`` of a step says how many messages and prompt ids those are, and ``repeats`` of which
    steps, where that is not the one before. What was sampled, judged and is learned from comes back as it
    was. In the task, and in what agent and environment put into the steps, a value that JSON does not know
    becomes its text.
    """
    conversations, tokens = Repeats(), Repeats()
    steps: list[Json] = []
    for index, step in enumerate(share(trajectory.steps)):
        conversation, completion = step.conversation, step.completion
        assert conversation is not None  # since the steps are shared
        repeated = [conversations.longest(conversation.span), (index - 1, 0)]
        conversations.add(index, conversation.span)
        own: Json = {"chat_completions": conversation.after(repeated[0][1]), "completion": None}
        if completion is not None:
            repeated[1] = tokens.longest(completion.tokens.part(0, completion.prompt_size))
            tokens.add(index, completion.tokens)
        values = plain_json(_values(step, own))
        if completion is not None:
            values["completion"] = _completion_to_json(completion, repeated[1][1])
        values["num_repeated"] = [num for _, num in repeated]
        origins = [origin if num else index - 1 for origin, num in repeated]
        if origins != [index - 1] * 2:
            values["repeats"] = origins
        steps.append(values)
    json: Json = plain_json(_values(trajectory, {"steps": None}))
    return json | {"steps": steps}


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


def _values(value: Trajectory | Step | Completion, own: Json) -> Json:
    """The fields of ``value``, of which those in ``own`` are not read."""
    names = _NAMES.get(type(value)) or tuple(field.name for field in fields(value))
    return {name: own[name] if name in own else getattr(value, name) for name in names}


def _completion_to_json(completion: Completion, num_repeated: int) -> Json:
    tokens, prompt_size = completion.tokens, completion.prompt_size
    own: Json = {
        "prompt_ids": packed(tokens.part(num_repeated, prompt_size).read()),
        "completion_ids": packed(tokens.part(prompt_size, tokens.stop).read()),
        "logprobs": packed(stored(completion, "logprobs")),
        "token_versions": packed(stored(completion, "token_versions")),
        "tool_calls": plain_json(completion.tool_calls),
    }
    return _values(completion, own)


def _steps(read: Sequence[Json]) -> list[Step]:
    """The steps, with what each repeats of an earlier one."""
    no_messages, no_ids = MessageTable().root, PrefixTree().root
    conversations: list[Conversation] = []
    completions: list[Completion | None] = []
    steps: list[Step] = []
    for index, values in enumerate(read):
        known = {name: values[name] for name in _STEP_FIELDS}  # a subclass may have written more
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


def plain_json(value: Any) -> Any:
    """The value as it will be read again: a value or key that JSON does not know becomes its text."""
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        if PLAIN_TYPES.issuperset(map(type, value)):  # ids and log-probabilities: most of what there is
            return list(value)
        return [plain_json(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
