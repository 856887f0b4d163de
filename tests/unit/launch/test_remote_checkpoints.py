"""Checkpoints at an address of fsspec: copied once they are whole, resumed from without the run's folder."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from machine import wait_until
from trained_run import save_whole

from environments.disk import FileDigest
from environments.errors import ConfigError, TroupeError
from launch import export
from launch.run_folder.checkpoint import STATE, CheckpointFolder, StreamState
from launch.run_folder.remote import RemoteCheckpoints
from launch.settings.address import masked
from launch.settings.compose import compose, named_settings
from launch.training.milestones import Milestones
from launch.training.run_state import RunState
from launch.validation.settings import check_settings

FILES = MemoryFileSystem()


@pytest.fixture
def address() -> Iterator[str]:
    root = f"/{uuid.uuid4().hex}"
    yield f"memory:/{root}"
    if FILES.exists(root):
        FILES.rm(root, recursive=True)


def save_shards(folder: str) -> Any:
    digests = {}
    for rank in range(2):
        path = Path(folder, f"state_0000{rank}_of_00002.safetensors")
        path.write_text(f"weights of {path.parent.name} on {rank}")
        digests[str(path)] = FileDigest.of(path)
    return lambda: digests


def save_model(folder: str) -> None:
    model = Path(folder, "huggingface")
    model.mkdir()
    (model / "config.json").write_text("{}")
    for number, text in enumerate(("one", "two"), start=1):
        (model / f"model-0000{number}-of-00002.safetensors").write_text(text)


def state_at(directory: Path, to: str = "", *settings: str) -> RunState:
    directory.mkdir(parents=True, exist_ok=True)
    return RunState(compose([f"run.directory={directory}", f"run.checkpoints.to={to}", *settings]), directory)


def save(state: RunState, *steps: int) -> None:
    for step in steps:
        state.progress.step = state.progress.stage_steps["reinforce"] = step
        (state.directory / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
        save_whole(state, StreamState(in_flight=(f"{step}/0000",)), save_shards)
        state.copy(wait=True)


def copies_at(address: str) -> list[str]:
    """Names of the copies of checkpoints, without their digests."""
    root = FILES._strip_protocol(address)
    return sorted({name.removeprefix(f"{root}/").partition("-")[0] for name in FILES.find(root)})


def files_of(address: str, step: int) -> dict[str, str]:
    """Full names of a copy's files by those in the copy."""
    found = FILES.glob(f"{FILES._strip_protocol(address)}/step_{step:06d}-*")
    return {name.removeprefix(f"{found[0]}/"): name for name in FILES.find(found[0])}


# -- the copies ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("place", ["memory", "a folder"])
def test_run_goes_on_without_its_folder(tmp_path: Path, address: str, place: str) -> None:
    to = address if place == "memory" else str(tmp_path / "far")
    save(state_at(tmp_path / "first", to), 1, 2, 3)
    resumed = state_at(tmp_path / "second", to, "run.resume=true")
    assert resumed.checkpoint is not None and resumed.checkpoint.name == "step_000003"
    assert resumed.progress == CheckpointFolder.progress(tmp_path / "first/checkpoints/step_000003")
    assert resumed.saved_stream().in_flight == ("3/0000",)
    assert (resumed.directory / "metrics.jsonl").read_text() == '{"step": 3}\n'
    for path in (tmp_path / "first/checkpoints/step_000003").iterdir():
        assert (resumed.checkpoint / path.name).read_bytes() == path.read_bytes()
    save(resumed, 4)
    assert CheckpointFolder(resumed.directory, kept=2).latest() == resumed.checkpoint.with_name("step_000004")


def test_older_copies_are_dropped_as_they_are_here(tmp_path: Path, address: str) -> None:
    state = state_at(tmp_path / "run", address)
    save(state, 1, 2)
    assert state.checkpoints.mark_best(1, "eval/reward_mean", 0.5)
    save(state, 3, 4, 5)
    assert copies_at(address) == ["step_000001", "step_000004", "step_000005"]
    other = state_at(tmp_path / "other", address, "run.resume=true")
    best = other.checkpoints.best()
    assert best is not None and best.name == "step_000001"
    assert not other.checkpoints.mark_best(5, "eval/reward_mean", 0.4), "the value has come along"
    save(other, 6)
    assert copies_at(address) == ["step_000001", "step_000005", "step_000006"]


def test_run_resumed_at_an_address_may_write_to_another(tmp_path: Path, address: str) -> None:
    save(state_at(tmp_path / "first", address), 1)
    to = f"{address}-other"
    state = state_at(tmp_path / "second", to, f"run.resume={address}")
    save(state, 2)
    assert (copies_at(address), copies_at(to)) == (["step_000001"], ["step_000001", "step_000002"])
    again = state_at(tmp_path / "second", to, f"run.resume={address}")
    assert again.progress.step == 2, "the folder has a newer one"
    FILES.rm(FILES._strip_protocol(to), recursive=True)


@pytest.mark.slow
def test_newer_copy_than_those_in_the_folder_is_fetched(tmp_path: Path, address: str) -> None:
    """The run went on on another machine; but who has gone back to an older checkpoint stays there."""
    save(state_at(tmp_path / "first", address), 1)
    save(state_at(tmp_path / "second", address, "run.resume=true"), 2, 3)
    assert state_at(tmp_path / "first", address, "run.resume=true").progress.step == 3
    latest = tmp_path / "second/checkpoints/latest"
    latest.unlink()
    latest.symlink_to("step_000002")
    assert state_at(tmp_path / "second", address, "run.resume=true").progress.step == 2


@pytest.mark.slow
def test_newer_copy_of_the_same_step_is_fetched(tmp_path: Path, address: str) -> None:
    """All checkpoints of a warm start are of step 0."""

    def warm(state: RunState, num_steps: int) -> None:
        state.progress.stage_steps["warm_start"] = num_steps
        save_whole(state, StreamState(), save_shards)
        state.copy(wait=True)

    first = state_at(tmp_path / "first", address)
    warm(first, 50)
    warm(state_at(tmp_path / "second", address, "run.resume=true"), 100)
    again = state_at(tmp_path / "first", address, "run.resume=true")
    assert again.progress.stage_steps == {"warm_start": 100}


def test_checkpoint_without_link_gives_way_to_no_older_copy(tmp_path: Path, address: str) -> None:
    save(state_at(tmp_path / "first", address), 1)
    save(state_at(tmp_path / "first", "", "run.resume=true"), 2)
    (tmp_path / "first/checkpoints/latest").unlink()
    with pytest.raises(ConfigError, match="holds step_000001, step_000002, and no link 'latest'"):
        state_at(tmp_path / "first", address, "run.resume=true")


class Killed(BaseException):
    """As SIGKILL: nothing catches it, nothing is cleaned up."""


@pytest.mark.slow
def test_kill_at_any_moment_of_copy_leaves_whole_copies(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, left = [], 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*arguments, **options)

        return call

    for operation in range(50):
        to, killed = f"{address}/{operation}", False
        state = state_at(tmp_path / str(operation), to)
        save(state, 1, 2)
        state.progress.step, left = 3, operation
        save_whole(state, StreamState(), save_shards)
        with monkeypatch.context() as patch:
            for name in ("put_file", "pipe_file", "rm_file", "rm"):
                patch.setattr(MemoryFileSystem, name, dying(getattr(MemoryFileSystem, name)))
            try:
                state.copy(wait=True)
            except Killed:
                killed = True
        resumed = state_at(tmp_path / f"{operation} resumed", to, "run.resume=true")
        found.append(resumed.progress.step)
        state.copy(wait=True)
        assert copies_at(to) == ["step_000002", "step_000003"], operation
        if not killed:
            break
    assert found == sorted(found) and (found[0], found[-1]) == (2, 3) and operation > 4


# -- what is not whole, or damaged ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no manifest", "half a manifest", "missing shard", "short shard"])
def test_copy_that_is_not_whole_does_not_count(tmp_path: Path, address: str, fault: str) -> None:
    save(state_at(tmp_path / "first", address), 1, 2)
    files = files_of(address, 2)
    manifest, shard = files[STATE], files["state_00001_of_00002.safetensors"]
    if fault == "half a manifest":
        FILES.pipe_file(manifest, FILES.cat_file(manifest)[:-9])
    elif fault == "short shard":
        FILES.pipe_file(shard, b"weight")
    else:
        FILES.rm_file(manifest if fault == "no manifest" else shard)
    assert state_at(tmp_path / "second", address, "run.resume=true").progress.step == 1
    save(state_at(tmp_path / "first", address, "run.resume=true"), 2)
    assert state_at(tmp_path / "third", address, "run.resume=true").progress.step == 2, "it was made whole"


def test_copy_dropped_meanwhile_does_not_count(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same run, whose last copy may be under way when it goes on after a lost part."""
    save(state_at(tmp_path / "first", address), 1, 2)
    listed, dropped = RemoteCheckpoints._listed, files_of(address, 1)[STATE]

    def list_and_drop(remote: RemoteCheckpoints) -> dict[str, dict[str, int]]:
        there = listed(remote)
        if FILES.exists(dropped):
            FILES.rm_file(dropped)
        return there

    monkeypatch.setattr(RemoteCheckpoints, "_listed", list_and_drop)
    assert state_at(tmp_path / "second", address, "run.resume=true").progress.step == 2


def test_copy_with_other_content_is_refused(tmp_path: Path, address: str) -> None:
    save(state_at(tmp_path / "first", address), 1)
    shard = files_of(address, 1)["state_00001_of_00002.safetensors"]
    FILES.pipe_file(shard, FILES.cat_file(shard)[::-1])
    damaged = r"to=memory://.* cannot be read .*state_00001_of_00002\.safetensors is not what was written"
    with pytest.raises(TroupeError, match=damaged):
        state_at(tmp_path / "second", address, "run.resume=true")
    assert CheckpointFolder(tmp_path / "second", kept=1).latest() is None


def test_copy_cannot_write_outside_the_folder(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store may have files of any name."""
    save(state_at(tmp_path / "first", address), 1)
    manifest = json.loads(FILES.cat_file(files_of(address, 1)[STATE]))
    del manifest["sha256"]
    manifest["files"] = {"../../planted": {"num_bytes": 2, "sha256": ""}} | manifest["files"]
    manifest["sha256"] = sha256(json.dumps(manifest).encode()).hexdigest()
    text = json.dumps(manifest).encode()
    name = f"step_000009-{sha256(text).hexdigest()[:8]}"
    FILES.pipe_file(f"{FILES._strip_protocol(address)}/{name}/{STATE}", text)
    there = {file: digest["num_bytes"] for file, digest in manifest["files"].items()} | {STATE: len(text)}
    monkeypatch.setattr(RemoteCheckpoints, "_listed", lambda _: {name: there})
    with pytest.raises(TroupeError, match=r"names '\.\./\.\./planted', which is outside"):
        state_at(tmp_path / "second", address, "run.resume=true")


@pytest.mark.parametrize("place", ["the run", "its address"])
def test_model_is_exported_from_where_the_run_is(
    tmp_path: Path, address: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = state_at(tmp_path / "run", address)
    state.progress.step = 2
    save_whole(state, StreamState(), save_model)
    state.copy(wait=True)
    run, target = (str(state.directory) if place == "the run" else address), tmp_path / "model"
    assert export.main([run, "--model", str(target)]) == 0
    assert f"The model of step_000002: {target}" in capsys.readouterr().out
    assert {each.name: each.read_text() for each in target.iterdir()} == {
        "config.json": "{}",
        "model-00001-of-00002.safetensors": "one",
        "model-00002-of-00002.safetensors": "two",
    }
    assert sorted(each.name for each in tmp_path.iterdir()) == ["model", "run"], "nothing is left beside it"
    assert export.main([run, "--model", str(target)]) == 2
    assert "is there already: name a new folder" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["the run", "its address"])
def test_export_of_several_policies_is_refused_by_name(
    tmp_path: Path, address: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def save_both(folder: str) -> None:
        for name in ("first", "second"):
            Path(folder, name).mkdir()
            save_model(f"{folder}/{name}")

    state = state_at(tmp_path / "run", address)
    state.progress.step = 2
    save_whole(state, StreamState(), save_both)
    state.copy(wait=True)
    run = str(state.directory) if place == "the run" else address
    assert export.main([run, "--model", str(tmp_path / "model")]) == 2
    assert "holds the policies first, second, and one model is exported" in capsys.readouterr().err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize("place", ["the run", "its address"])
def test_damaged_model_is_not_exported(
    tmp_path: Path, address: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = state_at(tmp_path / "run", address)
    state.progress.step = 2
    path = save_whole(state, StreamState(), save_model) / "huggingface" / "model-00001-of-00002.safetensors"
    state.copy(wait=True)
    path.write_text("eno")
    FILES.pipe_file(files_of(address, 2)["huggingface/model-00001-of-00002.safetensors"], b"eno")
    run = str(state.directory) if place == "the run" else address
    assert export.main([run, "--model", str(tmp_path / "model")]) == 2
    assert "model-00001-of-00002.safetensors is not what was written" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


# -- a copy that fails ---------------------------------------------------------------------------------


def test_failed_copy_is_named_at_the_next_update(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, alarms = state_at(tmp_path / "run", address), list[str]()
    tracker: Any = SimpleNamespace(announce=lambda text: None, alarm=alarms.append)
    nothing: Any = None
    milestones = Milestones(nothing, 9, state, None, nothing, nothing, tracker, nothing)
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", lambda *_, **__: 1 / 0)
        state.progress.step = 1
        save_whole(state, StreamState(), save_shards)
        milestones.finish_save(seconds=0)
        wait_until(lambda: state._copy is not None and state._copy.done())
        milestones.finish_save(seconds=0)
        milestones.finish_save(seconds=0)
        with pytest.raises(TroupeError, match="ZeroDivision"):
            milestones.finish_copy()
    assert len(alarms) == 1, "it is tried again with the next checkpoint, or at the end"
    assert alarms[0].startswith(f"run.checkpoints.to={address} has not all checkpoints (ZeroDivisionError")
    assert CheckpointFolder.progress(tmp_path / "run/checkpoints/step_000001").step == 1, "it is here"
    assert copies_at(address) == []
    milestones.finish_copy()
    assert copies_at(address) == ["step_000001"]


def test_checkpoint_stays_while_it_is_copied(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, begun, goes_on = state_at(tmp_path / "run", address), threading.Event(), threading.Event()
    put = MemoryFileSystem.put_file

    def wait_and_put(*arguments: Any, **options: Any) -> None:
        begun.set()
        assert goes_on.wait(20)
        put(*arguments, **options)

    monkeypatch.setattr(MemoryFileSystem, "put_file", wait_and_put)
    state.progress.step = 1
    save_whole(state, StreamState(), save_shards)
    state.copy()
    assert begun.wait(20)
    for step in (2, 3, 4):
        state.progress.step = step
        save_whole(state, StreamState(), save_shards)
        state.copy()
    assert [each.name for each in state.checkpoints.all()] == ["step_000001", "step_000003", "step_000004"]
    goes_on.set()
    state.copy(wait=True)
    assert copies_at(address)[-1] == "step_000004"


@pytest.mark.parametrize("num_before", [0, 1], ids=["before its files", "between two files"])
def test_copy_of_a_checkpoint_written_anew_is_never_mixed(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch, num_before: int
) -> None:
    """As by Ctrl-C soon after a checkpoint, or by each one of a warm start."""
    state, put = state_at(tmp_path / "run", address), MemoryFileSystem.put_file

    def save_text(text: str) -> None:
        save_whole(state, StreamState(), lambda folder: Path(folder, "weights").write_text(text) and None)

    def put_and_replace(files: MemoryFileSystem, path: str, *arguments: Any, **options: Any) -> None:
        nonlocal num_before
        num_before -= 1
        if num_before == -1:
            save_text("new")
        put(files, path, *arguments, **options)

    save_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", put_and_replace)
        state.copy()
        assert state._copy is not None
        assert "was written anew while it was copied" in str(state._copy.exception(20))
    assert not any(name.endswith(STATE) for name in FILES.find(FILES._strip_protocol(address)))
    state.copy(wait=True)
    assert FILES.cat_file(files_of(address, 0)["weights"]) == b"new", "the end makes up for it"


def test_run_begun_beside_another_deletes_none_of_its_copies(tmp_path: Path, address: str) -> None:
    first, second = (state_at(tmp_path / name, address) for name in ("first", "second"))
    save(first, 1)
    with pytest.raises(ConfigError, match="holds the checkpoints of another run"):
        save(second, 2)
    assert copies_at(address) == ["step_000001"]


@pytest.mark.slow
@pytest.mark.parametrize("resume", ["false", "true"])
def test_address_of_another_run_is_refused(tmp_path: Path, address: str, resume: str) -> None:
    save(state_at(tmp_path / "first", address), 1)
    if resume == "true":
        save(state_at(tmp_path / "second"), 1)
    with pytest.raises(ConfigError, match="holds the checkpoints of another run: name another address"):
        state_at(tmp_path / "second", address, f"run.resume={resume}")
    assert copies_at(address) == ["step_000001"]


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("run.checkpoints.to=s3://bucket/run", r"to=s3://bucket/run cannot be opened \(ImportError: .*s3fs"),
        ("run.checkpoints.to=nope://bucket/run", r"cannot be opened \(ValueError: Protocol not known: nope"),
        ("run.checkpoints.to=/proc/run", r"to=/proc/run cannot be written to \(FileNotFoundError"),
        ("run.resume=memory://nothing/here", "resume=memory://nothing/here holds no whole checkpoint"),
    ],
)
def test_address_that_cannot_be_used_is_an_error(tmp_path: Path, setting: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        state_at(tmp_path, "", setting)


# -- credentials ---------------------------------------------------------------------------------------

WITH_SECRETS = [
    "s3://AKIA:hush@bucket/run",
    "s3://AKIA%3Ahush@bucket/run",
    "ftp://me:hu/hush@host/run",
    "ftp://me:@hush@host/run",
    "https://hush@host/run",
    "me:hush@host:/run",
    "ftp://me:12%2Fhush@host/run",
    "simplecache::s3://AKIA:hush@bucket/run",
    "s3://bucket/run?key=hush",
    "s3://bucket/run?X-Amz-Signature=hush&b=1",
    "abfs://box@account.dfs.core.windows.net/run?sv=1&sig=hush",
    "s3://bucket/run#hush",
    "s3://bucket/run;secret=hush",
    "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=hush",
]
PLAIN = [
    "runs/copies",
    "/mnt/disk/run.1",
    "memory://a/b",
    "s3://bucket/team-a/run_1",
    "abfs://box@account.dfs.core.windows.net/run",
    "sftp://me@host:22/run",
    "hf://datasets/me/box@main/run",
    "hdfs://host:8020/run",
    "hdfs://host:8020/run@v1",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["run.checkpoints.to", "run.resume"])
@pytest.mark.parametrize("address", WITH_SECRETS)
def test_address_with_a_secret_is_refused_without_it(tmp_path: Path, name: str, address: str) -> None:
    config = compose([f"run.directory={tmp_path}"])
    if name == "run.resume":
        config.run.resume = address
    else:
        config.run.checkpoints["to"] = address
    with pytest.raises(ConfigError) as raised:
        check_settings(config)
    assert f"{name}=" in str(raised.value) and "may be a password or a key" in str(raised.value)
    with pytest.raises(ConfigError) as again:
        RunState(config, tmp_path)
    assert "hush" not in str(raised.value) + str(again.value)


@pytest.mark.slow
@pytest.mark.parametrize("address", PLAIN)
def test_address_without_a_secret_is_taken_as_it_is(address: str) -> None:
    assert masked(address) == address
    check_settings(compose([f"run.checkpoints.to={address}"]))


def test_secret_on_the_command_line_is_in_no_error() -> None:
    with pytest.raises(ConfigError) as raised:
        compose(["run.checkpoints.to=s3://AKIA:hush@bucket/run?key={"])
    assert "cannot be read" in str(raised.value) and "hush" not in str(raised.value)


@pytest.mark.parametrize("name", ["run", "run.checkpoints", "run.num_steps", "~run.checkpoints.to"])
def test_secret_in_the_value_of_another_setting_is_in_no_error(name: str) -> None:
    with pytest.raises(ConfigError, match=r"s3://\*\*\*bucket") as raised:
        overrides = [f"{name}=s3://AKIA:hush@bucket/run"]
        named_settings(overrides)
        compose(overrides)
    assert "hush" not in str(raised.value)


def test_secret_in_the_error_of_a_file_system_is_masked(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError("403 for https://me:hush@host/run?sig=hush with aws_secret=hush")

    state = state_at(tmp_path, address)
    monkeypatch.setattr(MemoryFileSystem, "put_file", fail)
    with pytest.raises(TroupeError, match="403 for https") as raised:
        save(state, 1)
    error: BaseException = raised.value
    assert "hush" not in str(error) and error.__suppress_context__


@pytest.mark.parametrize("resume", ["yes", "latest"])
def test_resume_that_is_no_address_is_an_error(resume: str) -> None:
    with pytest.raises(ConfigError, match=f"run.resume={resume} is neither true nor false nor an address"):
        check_settings(compose([f"run.resume={resume}"]))
