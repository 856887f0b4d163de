"""Fingerprints of classes, functions and objects, the same in every process."""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

Json = Any
Named = type | FunctionType | BuiltinFunctionType | MethodType


def fingerprint(value: Any) -> Json:
    """The value as JSON: the same in the next process, and different for what plays or judges differently.

    What Python finds under its name is that name: its code is not compared. What it does not, such as a
    lambda, a function that another one has made, or the class that ``LocalRetrievalTool.over`` returns, has a
    digest of its content behind its name. Dataclasses and ``functools.partial`` are what they show, so a
    field with ``repr=False``, mostly a secret, does not count. Other objects have a digest of their
    attributes behind the name of their class; objects among these count by their class.
    """
    return _described(value, (), False)


def digest(value: Any) -> str:
    """Twelve characters that differ where fingerprints do, and tell nothing of the value."""
    return hashlib.sha256(json.dumps(fingerprint(value), sort_keys=True).encode()).hexdigest()[:12]


def _described(value: Any, inside: tuple[Any, ...], in_object: bool) -> Json:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if any(value is each for each in inside):
        return "..."
    part = functools.partial(_described, inside=(*inside, value), in_object=in_object)
    match value:
        case Mapping():
            return {str(key): part(each) for key, each in value.items()}
        case list() | tuple():
            return [part(each) for each in value]
        case set() | frozenset():
            return sorted(map(part, value), key=json.dumps)
        case functools.partial():
            return {"partial": part(value.func), "args": part(value.args), "keywords": part(value.keywords)}
        case type() | FunctionType() | BuiltinFunctionType() | MethodType():
            name = f"{value.__module__}.{value.__qualname__}"
            return name if _is_found(value) else _digested(name, _content(value, part))
        case CodeType():
            return [value.co_code.hex(), part(value.co_names), part(value.co_consts)]
        case staticmethod() | classmethod():
            return part(value.__func__)
        case property():
            return part(value.fget)
        case ModuleType():
            return value.__name__
    return _described_object(value, part, in_object)


def _described_object(value: Any, part: Callable[..., Json], in_object: bool) -> Json:
    name = part(type(value))
    if is_dataclass(value):
        return {name: {each.name: part(getattr(value, each.name)) for each in fields(value) if each.repr}}
    attributes = getattr(value, "__dict__", None)
    if not attributes:
        return name if " at 0x" in repr(value) else repr(value)
    # A client or a lock inside another object says little, and what it counts or caches changes.
    return name if in_object else _digested(name, part(attributes, in_object=True))


def _content(value: Named, part: Callable[..., Json]) -> Json:
    match value:
        case type():
            own = {name: each for name, each in vars(value).items() if _is_own(name, each)}
            return [part(value.__bases__), part(own)]
        case FunctionType():
            closed_over = [each.cell_contents for each in value.__closure__ or () if each != CellType()]
            return [
                part(each) for each in (value.__code__, value.__defaults__, value.__kwdefaults__, closed_over)
            ]
        case _:
            return part(value.__self__)


def _is_own(name: str, attribute: Any) -> bool:
    """True if an attribute of a class is its author's, and not Python's."""
    return isinstance(attribute, FunctionType) or not (name.startswith("__") or name == "_abc_impl")


def _is_found(value: Named) -> bool:
    """True if the name leads back to the value."""
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _digested(name: str, content: Json) -> str:
    return f"{name}#{hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:12]}"
