"""Which engine a setting names, and which settings an engine rejects; no engine is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from environments.errors import ConfigError
from policies.engines.base import engine_class
from policies.engines.vllm import VLLMEngine
from policies.engines.vllm_settings import engine_arguments
from policies.settings import EngineConfig

SCRIPTED = "scripted_engine:ScriptedEngine"


def test_engine_is_chosen_by_name() -> None:
    assert engine_class(EngineConfig()) is VLLMEngine
    assert engine_class(EngineConfig(name=SCRIPTED)) is ScriptedEngine


@pytest.mark.parametrize(
    ("name", "message"),
    [("vlm", "server.engine.name: .*Did you mean 'vllm'"), ("pathlib:Path", "policies.engines.base.Engine")],
)
def test_what_is_no_engine_is_an_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        engine_class(EngineConfig(name=name))


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"cache_after_publish": "keep"}, {"max_num_seqs": 4}]
)
def test_setting_of_vllms_is_an_error_in_another_engine(settings: dict[str, Any]) -> None:
    VLLMEngine.check_config(EngineConfig(options=settings))
    with pytest.raises(ConfigError, match=rf"{next(iter(settings))}.* (has no effect|unknown)"):
        ScriptedEngine.check_config(EngineConfig(name=SCRIPTED, options=settings))


def test_adapters_are_error_in_engine_that_cannot_serve_them() -> None:
    VLLMEngine.check_config(EngineConfig(), {"mine": "folder"})
    with pytest.raises(ConfigError, match=r"server.adapters=\['mine'\]"):
        ScriptedEngine.check_config(EngineConfig(name=SCRIPTED), {"mine": "folder"})


def test_scheduling_that_would_blur_versions_of_tokens_is_error() -> None:
    with pytest.raises(ConfigError, match="async_scheduling"):
        VLLMEngine.check_config(EngineConfig(options={"async_scheduling": True}))
    VLLMEngine.check_config(EngineConfig(options={"async_scheduling": False}))


@pytest.mark.parametrize("name", ["max_loras", "logprobs_mode"])
def test_what_the_adapter_of_vllm_decides_is_no_setting(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"server.engine.options\.{name} cannot be set"):
        VLLMEngine.check_config(EngineConfig(options={name: 1}))


TINY = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LATENT = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
LARGE = {"num_hidden_layers": 30, "num_attention_heads": 9, "hidden_size": 576}


@pytest.mark.parametrize(
    ("shape", "settings", "expected"),
    [
        # 2 (keys, values) x 2 layers x 2 heads x 32 x 4 bytes; 384 tokens are three blocks.
        (TINY, {"max_model_tokens": 384}, 257 * 384 * 1024),
        (TINY, {"max_model_tokens": 384, "options": {"dtype": "float"}}, 257 * 384 * 1024),
        (TINY, {"max_model_tokens": 300, "options": {"dtype": "bfloat16"}}, 257 * 384 * 512),
        (TINY, {"max_model_tokens": 40, "options": {"max_num_seqs": 7, "block_size": 32}}, 8 * 64 * 1024),
        (LATENT, {"max_model_tokens": 384}, 257 * 384 * 2 * 576 * 4),  # keys and values are one
        (LARGE, {}, 1 << 30),
        ({"model_type": "mamba"}, {}, 1 << 30),
    ],
)
def test_cpu_engine_has_room_for_one_whole_step_and_no_more(
    shape: dict[str, Any], settings: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(shape))
    assert engine_arguments(str(tmp_path), EngineConfig(**settings))["kv_cache_memory_bytes"] == expected


def test_engine_uses_all_gpus_that_it_reserves() -> None:
    parallel = {"tensor_parallel_size": 2}
    for num_gpus, options in (
        (2, {}),
        (0.5, parallel),
        (1, parallel),
        (2, parallel | {"pipeline_parallel_size": 2}),
    ):
        with pytest.raises(ConfigError, match=rf"num_gpus={num_gpus} with .* spreads over . GPU"):
            VLLMEngine.check_config(EngineConfig(num_gpus=num_gpus, options=options))
    for num_gpus, options in ((0, {}), (0.5, {}), (1, {}), (2, parallel)):
        VLLMEngine.check_config(EngineConfig(num_gpus=num_gpus, options=options))


def test_step_that_holds_no_whole_prompt_is_refused() -> None:
    for num_gpus, options, name in (
        (0, {"max_num_seqs": 16}, r"server\.engine\.max_model_tokens=2048"),
        (1, {"max_num_seqs": 16, "enable_chunked_prefill": False}, r"server\.engine\.max_model_tokens=2048"),
        (1, {"max_num_seqs": 600}, r"server\.engine\.options\.max_num_seqs=600"),
    ):
        step = options | {"max_num_batched_tokens": 512}
        with pytest.raises(ConfigError, match=rf"max_num_batched_tokens=512 is below {name}: raise it"):
            VLLMEngine.check_config(EngineConfig(num_gpus=num_gpus, max_model_tokens=2048, options=step))
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        with pytest.raises(ConfigError, match=rf"server\.engine\.options\.{name}='8k' has to be a number"):
            VLLMEngine.check_config(EngineConfig(options={name: "8k"}))
    split = {"max_num_batched_tokens": 512, "max_num_seqs": 16}
    VLLMEngine.check_config(EngineConfig(num_gpus=1, max_model_tokens=2048, options=split))
