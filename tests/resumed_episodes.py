"""Environments of five turns that can be resumed, and a sampler that numbers its answers."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from environments.base import BaseEnv
from environments.types import Completion
from policies.sampler import SampleRequest

NUM_TURNS = 5
KILLED_TURN = 3


class ReplayedEnv(BaseEnv):
    """Five turns; kills its process once in the third one if ``scratch`` is given."""

    resumes_by = "replay"

    def __init__(self, scratch: str = "") -> None:
        self.scratch = scratch
        self.actions: list[Any] = []

    def reset(self) -> tuple[dict, dict]:
        return {"question": "Begin."}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict]:
        if self.scratch and len(self.actions) == KILLED_TURN - 1 and not Path(self.scratch).exists():
            Path(self.scratch).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.actions.append(action)
        return f"heard {self.actions}", 0.5, len(self.actions) == NUM_TURNS, {}

    @classmethod
    def from_dict(cls, info: dict) -> ReplayedEnv:  # type: ignore[override]
        return cls(info.get("scratch", ""))


class RestoredEnv(ReplayedEnv):
    resumes_by = "snapshot"

    def snapshot(self) -> list[Any]:
        return list(self.actions)

    def restore(self, snapshot: list[Any]) -> None:
        self.actions = list(snapshot)


class RestartedEnv(ReplayedEnv):
    resumes_by = None


class SeedSampler:
    """Answers with the request's seed and the number of the call, which tells when a turn was sampled."""

    source = "a script"

    def __init__(self) -> None:
        self.seeds: list[int] = []

    async def sample(self, request: SampleRequest) -> Completion:
        seed = request.params.seed or 0
        self.seeds.append(seed)
        return Completion(
            prompt_ids=(1, 2),
            completion_ids=(seed, 3),
            logprobs=(-float(seed), -0.1 * len(self.seeds)),
            text=f"seed {seed}",
            finish_reason="stop",
            token_versions=(7, 7),
        )

    async def open(self) -> None: ...
