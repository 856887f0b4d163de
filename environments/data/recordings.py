"""Recordings of served answers with the feedback of their clients: two small files an answer, in one folder.

    recordings/
      recordings.json                 how long they are kept, and who reads them
      canary.json                     the version on trial, if there is one: see environments.data.canary
      answers/resp_….json             the answer's place, and its trajectory with tokens and versions
      answers/resp_….feedback.json    its score and comment
      readings/….json                 which answers a reader has read, and when

A file appears when it is whole and on disk, and never changes. So processes need no lock: the one that
creates the file of an answer's feedback has given it, and any process finds an answer by its id. The answers
of a conversation follow each other: one is recorded, and read, only while those before it are recorded, since
its prompt holds their texts.
"""

from __future__ import annotations

import json
import math
import re
import time
import uuid
from collections.abc import Iterator, Sequence, Set
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from environments.data.canary import CanaryFile
from environments.data.trajectory_json import Json, trajectory_from_json, trajectory_line
from environments.disk import replaced, sync, writing_to
from environments.errors import ConfigError, DatasetError
from environments.types import Trajectory

T = TypeVar("T")

ANSWER_ID = re.compile(r"(resp_|chatcmpl-|msg_)[0-9a-f]{32}")
"""Ids of answers: nothing else is the name of a file."""
MAX_COMMENT = 4000
"""Characters of a comment."""
DAY_SECONDS = 24 * 3600.0
SWEEP_SECONDS = 3600.0
"""Seconds between two deletions of what has reached its time limit."""
ABOUT, ANSWERS, READINGS = "recordings.json", "answers", "readings"
_FEEDBACK = ".feedback.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedAnswer:
    """Facts about an answer beside its trajectory."""

    answer_id: str
    owner: str
    """The name of the key that it was given to."""
    model: str
    """The name by which its client has called the agent or the policy, with the version on trial if that has
    answered: policy@31, agent/calculator@31."""
    created: int
    """Time of the request, in seconds of Unix time."""
    conversation: str = ""
    """The name of its conversation: see ``environments.data.canary``."""
    after: str | None = None
    """The answer that its conversation has gone on from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """A client's verdict on an answer."""

    score: float
    """Number from -1 to 1."""
    comment: str = ""
    created: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """An answer as it was sampled, and what its client has thought of it."""

    answer: RecordedAnswer
    trajectory: Trajectory
    feedback: Feedback


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Use of recordings by a training."""

    reader: str
    time: int
    answers: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """Reach of a deletion."""

    answers: list[str]
    """The answers whose recordings and feedback are gone: the one that was named, and those after it."""
    readings: list[Reading]
    """Earlier uses of them, which it does not undo."""


@dataclass
class Recordings:
    """A folder of recordings, as servers write it. All processes that use it reach it by the same path.

    Args:
        folder: path of the folder, which only its owner's programs can open.
        keep_days: days after which an answer is deleted, with its feedback.
        readers: names of the trainings that may read it.
    """

    folder: Path
    keep_days: float
    readers: Sequence[str] = ()
    _swept: float = field(default=-math.inf, compare=False)
    """Time of the last deletion of what has reached its time limit, by a clock that nobody sets."""
    canary: CanaryFile = field(init=False, compare=False)
    """The version on trial among those that a server answers by."""

    def __post_init__(self) -> None:
        self.canary = CanaryFile(self.folder)

    def open(self) -> None:
        """Make the folder where it is not there, note its rules, and delete what is too old.

        Raises:
            ConfigError: it cannot be written.
        """
        remedy = "name a folder that this program may write to, and on several machines one that they share"
        with writing_to(f"server.recording.folder={self.folder}", remedy):
            for part in (self.folder, self.folder / ANSWERS, self.folder / READINGS):
                part.mkdir(mode=0o700, parents=True, exist_ok=True)
            rules = {"format": 1, "keep_days": self.keep_days, "readers": list(self.readers)}
            _create(self.folder / ABOUT, rules, replaces=True)
        self.sweep()

    def write(self, answer: RecordedAnswer, trajectory: Trajectory) -> bool:
        """Keep an answer; return whether it is recorded, and on disk.

        Raises:
            OSError: the disk is full, for example.
        """
        if time.monotonic() > self._swept + SWEEP_SECONDS:
            self.sweep()
        path = self._path(answer.answer_id)
        _create(path, asdict(answer), trajectory_line(trajectory, {}))
        if answer.after is None or self.has(answer.after):
            return True
        path.unlink(missing_ok=True)  # the one before was deleted meanwhile, and this one holds its text
        return False

    def has(self, answer_id: str) -> bool:
        """Return whether the answer of this id is recorded."""
        return ANSWER_ID.fullmatch(answer_id) is not None and self._is_kept(self._path(answer_id))

    def is_whole(self, answer_id: str, known: dict[str, bool]) -> bool:
        """Return whether an answer, and all before it in its conversation, are recorded.

        Args:
            known: has this for the answers that were seen before, and true for "", which is before the first.
        """
        line, before = list[str](), answer_id
        while before not in known:
            known[before] = False  # until those before it are known
            line.append(before)
            found = _first_line(RecordedAnswer, self._path(before)) if self.has(before) else None
            if found is not None:
                before = found.after or ""
        known |= dict.fromkeys(line, known[before])
        return known[answer_id]

    def answer(self, owner: str, answer_id: str) -> RecordedAnswer:
        """The recorded answer of this id. Raises ``FileNotFoundError`` if ``owner`` has none."""
        found = _first_line(RecordedAnswer, self._path(answer_id)) if self.has(answer_id) else None
        if found is None or found.owner != owner:
            raise FileNotFoundError(answer_id)
        return found

    def add_feedback(self, owner: str, answer_id: str, feedback: Feedback) -> None:
        """Keep the feedback on an answer: it is on disk at the return.

        Raises:
            FileNotFoundError: ``owner`` has no recorded answer of this id.
            FileExistsError: there is feedback on it.
        """
        self.answer(owner, answer_id)
        path = self._path(answer_id, _FEEDBACK)
        _create(path, asdict(feedback))
        if not self.has(answer_id):
            path.unlink(missing_ok=True)  # it was deleted meanwhile
            raise FileNotFoundError(answer_id)

    def feedback(self, owner: str, answer_id: str) -> Feedback | None:
        """The feedback on an answer. Raises ``FileNotFoundError`` if ``owner`` has no such recording."""
        self.answer(owner, answer_id)
        return _first_line(Feedback, self._path(answer_id, _FEEDBACK))

    def delete(self, owner: str, answer_id: str) -> Deletion:
        """Delete an answer's recording and feedback, and those of the answers after it in its conversation.

        Raises:
            FileNotFoundError: ``owner`` has no recorded answer of this id.
        """
        newest, deleted = self._branch({self.answer(owner, answer_id).answer_id}), list[str]()
        while newest:
            for each in reversed(newest):  # the named one goes last: a killed deletion can be repeated
                for ending in (_FEEDBACK, ".json", _FEEDBACK):  # what comes from now on finds no answer
                    self._path(each, ending).unlink(missing_ok=True)
            deleted += newest
            newest = self._branch(set(deleted))  # what was written after one while that was still there
        for path in (self.folder / ANSWERS).glob(".*.tmp"):  # of a writer that was killed, or finds it gone
            if path.name[1:].partition(".")[0] in deleted:
                path.unlink(missing_ok=True)
        sync(self.folder / ANSWERS)
        uses = [each for each in _readings(self.folder) if not set(deleted).isdisjoint(each.answers)]
        return Deletion(answers=deleted, readings=uses)

    def sweep(self) -> None:
        """Delete what has reached its time limit, and what killed programs have left half written."""
        self._swept = time.monotonic()
        for path in (*(self.folder / ANSWERS).iterdir(), *(self.folder / READINGS).iterdir()):
            recording = path.with_name(path.name.replace(_FEEDBACK, ".json"))
            is_over = _age(path) > SWEEP_SECONDS if path.suffix == ".tmp" else not self._is_kept(recording)
            if is_over:
                path.unlink(missing_ok=True)

    def _branch(self, first: Set[str]) -> list[str]:
        """The recorded answers among ``first``, and those after them, each behind those that it follows."""
        paths = (path for path in (self.folder / ANSWERS).glob("*.json") if not path.name.endswith(_FEEDBACK))
        recorded, following = set[str](), dict[str | None, list[str]]()
        for each in filter(None, (_first_line(RecordedAnswer, path) for path in paths)):
            recorded.add(each.answer_id)
            following.setdefault(each.after, []).append(each.answer_id)
        branch = [*first]
        for answer_id in branch:  # it grows meanwhile
            branch += following.pop(answer_id, ())
        return [each for each in dict.fromkeys(branch) if each in recorded]

    def _path(self, answer_id: str, ending: str = ".json") -> Path:
        return self.folder / ANSWERS / f"{answer_id}{ending}"

    def _is_kept(self, path: Path) -> bool:
        return _age(path) <= self.keep_days * DAY_SECONDS


def read_recordings(folder: str | Path, reader: str = "training") -> list[Recording]:
    """The recordings with feedback in ``folder`` within their time limit, the oldest first; the use is noted.

    Those are left out whose conversation has an earlier answer that is not recorded any more.

    Raises:
        ConfigError: the folder has no recordings, its rules do not name ``reader``, or it cannot be written.
        DatasetError: a file holds something else.
    """
    folder = Path(folder)
    try:
        rules = json.loads((folder / ABOUT).read_text(encoding="utf-8"))
        keep_days, readers = float(rules["keep_days"]), list(rules["readers"])
    except (OSError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{folder} is no folder of recordings ({error!r}): name the server.recording.folder of a server."
        ) from error
    if reader not in readers:
        raise ConfigError(
            f"{reader!r} may not read the recordings in {folder}, which are for "
            f"{', '.join(readers) or 'nobody'}: server.recording.readers of the server names those who may."
        )
    kept = Recordings(folder, keep_days)
    paths = (folder / ANSWERS).glob(f"*{_FEEDBACK}")
    known = {"": True}
    read = list(filter(None, (_recording(kept, path, known) for path in paths)))
    read.sort(key=lambda each: (each.answer.created, each.answer.answer_id))
    ids = [each.answer.answer_id for each in read]
    reading = Reading(reader=reader, time=int(time.time()), answers=ids)
    try:
        _create(folder / READINGS / f"{uuid.uuid4().hex}.json", asdict(reading))
    except OSError as error:
        raise ConfigError(
            f"The use of {folder} cannot be noted ({error}), and a deletion has to name it: let {reader!r} "
            f"write into {folder / READINGS}."
        ) from error
    # A deletion that has not found the reading has deleted its answers before that: they are not used.
    return [each for each in read if kept.has(each.answer.answer_id)]


def _recording(kept: Recordings, feedback_path: Path, known: dict[str, bool]) -> Recording | None:
    """The recording with this feedback; ``None`` unless all of its conversation up to it is kept."""
    answer_id = feedback_path.name.removesuffix(_FEEDBACK)
    path = feedback_path.with_name(f"{answer_id}.json")
    if not kept.is_whole(answer_id, known):
        return None
    try:
        first, line = path.read_bytes().splitlines()
        answer, trajectory = RecordedAnswer(**json.loads(first)), trajectory_from_json(json.loads(line))
    except FileNotFoundError:
        return None
    except (LookupError, TypeError, ValueError) as error:
        raise DatasetError(f"{path} holds no recording ({error!r}): repair or delete it.") from error
    feedback = _first_line(Feedback, feedback_path)
    if feedback is None:
        return None
    return Recording(answer=answer, trajectory=trajectory, feedback=feedback)


def _readings(folder: Path) -> Iterator[Reading]:
    return filter(None, (_first_line(Reading, path) for path in sorted((folder / READINGS).glob("*.json"))))


def _first_line(kind: type[T], path: Path) -> T | None:
    """The object in the first line of a file; ``None`` if the file was deleted meanwhile."""
    try:
        with path.open(encoding="utf-8") as file:
            return kind(**json.loads(file.readline()))
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as error:
        raise DatasetError(f"{path} is no file of recordings ({error!r}): repair or delete it.") from error


def _age(path: Path) -> float:
    """Seconds since a file was written; endless for one that is not there."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return float("inf")


def _create(path: Path, first: Json, line: bytes = b"", replaces: bool = False) -> None:
    """Create a file, whole and on disk. Raises ``FileExistsError`` unless it may replace one."""
    with replaced(path, is_new=not replaces) as unfinished:
        unfinished.touch(mode=0o600)
        unfinished.write_bytes(json.dumps(first).encode() + b"\n" + line)
