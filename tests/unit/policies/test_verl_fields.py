"""``learner.verl``: a field of verl's classes is acted on, or an error with a remedy."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from environments.errors import ConfigError
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig, LearnerConfig, LoRAConfig
from policies.learning.verl.fields import FREE, OWN_SETTINGS, check_base, check_fields

GRPO = resolve(AlgorithmConfig(), 64)


def check(section: str, algorithm: Any = GRPO, lora: int = 0, **given: Any) -> None:
    check_fields(LearnerConfig(verl={section: given}, lora=LoRAConfig(rank=lora)), algorithm)


@pytest.mark.slow
def test_fields_that_may_be_set_are_those_of_verl(verl_on_cpu: None) -> None:
    from policies.learning.verl import config as verl

    classes = {
        "engine": verl.FSDPEngineConfig,
        "model": verl.HFModelConfig,
        "optimizer": verl.FSDPOptimizerConfig,
        "actor": verl.FSDPActorConfig,
    }
    found = {section: {each.name for each in fields(cls)} - {"_target_"} for section, cls in classes.items()}
    for section, names in found.items():
        assert set(FREE[section]) <= names, section
    named = {name for names in OWN_SETTINGS.values() for name in names.split()}
    assert named <= set().union(*found.values())


@pytest.mark.parametrize(
    ("section", "name", "remedy"),
    [
        ("actor", "ppo_epochs", "set learner.num_epochs"),
        ("actor", "ppo_mini_batch_size", "set learner.mini_batch_size"),
        ("model", "use_remove_padding", "set learner.verl.model.*attn_implementation=flash_attention_2"),
        ("model", "hybrid_engine", "leave it out, nothing here acts on it"),
        ("model", "use_fused_kernels", "set learner.micro_batch_tokens"),
        ("engine", "max_token_len_per_gpu", "set learner.micro_batch_tokens"),
        ("engine", "qat", "leave it out, nothing here acts on it"),
        ("engine", "no_such", "leave it out, .*; learner.verl.engine has param_offload"),
        ("optimizer", "lr", "set learner.optimizer.lr"),
        ("model", "path", "set model.path"),
        ("model", "lora_adapter_path", "set model.path, with adapters merged"),
    ],
)
def test_field_without_effect_names_its_remedy(section: str, name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"learner.verl.{section}.{name}=7 cannot be set there: {remedy}"):
        check(section, **{name: 7})


@pytest.mark.parametrize(
    ("section", "name", "value", "kind"),
    [
        ("engine", "reshard_after_forward", "maybe", "true or false"),
        ("engine", "fsdp_size", "x", "a number"),
        ("engine", "fsdp_size", True, "a number"),
        ("engine", "mixed_precision", 3, "a map"),
        ("model", "override_config", 3, "a map"),
        ("model", "target_modules", 3, "a list or a text"),
        ("optimizer", "betas", 3, "a list or a text"),
        ("optimizer", "optimizer", None, "a text"),
        ("actor", "clip_ratio_c", "x", "a number"),
    ],
)
def test_value_of_another_kind_is_refused(section: str, name: str, value: Any, kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}\.{name}={value!r} has to be {kind}: write one, or"):
        check(section, lora=4, **{name: value})


@pytest.mark.parametrize("size", [0, 3, 8, True, "2", 2.0])
def test_ranks_of_a_row_divide_all_ranks(size: Any) -> None:
    def learner(size: Any) -> LearnerConfig:
        return LearnerConfig(num_workers=4, verl={"engine": {"ulysses_sequence_parallel_size": size}})

    with pytest.raises(ConfigError, match=rf"parallel_size={size!r} is no divisor of learner.num_workers=4"):
        check_fields(learner(size), GRPO)
    check_fields(learner(2), GRPO)
    assert learner(2).row_tokens == 2 * LearnerConfig().row_tokens


def test_unknown_names_are_errors() -> None:
    with pytest.raises(ConfigError, match=r"learner.verl='engin' is not one of .* Did you mean 'engine'"):
        check("engin")


def test_field_that_needs_another_setting_says_so() -> None:
    with pytest.raises(ConfigError, match=r"exclude_modules='lm_head' .* without learner.lora.rank"):
        check("model", exclude_modules="lm_head")
    with pytest.raises(ConfigError, match=r"tau_pos=1.5 .* its loss vanilla does not read it, but sapo"):
        check("actor", tau_pos=1.5)


@pytest.mark.parametrize("name", ["AdamW8bit", "PagedAdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_optimizer_with_small_moments_is_that_of_torchao(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ({}, {"optimizer_impl": "bitsandbytes.optim"}):
        with pytest.raises(ConfigError, match=rf"optimizer='{name}' is not .*optimizer_impl=torchao.optim"):
            check("optimizer", optimizer=name, **package)
    with pytest.raises(ConfigError, match=r"the package torchao is not installed.*pip install --no-deps"):
        check("optimizer", optimizer=name, optimizer_impl="torchao.optim")
    monkeypatch.setattr("policies.learning.verl.fields.find_spec", lambda package: package)
    check("optimizer", optimizer=name, optimizer_impl="torchao.optim")


@pytest.mark.parametrize(
    "given", [3, {}, {"load_in_8bit": True}, {"load_in_4bit": False}, {"load_in_4bit": True, "a": 1}]
)
def test_other_quantization_than_four_bits_is_refused(given: Any) -> None:
    verl = {"model": {"override_config": {"quantization_config": given}}}
    with pytest.raises(ConfigError, match=r"quantization_config=.*takes load_in_4bit=true alone"):
        check_fields(LearnerConfig(verl=verl, lora=LoRAConfig(rank=4)), GRPO)


def test_base_in_four_bits_is_beneath_adapters() -> None:
    given = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    verl = {"model": {"override_config": {"quantization_config": given}}}
    with pytest.raises(ConfigError, match=r"override_config.quantization_config=.*set learner.lora.rank=16"):
        check_fields(LearnerConfig(verl=verl), GRPO)
    learner = LearnerConfig(verl=verl, lora=LoRAConfig(rank=4))
    check_fields(learner, GRPO)
    check_base(learner, "model.path='a'", {"num_experts": 1})
    with pytest.raises(ConfigError, match=r"model.path='a' has num_experts=8, .*leave learner.verl.model"):
        check_base(learner, "model.path='a'", {"text_config": {"num_experts": 8}})
    with pytest.raises(ConfigError, match=r"has moe_num_experts=64, .*leave learner.verl.model"):
        check_base(learner, "model.path='a'", {"moe_num_experts": 64, "moe_k": 6})


def test_heads_of_a_row_are_shared_out_evenly_among_ranks() -> None:
    learner = LearnerConfig(verl={"engine": {"ulysses_sequence_parallel_size": 4}}, num_workers=4)
    check_base(learner, "model.path='a'", {"num_attention_heads": 8})
    with pytest.raises(ConfigError, match=r"model.path='a' has num_attention_heads=9, .* set a number that"):
        check_base(learner, "model.path='a'", {"text_config": {"num_attention_heads": 9}})


@pytest.mark.parametrize(
    ("entry", "is_refused"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, True),
        ({"rope_parameters": {"rope_type": "longrope"}}, True),
        ({"rope_parameters": {"rope_type": "yarn"}}, False),
        ({"sliding_window": 4096}, True),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
        ({"layer_types": ["full_attention"], "sliding_window": None}, False),
    ],
)
def test_rows_that_no_ranks_share_are_refused_before_ray(entry: dict[str, Any], is_refused: bool) -> None:
    learner = LearnerConfig(verl={"engine": {"ulysses_sequence_parallel_size": 2}}, num_workers=2)
    check_base(LearnerConfig(), "model.path='a'", entry)
    if not is_refused:
        check_base(learner, "model.path='a'", entry)
        return
    with pytest.raises(
        ConfigError, match=r"model.path='a' has (rope|sliding|layer).*: leave .*size=2 out, and"
    ):
        check_base(learner, "model.path='a'", {"text_config": entry})


FLASH = {"model": {"override_config": {"attn_implementation": "flash_attention_2"}}}


def test_flash_attention_is_for_gpus_and_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for learner in (LearnerConfig(verl=FLASH), LearnerConfig(verl=FLASH, device="cuda")):
        with pytest.raises(ConfigError, match=r"flash_attention_2.*Set learner.device=cuda learner.dtype=bf"):
            check_fields(learner, GRPO)
    learner = LearnerConfig(verl=FLASH, device="cuda", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"flash_attn is not installed.*pip install"):
        check_fields(learner, GRPO)
    monkeypatch.setattr("policies.learning.verl.fields.find_spec", lambda package: package)
    check_fields(learner, GRPO)


@pytest.mark.slow
def test_flash_attention_reaches_verl(verl_on_cpu: None, tiny_model: Path) -> None:
    from policies.learning.verl.config import worker_config

    learner = LearnerConfig(verl=FLASH, device="cuda", dtype="bfloat16")
    model = worker_config("language_model", str(tiny_model), learner, learner.optimizer, 1).model_config
    assert model.hf_config._attn_implementation == "flash_attention_2"


OFFLOADS = [
    ("engine", "param_offload"),
    ("engine", "optimizer_offload"),
    ("engine", "offload_policy"),
    ("model", "enable_activation_offload"),
]


@pytest.mark.parametrize(("section", "name"), OFFLOADS)
def test_offload_without_gpu_is_refused(section: str, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=True would have no effect with learner.device=cpu"):
        check(section, **{name: True})
    check(section, **{name: False})
    check_fields(LearnerConfig(device="cuda", verl={section: {name: True}}), GRPO)


@pytest.mark.slow
def test_settings_of_memory_and_precision_reach_verl(verl_on_cpu: None, tiny_model: Path) -> None:
    from policies.learning.verl.config import worker_config

    def workers(learner: LearnerConfig) -> tuple[Any, Any]:
        config = worker_config("language_model", str(tiny_model), learner, learner.optimizer, 1)
        return config.engine_config, config.model_config

    engine, model = workers(LearnerConfig())
    assert (engine.dtype, engine.mixed_precision["param_dtype"], engine.model_dtype) == (
        "float32",
        "fp32",
        "fp32",
    )
    assert not model.enable_gradient_checkpointing, "a CPU has memory rather than time"
    given: dict[str, dict[str, Any]] = {"engine": {}, "model": {"enable_gradient_checkpointing": True}}
    for section, name in OFFLOADS:
        given[section][name] = True
    engine, model = workers(LearnerConfig(device="cuda", dtype="bfloat16", verl=given))
    assert (engine.dtype, engine.mixed_precision["param_dtype"]) == ("bfloat16", "bf16")
    assert (engine.model_dtype, engine.mixed_precision["reduce_dtype"]) == ("fp32", "fp32"), "fp32 masters"
    assert all(getattr(engine, name) for section, name in OFFLOADS if section == "engine")
    assert model.enable_gradient_checkpointing and model.enable_activation_offload
    assert workers(LearnerConfig(device="cuda"))[1].enable_gradient_checkpointing, "unless it is switched off"


def test_what_verl_acts_on_is_passed() -> None:
    check("model", lora=4, exclude_modules="lm_head")
    check("actor", clip_ratio_c=4.0)
    check("engine", reshard_after_forward=False)
