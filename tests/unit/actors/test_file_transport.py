"""Weights as files: whole, verified, and gone when they are old."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import shutil
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ray.exceptions import ObjectLostError
from recording_engine import RecordingEngine, Tensors
from weight_shards import shards_of

from actors.weights import follower
from actors.weights.files import MANIFEST, FileTransport
from actors.weights.follower import WeightFollower, open_transport
from actors.weights.store import PublishedWeights
from actors.weights.transport import VersionGoneError, WeightTransportError, make_transport
from environments.errors import ConfigError, PartLostError, WeightsError
from policies.engines.weights import pack

if TYPE_CHECKING:
    import torch


def weights(seed: int) -> Tensors:
    """Tensors of several types and shapes; in buckets of 256 bytes they take several files."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(5, 7, generator=generator),
        "half": torch.randn(33, generator=generator).bfloat16(),
        "large": torch.randn(40, 10, generator=generator),
        "scalar": torch.tensor(float(seed)),
    }


packed = partial(pack, bucket_bytes=256)


def publish(transport: FileTransport, version: int) -> str:
    """Publish ``weights(version)`` from one rank; return their location."""
    (location,) = transport.keep_at(
        version, transport.publish(version, packed(weights(version).items()), rank=0)
    )
    return location


def fetched(transport: FileTransport, version: int, *locations: str) -> Tensors:
    engine = RecordingEngine()
    asyncio.run(transport.fetch(version, locations, engine))
    assert engine.version == version
    return engine.loaded


def assert_equal(found: Tensors, expected: Tensors) -> None:
    import torch

    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "weights_training"


@pytest.fixture
def transport(folder: Path) -> FileTransport:
    return FileTransport(str(folder))


def shards(location: str) -> list[Path]:
    return sorted(Path(location).glob("*.safetensors"))


def test_replica_reads_what_learner_has_written_to_last_bit(transport: FileTransport) -> None:
    location = publish(transport, 3)
    assert len(shards(location)) == 4
    there = pickle.loads(pickle.dumps(transport))  # as it gets into another process
    there.open()
    assert_equal(fetched(there, 3, location), weights(3))


def publish_by_ranks(transport: FileTransport, version: int, num_ranks: int) -> list[str]:
    locations: list[str] = []
    for rank in range(num_ranks):
        locations += transport.publish(version, packed(shards_of(weights(version), rank, num_ranks)), rank)
    return transport.keep_at(version, locations)


def test_newest_two_versions_are_kept_and_nothing_of_others(transport: FileTransport, folder: Path) -> None:
    for version in (8, 9, 10, 11):
        publish_by_ranks(transport, version, 2)
    names = [f"version-0000{version}-0000{rank}" for version in (10, 11) for rank in (0, 1)]
    assert sorted(path.name for path in folder.iterdir()) == ["run.txt", *names]


def test_shards_of_seven_ranks_make_the_weights_of_all(transport: FileTransport) -> None:
    locations = publish_by_ranks(transport, 3, 7)  # a matrix of 5 rows: two of them have none of it
    assert_equal(fetched(transport, 3, *locations), weights(3))
    with pytest.raises(WeightsError, match=r"have [0-9]+ of the [0-9]+ rows of [a-z]+: .* every rank"):
        fetched(transport, 3, *locations[1:])


def test_version_that_evaluation_has_pinned_outlives_training_s(
    transport: FileTransport, tmp_path: Path
) -> None:
    pinning = FileTransport(str(tmp_path / "run" / "weights_evaluation"))
    pinned = pinning.keep_at(1, publish_by_ranks(transport, 1, 2))
    for version in (2, 3, 4):
        publish(transport, version)
    assert_equal(fetched(pinning, 1, *pinned), weights(1))


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def cut_off(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


@pytest.mark.parametrize("damage", [flip_a_bit, cut_off, Path.unlink])
@pytest.mark.parametrize("name", ["weights-00001.safetensors", MANIFEST])
def test_damaged_weights_reach_no_engine_and_name_their_file(
    transport: FileTransport, damage: Callable[[Path], None], name: str
) -> None:
    location = publish(transport, 1)
    damage(Path(location, name))
    engine = RecordingEngine()
    with pytest.raises(WeightTransportError, match=r"run\.resume=true") as raised:
        asyncio.run(transport.fetch(1, [location], engine))
    assert location in str(raised.value) and not isinstance(raised.value, VersionGoneError)
    if name != MANIFEST:
        assert name in str(raised.value)
    assert engine.version == 0


def test_file_too_few_in_the_manifest_is_not_overlooked(transport: FileTransport) -> None:
    """A manifest is whole or damaged: there is no prefix of it that can be read."""
    content = Path(publish(transport, 1), MANIFEST).read_text(encoding="utf-8")
    for length in range(len(content)):
        with pytest.raises(json.JSONDecodeError):
            json.loads(content[:length])


def test_version_half_written_is_never_seen(transport: FileTransport, folder: Path) -> None:

    def interrupted() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights(1).items():
            assert not list(folder.glob("version-*"))
            yield name, tensor
        assert (
            len(list(folder.glob("*/*.safetensors"))) == 3
        )  # of 4: the writer was in the middle of its work
        raise RuntimeError("a rank has died")

    with pytest.raises(RuntimeError, match="a rank has died"):
        transport.publish(1, packed(interrupted()), rank=0)
    assert [path.name for path in folder.iterdir()] == ["run.txt"]


def test_what_killed_process_has_left_is_deleted_at_next_start(
    transport: FileTransport, folder: Path
) -> None:
    publish(transport, 7)
    shutil.copytree(folder / "version-000007-00000", folder / ".unfinished-1")
    FileTransport(str(folder))
    assert [path.name for path in folder.iterdir()] == ["run.txt"]


def test_version_published_again_replaces_one_no_store_knows(transport: FileTransport, folder: Path) -> None:
    (folder / ".unfinished-0-of-a-killed-rank").mkdir()
    transport.publish(7, packed(weights(1).items()), rank=0)  # and then another rank dies
    (location,) = transport.publish(7, packed(weights(2).items()), rank=0)
    assert_equal(fetched(transport, 7, *transport.keep_at(7, [location])), weights(2))
    assert sorted(each.name for each in folder.iterdir()) == ["run.txt", "version-000007-00000"]


def test_full_disk_is_error_that_names_folder_and_remedy(transport: FileTransport, folder: Path) -> None:
    publish(transport, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))  # bytes: the operating system refuses more
    try:
        with pytest.raises(ConfigError, match=r"Version 2 .*File too large.*room.*shared_folder=") as raised:
            transport.publish(2, packed(weights(2).items()), rank=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(folder) in str(raised.value)
    assert sorted(path.name for path in folder.iterdir()) == ["run.txt", "version-000001-00000"]
    assert_equal(fetched(transport, 1, str(folder / "version-000001-00000")), weights(1))


def test_folder_that_cannot_be_made_names_itself_and_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/shared.*Not a directory.*shared_folder="):
        FileTransport(str(tmp_path / "run"), shared_folder=str(tmp_path / "file" / "shared"))


def test_folder_not_shared_is_noticed_before_the_model_loads(transport: FileTransport, folder: Path) -> None:
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=r"all nodes share.*weights_training.*shared_folder="):
        transport.open()
    FileTransport(str(folder))  # what stands at this path on another node is an earlier try of the same run
    with pytest.raises(ConfigError, match=r"all nodes share.*weights_training.*shared_folder="):
        transport.open()


def test_two_runs_cannot_use_the_same_folder(tmp_path: Path) -> None:
    shared = str(tmp_path / "shared")
    FileTransport(str(tmp_path / "one" / "weights_training"), shared_folder=shared)
    FileTransport(str(tmp_path / "one" / "weights_training"), shared_folder=shared)  # resumed
    with pytest.raises(
        ConfigError, match=r"shared/weights_training.*something else.*'run\.txt'.*another folder"
    ):
        FileTransport(str(tmp_path / "two" / "weights_training"), shared_folder=shared)


def test_at_the_end_of_a_run_its_weights_are_deleted(transport: FileTransport, folder: Path) -> None:
    publish(transport, 1)
    transport.close()
    assert not folder.exists()


# -- replicas ------------------------------------------------------------------------------------------


class Answer:
    """An actor's method: ``remote`` calls it."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    async def remote(self, *args: Any) -> Any:
        return self._method(*args)


class Piece:
    """A reference as Ray's: it is awaited."""

    def __init__(self, value: str) -> None:
        self._value = value

    def __await__(self) -> Generator[None, None, str]:
        yield from ()
        return self._value


class LostPiece(Piece):
    """One whose node is gone."""

    def __await__(self) -> Generator[None, None, str]:
        yield from ()
        raise ObjectLostError("00", b"", "")


def at(version: int, location: str) -> PublishedWeights:
    return PublishedWeights(version, [Piece(location)])


class FakeStore:
    """A weight store in this process, whose newest version can be replaced at any time."""

    def __init__(self, *published: PublishedWeights) -> None:
        self.published = list(published)
        self.reports: list[Exception] = []
        self.newest = Answer(lambda: self.published.pop(0) if len(self.published) > 1 else self.published[0])
        self.report = Answer(self.reports.append)


def follow(transport: FileTransport, store: FakeStore) -> RecordingEngine:
    engine = RecordingEngine()
    asyncio.run(WeightFollower(store, transport, engine, lambda: None).catch_up())
    return engine


def test_version_that_vanishes_makes_way_for_the_newest(transport: FileTransport) -> None:
    locations = {version: publish(transport, version) for version in (1, 2, 3)}
    store = FakeStore(*(at(version, locations[version]) for version in (1, 3)))
    engine = follow(transport, store)
    assert engine.version == 3 and not store.reports
    assert_equal(engine.loaded, weights(3))


def test_version_lost_with_its_node_makes_way_for_the_newest(
    transport: FileTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = PublishedWeights(1, [LostPiece("")])
    assert follow(transport, FakeStore(lost, at(2, publish(transport, 2)))).version == 2
    monkeypatch.setattr(follower, "FETCH_RETRY_SECONDS", 0.02)
    monkeypatch.setattr(follower, "MISSING_VERSION_SECONDS", 0.1)
    store = FakeStore(lost)
    with pytest.raises(VersionGoneError, match="Version 1 of the weights was lost with the node"):
        follow(transport, store)
    assert isinstance(store.reports[0], PartLostError), "the driver goes on from its checkpoint"


def test_damaged_version_makes_way_for_a_newer_one(transport: FileTransport) -> None:
    locations = {version: publish(transport, version) for version in (1, 2)}
    flip_a_bit(shards(locations[1])[0])
    store = FakeStore(*(at(version, locations[version]) for version in (1, 2)))
    assert follow(transport, store).version == 2 and not store.reports


def test_newest_version_that_is_damaged_is_reported_to_store(transport: FileTransport) -> None:
    location = publish(transport, 1)
    flip_a_bit(shards(location)[0])
    store = FakeStore(at(1, location))
    with pytest.raises(WeightTransportError, match="SHA-256"):
        follow(transport, store)
    assert "SHA-256" in str(store.reports[0])


def test_newest_version_that_shows_late_is_awaited_with_an_end(
    transport: FileTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "FETCH_RETRY_SECONDS", 0.02)
    location = publish(transport, 1)
    hidden = Path(location).rename(Path(location).parent / "hidden")

    async def show_late() -> int:
        engine = RecordingEngine()
        store = FakeStore(at(1, location))
        fetching = asyncio.create_task(WeightFollower(store, transport, engine, lambda: None).catch_up())
        await asyncio.sleep(0.1)
        assert not fetching.done()
        hidden.rename(location)
        await fetching
        return engine.version

    assert asyncio.run(show_late()) == 1
    monkeypatch.setattr(follower, "MISSING_VERSION_SECONDS", 0.1)
    shutil.rmtree(location)
    with pytest.raises(VersionGoneError, match=r"not shared with this one.*shared_folder="):
        follow(transport, FakeStore(at(1, location)))


def test_replica_that_cannot_open_its_transport_reports_it(transport: FileTransport, folder: Path) -> None:
    store = FakeStore()
    store.transport = Answer(lambda: transport)
    assert asyncio.run(open_transport(store)) is transport
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="all nodes share"):
        asyncio.run(open_transport(store))
    assert "all nodes share" in str(store.reports[0])


# -- settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"transport": "file"}, "server.weights.transport: there is no 'file'. Did you mean 'files'"),
        ({"transport": "files", "folder_name": "x"}, "transport=files does not take .*'folder_name'"),
        ({"transport": "object_store", "shared_folder": "x"}, "object_store does not take .*shared_folder"),
    ],
)
def test_transport_that_cannot_be_made_names_its_setting(
    settings: dict[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_transport(settings, str(tmp_path), "training")
