"""Small worlds of OpenEnv behind its real server: ``outside_openenv.py echo 8000 1``, for one session.

It runs in the environment of ``outside_openenv.txt``.
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Text(Observation):
    text: str


class Message(Action):
    message: str = Field(min_length=1)


class Echo(Environment):
    """Repeats a message, and pays a tenth for each letter, until it is "bye"."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, **others: Any) -> Text:
        return Text(text=f"Seed {seed}. Write.")

    def step(self, action: Message, timeout_s: float | None = None, **others: Any) -> Text:
        if action.message == "raise":
            raise RuntimeError("the world is broken")
        reward = float("nan") if action.message == "nan" else len(action.message) / 10
        return Text(text=action.message, reward=reward, done=action.message == "bye")

    @property
    def state(self) -> State:
        return State()


class Move(Action):
    row: int
    column: int


class Board(Echo):
    """Pays for the cell (1, 2)."""

    def step(self, action: Move, timeout_s: float | None = None, **others: Any) -> Text:
        return Text(text="Done.", reward=float((action.row, action.column) == (1, 2)), done=True)


class Sums(MCPEnvironment):
    """Asks for a sum, which is added and submitted by tools."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        self.terms, self.answer = (0, 0), None
        server = FastMCP("sums")

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            return a + b

        @server.tool
        def submit(answer: int) -> str:
            """Submit the sum."""
            self.answer = answer
            return "Thank you."

        super().__init__(server)

    def list_splits(self) -> list[str]:
        return ["test", "train"]

    def num_tasks(self, split: str) -> int:
        return {"train": 30, "test": 5}[split]

    def reset(self, split: str = "train", index: int = 0, **others: Any) -> Text:
        self.terms, self.answer = (index, 100 if split == "test" else 0), None
        return Text(text=f"What is {index} + {self.terms[1]}?")

    async def step_async(self, action: Action, timeout_s: float | None = None, **others: Any) -> Any:
        observation = await super().step_async(action, timeout_s, **others)
        if self.answer is not None:
            observation.done, observation.reward = True, float(self.answer == sum(self.terms))
        return observation

    def _step_impl(self, action: Action, timeout_s: float | None = None, **others: Any) -> Any:
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


WORLDS = {
    "echo": (Echo, Message, Text),
    "board": (Board, Move, Text),
    "sums": (Sums, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    name, port, most = sys.argv[1:]
    app = create_app(*WORLDS[name], env_name=name, max_concurrent_envs=int(most))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
