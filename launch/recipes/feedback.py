"""Training from the feedback of clients: demonstrations and preferences of a workload, or recorded rollouts.

Your module's ``workload(seed)`` returns ``feedback_workload("recordings", workload)``: the warm start learns
its demonstrations, the stage ``preferences`` its pairs. ``python -m launch.recipes.feedback recordings run``
writes the answers with their scores as rollouts, which ``run.replay=run`` learns from, token for token.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from environments.command_name import explained, module_parser
from environments.data.feedback import judged_groups, liked_conversations, preferred_answers
from environments.data.recordings import read_recordings
from environments.errors import ConfigError
from environments.types import TrajectoryGroup
from launch.run_folder.trajectory_log import TRAIN, TrajectoryLog, kept_steps
from launch.workload import Workload
from policies.learning.preferences import Preference

READER = "training"
"""The reader that ``server.recording.readers`` names unless it was changed."""


def feedback_workload(folder: str | Path, workload: Workload, reader: str = READER) -> Workload:
    """Return ``workload`` with the feedback in ``folder``.

    Its demonstrations are the conversations that clients liked, and its preferences pairs of a better and a
    worse answer to the same prompt, token for token.

    Raises:
        ConfigError: ``reader`` may not read the folder, or there is nothing of either to learn from.
    """
    recordings = read_recordings(folder, reader)
    liked = liked_conversations(recordings)
    pairs = [Preference(chosen=better, rejected=worse) for better, worse in preferred_answers(recordings)]
    if not liked and not pairs:
        raise ConfigError(
            f"{folder} has {len(recordings)} answers, and none to learn from: wait for feedback with a score "
            "above 0, or with two scores on answers to one prompt."
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
    run = Path(run)
    if kept_steps(run, TRAIN):
        raise ConfigError(f"{run} has trajectories already: name another folder, or delete it.")
    groups = judged_groups(read_recordings(folder, reader))
    num_updates = len(groups) // groups_per_step
    if num_updates == 0:
        raise ConfigError(
            f"{folder} has feedback on answers to {len(groups)} prompts, and an update learns from "
            f"{groups_per_step}: lower groups_per_step, or wait for more."
        )
    run.mkdir(parents=True, exist_ok=True)
    log = TrajectoryLog(run, num_updates)
    for step in range(num_updates):
        log.record_update(step + 1, groups[step * groups_per_step : (step + 1) * groups_per_step], {}, {})
    return groups[: num_updates * groups_per_step]


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    options = module_parser("launch.recipes.feedback", __doc__)
    options.add_argument("recordings", help="server.recording.folder of the server")
    options.add_argument("run", help="a new folder for the rollouts")
    options.add_argument("--groups-per-step", type=int, default=8, help="rollout.groups_per_step")
    options.add_argument("--reader", default=READER, help="a name in server.recording.readers")
    given = options.parse_args(arguments)
    groups = write_rollouts(given.recordings, given.run, given.groups_per_step, given.reader)
    num_answers = sum(len(each.trajectories) for each in groups)
    settings = (
        f"run.replay={given.run} run.num_steps={len(groups) // given.groups_per_step} "
        f"rollout.groups_per_step={given.groups_per_step}"
    )
    sys.stdout.write(f"{num_answers} answers to {len(groups)} prompts. Learn from them by {settings}.\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
