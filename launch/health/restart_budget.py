"""Number of times that a run may go on from its checkpoint before it ends with the cause."""

from __future__ import annotations

RECOVERY_MINUTES = 10.0
"""Window over which ``run.max_recoveries`` counts: what fails more often will not be repaired by going on."""


class RestartBudget:
    """Counts the recoveries of a run over a sliding window of time.

    Args:
        most: recoveries that the window may hold.
        minutes: length of the window.
    """

    def __init__(self, most: int, minutes: float = RECOVERY_MINUTES) -> None:
        self._most = most
        self._seconds = 60 * minutes
        self._times: list[float] = []

    def allow(self, now: float) -> bool:
        """Decide whether the run may recover at ``now``, in seconds. If so, this recovery is counted."""
        self._times = [each for each in self._times if now - each < self._seconds]
        if len(self._times) >= self._most:
            return False
        self._times.append(now)
        return True

    def take_back(self) -> None:
        """Count the newest recovery no more: another one takes its place."""
        self._times.pop()


def lost_updates(step: int, saved_step: int) -> str:
    """A sentence on the updates that no checkpoint holds.

    Args:
        step: updates that were made.
        saved_step: updates that the newest checkpoint knows of; -1 without a checkpoint.
    """
    if saved_step < 0:
        return f"There is no checkpoint yet: {step} update(s) are lost, and the run begins anew."
    return f"{step - saved_step} update(s) since the checkpoint of step {saved_step} are lost."
