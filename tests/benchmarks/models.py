"""The models that are measured: three with random weights, or any that ``model.path`` takes."""

from __future__ import annotations

from pathlib import Path

import repository  # noqa: F401

from launch.run_folder.model_paths import model_folder
from policies.tiny import build_model, build_tokenizer

TINY = "tiny"
CONVERSATIONS = [
    [{"role": "user", "content": f"What is {a}+{b}?"}, {"role": "assistant", "content": str(a + b)}]
    for a in range(10, 60)
    for b in range(10, 60)
]


def chosen(name: str, folder: Path) -> str:
    """The folder of the ``tiny``, ``medium`` or ``large`` model, which is made in ``folder``, or of one that
    ``model.path`` takes."""
    made = {TINY: tiny, "medium": medium, "large": large}
    return made[name](folder) if name in made else model_folder(name)


def tiny(folder: Path) -> str:
    """The quickstart's model, 353k parameters; returns its folder."""
    return str(build_model(folder / "tiny", CONVERSATIONS))


def medium(folder: Path) -> str:
    """175M parameters, untied, with the tiny model's tokenizer; returns its folder."""
    return _random(folder / "medium", heads=14, layers=14)


def large(folder: Path) -> str:
    """The same with 493M parameters."""
    return _random(folder / "large", heads=20, layers=20)


def _random(folder: Path, heads: int, layers: int) -> str:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = build_tokenizer(CONVERSATIONS)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=64 * heads,
        intermediate_size=256 * heads,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)
