"""Copies of a run's checkpoints in any file system that fsspec knows, such as ``s3://bucket/run``."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path, PurePosixPath

from environments.errors import ConfigError, TroupeError
from launch.run_folder.checkpoint import BEST, STATE, STEP_PREFIX, CheckpointFolder, Manifest, Progress
from launch.settings.address import check_address, masked

COPY = re.compile(rf"{STEP_PREFIX}(\d+)-([0-9a-f]{{8}})")
"""The name of a copy: that of the checkpoint, and the beginning of its manifest's digest."""
BESIDE = re.compile(rf"beside/(\w+\.jsonl|checkpoints/{BEST})")
"""A copy's files of what the run's folder had then: its logs, and the name of the best checkpoint."""
_one_at_a_time = threading.Lock()
"""Held while copies are made: a run that goes on from its checkpoint may have begun some before."""

Sizes = Mapping[str, int]
"""Sizes of a copy's files, by their paths in it."""


class RemoteCheckpoints:
    """The copies of a run's checkpoints at one address.

    A copy is a folder ``step_000012-1f2e3d4c`` with the files of the checkpoint. Its manifest comes last, and
    has the digest that the folder is named after: without it, or with a file of another size than it names,
    the copy is not whole. So none is ever written over, and ``mirror`` finishes one that was cut off.

    Args:
        setting: that names the address, for errors.
        address: of a folder.

    Raises:
        ConfigError: it holds a password or a key, or no package that is installed knows it.
    """

    def __init__(self, setting: str, address: str) -> None:
        check_address(setting, address)
        self._name = f"{setting}={address}"
        with self._explained("cannot be opened", ConfigError):
            from fsspec.core import url_to_fs

            self._files, root = url_to_fs(address)
            self._root = root.rstrip("/")

    def __str__(self) -> str:
        return self._name

    # -- from the run's folder -----------------------------------------------------------------------

    def check_beginning(self, checkpoints: CheckpointFolder) -> None:
        """Check that what ``checkpoints`` has may be copied to the address.

        Raises:
            ConfigError: it holds the checkpoints of another run, or cannot be written to.
        """
        with self._explained("cannot be written to", ConfigError):
            probe = f"{self._root}/.probe"
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(probe, b"")
            self._files.rm_file(probe)
            self._check_run(checkpoints, self._whole(self._listed()))

    def mirror(self, checkpoints: CheckpointFolder) -> None:
        """Copy what ``checkpoints`` has, and delete the copies of what it has no more.

        Raises:
            TroupeError: names the address and the reason.
        """
        with _one_at_a_time, self._explained("has not all checkpoints"), checkpoints.held() as held:
            there = self._listed()
            self._check_run(checkpoints, self._whole(there))
            wanted = {f"{each.name}-{_mark((each / STATE).read_bytes())}": each for each in held}
            for name, checkpoint in wanted.items():
                if self._manifest(name, there.get(name, {})) is None:
                    self._upload(checkpoint, name, there.get(name, {}))
            for name in filter(COPY.fullmatch, there.keys() - wanted.keys()):
                if STATE in there[name]:  # first, so that none is ever seen half deleted
                    self._files.rm_file(self._path(name, STATE))
                self._files.rm(self._path(name), recursive=True)

    def _upload(self, checkpoint: Path, name: str, there: Sizes) -> None:
        text, run = (checkpoint / STATE).read_bytes(), checkpoint.parents[1]
        for file, digest in Manifest.of(text).files.items():
            if there.get(file) != digest.num_bytes:
                self._put(checkpoint / file, self._path(name, file))
            if (size := self._files.size(self._path(name, file))) != digest.num_bytes:
                raise OSError(f"{name}/{file} has {size} bytes there instead of {digest.num_bytes}")
        logs = sorted(run.glob("*.jsonl"))  # before the best, which is named before it is logged
        for path in filter(Path.is_file, (*logs, checkpoint.with_name(BEST))):
            self._put(path, self._path(name, "beside", str(path.relative_to(run))))
        if _mark((checkpoint / STATE).read_bytes()) != name.rpartition("-")[2]:
            raise OSError(f"{checkpoint.name} was written anew while it was copied")
        self._files.pipe_file(self._path(name, STATE), text)

    def _put(self, path: Path, target: str) -> None:
        self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
        self._files.put_file(str(path), target)

    # -- to the run's folder -------------------------------------------------------------------------

    def fetch(self, checkpoints: CheckpointFolder, directory: Path) -> None:
        """Fetch the newest whole copy, the best one, and the logs, unless ``checkpoints`` has one as new.

        Args:
            directory: the run's folder.

        Raises:
            ConfigError: the address holds the checkpoints of another run.
            TroupeError: a file is damaged or cannot be had; names the address and the reason.
        """
        with self._explained("cannot be read"):
            there = self._listed()
            whole = self._whole(there)
            if checkpoints.latest() is not None:
                self._check_run(checkpoints, whole)
            if not whole:
                return
            newest, *others = whole
            here = [_done(checkpoints.progress(each, reads_all=False)) for each in checkpoints.all()[-1:]]
            # One without a link to it may be of a fetch that was cut off.
            is_linked = checkpoints.latest() is not None
            if here and (here[0], is_linked) >= (_done(whole[newest].progress), True):
                return
            for found in filter(None, map(BESIDE.fullmatch, there[newest])):
                self._get(newest, found[0], directory, found[1])
            best = directory / "checkpoints" / BEST
            is_best = best.read_text(encoding="utf-8").partition(" ")[0] if best.is_file() else ""
            for name in (*(each for each in others if each.startswith(f"{is_best}-")), newest):
                download = partial(self._download, name, whole[name])
                checkpoints.adopt(name.partition("-")[0], download, is_newest=name == newest)

    def fetch_part(self, part: str, folder: Path) -> str | None:
        """Fetch the manifest of the newest whole copy, and its files of which the names begin with ``part``.

        Returns:
            The name of the checkpoint; ``None`` if there is no whole copy.

        Raises:
            TroupeError: a file cannot be had; names the address and the reason.
        """
        with self._explained("cannot be read"):
            for name, manifest in self._whole(self._listed()).items():
                for file in (STATE, *(each for each in manifest.files if each.startswith(part))):
                    self._get(name, file, folder, file)
                return name.partition("-")[0]
            return None

    def _download(self, name: str, manifest: Manifest, folder: Path) -> None:
        for file in (STATE, *manifest.files):
            self._get(name, file, folder, file)

    def _get(self, name: str, file: str, folder: Path, inside: str) -> None:
        path = PurePosixPath(inside)
        if path.is_absolute() or ".." in path.parts:
            raise ValueError(f"{name} names {inside!r}, which is outside of its folder")
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(self._path(name, file), str(folder / path))

    # -- what is there -------------------------------------------------------------------------------

    def _path(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _listed(self) -> dict[str, dict[str, int]]:
        """Sizes of the files by their paths, in each folder at the address."""
        self._files.invalidate_cache()
        try:
            found = self._files.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        sizes: dict[str, dict[str, int]] = {}
        for path, entry in found.items():
            name, _, file = path.removeprefix(f"{self._root}/").partition("/")
            sizes.setdefault(name, {})[file] = entry["size"]
        return sizes

    def _whole(self, there: Mapping[str, Sizes]) -> dict[str, Manifest]:
        """Manifests of the whole copies, the newest first."""
        manifests = {name: self._manifest(name, there[name]) for name in filter(COPY.fullmatch, there)}
        whole = {name: each for name, each in manifests.items() if each is not None}
        return dict(sorted(whole.items(), key=lambda each: _done(each[1].progress), reverse=True))

    def _manifest(self, name: str, there: Sizes) -> Manifest | None:
        """The manifest of a whole copy; ``None`` if it is not whole."""
        if STATE not in there:
            return None
        try:
            text = self._files.cat_file(self._path(name, STATE))
        except FileNotFoundError:  # dropped since it was listed, by the run that writes there
            return None
        if _mark(text) != name.rpartition("-")[2]:
            return None
        manifest = Manifest.of(text)
        sizes = {file: digest.num_bytes for file, digest in manifest.files.items()}
        return manifest if sizes.items() <= there.items() else None

    def _check_run(self, checkpoints: CheckpointFolder, whole: Mapping[str, Manifest]) -> None:
        """Raise ``ConfigError`` if a copy is not of the run of ``checkpoints``."""
        owners = {each.progress.run for each in whole.values()}
        newest = checkpoints.latest()
        run = None if newest is None else checkpoints.progress(newest, reads_all=False).run
        if owners - ({"", run} if newest else set()):
            raise ConfigError(
                f"{self} holds the checkpoints of another run: name another address, or go on with that run "
                "by run.resume=true and a run.directory without a checkpoint."
            )

    @contextmanager
    def _explained(self, what: str, kind: type[TroupeError] = TroupeError) -> Iterator[None]:
        try:
            yield
        except TroupeError:
            raise
        except Exception as error:  # noqa: BLE001  # each file system has errors of its own
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            # From None: a traceback would show the text of the error, which may hold a key.
            raise kind(f"{self} {what} ({masked(reason)}): mend that, or name another address.") from None


def _done(progress: Progress) -> tuple[int, int]:
    """Updates, and steps of all stages, which tell the checkpoints of one step apart."""
    return progress.step, sum(progress.stage_steps.values())


def _mark(text: bytes) -> str:
    return sha256(text).hexdigest()[:8]
