"""Trajectories as JSON: what runs and evaluations write, and read again without running any code."""

from __future__ import annotations

from environments.messages import Json, plain_json
from environments.turns import encoded, names_of, steps_of
from environments.types import TerminationReason, Trajectory


def trajectory_line(trajectory: Trajectory, before: Json) -> bytes:
    """A line of ``before`` and the trajectory, whose turns are as ``Turns`` has them.

    What was sampled, judged and is learned from comes back as it was. In the task, and in what agent and
    environment put into the steps, a value that JSON does not know becomes its text.
    """
    own = {name: plain_json(getattr(trajectory, name)) for name in names_of(Trajectory) if name != "steps"}
    begun = encoded(before | own)
    return b'%s,"steps":%s}\n' % (begun[:-1], trajectory.columns.json())


def trajectory_from_json(values: Json) -> Trajectory:
    """The trajectory of a line that ``trajectory_line`` wrote.

    Raises:
        LookupError, TypeError or ValueError: ``values`` are of something else.
    """
    known = {name: values[name] for name in names_of(Trajectory)}
    known["steps"] = steps_of(known["steps"])
    if known["termination_reason"] is not None:
        known["termination_reason"] = TerminationReason(known["termination_reason"])
    return Trajectory(**known)
