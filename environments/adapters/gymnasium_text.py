"""Gymnasium's observations as texts for a model: pictures for a terminal, and plain values."""

from __future__ import annotations

import math
import re
from typing import Any

from environments.adapters import foreign

LEAST_PICTURE = 64 * 64
"""Bytes in rows from which on they are a picture, and no board that a model could read."""
_CODE = re.compile(r"\x1b\[([\d;]*)m")
"""A terminal's code for the colour of the text behind it."""
_COLOURS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")

_DIRECTIONS = ("right", "down", "left", "up")  # by MiniGrid's numbers
_SHORT = {"unseen": "?", "empty": "_", "wall": "wall", "floor": "_", "lava": "lava"}
"""Objects whose colour says nothing."""


def render(observation: Any, env: Any) -> str:
    """The environment's own picture, where it was made with ``render_mode="ansi"``, else the observation."""
    if env.render_mode == "ansi":
        return picture_in_words(str(env.render()))
    # MiniGrid's own, which no wrapper changes:
    if is_of_minigrid(env) and env.observation_space == env.unwrapped.observation_space:
        return view_in_words(observation)
    return in_words(observation)


def holds_picture(space: Any) -> bool:
    """Return whether an observation of ``space`` has a part with the bytes of a picture."""
    spaces = foreign("gymnasium.spaces", "gymnasium")
    if isinstance(space, spaces.Dict | spaces.Tuple):
        return any(map(holds_picture, space.values() if isinstance(space, spaces.Dict) else space))
    shape = getattr(space, "shape", None) or ()
    return len(shape) > 1 and str(space.dtype) == "uint8" and math.prod(shape) >= LEAST_PICTURE


def is_of_minigrid(env: Any) -> bool:
    """Return whether it is one of MiniGrid's environments, wrapped or not."""
    return type(env.unwrapped).__module__.startswith("minigrid.")


def view_in_words(observation: dict[str, Any]) -> str:
    """Describe an observation; its ``image`` has three numbers for each column and row of the view."""
    rows = [[_object(*map(int, cell)) for cell in row] for row in observation["image"].swapaxes(0, 1)]
    middle, carried = len(rows[-1]) // 2, rows[-1][len(rows[-1]) // 2]
    rows[-1][middle] = "you"
    return "\n".join(
        [
            f"Mission: {observation['mission']}.",
            f"You face {_DIRECTIONS[int(observation['direction'])]}, which is the top of your view:",
            *(" | ".join(row) for row in rows),
            "You carry nothing." if carried in ("_", "?") else f"You carry: {carried}.",
        ]
    )


def _object(kind: int, colour: int, state: int) -> str:
    constants = foreign("minigrid.core.constants", "minigrid")
    name = constants.IDX_TO_OBJECT[kind]
    if name in _SHORT:
        return _SHORT[name]
    states = {number: word for word, number in constants.STATE_TO_IDX.items()}
    words = [states[state]] if name == "door" else []
    return " ".join([*words, constants.IDX_TO_COLOR[colour], name])


def picture_in_words(picture: str) -> str:
    """A picture for a terminal with its colours as words: ``[blue Y]``, or ``[yellow]`` where it is blank.

    A part that is only bold or underlined stands in brackets too.
    """
    first, *others = _CODE.split(picture)
    texts, marks = [first], list[str]()
    for codes, text in zip(others[::2], others[1::2], strict=True):
        for code in codes.split(";"):
            marks = [*marks, _colour(int(code))] if int(code or 0) else []
        words = [*filter(None, marks), *filter(None, [text.strip(" ")])]
        texts.append(f"[{' '.join(words)}]" if marks and text else text)
    return "".join(texts)


def _colour(code: int) -> str:
    """The colour of letters (30 to 37) or of their background (40 to 47), bright (90, 100) or not."""
    tens, number = divmod(code, 10)
    return _COLOURS[number] if tens in (3, 4, 9, 10) and number < len(_COLOURS) else ""


def in_words(observation: Any) -> str:
    """A value as text: a line for each key of a dict and each row of a table, numbers with four digits."""
    numpy = foreign("numpy", "numpy")
    if isinstance(observation, dict):
        texts = ((key, in_words(value)) for key, value in observation.items())
        return "\n".join(f"{key}:\n{text}" if "\n" in text else f"{key}: {text}" for key, text in texts)
    if isinstance(observation, tuple):
        return f"({', '.join(map(in_words, observation))})"
    if isinstance(observation, numpy.ndarray) and observation.ndim > 1:
        return "\n".join(" ".join(",".join(map(_number, cell.flat)) for cell in row) for row in observation)
    if isinstance(observation, numpy.ndarray):
        return f"[{', '.join(map(_number, observation.flat))}]"
    return _number(observation)


def _number(value: Any) -> str:
    """A number of Python or numpy with at most four digits behind the point; other values as they print."""
    plain = value.item() if isinstance(value, foreign("numpy", "numpy").generic) else value
    return f"{plain:.4g}" if isinstance(plain, float) else str(plain)
