"""The consumed log: which rollouts each update has consumed, to prove that none was used twice or lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

from launch.run_folder.jsonl_log import JsonlLog, read_records

CONSUMED_LOG = "consumed.jsonl"


class Consumed(TypedDict):
    """Rollouts that one update took from the stream."""

    step: int
    """The update that it was taken for, from 1."""
    trained: list[str]
    """Ids of the rollouts in groups that were trained on."""
    dropped: dict[str, list[str]]
    """Ids of the rollouts in groups that were not, by the reason."""


class ConsumedLog(JsonlLog):
    """Writes ``consumed.jsonl`` in the folder of a run, a line per update.

    A line is written before the checkpoint of its step, so that a checkpoint never knows of a step that the
    consumed log does not.

    Args:
        directory: the run's folder.
        last_step: the step of the checkpoint that the run goes on from, 0 without one. What was consumed
            after it is cut off: it is consumed again.
    """

    def __init__(self, directory: Path, last_step: int) -> None:
        super().__init__(directory / CONSUMED_LOG, last_step)

    def record(self, step: int, trained: Sequence[str], dropped: Mapping[str, Sequence[str]]) -> None:
        """Write down what the update ``step`` has consumed: rollout ids, the dropped ones by reason."""
        reasons = {reason: list(ids) for reason, ids in dropped.items() if ids}
        self.append({"step": step, "trained": list(trained), "dropped": reasons})


def read_consumed_log(directory: Path) -> list[Consumed]:
    """Records of the updates of the run in ``directory``, oldest first."""
    return [cast(Consumed, record) for record in read_records(directory / CONSUMED_LOG)]
