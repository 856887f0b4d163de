"""The rows of the page "On GPUs", and the recipe for Qwen3-4B, as verl's and vLLM's own classes take them."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu_page import ROWS

from launch.settings.compose import compose
from launch.training.start import with_turns
from policies.engines.vllm_settings import engine_arguments, without_own

SETTINGS = [
    *(row.settings for row in ROWS),
    ("recipe=math_gpu",),
    ("recipe=math_gpu", "server.colocated=true"),
]
pytestmark = [pytest.mark.slow, pytest.mark.parametrize("settings", SETTINGS, ids=" ".join)]


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


def test_vllm_takes_the_settings_of_a_row(tiny_model: Path, settings: tuple[str, ...]) -> None:
    from vllm import EngineArgs

    config = with_turns(compose(list(settings)))
    given = config.server.engine
    arguments = EngineArgs(**engine_arguments(str(tiny_model), given) | without_own(given.options))
    assert arguments.tensor_parallel_size == max(1, given.num_gpus)
    assert (arguments.dtype, arguments.enable_sleep_mode) == ("bfloat16", config.server.colocated)
    assert arguments.kv_cache_memory_bytes is None and not arguments.async_scheduling
