"""What the journal costs a turn: PYTHONPATH=. python tests/benchmarks/journal.py. Starts Ray."""

from __future__ import annotations

import time
from typing import Any

import ray

from actors.ray_tools.connect import connect
from actors.rollouts.journal import Journal, JournalStore
from environments.base import MultiTurnEnvironment, Task
from environments.types import Completion

NUM_TURNS = 300


class OneAnswerEnv(MultiTurnEnvironment):
    """Answers always the same."""

    resumes_by = "replay"

    def get_reward_and_next_obs(self, task: Task, action: Any) -> tuple[float, dict[str, Any]]:
        return 0.0, {}


@ray.remote(num_cpus=0)
class Keeper:
    """Keeps the entries as the fleet does."""

    def __init__(self) -> None:
        self._store = JournalStore()
        self._store.open("0/0", 1)

    async def record_turn(self, rollout_id: str, attempt: int, index: int, entry: bytes) -> None:
        self._store.record(rollout_id, attempt, index, entry)

    async def ready(self) -> None: ...


def milliseconds(num_prompt_tokens: int) -> float:
    """Mean of what a rollout actor spends on the journal in a turn."""
    keeper = Keeper.remote()
    ray.get(keeper.ready.remote())
    send = keeper.record_turn.options(num_returns=0).remote
    env = OneAnswerEnv({"question": "?"})
    journal = Journal(lambda index, entry: send("0/0", 1, index, entry) and None)
    journal.open(env, lambda env: env.reset())
    completion = Completion(
        prompt_ids=tuple(range(num_prompt_tokens)),
        completion_ids=tuple(range(200)),
        logprobs=tuple(-1 / (i + 1) for i in range(200)),
        text="x" * 800,
        finish_reason="stop",
        token_versions=(3,) * 200,
    )
    start = time.perf_counter()
    for turn in range(NUM_TURNS):
        journal.step(turn, env, completion, "an action")
    seconds = time.perf_counter() - start
    ray.kill(keeper)
    return 1000 * seconds / NUM_TURNS


if __name__ == "__main__":
    connect(num_cpus=2)
    for num_prompt_tokens in (100, 1000, 4000, 16000):
        print(f"{num_prompt_tokens} prompt tokens: {milliseconds(num_prompt_tokens):.2f} ms a turn")
