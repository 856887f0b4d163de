"""Pickles that run code, planted in the files of a real checkpoint: no file that a resume reads runs any."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from learner_samples import save

from environments.errors import ConfigError
from environments.types import Trajectory
from launch.run_folder.checkpoint import CheckpointFolder, Progress, StreamState
from policies.learning.settings import AlgorithmConfig, KLConfig, LearnerConfig, LoRAConfig

if TYPE_CHECKING:
    from learner_samples import MakeRank

pytestmark = pytest.mark.slow

ADAPTED = LearnerConfig(lora=LoRAConfig(rank=4))
WITH_REFERENCE = AlgorithmConfig(kl=KLConfig(place="loss", coef=0.1, estimator="k3"))
STATE_OF_ONE_RANK = ["state_00000_of_00001.safetensors", "extra_state_world_size_1_rank_0.pt"]
READ_BY_A_RESUME = {
    "state.json",
    "ready.jsonl",
    "lora_train_meta.json",
    *STATE_OF_ONE_RANK,
    *(f"critic/{name}" for name in STATE_OF_ONE_RANK),
}


class Planted:
    """Makes the folder ``mark`` when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def as_pickle(path: Path, planted: Planted) -> None:
    path.write_bytes(pickle.dumps((planted,)))


def as_torch(path: Path, planted: Planted) -> None:
    torch.save({"lr_scheduler": planted}, path)


def as_torch_of_old(path: Path, planted: Planted) -> None:
    torch.save({"lr_scheduler": planted}, path, _use_new_zipfile_serialization=False)


def sign(checkpoint: Path, name: str) -> None:
    """Have the manifest say that the file is as it was written."""
    content = (checkpoint / name).read_bytes()
    manifest = json.loads((checkpoint / "state.json").read_text())
    manifest["files"][name] = {"num_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    del manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest).encode()).hexdigest()
    (checkpoint / "state.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def learner(make_rank: MakeRank, make_critic_rank: MakeRank) -> tuple[Any, Any]:
    return make_rank(ADAPTED, WITH_REFERENCE), make_critic_rank()


@pytest.fixture
def checkpoint(learner: tuple[Any, Any], tmp_path: Path) -> Path:
    """A checkpoint with all the files that there can be: of adapters, a reference, a critic, a rollout."""
    rank, critic = learner

    def save_both(folder: str) -> None:
        save(rank, folder)
        save(critic, f"{folder}/critic")

    ready = (Trajectory(task={"n": 1}, rollout_id="00000000/0000"),)
    return CheckpointFolder(tmp_path, kept=1).begin_save(
        Progress(step=1), StreamState(ready=ready), save_both
    )()


def resume(checkpoint: Path, learner: tuple[Any, Any]) -> StreamState:
    """Read ``checkpoint`` as a run does that goes on from it."""
    rank, critic = learner
    CheckpointFolder.progress(checkpoint)
    rank.load(str(checkpoint))
    critic.load(str(checkpoint / "critic"))
    return CheckpointFolder.stream(checkpoint)


def load_as_model(checkpoint: Path) -> None:
    """Read ``checkpoint`` as ``model.path`` is read."""
    from transformers import AutoModelForCausalLM

    from policies.chat import load_tokenizer

    for read in (AutoModelForCausalLM.from_pretrained, load_tokenizer):
        with suppress(Exception):  # whatever a library says of a file that is none of its own
            read(str(checkpoint / "huggingface"))


@pytest.mark.parametrize("plant", [as_pickle, as_torch, as_torch_of_old])
def test_no_file_of_checkpoint_runs_code_and_error_names_file(
    checkpoint: Path, learner: tuple[Any, Any], tmp_path: Path, plant: Callable[[Path, Planted], None]
) -> None:
    mark = tmp_path / "planted code has run"
    names = [str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()]
    assert set(names) >= READ_BY_A_RESUME
    for name in names:
        path = checkpoint / name
        before, manifest = path.read_bytes(), (checkpoint / "state.json").read_bytes()
        plant(path, Planted(mark))
        if name != "state.json":
            sign(checkpoint, name)
        if name in READ_BY_A_RESUME:
            with pytest.raises(ConfigError, match=path.name.replace(".", r"\.")):
                resume(checkpoint, learner)
        else:
            resume(checkpoint, learner)
        load_as_model(checkpoint)
        assert not mark.exists(), name
        (checkpoint / "state.json").write_bytes(manifest)
        path.write_bytes(before)
    assert resume(checkpoint, learner).ready


def test_model_in_torchs_own_format_runs_no_code(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "planted code has run"
    (checkpoint / "huggingface" / "model.safetensors").unlink()
    as_torch(checkpoint / "huggingface" / "pytorch_model.bin", Planted(mark))
    load_as_model(checkpoint)
    assert not mark.exists()


def test_planted_code_does_run_where_it_is_unpickled(tmp_path: Path) -> None:
    """The counterpart of the tests before: their mark does appear where a file is not read as data."""
    for number, plant in enumerate((as_pickle, as_torch, as_torch_of_old)):
        mark = tmp_path / f"mark {number}"
        plant(tmp_path / "file", Planted(mark))
        if plant is as_pickle:
            pickle.loads((tmp_path / "file").read_bytes())
        else:
            torch.load(tmp_path / "file", weights_only=False)
        assert mark.exists()
