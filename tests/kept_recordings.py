"""All answers in a folder of recordings, for tests: a training reads those with feedback alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from environments.data.recordings import ANSWERS, Feedback, RecordedAnswer
from environments.data.trajectory_json import trajectory_from_json
from environments.types import Trajectory


@dataclass(frozen=True)
class KeptRecording:
    """An answer as it lies in its folder."""

    answer: RecordedAnswer
    trajectory: Trajectory
    feedback: Feedback | None


def kept_recordings(folder: Path) -> list[KeptRecording]:
    """Read the answers of a folder, the oldest first; nothing is noted."""
    found = []
    for path in (folder / ANSWERS).glob("*.json"):
        if path.name.endswith(".feedback.json"):
            continue
        answer, trajectory = map(json.loads, path.read_text().splitlines())
        judged = path.with_name(f"{path.stem}.feedback.json")
        feedback = Feedback(**json.loads(judged.read_text())) if judged.exists() else None
        found.append(KeptRecording(RecordedAnswer(**answer), trajectory_from_json(trajectory), feedback))
    return sorted(found, key=lambda each: (each.answer.created, each.answer.answer_id))
