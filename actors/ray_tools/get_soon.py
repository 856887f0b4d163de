"""Answers of actors that have to come soon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError

from environments.command_name import command_name
from environments.errors import TroupeError

ANSWER_SECONDS = 60.0
"""An actor that does not answer within this time is treated as hung."""


def answers(references: Sequence[ray.ObjectRef], asked: str) -> list[Any]:
    """What the actors answer.

    Args:
        asked: who they are, for the error.

    Raises:
        TroupeError: one of them does not answer.
        RayActorError: one of them has died.
    """
    try:
        return list(ray.get(list(references), timeout=ANSWER_SECONDS))
    except GetTimeoutError as error:
        raise TroupeError(
            f"{asked} did not answer for {ANSWER_SECONDS:g} s: a process hangs or was stopped, or its node "
            f"has too much to do. `{command_name('chaos')}` lists the processes of a node."
        ) from error
