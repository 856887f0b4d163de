"""Checkpoints: written to a temporary folder, renamed when whole, found again by a link."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from environments.data.trajectory_json import trajectory_from_json, trajectory_line
from environments.disk import FileDigest, replaced, sync
from environments.errors import ConfigError, TroupeError
from environments.types import Trajectory
from policies.learning.settings import LearnerConfig
from policies.learning.verl.fields import in_four_bits

LATEST = "latest"
BEST = "best"
STATE = "state.json"
READY = "ready.jsonl"
DIGEST = "sha256"
"""Field of ``state.json`` with the digest of the others."""
STEP_PREFIX = "step_"


@dataclass
class Progress:
    """Progress of a run: with the learner's state, all that a resumed run needs."""

    stage_steps: dict[str, int] = field(default_factory=dict)
    """Steps that are done of each stage of training, by its name."""
    step: int = 0
    """Policy updates that are done, by all stages together."""
    version: int = 0
    """Version of the policy that is published."""
    num_groups: int = 0
    """Groups consumed so far, trained on or dropped: the data cursor. These and the groups of ``StreamState``
    are all that were requested."""
    tasks_digest: str = ""
    """Digest of what decides which task a group plays: what was under way belongs to these tasks."""
    kl_coef: float | None = None
    """Present coefficient of the adaptive KL controller; null without one."""
    set_aside: dict[str, int] = field(default_factory=dict)
    """Positions of the tasks that failed everywhere, and the first group that must not play each."""
    num_turns: int = 0
    """Turns that tasks have had so far, where a curriculum decides at which of them they are played."""
    chosen_tasks: dict[str, int] = field(default_factory=dict)
    """Positions of the tasks that a curriculum has chosen for the groups that are not consumed, by number."""
    curriculum: dict[str, Any] = field(default_factory=dict)
    """State of the curriculum: what it knows of the tasks."""
    observed_by: str = ""
    """Method of the curriculum that made this state, whose form others may not read."""
    run: str = ""
    """Name that the run has given itself: that of whose checkpoints lie at an address."""
    judged_by: dict[str, str] = field(default_factory=dict)
    """The judge of success in the updates ("rollout") and in the evaluations ("eval") so far."""

    @classmethod
    def first(cls, learner: LearnerConfig) -> Progress:
        """Make that of a run that begins: weights in four bits are a version of their own, since the
        model's file has others.
        """
        return cls(version=int(in_four_bits(learner)))


@dataclass(frozen=True)
class StreamState:
    """Rollouts between the fleet and the loop."""

    ready: tuple[Trajectory, ...] = ()
    """Finished and not consumed yet."""
    in_flight: tuple[str, ...] = ()
    """Ids of the rollouts that were requested and had not come back."""

    def with_played_again(self, is_chosen: Callable[[Trajectory], bool]) -> StreamState:
        """The same rollouts, of which the chosen ones count as unfinished: they are played again."""
        again = (each.rollout_id for each in self.ready if is_chosen(each))
        ready = tuple(each for each in self.ready if not is_chosen(each))
        return StreamState(ready, in_flight=(*again, *self.in_flight))


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``state.json``: the meaning of a checkpoint's other files, and their digests."""

    progress: Progress
    in_flight: tuple[str, ...]
    num_ready: int
    files: dict[str, FileDigest]
    """Digests of its files, by the path inside the checkpoint."""

    @staticmethod
    def read(checkpoint: Path) -> Manifest:
        """Raises OSError, ValueError or TypeError for what is no manifest."""
        return Manifest.of((checkpoint / STATE).read_bytes())

    @staticmethod
    def of(text: bytes) -> Manifest:
        """The manifest of this text. Raises ValueError or TypeError for what is none."""
        try:
            fields = dict(json.loads(text))
        except ValueError as error:
            raise ValueError(f"{STATE} is no JSON: {error}") from error
        if fields.pop(DIGEST, None) != _digest_of(fields):
            raise ValueError(f"{STATE} is not what this version has written: its SHA-256 differs")
        return replace(
            Manifest(**fields),
            progress=Progress(**fields["progress"]),
            in_flight=tuple(fields["in_flight"]),
            files={name: FileDigest(**digest) for name, digest in fields["files"].items()},
        )


SaveLearner = Callable[[str], Callable[[], dict[str, FileDigest]] | None]
"""Copies the learner's state and begins to write it to the folder that it is given. Returns a function that
waits for the end and returns digests of files by path, or ``None`` where all is written."""


class CheckpointFolder:
    """The checkpoints of one run, in ``checkpoints/`` of its folder.

    A checkpoint is a folder ``step_000012`` with the manifest ``state.json``, the learner's shards (weights,
    optimizer, schedule, random generators), ``huggingface/``, which ``AutoModelForCausalLM.from_pretrained``
    loads, and ``ready.jsonl``, the trajectories that were waiting. All of them are read as data: whoever has
    written them, none runs code in the run that reads it. No random generator of the driver is saved, because
    none is used: requests, seeds and batches are functions of the run's seed and of ``Progress``.

    ``latest`` is a link to a checkpoint, or a file with its name where the file system has no links; the file
    ``best`` names one with the value that it was found best by. However a run ends, ``latest`` names a whole
    one. A checkpoint is written beside what the run does, one at a time. Once it is whole, those are deleted
    that are neither among the newest ``kept`` nor best nor under evaluation, whichever process has written
    them; and so are those of later steps, which are left of a future that the run has gone back from.

    Args:
        directory: the run's folder.
        kept: checkpoints to keep, at least 1.
    """

    def __init__(self, directory: Path, kept: int) -> None:
        self._directory = directory / "checkpoints"
        self._kept = kept
        self.lock = threading.Lock()
        """Held while a checkpoint takes its name, which another one may have had."""
        self._unfinished: Path | None = None
        """The folder that is being written."""
        self._held: Sequence[Path] = ()
        """Checkpoints that are being copied."""
        self._num_begun = 0

    def begin_save(
        self,
        progress: Progress,
        stream: StreamState,
        save_learner: SaveLearner,
        step_under_evaluation: int | None = None,
    ) -> Callable[[], Path]:
        """Begin to write a checkpoint. Until it is whole, the one before it is the newest.

        Args:
            step_under_evaluation: its checkpoint stays at this save: it may become the best.

        Returns:
            A function that waits for the learner's files, and makes the checkpoint the newest. Another thread
            may call it.
        """
        name = _name(progress.step)
        with self.lock:
            self._undo_half_a_save()
            self._num_begun += 1  # one that was given up may still be writing to its own folder
            self._unfinished = temporary = self._directory / f".{name}.{self._num_begun}.tmp"
        for half in self._directory.glob(f".{STEP_PREFIX}*.tmp"):  # first: the disk may have no room for both
            shutil.rmtree(half, ignore_errors=True)
        temporary.mkdir(parents=True)
        wait = save_learner(str(temporary))
        with (temporary / READY).open("wb") as file:
            file.writelines(trajectory_line(each, {}) for each in stream.ready)

        def finish() -> Path:
            written = {} if wait is None else wait()
            digests = {str(Path(path).relative_to(temporary)): each for path, each in written.items()}
            _write_manifest(temporary, progress, stream, digests)
            with self.lock:
                if self._unfinished != temporary:
                    raise TroupeError(f"The checkpoint of step {progress.step} was given up.")
                final = self._put_in_place(temporary, name)
                self._link_latest(name)
                self._unfinished = None
                self._drop_old(step_under_evaluation)
            return final

        return finish

    def give_up(self) -> None:
        """Let the checkpoint that is being written, if there is one, never become the newest."""
        with self.lock:
            self._unfinished = None

    @contextmanager
    def held(self) -> Iterator[Sequence[Path]]:
        """The whole checkpoints, the newest first: while the block runs, none is dropped."""
        with self.lock:
            newest = self.latest()
            self._held = [each for each in self.all() if newest and step_of(each) <= step_of(newest)][::-1]
        try:
            yield self._held
        finally:
            self._held = ()

    def adopt(self, name: str, download: Callable[[Path], None], is_newest: bool) -> None:
        """Take a checkpoint from another place. All its files are read, to see if they are whole.

        Args:
            name: of its folder.
            download: writes it to the folder that it is given.

        Raises:
            ValueError: a file is missing or damaged.
        """
        temporary = self._directory / f".{name}.fetched.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        download(temporary)
        check_digests(temporary, Manifest.read(temporary).files)
        for path in (*temporary.rglob("*"), temporary):
            sync(path)
        self._put_in_place(temporary, name)
        if is_newest:
            self._link_latest(name)

    def mark_best(self, checkpoint_step: int, metric: str, value: float) -> bool:
        """Make the checkpoint of that step ``best`` if ``value`` is higher than that of the best so far.

        Values of another ``metric`` are not compared: the best by the former one gives way. A step that is
        best already and is evaluated again has the new value. False, and nothing changes, if the value is not
        higher or not a number, or if no checkpoint of that step is kept.
        """
        with self.lock:
            self._undo_half_a_save()
            name, latest = _name(checkpoint_step), self.latest()
            if latest is None or checkpoint_step > step_of(latest) or not (self._directory / name).exists():
                return False  # a folder beyond the newest is what an interrupted run has left
            if math.isnan(value):
                return False
            best = self._best()
            is_best = best is None or best[0] == name or best[1] != metric or value > best[2]
            if is_best:
                self._write_pointer(BEST, f"{name} {metric} {value!r}")
            self._drop_old()
            return is_best

    def latest(self) -> Path | None:
        """The newest whole checkpoint. Raises ``ConfigError`` if the file that names it is damaged."""
        pointer = self._directory / LATEST
        if pointer.is_symlink():  # also while what it names is being replaced
            name = str(pointer.readlink())
        elif pointer.is_dir():
            raise ConfigError(
                f"{pointer} is a folder, as in a copy that has followed links: delete it, and link it to the "
                f"newest checkpoint beside it, `ln -sfn {_name(12)} {pointer}`."
            )
        elif pointer.exists():
            name = _text(pointer)
        else:
            return None
        named, replaced = self._directory / name, self._directory / f".{name}.old"
        # A reader leaves it where it is: the run that writes here may be between the two renames just now.
        return replaced if replaced.exists() and not named.exists() else named

    def all(self) -> list[Path]:
        """The checkpoints that are there, the oldest first."""
        there = self._directory.iterdir() if self._directory.is_dir() else ()
        return sorted((each for each in there if step_of(each) >= 0), key=step_of)

    def best(self) -> Path | None:
        """The checkpoint that ``mark_best`` has found best, if any."""
        best = self._best()
        return None if best is None else self._directory / best[0]

    @staticmethod
    def progress(checkpoint: Path, reads_all: bool = True) -> Progress:
        """Progress when ``checkpoint`` was written.

        Args:
            reads_all: whether all its files are read, to see if they are whole.

        Raises:
            ConfigError: a file is missing or damaged.
        """
        with _damage_explained(checkpoint):
            manifest = Manifest.read(checkpoint)
            if reads_all:
                check_digests(checkpoint, manifest.files)
                tensors = {str(each.relative_to(checkpoint)) for each in checkpoint.rglob("*.safetensors")}
                if strange := sorted(tensors - manifest.files.keys()):
                    raise ValueError(f"{strange[0]} has no digest in {STATE}")
            return manifest.progress

    @staticmethod
    def stream(checkpoint: Path) -> StreamState:
        """Rollouts that were ready and in flight when ``checkpoint`` was written.

        Raises:
            ConfigError: it cannot be read.
        """
        with _damage_explained(checkpoint):
            manifest = Manifest.read(checkpoint)
            check_digests(checkpoint, {READY: manifest.files[READY]})
            ready = _read_ready(checkpoint)
            if len(ready) != manifest.num_ready:
                raise ValueError(f"{READY} holds {len(ready)} trajectories instead of {manifest.num_ready}")
            return StreamState(ready=ready, in_flight=manifest.in_flight)

    def _undo_half_a_save(self) -> None:
        """Give the newest checkpoint its name back, if ``_put_in_place`` was killed between its renames."""
        latest = self.latest()
        if latest is not None and latest.name.startswith("."):
            latest.rename(self._directory / latest.name.removeprefix(".").removesuffix(".old"))

    def _put_in_place(self, temporary: Path, name: str) -> Path:
        final, replaced = self._directory / name, self._directory / f".{name}.old"
        if final.exists():  # the same step again, for example at a Ctrl-C right after a checkpoint
            shutil.rmtree(replaced, ignore_errors=True)
            final.rename(replaced)
        temporary.rename(final)
        sync(self._directory)
        return final

    def _link_latest(self, name: str) -> None:
        temporary = self._directory / f".{LATEST}.tmp"
        temporary.unlink(missing_ok=True)
        try:
            temporary.symlink_to(name)
        except OSError:  # a file system without links, such as one in front of an object store
            self._write_pointer(LATEST, name)
            return
        os.replace(temporary, self._directory / LATEST)
        sync(self._directory)

    def _write_pointer(self, pointer: str, text: str) -> None:
        with replaced(self._directory / pointer) as unfinished:
            unfinished.write_text(text + "\n", encoding="utf-8")

    def _best(self) -> tuple[str, str, float] | None:
        """Name, metric and value of the best checkpoint, if it is there."""
        pointer = self._directory / BEST
        if not pointer.exists():
            return None
        text = pointer.read_text(encoding="utf-8")
        try:
            name, *metric, value = text.split()
            best = name, " ".join(metric), float(value)
        except ValueError as error:
            raise ConfigError(
                f"{pointer} holds {text!r}, which is not a checkpoint's name, a metric and its value, as "
                f"'{_name(12)} eval/reward_mean 0.5': repair or delete it."
            ) from error
        return best if (self._directory / name).exists() else None

    def _drop_old(self, step_under_evaluation: int | None = None) -> None:
        newest = self.latest()
        assert newest is not None, "nothing is dropped before something is saved"
        checkpoints = self.all()
        past = [each for each in checkpoints if step_of(each) <= step_of(newest)]
        best = self.best()
        if best is not None and best not in past:
            (self._directory / BEST).unlink()
        kept = {
            *past[-self._kept :],
            *self._held,
            *(each for each in past if each == best or step_of(each) == step_under_evaluation),
        }
        for leftover in self._directory.glob(f".{STEP_PREFIX}*"):
            if leftover != self._unfinished:
                shutil.rmtree(leftover)
        for checkpoint in checkpoints:
            if checkpoint not in kept:  # renamed first, so that none is ever seen half deleted
                shutil.rmtree(checkpoint.rename(self._directory / f".{checkpoint.name}.old"))


def _text(pointer: Path) -> str:
    try:
        return pointer.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{pointer} is no text ({error}): link it to the newest checkpoint beside it, "
            f"`ln -sfn {_name(12)} {pointer}`."
        ) from error


def _name(step: int) -> str:
    return f"{STEP_PREFIX}{step:06d}"


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint's folder, -1 of anything else."""
    match = re.fullmatch(rf"{STEP_PREFIX}(\d+)", checkpoint.name)
    return int(match[1]) if match else -1


# -- what a checkpoint holds ---------------------------------------------------------------------------


def _read_ready(checkpoint: Path) -> tuple[Trajectory, ...]:
    try:
        with (checkpoint / READY).open(encoding="utf-8") as file:
            return tuple(trajectory_from_json(json.loads(line)) for line in file)
    except (LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{READY} holds something else than trajectories: {error!r}") from error


def _write_manifest(
    folder: Path, progress: Progress, stream: StreamState, digests: Mapping[str, FileDigest]
) -> None:
    """Write ``state.json``, and force all to disk: no power cut leaves a renamed folder of empty files.

    Args:
        digests: of those who wrote the files. The files without one are small, and are read here.
    """
    paths = sorted(folder.rglob("*"))
    names = {str(path.relative_to(folder)) for path in paths if path.is_file()}
    manifest = Manifest(
        progress=progress,
        in_flight=stream.in_flight,
        num_ready=len(stream.ready),
        files=dict(sorted({**digests, **_digests(folder, sorted(names - set(digests)))}.items())),
    )
    fields = asdict(manifest)
    text = json.dumps(fields | {DIGEST: _digest_of(fields)}, indent=1)
    (folder / STATE).write_text(text, encoding="utf-8")
    for path in (*paths, folder / STATE, folder):
        sync(path)


def _digest_of(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def _digests(checkpoint: Path, names: Sequence[str]) -> dict[str, FileDigest]:
    """Digests of the named files, in parallel: a large model's are hundreds of gigabytes."""

    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(FileDigest.of, [checkpoint / name for name in names]), strict=True))


def check_digests(checkpoint: Path, files: Mapping[str, FileDigest]) -> None:
    """Raise ValueError for the first file that is not as it was written."""
    for name, digest in files.items():
        path = checkpoint / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != digest.num_bytes:
            raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {digest.num_bytes}")
    for name, found in _digests(checkpoint, list(files)).items():
        if found != files[name]:
            raise ValueError(f"{name} is not what was written: its SHA-256 differs")


@contextmanager
def _damage_explained(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, KeyError) as error:
        others = sorted(
            each.name for each in checkpoint.parent.glob("*") if step_of(each) >= 0 and each != checkpoint
        )
        another = f"another one ({', '.join(others)})" if others else "another one"
        raise ConfigError(
            f"The checkpoint {checkpoint} cannot be read ({error}): link {checkpoint.parent / LATEST} to "
            f"{another} with `ln -sfn`, or start with a new run.directory."
        ) from error
