"""Gymnasium's environments, played in text: observations are described, actions are read from sentences."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from environments.adapters import foreign, unknown
from environments.adapters.gymnasium_text import holds_picture, is_of_minigrid, render
from environments.base import WorldEnvironment
from environments.errors import ConfigError, EnvironmentFailure
from environments.rewards.reading import last_boxed

Describe = Callable[[Any, Any], str]
"""``describe(observation, env)``: the text for the model. ``env`` is Gymnasium's environment."""
Parse = Callable[[str], Any]
"""``parse(text)``: the action that the model's text names, or None if it names none."""

FROZEN_LAKE_RULES = """\
You walk on a frozen lake, shown as a grid: P is you, _ is ice, O is a hole, G is the goal. \
Reach the goal without falling into a hole."""
SLIPPERY = "The ice is slippery: you may slide to the left or right of where you want to go."
_TRIMMINGS = " \t\n.,;:!?\"'`*$"
"""Characters around a name that mean nothing."""
_OTHER_PACKAGES = " One of another package is named with its module: minigrid:MiniGrid-Empty-5x5-v0."
_MAX_MAPS = 1000
"""Number of maps that are drawn in search of one with a way to the goal."""


class GymnasiumEnvironment(WorldEnvironment):
    """Any environment that is registered with Gymnasium and whose action space is discrete or text.

    ``env_id`` of another package begins with its module: ``minigrid:MiniGrid-Empty-5x5-v0``.

    ``describe`` makes the text for the model; without it, this is the environment's own ``ansi`` picture if
    it can draw one, with its colours as words (``[blue Y]``: say in ``instructions`` which is whose), else
    the values of the observation, such as a mission's text; MiniGrid's numbers are told as objects. The
    first observation also holds ``instructions`` and, for a discrete space, the names of the actions.

    ``parse`` reads the action; without it, an action is the last ``\\boxed{...}`` or code block that is a
    name of ``action_names`` or a number, or else the last such name (without names: number) in the text.
    A text that names no action is answered with the valid ones, at reward 0: the world does not move, but
    one of ``max_steps`` is used up. Rewards are Gymnasium's; terminated and truncated both mean done. A
    success is what the environment calls so: ``is_success`` in its info, or a reward at the end in MiniGrid.

    ``reset`` starts the same episode each time if ``seed`` is given. ``make_args`` are for
    ``gymnasium.make``.
    """

    wants_seed = True

    def __init__(
        self,
        env_id: str,
        seed: int | None = None,
        action_names: Sequence[str] | None = None,
        describe: Describe | None = None,
        parse: Parse | None = None,
        instructions: str = "",
        max_steps: int | None = None,
        make_args: dict[str, Any] | None = None,
    ) -> None:
        if max_steps is not None and max_steps < 1:
            raise ConfigError(f"max_steps={max_steps} leaves no step to play: use 1 and above.")
        self.instructions = instructions
        self.max_steps = max_steps
        self._seed = seed
        self._env = _make(env_id, make_args or {}, pictures=describe is None)
        self._describe = describe or render
        self._space = _readable_space(self._env, env_id, parse, describe)
        self._names = _names(self._space, action_names)
        self._parse = parse or self._read_action
        self._steps_left: float = 0
        self._is_solved: bool | None = None

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        try:
            observation, info = self._env.reset(seed=self._seed)
        except (foreign("gymnasium.error", "gymnasium").DependencyNotInstalled, OSError) as error:  # only now
            raise ConfigError(f"Gymnasium cannot begin {self._env.spec.id!r}: {error}") from error
        self._is_solved = is_solved(self._env, 0.0, info)
        self._steps_left = float("inf") if self.max_steps is None else self.max_steps
        parts = [self.instructions, self._describe(observation, self._env), self._choices()]
        return {"question": "\n\n".join(part.strip("\n") for part in parts if part)}, _plain(info)

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        """Take the action that the text names. Info holds it as ``action`` (None if there is none)."""
        if self._steps_left <= 0:
            raise EnvironmentFailure("This Gymnasium episode is over or not begun: call reset() first.")
        self._steps_left -= 1
        move = self._parse(str(action))
        if move is None:
            answer = f"I found no valid action in that. {self._choices()}".strip()
            return answer, 0.0, self._steps_left <= 0, {"action": None}
        observation, reward, terminated, truncated, info = self._env.step(move)
        self._is_solved = is_solved(self._env, reward, info)
        done = bool(terminated or truncated) or self._steps_left <= 0
        if done:
            self._steps_left = 0
        text = self._describe(observation, self._env).strip("\n")
        return text, float(reward), done, {**_plain(info), "action": _plain(move)}

    def is_correct(self) -> bool | None:
        return self._is_solved

    def close(self) -> None:
        self._env.close()

    def _choices(self) -> str:
        return f"Answer with one of: {', '.join(self._names)}." if self._names else ""

    def _read_action(self, text: str) -> Any:
        if not self._names:
            return text if text in self._space else None  # a text space
        position = named_choice(text, self._names)
        return None if position is None else int(self._space.start) + position


class FrozenLakeEnvironment(GymnasiumEnvironment):
    """FrozenLake on a random map that has a way to the goal; ``seed`` decides on the map and the slips.

    The map has ``size`` times ``size`` cells, each of which is ice with probability ``p``. Reward 1 for
    the goal, else 0.
    """

    def __init__(
        self, size: int = 4, p: float = 0.8, seed: int = 0, is_slippery: bool = False, max_steps: int = 16
    ) -> None:
        self.map = frozen_lake_map(size, p, seed)
        super().__init__(
            "FrozenLake-v1",
            seed=seed,
            action_names=("Left", "Down", "Right", "Up"),  # in Gymnasium's order
            describe=_frozen_lake_grid,
            instructions=f"{FROZEN_LAKE_RULES} {SLIPPERY}" if is_slippery else FROZEN_LAKE_RULES,
            max_steps=max_steps,
            make_args={"desc": self.map, "is_slippery": is_slippery, "max_episode_steps": max_steps},
        )

    def is_correct(self) -> bool:
        lake = self._env.unwrapped
        return bool(lake.desc.flat[int(getattr(lake, "s", 0))] == b"G")  # before reset, it stands nowhere


def is_solved(env: Any, reward: float, info: dict[str, Any]) -> bool | None:
    """Return whether ``env`` calls it a success after a step; ``None`` of an environment that does not say
    so."""
    if "is_success" in info:
        return bool(info["is_success"])
    return float(reward) > 0 if is_of_minigrid(env) else None


def named_choice(text: str, names: Sequence[str]) -> int | None:
    r"""Return which of ``names`` a model's text chooses, or None.

    That is the last ``\boxed{...}``, else the last code block, if it is a name (in any case) or the
    position of one, which counts from 0 and where names are numbers says nothing; else the last name that
    stands in the text as a word, and not in a number such as 2.5 or 1/2.
    """
    positions = {name.lower(): position for position, name in enumerate(names)}
    if not any(re.fullmatch(r"[+-]?\d+", name) for name in names):
        positions = {str(position): position for position in range(len(names))} | positions
    blocks = re.findall(r"```(.*?)```", text, re.DOTALL)
    marked = last_boxed(text) or (blocks[-1] if blocks else None)
    if marked is not None:
        return next((positions[name] for name in _readings(marked.lower()) if name in positions), None)
    longest_first = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    words = re.findall(rf"(?<![\w.-])(?<!\d[/,:])(?:{longest_first})(?!\w|[./,:]\d)", text, re.IGNORECASE)
    return positions.get(words[-1].lower()) if words else None  # a long s matches s, and stays as it is


def _readings(marked: str) -> Iterator[str]:
    """The readings of a box or a block: all of it, or that without its language, LaTeX and punctuation."""
    for part in filter(None, (marked, marked.partition("\n")[2])):
        yield part.strip()
        yield re.sub(r"\\[a-z]+\s*\{|\}", "", part).strip(_TRIMMINGS)


def _make(env_id: str, make_args: dict[str, Any], pictures: bool) -> Any:
    gymnasium = foreign("gymnasium", "gymnasium")
    try:
        env = gymnasium.make(env_id, **make_args)
        if not pictures or "render_mode" in make_args or "ansi" not in env.metadata.get("render_modes", ()):
            return env
        env.close()
        return gymnasium.make(env_id, **make_args, render_mode="ansi")
    except gymnasium.error.UnregisteredEnv as error:
        raise unknown("Gymnasium environment", env_id, gymnasium.registry, _OTHER_PACKAGES) from error
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise ConfigError(f"Gymnasium cannot make {env_id!r} with {make_args}: {error}") from error


def _readable_space(env: Any, env_id: str, parse: Parse | None, describe: Describe | None) -> Any:
    spaces = foreign("gymnasium.spaces", "gymnasium")
    shown = getattr(env, "observation_space", None)  # what is only played needs none
    if describe is None and env.render_mode != "ansi" and holds_picture(shown):
        env.close()
        raise ConfigError(
            f"{env_id} shows pictures, {shown}, whose numbers tell a model nothing: pass "
            "describe=, a function that turns an observation into text."
        )
    if parse is None and not isinstance(env.action_space, spaces.Discrete | spaces.Text):
        env.close()
        raise ConfigError(
            f"{env_id} has the action space {env.action_space}, whose actions a text does not name: pass "
            "parse=, a function that turns the model's text into an action, or None for an invalid one."
        )
    return env.action_space


def _names(space: Any, action_names: Sequence[str] | None) -> list[str]:
    if not isinstance(space, foreign("gymnasium.spaces", "gymnasium").Discrete):
        return list(action_names or ())
    first, count = int(space.start), int(space.n)
    if action_names is None:
        return [str(first + position) for position in range(count)]
    if len(action_names) != count:
        raise ConfigError(f"action_names={list(action_names)}, but the environment has {count} actions.")
    return list(action_names)


def _plain(value: Any) -> Any:
    """``value`` as JSON holds it: arrays as lists, other values as text."""
    numpy = foreign("numpy", "numpy")

    def convert(other: Any) -> Any:
        return other.tolist() if isinstance(other, numpy.ndarray | numpy.generic) else str(other)

    return json.loads(json.dumps(value, default=convert, skipkeys=True))


def frozen_lake_map(size: int, p: float, seed: int) -> list[str]:
    """Draw maps until one has a way. Gymnasium's own function searches for ever where there is none."""
    frozen_lake = foreign("gymnasium.envs.toy_text.frozen_lake", "gymnasium")
    if not (2 <= size <= 64 and 0 <= p <= 1):
        raise ConfigError(f"size={size} and p={p} make no lake: use a size of 2 to 64 and p from 0 to 1.")
    rng = random.Random(seed)
    for _ in range(_MAX_MAPS):
        cells = ["F" if rng.random() < p else "H" for _ in range(size * size)]
        cells[0], cells[-1] = "S", "G"
        rows = [cells[start : start + size] for start in range(0, size * size, size)]
        if frozen_lake.is_valid(rows, size):
            return ["".join(row) for row in rows]
    raise ConfigError(f"None of {_MAX_MAPS} maps of size={size} with p={p} has a way: raise p.")


def _frozen_lake_grid(observation: Any, env: Any) -> str:
    lake = env.unwrapped
    symbols = {b"S": "_", b"F": "_", b"H": "O", b"G": "G"}
    grid = [[symbols[bytes(cell)] for cell in row] for row in lake.desc]
    row, column = divmod(int(observation), lake.ncol)
    under = grid[row][column]
    grid[row][column] = "P"
    ending = {"O": "\nYou fell into a hole.", "G": "\nYou reached the goal."}.get(under, "")
    return "\n".join(" ".join(cells) for cells in grid) + ending
