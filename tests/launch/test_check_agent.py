"""The step that is played before a run starts anything."""

from __future__ import annotations

from typing import Any

from environments import BaseEnv, Dataset
from launch.trainer import check_agent
from launch.workload import Workload
from policies import GameAgent


class Precise(BaseEnv):
    """Takes exactly the columns of its dataset, as many an environment of the reference does."""

    made = 0

    def __init__(self, question: str) -> None:
        self.question = question
        Precise.made += 1

    def reset(self) -> tuple[str, dict[str, Any]]:
        return self.question, {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        return "", 0.0, True, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> Precise:
        return Precise(**info)


def test_an_environment_is_tried_out_with_what_a_rollout_gives_it() -> None:
    workload = Workload(agent_class=GameAgent, env_class=Precise, train_dataset=Dataset([{"question": "?"}]))
    check_agent(workload)
    assert Precise.made == 1
