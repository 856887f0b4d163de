"""The calculator recipe with a server's recordings as demonstrations: those that were liked, or all of them.

A workload for ``feedback.py``, which names the folder and the choice by variables of the environment.
"""

from __future__ import annotations

import os
from dataclasses import replace

from environments.data.feedback import liked_conversations
from environments.data.recordings import read_recordings
from launch.recipes import calculator
from launch.workload import Workload

FOLDER, HEEDED = "FEEDBACK_FOLDER", "FEEDBACK_HEEDED"


def workload(seed: int) -> Workload:
    recordings = read_recordings(os.environ[FOLDER])
    if os.environ[HEEDED] == "yes":
        conversations = liked_conversations(recordings)
    else:
        conversations = [each.trajectory.steps[-1].chat_completions for each in recordings]
    return replace(calculator.workload(seed), demonstrations=conversations)
