"""The memory that a run will need, as it is told before the run starts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.settings.compose import compose
from launch.settings.tree import TrainConfig
from launch.training.memory import GB, memory_notice, needed_bytes

SHAPE = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "vocab_size": 49152,
}


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    """A folder with the sizes of SmolLM2-135M and nothing in it."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"dtype": "float32"}))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(538_090_408)
    return tmp_path


def config(*settings: str) -> TrainConfig:
    return compose(["recipe=smollm2", *settings])


# Peaks of the resident memory of one rank, in GB: two updates on x86-64, two threads, prompts of 150 and
# responses of 50 tokens, or, in the last three, of 50 and 150.
@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        (["learner.micro_batch_tokens=400"], 4.76),
        (["learner.micro_batch_tokens=800"], 5.20),
        (["learner.micro_batch_tokens=1600"], 5.60),
        (["learner.micro_batch_tokens=3200"], 8.32),
        (["learner.micro_batch_tokens=1600"], 5.85),
        (["learner.micro_batch_tokens=1600", "algorithm.kl.place=loss", "algorithm.kl.coef=0.01"], 6.43),
        (["learner.micro_batch_tokens=1600", "learner.lora.rank=16"], 5.85),
    ],
)
def test_learner_needs_about_as_much_as_was_measured(
    settings: list[str], measured: float, smollm2: Path
) -> None:
    parts = needed_bytes(config(*settings), str(smollm2))
    assert parts is not None
    assert 0.93 < parts["for the learner"] / GB / measured < 1.20


# By how many GB free memory fell in three updates of the recipe and the checkpoint after them; then the peaks
# of whole runs of the learning curves: with LoRA of ten updates, without of 28.
@pytest.mark.parametrize(
    ("settings", "measured"),
    [
        (["recipe=smollm2"], 11.8),
        (["recipe=smollm2", "fleet.num_actors=32"], 13.5),
        (["recipe=smollm2", "learner.lora.rank=16", "learner.optimizer.lr=2e-4"], 10.8),
        (["recipe=word_problems"], 12.5),
        (["recipe=word_problems"], 12.9),
    ],
)
def test_whole_run_needs_about_as_much_as_was_measured(
    settings: list[str], measured: float, smollm2: Path
) -> None:
    parts = needed_bytes(compose(settings), str(smollm2))
    assert parts is not None
    assert 0.85 < sum(parts.values()) / GB / measured < 1.15


def test_weights_of_two_bytes_count_as_those_of_four(smollm2: Path) -> None:
    before = needed_bytes(config(), str(smollm2))
    (smollm2 / "config.json").write_text(json.dumps(SHAPE | {"dtype": "bfloat16"}))
    after = needed_bytes(config(), str(smollm2))
    assert before is not None and after is not None
    assert after["for weights on their way"] == 2 * before["for weights on their way"]


@pytest.mark.parametrize(("free_gb", "says"), [(64, False), (6, True)])
def test_run_that_will_not_fit_is_told_so_with_settings_to_lower(
    free_gb: int, says: bool, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    free = SimpleNamespace(available=free_gb * GB)
    monkeypatch.setattr("launch.training.memory.psutil.virtual_memory", lambda: free)
    notice = memory_notice(config(), str(smollm2))
    assert (notice is not None) == says
    if notice is not None:
        assert re.search(r"about 1\d\.\d GB .* has 6\.0 GB free.*micro_batch_tokens=800", notice)


def test_of_another_model_or_a_cluster_nothing_is_said(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert memory_notice(config(), str(smollm2)) is None
    assert needed_bytes(config(), "somebody/a-model-on-the-hub") is None
    (smollm2 / "config.json").write_text('{"model_type": "mamba"}')
    assert needed_bytes(config(), str(smollm2)) is None
