"""A run's policy on the Hugging Face hub, for which a folder stands in, and its model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from environments.errors import ConfigError, TroupeError
from launch.export import export_hub, main
from launch.reporting.model_card import wilson_interval
from launch.reporting.tracker import Tracker
from launch.run_folder.checkpoint import CheckpointFolder, Progress, StreamState
from launch.settings.compose import compose
from policies.model_files import config_of

SECRET = "a conversation"


class FolderHub:
    """Keeps what is uploaded in a folder, as the hub would."""

    def __init__(self, folder: Path, is_private: bool | None = None) -> None:
        self.folder, self._is_private = folder, is_private

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> str:
        assert exist_ok
        self._is_private = private if self._is_private is None else self._is_private
        return f"https://hub/{repo_id}"

    def model_info(self, repo_id: str) -> Any:
        return SimpleNamespace(private=self._is_private)

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str) -> None:
        shutil.copytree(folder_path, self.folder / repo_id)


def save_model(folder: str) -> None:
    model = Path(folder) / "huggingface"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "config.json").write_text("{}")


def run_in(folder: Path, *settings: str, evaluated: bool = True) -> Path:
    run = folder / "runs" / "mine"
    (run / "trajectories").mkdir(parents=True)
    (run / "trajectories" / "step_000002.jsonl").write_text(SECRET)
    tracker = Tracker(run, 2)
    tracker.settings(compose([f"run.directory={run}", "server.access.hosts=[my-host]", *settings]))
    numbers = {"eval/reward_min": 0.0, "eval/reward_max": 1.0, "eval/num_tasks": 50, "time/evaluate": 1.0}
    for step, share in ((0, 0.2), (1, 0.5), (2, 0.8)) if evaluated else ():
        tracker.evaluation(step, numbers | {"eval/reward_mean": share, "eval/pass_at_1": share})
    tracker.close()
    progress = Progress(stage_steps={"warm_start": 5, "reinforce": 2}, step=2)
    CheckpointFolder(run, kept=1).begin_save(progress, StreamState(), save_model)()
    return run


def test_hub_gets_model_and_card_and_no_trajectory(tmp_path: Path) -> None:
    run = run_in(tmp_path, "model.path=Qwen/Qwen3-0.6B", "learner.optimizer.lr=1e-5", "run.num_steps=2")
    hub: Any = FolderHub(tmp_path / "hub")
    assert export_hub(run, "me/mine", False, hub) == "https://hub/me/mine"
    there = tmp_path / "hub" / "me" / "mine"
    assert {each.name for each in there.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert (there / "model.safetensors").read_bytes() == b"weights" and hub.model_info("me/mine").private
    card = (there / "README.md").read_text()
    for text in (
        "base_model: Qwen/Qwen3-0.6B\n",
        "- Algorithm: grpo",
        "| 0 | 50 | 0.200 | 0.000 to 1.000 | 0.200 (0.112 to 0.330) |",
        "| 2 | 50 | 0.800 |",
        "- `learner.optimizer.lr=1e-05`",
        "model.path=me/mine",
        "The spread between seeds",
        "Made with Troupe 0.",
    ):
        assert text in card, text
    assert "| 1 | 50" not in card, "that is another policy's"
    assert not any(text in card for text in (SECRET, "my-host", str(tmp_path), "rollout.group_size"))


def test_card_without_evaluation_says_so(tmp_path: Path) -> None:
    run = run_in(tmp_path, f"model.path={tmp_path}/secret/base", evaluated=False)
    records = [{"step": 5, "held_out_loss": 1.25}, {"step": 10, "held_out_loss": 0.5}]
    (run / "warm_start.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    hub: Any = FolderHub(tmp_path / "hub")
    export_hub(run, "me/mine", True, hub)
    card = (tmp_path / "hub" / "me" / "mine" / "README.md").read_text()
    assert "no evaluation on held-out tasks" in card and "after the 2 updates" in card
    assert "1.250 after step 5." in card, "the checkpoint is of step 5"
    assert "base_model" not in card and "secret" not in card
    assert "the local model `base`" in card and not hub.model_info("me/mine").private


def test_public_model_is_not_written_to_by_chance(tmp_path: Path) -> None:
    hub: Any = FolderHub(tmp_path / "hub", is_private=False)
    with pytest.raises(ConfigError, match=r"where all can see it: add --public"):
        export_hub(run_in(tmp_path), "me/mine", False, hub)
    assert not hub.folder.exists()


def test_several_policies_are_refused_by_name(tmp_path: Path) -> None:
    run, hub = run_in(tmp_path), cast("Any", FolderHub(tmp_path / "hub"))

    def save_both(folder: str) -> None:
        for name in ("first", "second"):
            Path(folder, name).mkdir()
            save_model(f"{folder}/{name}")

    CheckpointFolder(run, kept=1).begin_save(Progress(step=3), StreamState(), save_both)()
    with pytest.raises(ConfigError, match="holds the policies first, second, and one model is exported"):
        export_hub(run, "me/mine", False, hub)
    assert not hub.folder.exists()


def test_card_shows_no_address_and_no_folder(tmp_path: Path) -> None:
    settings = ["workload='openenv:uvicorn w:app --port PORT --key SECRET'", "learner.nodes={my-rack: 1}"]
    run = run_in(tmp_path, "model.path=runs/base", *settings)
    (tmp_path / "runs" / "base").mkdir()
    hub: Any = FolderHub(tmp_path / "hub")
    export_hub(run, "me/mine", False, hub)
    card = (tmp_path / "hub" / "me" / "mine" / "README.md").read_text()
    assert '`workload="openenv"`' in card and not any(text in card for text in ("SECRET", "my-rack"))
    assert "the local model `base`" in card and "base_model" not in card, "runs/base is nobody's on the hub"


@pytest.mark.slow
@pytest.mark.parametrize("reason", [httpx.HTTPError("403 Forbidden"), OfflineModeIsEnabled("403 Forbidden")])
def test_refusal_of_the_hub_is_explained(tmp_path: Path, reason: Exception) -> None:
    def refuse(*arguments: Any, **named: Any) -> None:
        raise reason

    hub: Any = SimpleNamespace(create_repo=refuse)
    with pytest.raises(TroupeError, match=r"not taken me/mine \(403 Forbidden\).*HF_TOKEN may write"):
        export_hub(run_in(tmp_path), "me/mine", False, hub)


def test_missing_token_or_name_is_refused_before_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    table = tmp_path / "a.parquet"
    run = run_in(tmp_path)
    assert main([str(run), "--hub", "me/mine", "--parquet", str(table)]) == 2
    assert "set HF_TOKEN" in capsys.readouterr().err and not table.exists()
    assert main([str(run), "--hub", "mine"]) == 2
    assert "write OWNER/NAME" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(run), "--public", "--parquet", str(table)])


def test_model_is_not_fetched_from_a_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """``hf_hub_download`` tries again for half a minute, and where nothing comes back for six."""
    fetched: list[str] = []
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda name, *_, **__: fetched.append(name))
    with pytest.raises(ConfigError, match=r"model.path='a/model' is no folder here.*offline mode"):
        config_of("a/model")
    assert not fetched


def test_interval_of_a_share_is_wilsons() -> None:
    assert wilson_interval(1.0, 20) == pytest.approx((0.839, 1.0), abs=1e-3)
    assert wilson_interval(0.5, 100) == pytest.approx((0.404, 0.596), abs=1e-3)
