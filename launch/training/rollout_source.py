"""The protocol between a training and whatever its rollouts come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from actors.rollouts.rollout import RolloutRequest
from environments.types import Trajectory, TrajectoryGroup


class RolloutSource(Protocol):
    """Groups of rollouts on request: ``TrajectoryStream`` plays them, ``RecordedRollouts`` reads them.

    A group is requested once, with all its rollouts in one call, and taken once.
    """

    def request(self, requests: Sequence[RolloutRequest], finished: Sequence[Trajectory] = ()) -> None:
        """Have ``requests`` rolled out, except those that are ``finished`` already: a resumed run plays
        nothing twice.
        """
        ...

    def take(self, *group_ids: str) -> TrajectoryGroup:
        """The first of the requested groups ``group_ids`` that is complete. This waits for one.

        Args:
            group_ids: the one to prefer first, where several are complete.

        Raises:
            RayActorError, or the fleet's own error: no process is left that could deliver it.
        """
        ...

    def finished(self) -> list[Trajectory]:
        """Trajectories that a checkpoint has to keep: they are here, and their groups were not taken."""
        ...
