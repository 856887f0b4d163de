"""The turns of a trajectory in columns: the form in which they travel, and in which they are written.

A later turn repeats the conversation before it, and an answer stands in several fields of its turn. Both are
there once. What is made of each turn is made where it was played: whoever passes the columns on, or writes
them down, copies bytes.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import accumulate, pairwise, starmap
from operator import attrgetter
from typing import Any

from environments.columns import narrow, packed, stored_in_each, unpacked, widened
from environments.messages import Conversation, Json, MessageTable, is_plain, json_key, picture_of, plain_json
from environments.prefix_tree import PrefixTree, Span
from environments.steps import Completion, Played, Step, shared_parts


@cache
def names_of(kind: type[Any]) -> tuple[str, ...]:
    """The names of a dataclass's fields."""
    return tuple(field.name for field in fields(kind))


_JOINED = ("logprobs", "token_versions")
_ARRAYS = ("tokens", *_JOINED)
"""Columns of completions whose numbers are in ``Turns._arrays``."""
_OWN_FORM = {"chat_completions", "completion", "prompt_ids", "completion_ids", "pictures", *_JOINED}
"""Fields of a turn and its completion that are no plain columns."""
_TEXTS = {"thought", "action", "observation", "model_response", "text"}
"""Fields that mostly hold what a message holds."""
_ATTRIBUTES = {*names_of(Step), "_conversation"}
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


@dataclass(slots=True)
class Turn(Played):
    """A step as far as its tokens are learned from."""

    reward: float
    completion: Completion | None
    info: dict[str, Any]


@dataclass(frozen=True)
class Turns:
    """Steps in columns: in JSON, but for the many numbers of completions, which are arrays.

    ``messages`` holds each message once, and ``conversations`` are sequences of their numbers; so are the
    ``tokens`` of ``completion``. In a column of texts the number of a message stands for its content, and
    another value in a list of its own.
    """

    _columns: bytes
    _arrays: tuple[array[Any], ...]

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Turns:
        """The columns of ``steps``; a value that JSON does not know becomes its text."""
        return _Shared(steps).turns()

    @classmethod
    def exact(cls, steps: Iterable[Step]) -> Turns | None:
        """The columns of ``steps``, if what they make is equal to these: all values are such that JSON gives
        them back, and no step or completion is of a class of its own."""
        shared = _Shared(steps)
        turns = shared.turns() if shared.is_plain else None
        # Two halves of a character, which JSON writes so, would become one.
        return None if turns is None or b"\\ud" in turns._columns else turns

    def __reduce__(self) -> tuple[Any, ...]:
        return Turns, (self._columns, self._arrays)  # others do not travel

    def json(self) -> bytes:
        """The turns as they are written, which ``steps_of`` reads."""
        arrays = (
            b'"%s":"%s"' % (name.encode(), packed(each))
            for name, each in zip(_ARRAYS, self._arrays, strict=True)
        )
        return b'%s,"arrays":{%s}}' % (self._columns[:-1], b",".join(arrays))

    @cached_property
    def rows(self) -> list[Turn]:
        """The turns one by one."""
        columns = json.loads(self._columns)
        return [*map(Turn, columns["reward"], _completions(columns, self._arrays), columns["info"])]

    def steps(self) -> list[Step]:
        """Make the steps, with the completions of ``rows``."""
        return _steps(json.loads(self._columns), [turn.completion for turn in self.rows])


def steps_of(columns: Json) -> list[Step]:
    """The steps that ``Turns.json`` has written.

    Raises:
        LookupError, TypeError or ValueError: ``columns`` are of something else.
    """
    completion = columns["completion"]
    for size, stop in zip(completion["prompt_sizes"], completion["tokens"]["stops"], strict=True):
        if not 0 <= size <= stop:
            raise ValueError(f"{size} ids of a prompt among {stop}")
    return _steps(columns, _completions(columns, [unpacked(columns["arrays"][name]) for name in _ARRAYS]))


# -- writing -------------------------------------------------------------------------------------------


class _Shared:
    """Steps as they are, and stored once what they repeat: ``Turns`` are made of it."""

    def __init__(self, steps: Iterable[Step]) -> None:
        parts = [*shared_parts(steps)]
        self._steps = [step for step, _, _ in parts]
        self._sampled_turns = [turn for turn, (*_, each) in enumerate(parts) if each is not None]
        self._completions = [each for *_, each in parts if each is not None]
        self._tree, numbers = _described([each.span for _, each, _ in parts])
        own = {number: index for index, number in enumerate(dict.fromkeys(numbers))}
        self._tree["numbers"] = [*map(own.get, numbers)]
        self._messages = parts[0][1].table.read(own) if parts else []
        kinds = {*map(type, self._steps)}
        names = dict.fromkeys(name for kind in (Step, *kinds) for name in names_of(kind))
        self._of_steps = _read(self._steps, names)
        self._sampled = _read(self._completions, names_of(Completion))
        values = [self._messages, *map(list, self._of_steps.values()), *map(_lists, self._sampled.values())]
        self.is_plain = (
            kinds <= {Step}
            and {*map(type, self._completions)} <= {Completion}
            and all(vars(step).keys() <= _ATTRIBUTES for step in self._steps)
            and is_plain(values)
        )
        """Equality of all values with what JSON makes of them."""

    def turns(self) -> Turns:
        """The columns."""
        messages = self._messages if self.is_plain else plain_json(self._messages)
        contents = {
            key: number
            for number, message in enumerate(messages)
            if type(message) is dict and (key := _content_key(message.get("content"))) is not None
        }
        answers = stored_in_each(self._completions, "completion_ids")
        tokens, ids = _described(answers)
        joined = {name: stored_in_each(self._completions, name) for name in _JOINED}
        columns = {
            **self._written(self._of_steps, contents),  # first: a subclass may have a field of such a name
            "messages": messages,
            "conversations": self._tree,
            "completion": {
                "turns": self._sampled_turns,
                "tokens": tokens,
                "prompt_sizes": [each.start for each in answers],
                **{name: [*map(len, arrays)] for name, arrays in joined.items()},
                **self._written(self._sampled, contents),
                **self._pictures(),
            },
        }
        return Turns(encoded(columns), (narrow(ids), *map(_joined, joined.values())))

    def _pictures(self) -> Json:
        """A column of the completions' pictures, if there are any: places in the messages, or themselves."""
        if not any(each.pictures for each in self._completions):
            return {}
        places = {
            picture: [number, place]
            for number, message in enumerate(self._messages)
            if type(parts := message.get("content")) is list
            for place, part in enumerate(parts)
            if (picture := picture_of(part)) is not None
        }
        return {"pictures": [[places.get(one, one) for one in each.pictures] for each in self._completions]}

    def _written(self, columns: Mapping[str, Sequence[Any]], contents: Mapping[Hashable, int]) -> Json:
        if not self.is_plain:
            columns = {name: plain_json(column) for name, column in columns.items()}
        return {
            name: _texts(column, contents) if name in _TEXTS else column for name, column in columns.items()
        }


def _read(rows: Sequence[Step | Completion], names: Iterable[str]) -> dict[str, Sequence[Any]]:
    plain = [name for name in names if name not in _OWN_FORM]
    try:
        read = [*map(attrgetter(*plain), rows)]
    except AttributeError:  # steps of several classes
        read = [tuple(getattr(row, name, None) for name in plain) for row in rows]
    return dict(zip(plain, [*zip(*read, strict=True)] or [()] * len(plain), strict=True))


def _lists(values: Sequence[Any]) -> list[Any]:
    """``values``, of which those that are tuples will be read as such."""
    return [list(each) if type(each) is tuple else each for each in values]


def _texts(values: Sequence[Any], contents: Mapping[Hashable, int]) -> list[Any]:
    """The numbers of the messages whose contents they are; a value that is none's alone in a row."""
    return [contents.get(_content_key(each), [each]) for each in values]


def _content_key(value: Any) -> Hashable | None:
    """Key of a message's content: a text itself, or the key of its parts; ``None`` of another value."""
    if type(value) is str:
        return value
    return json_key(value) if type(value) is list and value and type(value[0]) is dict else None


def _described(spans: Sequence[Span]) -> tuple[Json, array[int]]:
    """Return what describes a tree of these sequences alone, and its numbers."""
    parents, starts, parts, nodes = (spans[0].tree if spans else PrefixTree()).rows(spans)
    tree = {"parents": parents, "starts": starts, "sizes": [*map(len, parts)]}
    return tree | {"nodes": nodes, "stops": [each.stop for each in spans]}, array("i", b"".join(parts))


def _joined(arrays: Sequence[array[Any]]) -> array[Any]:
    if len({each.typecode for each in arrays}) > 1:
        arrays = [array("d", each) for each in arrays]
    return array(arrays[0].typecode if arrays else "f", b"".join(arrays))


def encoded(value: Any) -> bytes:
    """JSON in UTF-8."""
    try:
        return _ENCODER.encode(value).encode()
    except UnicodeEncodeError:  # half a character, which UTF-8 has not
        return json.dumps(value).encode()


# -- reading -------------------------------------------------------------------------------------------


def _steps(columns: Json, completions: Sequence[Completion | None]) -> list[Step]:
    described, table = columns["conversations"], MessageTable()
    if not all(0 <= number < len(columns["messages"]) for number in described["numbers"]):
        raise IndexError(f"a conversation of others than {len(columns['messages'])} messages")
    tree = _tree(described, array("i", described["numbers"]))
    table.__setstate__((columns["messages"], tree))
    rows = _rows(columns, names_of(Step), columns["messages"])
    return [
        Step(**values).storing(Conversation(table, span), completion)
        for values, span, completion in zip(rows, _spans(tree, described), completions, strict=True)
    ]


def _completions(columns: Json, arrays: Sequence[array[Any]]) -> list[Completion | None]:
    """The completion of each turn."""
    own, (ids, *joined) = columns["completion"], arrays
    tree = _tree(own["tokens"], widened(ids, sum(own["tokens"]["sizes"])))
    spans = _spans(tree, own["tokens"])
    parts = map(_parts, joined, map(own.get, _JOINED))
    for name in ("tool_calls", "usage"):
        own[name] = [each if each is None else tuple(each) for each in own[name]]
    values = _rows(own, names_of(Completion), columns["messages"])
    if "pictures" in own:
        values = (
            {**each, "pictures": tuple(_picture(one, columns["messages"]) for one in row)}
            for each, row in zip(values, own["pictures"], strict=True)
        )
    rows = zip(spans, own["prompt_sizes"], *parts, values, strict=True)
    completions = dict(zip(own["turns"], starmap(Completion.of, rows), strict=True))
    return [*map(completions.get, range(len(columns["info"])))]


def _picture(stored: Any, messages: Sequence[Any]) -> Any:
    """The picture at a place in the messages, or itself."""
    return stored if isinstance(stored, str) else picture_of(messages[stored[0]]["content"][stored[1]])


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
    if len(sizes) == 1:
        return [values]
    return [values[start:stop] for start, stop in pairwise(accumulate(sizes, initial=0))]
