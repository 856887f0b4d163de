"""Tiny models of the families that people use, with random weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).with_name("templates")
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    # At the usual 0.02 all tokens are nearly as likely, and rounding chooses the likeliest.
    "initializer_range": 0.1,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {
    "kv_lora_rank": 512,  # as in the real ones: vLLM has kernels for the 512 + 64 numbers of a token alone
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
SMOL_PICTURES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 16,
}
PICTURES = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}


@dataclass(frozen=True)
class Family:
    """A family.

    Attributes:
        config: of transformers, without ``Config``.
        settings: its sizes beside or instead of ``SIZES``.
        tokenizer: one of ``real_tokenizers.MODEL_TYPES``.
        template: file of ``tests/templates``; without it the tokenizer's own.
        tied: forms that its models have: output layer and embedding are one, or are two.
    """

    config: str
    tokenizer: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    tied: tuple[bool, ...] = (False,)


FAMILIES = {
    "Llama 3": Family("Llama", "llama3_1", tied=(True, False)),
    # Its heads are hidden_size / num_attention_heads wide, and vLLM's CPU build has no kernel for 16.
    "Qwen2.5": Family("Qwen2", "qwen3", {"hidden_size": 128}, template="qwen2_5.jinja", tied=(True, False)),
    "Qwen3": Family("Qwen3", "qwen3", tied=(True, False)),
    "Qwen3-MoE": Family("Qwen3Moe", "qwen3", {**EXPERTS, "num_experts": 4}),
    "Gemma 3": Family(
        "Gemma3Text",
        "gemma3",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
        },
        tied=(True,),
    ),
    "Mistral": Family("Mistral", "llama3_1", {"sliding_window": None}, template="chatml.jinja"),
    "DeepSeek V2": Family("DeepseekV2", "deepseek_v3", {**LATENT, **EXPERTS, "topk_method": "greedy"}),
    "DeepSeek V3": Family("DeepseekV3", "deepseek_v3", {**LATENT, **EXPERTS, "topk_method": "noaux_tc"}),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VL", "qwen3", {"hidden_size": 128}, template="qwen2_5.jinja", tied=(True, False)
    ),
    "SmolVLM": Family("SmolVLM", "llama3_1", template="chatml.jinja"),
}


def build(family: Family, tied: bool, tokenizer: Any, folder: Path) -> Path:
    """Save a model of ``family`` and the tokenizer to ``folder``, which is returned, in Hugging Face format.

    The number of its tokens is odd, so that an engine pads it.
    """
    import torch
    import transformers

    if family.template is not None:
        tokenizer.chat_template = (TEMPLATES / family.template).read_text(encoding="utf-8")
    has_pictures = family.config in ("Qwen2_5_VL", "SmolVLM")
    sizes = {
        **SIZES,
        **family.settings,
        "vocab_size": len(tokenizer) // 2 * 2 + 1,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if family.config == "SmolVLM":
        sizes = {
            "text_config": {**sizes, "model_type": "llama"},
            "vision_config": SMOL_PICTURES,
            "tie_word_embeddings": tied,
            "image_token_id": sizes["vocab_size"] - 1,
        }
    elif has_pictures:
        sizes = _with_pictures(sizes, tokenizer, folder)
    config = getattr(transformers, f"{family.config}Config")(**sizes)
    auto = transformers.AutoModelForImageTextToText if has_pictures else transformers.AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(config, dtype=torch.float32)
    model.generation_config = transformers.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _with_pictures(text: dict[str, Any], tokenizer: Any, folder: Path) -> dict[str, Any]:
    """The sizes of a model that reads pictures too, whose image processor goes into ``folder``."""
    from transformers import Qwen2VLImageProcessor

    Qwen2VLImageProcessor(min_pixels=56 * 56, max_pixels=112 * 112).save_pretrained(folder)
    names = {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    }
    numbers = {name: tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    return {
        "text_config": {**text, "rope_parameters": rope},
        "vision_config": PICTURES,
        "tie_word_embeddings": text["tie_word_embeddings"],
        **{name: number for name, number in numbers.items() if number is not None},
    }
