from __future__ import annotations

import sys
from types import ModuleType

import pytest

from environments.adapters.gymnasium import GymnasiumEnvironment
from environments.adapters.gymnasium_text import view_in_words

numpy = pytest.importorskip("numpy")

OBJECTS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
COLOURS = ("red", "green", "blue", "purple", "yellow", "grey")


@pytest.fixture
def constants(monkeypatch):
    """The numbers of MiniGrid 3.2, which need not be installed."""
    for name in ("minigrid", "minigrid.core", "minigrid.core.constants"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module = sys.modules["minigrid.core.constants"]
    module.IDX_TO_OBJECT = dict(enumerate(OBJECTS))
    module.IDX_TO_COLOR = dict(enumerate(COLOURS))
    module.STATE_TO_IDX = {"open": 0, "closed": 1, "locked": 2}


def seen(*rows):
    """An observation that faces down, of rows with (object, colour, state); MiniGrid's columns come first."""
    image = numpy.array(rows, dtype=numpy.uint8).swapaxes(0, 1)
    return {"image": image, "direction": numpy.int64(1), "mission": "open the door"}


def test_view_is_told_in_words(constants):
    text = view_in_words(seen([(0, 0, 0), (4, 4, 2), (2, 5, 0)], [(1, 0, 0), (5, 2, 0), (8, 1, 0)]))
    assert text.splitlines() == [
        "Mission: open the door.",
        "You face down, which is the top of your view:",
        "? | locked yellow door | wall",
        "_ | you | green goal",
        "You carry: blue key.",
    ]


def test_empty_hands_are_told(constants):
    assert view_in_words(seen([(1, 0, 0), (1, 0, 0), (1, 0, 0)])).endswith("_ | you | _\nYou carry nothing.")


@pytest.mark.filterwarnings("ignore")
def test_environment_of_minigrid_is_told_by_its_view():
    pytest.importorskip("minigrid")
    env = GymnasiumEnvironment("minigrid:MiniGrid-DoorKey-5x5-v0", seed=1)
    question = env.reset()[0]["question"]
    assert question.startswith(
        "Mission: use the key to open the door and then get to the goal.\nYou face down"
    )
    assert "? | ? | locked yellow door | you | wall | ? | ?\nYou carry nothing." in question
