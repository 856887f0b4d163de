"""Rollouts of another run as a source, which the setting ``run.replay`` chooses, in place of a service."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actors.rollouts.rollout import RolloutRequest
from environments.errors import ConfigError, TroupeError
from environments.thoughts import is_unfinished
from environments.types import Trajectory, TrajectoryGroup
from launch.run_folder.checkpoint import CheckpointFolder
from launch.run_folder.trajectory_log import (
    BASELINE,
    TRAIN,
    KeptTrajectory,
    first_completions,
    kept_steps,
    read_kept,
)
from launch.training.rollout_requests import group_name
from policies.model_files import HUGGINGFACE

MOST_MISREAD = 0.1
"""Share of texts that may be read differently: vLLM leaves out a character of which it has a part only."""


class RecordedRollouts:
    """The groups that a run has kept, numbered in the order in which its updates took them.

    A source of rollouts in which all are there at once. In the order of the tasks the groups have the numbers
    of the recorded run; one of another order has left gaps, and here they have none. A group is read with the
    update that took it, so memory holds one update at a time.

    Args:
        folder: of the run whose rollouts are used. ``check_tokenizer`` says whether a model can read them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps = iter(kept_steps(folder, TRAIN))
        self._num_read = 0
        self._requested: set[str] = set()
        self._groups: dict[str, list[KeptTrajectory]] = {}

    def request(self, requests: Sequence[RolloutRequest], finished: Sequence[Trajectory] = ()) -> None:
        """Note the groups of ``requests``: they may be taken."""
        self._requested.update(each.group_id for each in requests)

    def take(self, *group_ids: str) -> TrajectoryGroup:
        """The first of ``group_ids``: all are there.

        Raises:
            TroupeError: the run has not kept it.
        """
        group_id = group_ids[0]
        while group_id not in self._groups:
            step = next(self._steps, None)
            if step is None:
                raise TroupeError(
                    f"{self._folder} holds no rollouts of group {int(group_id)}: it made fewer updates, or "
                    "left out fewer groups. Set run.num_steps to the updates that it made, and the same "
                    "rollout.groups_per_step and selection."
                )
            self._groups = self._read(step)
        self._requested.remove(group_id)
        return group_of(group_id, self._groups.pop(group_id))

    def finished(self) -> list[Trajectory]:
        """None: a resumed run reads the recording again."""
        return []

    def _read(self, step: int) -> dict[str, list[KeptTrajectory]]:
        """The groups of an update, by the names that their places in the recording give them."""
        groups = by_group(self._folder, step)
        numbers = range(self._num_read, self._num_read + len(groups))
        self._num_read += len(groups)
        return {
            group_name(number): groups[name] for number, name in zip(numbers, sorted(groups), strict=True)
        }


def recorded_groups(folder: Path, step: int) -> list[TrajectoryGroup]:
    """The groups that the update ``step`` of the run in ``folder`` took, those that it left out last.

    Raises:
        TroupeError: the run has not kept them.
    """
    return [group_of(name, kept) for name, kept in by_group(folder, step).items()]


def by_group(folder: Path, step: int) -> dict[str, list[KeptTrajectory]]:
    """The trajectories that a run has kept of the update ``step``, by the ids of their groups."""
    groups: dict[str, list[KeptTrajectory]] = {}
    for kept in read_kept(folder, TRAIN, step):
        groups.setdefault(kept.group_id, []).append(kept)
    return groups


def group_of(group_id: str, kept: Sequence[KeptTrajectory]) -> TrajectoryGroup:
    """A group under the id ``group_id``, which need not be the one it was kept under."""
    for each in kept:
        each.trajectory.rollout_id = f"{group_id}/{each.trajectory.rollout_id.rpartition('/')[2]}"
    members = [each.trajectory for each in kept if each.outcome != BASELINE]
    members.sort(key=lambda each: each.rollout_id)
    baseline = next((each.trajectory for each in kept if each.outcome == BASELINE), None)
    return TrajectoryGroup(
        group_id=group_id, task=members[0].task, trajectories=tuple(members), baseline=baseline
    )


def check_tokenizer(folder: Path, model_path: str) -> None:
    """Check that the model in ``model_path`` reads the tokens of the run in ``folder`` as they were meant.

    Raises:
        ConfigError: it reads other texts in the tokens of the first update.
    """
    from policies.chat import ChatRenderer, load_tokenizer

    renderer = ChatRenderer(load_tokenizer(model_path))
    meant = _meant_texts(folder)
    wrong = [(text, ids) for text, ids in meant if text not in renderer.decode(ids)]
    if len(wrong) > MOST_MISREAD * len(meant):
        text, ids = wrong[0]
        raise ConfigError(
            f"run.replay={folder} was recorded with another tokenizer: it has the text {text[:60]!r}, which "
            f"{model_path} reads as {renderer.decode(ids)[:60]!r}. Set model.path to the model that the run "
            "began with, or to one of the same tokenizer. A tiny model is of its seed: set seed as well."
        )


def _meant_texts(folder: Path) -> list[tuple[str, tuple[int, ...]]]:
    """Texts of the first update and their tokens.

    A checkpoint of the run has its tokenizer, which reads prompts and answers. Without one there are the
    texts that the policy server has returned.
    """
    from policies.chat import ChatRenderer, load_tokenizer

    completions = first_completions(folder)
    checkpoint = CheckpointFolder(folder, kept=1).latest()
    if checkpoint is None:
        # A server that parses tool calls takes them out of the text, and one that cuts thoughts out of it
        # leaves the mark of an unfinished one to whoever reads the text.
        parsed = [
            each for each in completions if each.text and not each.tool_calls and not is_unfinished(each.text)
        ]
        return [(each.text, each.completion_ids) for each in parsed]
    own = ChatRenderer(load_tokenizer(checkpoint / HUGGINGFACE))
    sequences = dict.fromkeys(ids for each in completions for ids in (each.prompt_ids, each.completion_ids))
    return [(own.decode(ids), ids) for ids in sequences]
