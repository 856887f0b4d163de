"""Rewards that come after their rollouts have ended: two small files for each, in one folder.

    late_rewards/
      SESSION.awaited    its rollout has ended, and waits for a reward
      SESSION.json       the reward

A file appears when it is whole and on disk, and never changes: so a reward counts once, also for a server
that was started anew.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environments.disk import replaced
from environments.errors import DatasetError
from environments.rewards.base import is_reward

SESSION = re.compile(r"[A-Za-z0-9_-]{8,64}")
"""Names of sessions: nothing else is the name of a file."""


@dataclass(frozen=True)
class LateRewards:
    """A folder of late rewards."""

    folder: Path

    def expect(self, session: str) -> None:
        """Take note that the rollout of a session has ended without its reward."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with replaced(self._path(session, "awaited")) as unfinished:
            unfinished.touch()

    def give(self, session: str, result: dict[str, Any]) -> None:
        """Keep the reward of a session: it is on disk at the return.

        Args:
            result: ``reward`` or ``rewards``, and ``is_correct``, as programs send them.

        Raises:
            FileNotFoundError: none is awaited.
            FileExistsError: it has one.
            ValueError: it has no reward that can be learned from.
        """
        given = [each for each in result.get("rewards", [result.get("reward")]) if each is not None]
        if "error" not in result and not (given and all(map(is_reward, given))):
            raise ValueError(f'{result!r:.100} has no reward: give {{"reward": 1.0}}, a finite number.')
        if SESSION.fullmatch(session) is None or not self._path(session, "awaited").exists():
            raise FileNotFoundError(session)
        with replaced(self._path(session, "json"), is_new=True) as unfinished:
            unfinished.write_text(json.dumps(result, allow_nan=False), encoding="utf-8")

    def read(self) -> dict[str, dict[str, Any]]:
        """The rewards by their sessions. Raises ``DatasetError`` for a damaged file."""
        found = {}
        for path in self.folder.glob("*.json"):
            try:
                found[path.stem] = dict(json.loads(path.read_text(encoding="utf-8")))
            except (TypeError, ValueError) as error:
                raise DatasetError(f"{path} is no late reward ({error!r}): delete it.") from error
        return found

    def _path(self, session: str, ending: str) -> Path:
        return self.folder / f"{session}.{ending}"
