"""The rows of the page "On GPUs", and the recipe for Qwen3-4B, as verl's and vLLM's own classes take them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from gpu_page import ROWS

from environments import DatasetRegistry
from launch.recipes.task_file import workload_of
from launch.settings.compose import compose
from launch.training.start import with_turns
from launch.training.trainer import check_training
from policies.engines.vllm_settings import engine_arguments, without_own

SETTINGS = [
    *(row.settings for row in ROWS),
    ("recipe=math_gpu",),
    ("recipe=math_gpu", "server.colocated=true"),
]
TEMPLATE = Path(__file__).resolve().parents[2] / "templates" / "qwen3.jinja"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("turns", ["false", "true"])
def test_recipe_for_qwen3_passes_all_checks_of_a_start(
    turns: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "a-cluster-with-gpus:6379")  # no check connects to it
    monkeypatch.setenv("TROUPE_HOME", str(tmp_path))
    for name in ("deepscaler_math/train", "math500/test"):
        DatasetRegistry.register_dataset(
            name.split("/")[0], [{"question": "1+1", "ground_truth": "2"}], name.split("/")[1]
        )
    model = shutil.copytree(tiny_model, tmp_path / "model")
    shutil.copy(TEMPLATE, model / "chat_template.jinja")
    config = compose(["recipe=math_gpu", f"model.path={model}", f"server.colocated={turns}"])
    check_training(config, workload_of(config))


@pytest.mark.parametrize("settings", SETTINGS, ids=" ".join)
def test_verl_takes_the_settings_of_a_row(
    verl_on_cpu: None, tiny_model: Path, settings: tuple[str, ...]
) -> None:
    from policies.learning.verl.config import worker_config

    config = with_turns(compose(list(settings)))
    learner = config.learner
    worker = worker_config("language_model", str(tiny_model), learner, learner.optimizer, 1)
    engine = worker.engine_config
    assert (engine.strategy, engine.dtype, engine.model_dtype) == ("fsdp2", "bfloat16", "fp32")
    assert engine.max_token_len_per_gpu == learner.micro_batch_tokens
    assert engine.offload_policy == ("learner.verl.engine.offload_policy=true" in settings)
    assert engine.param_offload == engine.optimizer_offload == config.server.colocated
    assert worker.model_config.enable_gradient_checkpointing


@pytest.mark.parametrize("settings", SETTINGS, ids=" ".join)
def test_vllm_takes_the_settings_of_a_row(tiny_model: Path, settings: tuple[str, ...]) -> None:
    from vllm import EngineArgs

    config = with_turns(compose(list(settings)))
    given = config.server.engine
    arguments = EngineArgs(**engine_arguments(str(tiny_model), given) | without_own(given.options))
    assert arguments.tensor_parallel_size == max(1, given.num_gpus)
    assert (arguments.dtype, arguments.enable_sleep_mode) == ("bfloat16", config.server.colocated)
    assert arguments.kv_cache_memory_bytes is None and not arguments.async_scheduling
