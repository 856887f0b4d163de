"""What an agent of MiniGrid sees, in words: its mission, where it looks, and the objects in its view."""

from __future__ import annotations

from typing import Any

from environments.adapters import foreign

_DIRECTIONS = ("right", "down", "left", "up")  # by MiniGrid's numbers
_SHORT = {"unseen": "?", "empty": "_", "wall": "wall", "floor": "_", "lava": "lava"}
"""Objects whose colour says nothing."""


def view_in_words(observation: dict[str, Any]) -> str:
    """Tell an observation; its ``image`` has three numbers for each column and row of the view."""
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
