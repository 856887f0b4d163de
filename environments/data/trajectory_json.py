"""Trajectories as JSON: what runs and evaluations write, and read again without running any code.

A later turn repeats the conversation before it, and an answer stands in several fields of its turn. Both are
written once, and the turns as columns: a line takes as much time as what differs in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from itertools import accumulate, chain, pairwise
from operator import attrgetter
from typing import Any

from environments.columns import packed, stored_in_each, unpacked
from environments.messages import PLAIN_TYPES, TEXT, Conversation, MessageTable
from environments.prefix_tree import PrefixTree, Span
from environments.types import Completion, Step, TerminationReason, Trajectory, share

Json = dict[str, Any]


@cache
def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


_LATER_FIELDS = {"metrics", "is_correct", "by_reward_function", "forked_from", "num_shared_turns"}
"""Fields that files of earlier versions do not have."""
_TRAJECTORY_FIELDS = {*_names(Trajectory)} - _LATER_FIELDS
_STEP_FIELDS = _names(Step)
_JOINED = ("logprobs", "token_versions")
_PACKED_FIELDS = {"prompt_ids", "completion_ids", *_JOINED}
"""Fields of a completion that are ``packed``; files of earlier versions have lists there."""
_OWN_FORM = {"chat_completions", "completion", *_PACKED_FIELDS}
"""Fields of a turn and its completion that are no plain columns."""
_TEXTS = {"thought", "action", "observation", "model_response", "text"}
"""Fields that mostly hold what a message holds."""


def trajectory_to_json(trajectory: Trajectory) -> Json:
    """``trajectory`` for ``json.dumps``, without what repeats in it.

    ``steps`` holds the ``messages``, each once, the ``conversations`` as sequences of their numbers,
    ``completion`` with its ``tokens`` alike, and a column for every other field. In a column of texts the
    number of a message stands for its content, and another value in a list of its own. What was sampled,
    judged and is learned from comes back as it was. In the task, and in what agent and environment put into
    the steps, a value that JSON does not know becomes its text.
    """
    steps = share(trajectory.steps)
    shared = [conversation for step in steps if (conversation := step.conversation) is not None]
    assert len(shared) == len(steps)  # since the steps are shared
    conversations, numbers = _tree_to_json([each.span for each in shared])
    table = shared[0].table if shared else MessageTable()
    own = {number: index for index, number in enumerate(dict.fromkeys(numbers))}
    messages = plain_json(table.read(own))
    contents = {
        text: number
        for number, message in enumerate(messages)
        if type(message) is dict and type(text := message.get("content")) is str
    }
    names = dict.fromkeys(name for kind in (Step, *{*map(type, steps)}) for name in _names(kind))
    own_names = (field.name for field in fields(trajectory))
    json: Json = {name: plain_json(getattr(trajectory, name)) for name in own_names if name != "steps"}
    json["steps"] = {
        **_columns(steps, names, contents),  # first: a subclass of ``Step`` may have a field of such a name
        "messages": messages,
        "conversations": conversations | {"numbers": [*map(own.__getitem__, numbers)]},
        "completion": _completions_to_json([step.completion for step in steps], contents),
    }
    return json


def trajectory_from_json(values: Json) -> Trajectory:
    """The trajectory that ``trajectory_to_json`` wrote, or an earlier version of it.

    Raises:
        LookupError, TypeError or ValueError: ``values`` are of something else.
    """
    known = {name: values[name] for name in _TRAJECTORY_FIELDS}
    known |= {name: values[name] for name in _LATER_FIELDS if name in values}
    steps = values["steps"]
    known["steps"] = [*_steps(steps)] if isinstance(steps, dict) else _steps_turn_by_turn(steps)
    if known["termination_reason"] is not None:
        known["termination_reason"] = TerminationReason(known["termination_reason"])
    return Trajectory(**known)


def _columns(rows: Sequence[Step | Completion], names: Iterable[str], contents: Mapping[str, int]) -> Json:
    plain = [name for name in names if name not in _OWN_FORM]
    try:
        read = [*map(attrgetter(*plain), rows)]
    except AttributeError:  # steps of several classes
        read = [tuple(getattr(row, name, None) for name in plain) for row in rows]
    columns = [*zip(*read, strict=True)] or [()] * len(plain)
    return {
        name: _texts(column, contents) if name in _TEXTS else plain_json(column)
        for name, column in zip(plain, columns, strict=True)
    }


def _texts(values: Sequence[Any], contents: Mapping[str, int]) -> list[Any]:
    """The numbers of the messages whose contents they are; a value that is none's alone in a row."""
    if TEXT.issuperset(map(type, values)):
        return [*map(contents.get, values, zip(values, strict=True))]
    return [contents.get(each, [each]) if type(each) is str else [plain_json(each)] for each in values]


def _completions_to_json(of_steps: Sequence[Completion | None], contents: Mapping[str, int]) -> Json:
    completions = [each for each in of_steps if each is not None]
    answers = stored_in_each(completions, "completion_ids")
    tokens, ids = _tree_to_json(answers)
    return {
        "turns": [turn for turn, each in enumerate(of_steps) if each is not None],
        "tokens": tokens | {"numbers": packed(ids)},
        "prompt_sizes": [each.start for each in answers],
        **{name: _joined(stored_in_each(completions, name)) for name in _JOINED},
        **_columns(completions, _names(Completion), contents),
    }


def _tree_to_json(spans: Sequence[Span]) -> tuple[Json, array[int]]:
    """Return what describes a tree of these sequences alone, and its numbers."""
    parents, starts, parts, nodes = (spans[0].tree if spans else PrefixTree()).rows(spans)
    tree = {"parents": parents, "starts": starts, "sizes": [*map(len, parts)]}
    return tree | {"nodes": nodes, "stops": [each.stop for each in spans]}, array("i", b"".join(parts))


def _joined(arrays: Sequence[array[Any]]) -> Json:
    if len({each.typecode for each in arrays}) > 1:
        arrays = [array("d", each) for each in arrays]
    typecode = arrays[0].typecode if arrays else "f"
    return {"sizes": [*map(len, arrays)], "values": packed(array(typecode, b"".join(arrays)))}


def _steps(columns: Json) -> Iterator[Step]:
    messages, completion = columns["messages"], columns["completion"]
    described, table = columns["conversations"], MessageTable()
    tree = _tree(described, array("i", described["numbers"]))
    table.__setstate__((messages, tree))
    completions = dict(zip(completion["turns"], _completions(completion, messages), strict=True))
    rows = zip(_rows(columns, _STEP_FIELDS, messages), _spans(tree, described), strict=True)
    for turn, (values, span) in enumerate(rows):
        yield Step(**values).storing(Conversation(table, span), completions.get(turn))


def _completions(columns: Json, messages: Sequence[Any]) -> Iterator[Completion]:
    tree = columns["tokens"]
    spans = _spans(_tree(tree, unpacked(tree["numbers"])), tree)
    joined = [_parts(unpacked(columns[name]["values"]), columns[name]["sizes"]) for name in _JOINED]
    rows = _rows(columns, _names(Completion), messages)
    for span, size, values, *parts in zip(spans, columns["prompt_sizes"], rows, *joined, strict=True):
        ids = {"prompt_ids": span.part(0, size), "completion_ids": span.part(size, span.stop)}
        yield _completion(values | ids | dict(zip(_JOINED, parts, strict=True)))


def _rows(columns: Json, names: Iterable[str], messages: Sequence[Any]) -> Iterator[Json]:
    """The rows of the plain columns of these names."""
    plain = [name for name in names if name not in _OWN_FORM]
    read = [
        [messages[each]["content"] if type(each) is int else each[0] for each in columns[name]]
        if name in _TEXTS
        else columns[name]
        for name in plain
    ]
    return (dict(zip(plain, row, strict=True)) for row in zip(*read, strict=True))


def _tree(described: Json, numbers: array[int]) -> PrefixTree:
    return PrefixTree.of(described["parents"], described["starts"], _parts(numbers, described["sizes"]))


def _spans(tree: PrefixTree, described: Json) -> list[Span]:
    return [tree.span(*end) for end in zip(described["nodes"], described["stops"], strict=True)]


def _parts(values: array[Any], sizes: Sequence[int]) -> list[array[Any]]:
    if sum(sizes) != len(values):
        raise ValueError(f"{len(values)} numbers for parts of {sum(sizes)}")
    return [values[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]


def _steps_turn_by_turn(read: Sequence[Json]) -> list[Step]:
    """The steps as earlier versions wrote them, with what each repeats of an earlier one."""
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
    """The value as it will be read again: a value or key that JSON does not know becomes its text.

    It may share parts with ``value``.
    """
    kind = type(value)
    if kind in PLAIN_TYPES:
        return value
    if kind is dict and PLAIN_TYPES.issuperset(map(type, value.values())):
        return value.copy() if TEXT.issuperset(map(type, value)) else {str(key): value[key] for key in value}
    if kind in (list, tuple):
        return _plain_list(value)
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value if isinstance(value, bool | int | float | str) else str(value)


def _plain_list(values: Sequence[Any]) -> list[Any]:
    kinds = {*map(type, values)}
    if kinds == {tuple} and PLAIN_TYPES.issuperset(map(type, chain(*values))):
        return [*map(list, values)]
    if kinds == {dict} and TEXT.issuperset(map(type, chain(*values))):  # most messages
        kinds = {*map(type, chain.from_iterable(map(dict.values, values)))}
    return list(values) if kinds <= PLAIN_TYPES else [*map(plain_json, values)]
