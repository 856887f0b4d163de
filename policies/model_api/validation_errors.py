"""What pydantic's errors about a body say to its client."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def told(details: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
    """The message for the ``errors()`` of a body, and the field of the first of them."""
    nearest = _nearest(details)
    places = [_place(detail) for detail in nearest]
    sentences = [
        f"{place or 'The body'}: {_complaint(detail)}" for place, detail in zip(places, nearest, strict=True)
    ]
    return " ".join(sentences), places[0]


def _is_form(part: str | int) -> bool:
    """Whether a part of a place is no field's name: pydantic's word for one of several forms of a value."""
    return isinstance(part, str) and (part == "str" or part[:1].isupper() or not part.isidentifier())


def _nearest(details: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of a field that may have several forms, only the errors of the form that the value comes nearest to."""
    by_field: dict[tuple[str | int, ...], list[Mapping[str, Any]]] = {}
    for detail in details:
        field = tuple(itertools.takewhile(lambda part: not _is_form(part), detail["loc"]))
        by_field.setdefault(field, []).append(detail)
    nearest = []
    for errors in by_field.values():
        ranks = [(len(each["loc"]), not each["type"].endswith("_type")) for each in errors]
        nearest += [each for each, rank in zip(errors, ranks, strict=True) if rank == max(ranks)]
    return nearest


def _place(detail: Mapping[str, Any]) -> str | None:
    if detail["type"] == "json_invalid":
        return None
    path = [str(part) for part in detail["loc"] if not _is_form(part)]
    return ".".join(path[1:] if path[:1] == ["body"] else path) or None


def _complaint(detail: Mapping[str, Any]) -> str:
    if detail["type"] == "extra_forbidden":
        return "this server does not support the field: leave it out."
    return str(detail["msg"]).removeprefix("Value error, ").rstrip(".") + "."
