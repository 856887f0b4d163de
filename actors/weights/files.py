"""Weights as files in a folder that all nodes share: for clusters without a common object store.

    <folder>/run.txt                       the run whose folder it is, and a key of its present process
    <folder>/version-000017-00000/         shards of rank 0, named when all are on the disk
        weights-00000.safetensors ...
        manifest.json                      written last: the SHA-256 of each file

The newest two versions are kept: the one before the newest for replicas that are still reading it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import ray

from actors.weights.transport import VersionGoneError, WeightTarget, WeightTransport, WeightTransportError
from environments.disk import sync
from environments.errors import ConfigError
from policies.engines.weights import WeightBucket, pack

OWNER = "run.txt"
MANIFEST = "manifest.json"
NUM_KEPT = 2
UNFINISHED, DELETED = ".unfinished-", ".deleted-"
"""Beginnings of the names of folders that no replica reads."""
REMEDY = (
    "name a folder that all nodes share and can write to with server.weights.shared_folder=..., or "
    "put run.directory there"
)


class FileTransport(WeightTransport):
    """Writes the weights of each version into a folder of its own, and deletes them when they are old.

    Args:
        folder: where to, unless ``shared_folder`` is given.
        shared_folder: a folder outside the run's folder. One run at a time can use it.

    Raises:
        ConfigError: the folder cannot be written to, or is in use by something else.
    """

    def __init__(self, folder: str, shared_folder: str | None = None) -> None:
        self._folder = (
            Path(os.path.abspath(shared_folder), Path(folder).name) if shared_folder else Path(folder)
        )
        self._owner = f"{folder}\n{uuid.uuid4().hex}\n"
        with self._writing("The folder for weights"):
            self._folder.mkdir(parents=True, exist_ok=True)
            if shared_folder:
                self._check_owner(folder)
            self._take_over()

    def open(self) -> None:
        try:
            seen = (self._folder / OWNER).read_text(encoding="utf-8")
        except OSError as error:
            raise self._not_shared(str(error)) from error
        if seen != self._owner:
            raise self._not_shared(f"{OWNER} there is {seen!r}")

    def publish(self, version: int, buckets: Iterable[WeightBucket], rank: int) -> list[str]:
        from safetensors.torch import save

        for left in self._folder.glob(f"{UNFINISHED}{rank}-*"):  # by one that was killed while it wrote
            shutil.rmtree(left, ignore_errors=True)
        unfinished = self._unfinished(rank)
        try:
            with self._writing(f"Version {version} of the weights"):
                unfinished.mkdir()
                digests = {}
                for number, bucket in enumerate(buckets):
                    name = f"weights-{number:05d}.safetensors"
                    digests[name] = _write(unfinished / name, save(dict(bucket.shards())))
                manifest = {"version": version, "sha256": digests}
                _write(unfinished / MANIFEST, json.dumps(manifest, indent=1).encode())
                return [self._finish(unfinished, f"version-{version:06d}-{rank:05d}")]
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)  # it exists only after an error

    async def keep(self, version: int, pieces: Sequence[ray.ObjectRef]) -> Sequence[ray.ObjectRef]:
        locations = await asyncio.gather(*pieces)
        return [ray.put(each) for each in await asyncio.to_thread(self.keep_at, version, locations)]

    async def fetch(self, version: int, pieces: Sequence[str], engine: WeightTarget) -> None:
        # Into memory, whole and verified, before the engine is touched: it cannot go back.
        read = [await asyncio.to_thread(_read, Path(location)) for location in pieces]
        await engine.load_weights(version, [bucket for buckets in read for bucket in buckets])

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def keep_at(self, version: int, locations: Sequence[str]) -> list[str]:
        """Take a version over from another store's folder, if it lies there; then delete old versions.

        Returns:
            Where the version is, by rank.
        """
        kept = [self._taken_over(version, Path(location)) for location in locations]
        by_version: dict[int, list[Path]] = {}
        for path in self._folder.glob("version-*"):
            by_version.setdefault(int(path.name.split("-")[1]), []).append(path)
        for old in sorted(by_version)[:-NUM_KEPT]:
            for path in by_version[old]:
                self._put_away(path)
        for deleted in self._folder.glob(f"{DELETED}*"):
            # A file that is open on another node may stay: then the next version deletes it.
            shutil.rmtree(deleted, ignore_errors=True)
        return kept

    def _taken_over(self, version: int, location: Path) -> str:
        if location.parent == self._folder:
            return str(location)
        unfinished = self._unfinished("copy")
        with self._writing(f"Version {version} of the weights"):
            shutil.copytree(location, unfinished, copy_function=_link_or_copy)
            return self._finish(unfinished, location.name)

    # -- the folder ----------------------------------------------------------------------------------

    def _check_owner(self, run: str) -> None:
        present = sorted(each.name for each in self._folder.iterdir())
        owner = self._folder / OWNER
        if present and not (owner.is_file() and owner.read_text(encoding="utf-8").startswith(f"{run}\n")):
            raise ConfigError(
                f"{self._folder} cannot hold the weights of this run: there is something else in it, such as "
                f"{present[0]!r}. Delete it if no run uses it, or name another folder with "
                "server.weights.shared_folder=..."
            )

    def _take_over(self) -> None:
        """Make the folder this process's, and delete what an earlier process of the same run has left."""
        for left in self._folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        _write(self._folder / OWNER, self._owner.encode())
        sync(self._folder)

    def _finish(self, unfinished: Path, name: str) -> str:
        final = self._folder / name
        sync(unfinished)
        if final.exists():  # no store has heard of it: a rank was lost before it could say that it was done
            self._put_away(final)
        unfinished.rename(final)
        sync(self._folder)
        return str(final)

    def _put_away(self, folder: Path) -> None:
        """Have a version gone at once, for all who read it; ``keep_at`` deletes it."""
        folder.rename(self._folder / f"{DELETED}{uuid.uuid4().hex}")

    def _unfinished(self, writer: object) -> Path:
        return self._folder / f"{UNFINISHED}{writer}-{uuid.uuid4().hex}"

    @contextmanager
    def _writing(self, subject: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{subject} cannot be written to {self._folder} on {socket.gethostname()} "
                f"({error.strerror or error}): make room or grant access there, or {REMEDY}."
            ) from error

    def _not_shared(self, finding: str) -> ConfigError:
        return ConfigError(
            f"server.weights.transport=files needs a folder that all nodes share, and {self._folder} on "
            f"{socket.gethostname()} is not the one that the run has written to ({finding}): {REMEDY}."
        )


# -- files ---------------------------------------------------------------------------------------------


def _write(path: Path, content: bytes) -> str:
    """Write a file to the disk; return its SHA-256."""
    path.write_bytes(content)
    sync(path)
    return hashlib.sha256(content).hexdigest()


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _read(location: Path) -> list[WeightBucket]:
    """The verified weights of a version.

    Raises:
        VersionGoneError: it was deleted.
        WeightTransportError: a file is missing, damaged or unreadable.
    """
    try:
        digests = json.loads((location / MANIFEST).read_bytes())["sha256"]
        return [bucket for name in digests for bucket in _buckets(location / name, digests[name])]
    except (OSError, ValueError, KeyError, TypeError) as error:
        if not location.exists():
            raise VersionGoneError(
                f"The weights in {location} are not there on {socket.gethostname()}. If the folder exists on "
                f"other nodes, it is not shared with this one: {REMEDY}."
            ) from error
        raise WeightTransportError(
            f"The weights in {location} are damaged, read on {socket.gethostname()}: {error}. Check the disk "
            "or the mount; then go on from the newest checkpoint with run.resume=true."
        ) from error


def _buckets(path: Path, digest: str) -> Iterator[WeightBucket]:
    from safetensors.torch import load

    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != digest:
        raise ValueError(f"{path.name} has the SHA-256 {found} instead of {digest} ({len(content)} bytes)")
    return pack(load(content).items())
