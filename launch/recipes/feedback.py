"""Training from the feedback of clients: demonstrations and preferences of a workload, or recorded rollouts.

Your module's ``workload(seed)`` returns ``feedback_workload("recordings", workload)``: the warm start learns
its demonstrations, the stage ``preferences`` its pairs. ``python -m launch.recipes.feedback recordings run``
writes the answers with their scores as rollouts, which ``run.replay=run`` learns from, token for token.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from environments.command_name import command_parser, explained
from environments.data.feedback import judged_groups, liked_conversations, preferred_answers
from environments.data.recordings import read_recordings
from environments.errors import ConfigError
from environments.types import TrajectoryGroup
from launch.run_folder.trajectory_log import TRAIN, TrajectoryLog, kept_steps
from launch.workload import Workload
from policies.learning.preferences import Preference
from policies.learning.samples import training_samples

READER = "training"
"""The reader that ``server.recording.readers`` names unless it was changed."""


def feedback_workload(folder: str | Path, workload: Workload, reader: str = READER) -> Workload:
    """Return ``workload`` with the feedback in ``folder``.

    Its demonstrations are the answers that clients liked, and its preferences pairs of a better and a worse
    answer to the same prompt, token for token. A pair with an answer that a limit has ended, where such ones
    are masked, is left out: nothing is learned from that.

    Raises:
        ConfigError: ``reader`` may not read the folder, or there is nothing of either to learn from.
    """
    recordings = read_recordings(folder, reader)
    liked = liked_conversations(recordings)
    pairs = [
        Preference(chosen=better, rejected=worse)
        for better, worse in preferred_answers(recordings)
        if training_samples(better) and training_samples(worse)
    ]
    if not liked and not pairs:
        raise ConfigError(
            f"{folder} has feedback on {len(recordings)} answers, and none to learn from: wait for a score "
            "above 0, or for two scores on answers to one prompt."
        )
    return replace(workload, demonstrations=liked, preferences=pairs)


def write_rollouts(
    folder: str | Path, run: str | Path, groups_per_step: int, reader: str = READER
) -> list[TrajectoryGroup]:
    """Write the answers of ``folder`` that have feedback as the rollouts of a run, for ``run.replay``.

    Args:
        run: a folder without trajectories.
        groups_per_step: groups of an update, as the training has ``rollout.groups_per_step``.

    Returns:
        The groups, one for a prompt. The newest that would fill no whole update are left out.

    Raises:
        ConfigError: ``reader`` may not read the folder, it has too little feedback, or ``run`` has
            trajectories.
    """
    groups = judged_groups(read_recordings(folder, reader))
    return write_groups(groups, Path(run), groups_per_step, f"{folder} has feedback on answers to")


def write_groups(
    groups: Sequence[TrajectoryGroup], run: Path, groups_per_step: int, found: str
) -> list[TrajectoryGroup]:
    """Write groups as the rollouts of a run; return those that fill whole updates.

    Args:
        found: beginning of the sentence on their number.

    Raises:
        ConfigError: they fill no update, or ``run`` has trajectories.
    """
    if kept_steps(run, TRAIN):
        raise ConfigError(f"{run} has trajectories already: name another folder, or delete it.")
    num_updates = len(groups) // groups_per_step
    if num_updates == 0:
        raise ConfigError(
            f"{found} {len(groups)} prompts, and an update learns from {groups_per_step}: lower "
            "groups_per_step, or wait for more."
        )
    run.mkdir(parents=True, exist_ok=True)
    log = TrajectoryLog(run, num_updates)
    for step in range(num_updates):
        log.record_update(step + 1, groups[step * groups_per_step : (step + 1) * groups_per_step], {}, {})
    return list(groups[: num_updates * groups_per_step])


def report(groups: Sequence[TrajectoryGroup], what: str, run: Path, groups_per_step: int) -> None:
    """Print how many rollouts were written, and the settings by which they are learned from."""
    number = sum(len(each.trajectories) for each in groups)
    sys.stdout.write(
        f"{number} {what} to {len(groups)} prompts. Learn from them by run.replay={run} "
        "algorithm.correction.level=token "  # the policy that learns has not sampled them
        f"run.num_steps={len(groups) // groups_per_step} rollout.groups_per_step={groups_per_step}.\n"
    )


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = command_parser("launch.recipes.feedback", __doc__)
    options.add_argument("recordings", help="server.recording.folder of the server")
    options.add_argument("run", help="a new folder for the rollouts")
    options.add_argument("--groups-per-step", type=int, default=8, help="rollout.groups_per_step")
    options.add_argument("--reader", default=READER, help="a name in server.recording.readers")
    given = options.parse_args(arguments)
    groups = write_rollouts(given.recordings, given.run, given.groups_per_step, given.reader)
    report(groups, "answers", Path(given.run), given.groups_per_step)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
