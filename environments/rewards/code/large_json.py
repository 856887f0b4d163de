"""JSON whose integers may have any number of digits: Python's own takes 4,300 of them."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

_MOST_DIGITS = 4300


def read_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none.
        RecursionError: it is nested too deeply.
    """
    return json.loads(text, parse_int=_integer)


def write_json(value: Any) -> str:
    """Return the JSON text of a value."""
    try:
        return json.dumps(value)
    except ValueError:  # an integer is too long
        if isinstance(value, list | tuple):
            return f"[{', '.join(map(write_json, value))}]"
        if isinstance(value, dict):
            items = (f"{json.dumps(str(key))}: {write_json(item)}" for key, item in value.items())
            return f"{{{', '.join(items)}}}"
        if not isinstance(value, int):
            raise
        return str(Decimal(value))


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= _MOST_DIGITS else int(Decimal(digits))
