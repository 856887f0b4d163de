from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from environments.types import Message
from policies.tiny import build_model, build_tokenizer

CONVERSATION: list[Message] = [
    {"role": "system", "content": "Give the final answer in \\boxed{}."},
    {"role": "user", "content": "What is 12+34?"},
    {"role": "assistant", "content": '<tool_call>\n{"name": "calculator"}\n</tool_call>'},
    {"role": "tool", "content": "46", "tool_call_id": "call_0"},
    {"role": "assistant", "content": "\\boxed{46}"},
]


def render(tokenizer: Any, messages: list[Message], add_generation_prompt: bool = True) -> str:
    return str(
        tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
    )


def test_template_is_plain_chatml() -> None:
    assert render(build_tokenizer([CONVERSATION]), CONVERSATION) == (
        "<|im_start|>system\nGive the final answer in \\boxed{}.<|im_end|>\n"
        "<|im_start|>user\nWhat is 12+34?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calculator"}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n46\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n\\boxed{46}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_template_adds_no_system_prompt_and_keeps_white_space() -> None:
    messages: list[Message] = [{"role": "user", "content": "  hi \n"}]
    assert render(build_tokenizer([]), messages, add_generation_prompt=False) == (
        "<|im_start|>user\n  hi \n<|im_end|>\n"
    )


def test_template_only_appends() -> None:
    tokenizer = build_tokenizer([CONVERSATION])
    whole = render(tokenizer, CONVERSATION)
    for length, message in enumerate(CONVERSATION):
        if message["role"] == "assistant":
            assert whole.startswith(render(tokenizer, CONVERSATION[:length]) + message["content"])


@pytest.mark.parametrize("text", ["What is 12+34?", "naïve ½ 日本 🤖 \x00\t", " , it 's  so ! ", "\n\n"])
def test_any_text_survives_encoding(text: str) -> None:
    tokenizer = build_tokenizer([CONVERSATION])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text


def test_digits_are_never_merged() -> None:
    tokenizer = build_tokenizer([[{"role": "user", "content": "1234 1234"}]] * 50)
    assert len(tokenizer.encode("1234", add_special_tokens=False)) == 4


def test_frequent_pairs_are_merged_and_special_tokens_are_one() -> None:
    tokenizer = build_tokenizer([CONVERSATION] * 2)
    for text in ("assistant", "user", "calculator", "<|im_start|>", "<|im_end|>", "<|endoftext|>"):
        assert len(tokenizer.encode(text, add_special_tokens=False)) == 1, text
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")


def test_what_occurs_once_is_not_merged() -> None:
    rare: list[Message] = [{"role": "user", "content": "zyxwv"}]
    assert len(build_tokenizer([rare]).encode("zyxwv", add_special_tokens=False)) == 5


def test_model_has_the_measured_shape_and_loads(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert build_model(tmp_path, [CONVERSATION] * 20) == tmp_path
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    config = model.config
    assert (config.model_type, config.hidden_size, config.intermediate_size) == ("qwen3", 128, 256)
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert (config.head_dim, config.max_position_embeddings) == (32, 2048)
    assert config.rope_parameters["rope_theta"] == 1e4
    assert config.vocab_size % 8 == 0
    assert 0 <= config.vocab_size - len(tokenizer) < 8
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            assert abs(parameter.std().item() - 0.08) < 0.004, name
        else:
            assert bool((parameter == 1).all()), name


def test_generation_ends_at_the_end_of_a_message(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    build_model(tmp_path, [CONVERSATION])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_tied_on_request(tmp_path: Path, tied: bool) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    build_model(tmp_path, [CONVERSATION], tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.tie_word_embeddings is tied
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight) is tied


def test_same_seed_gives_the_same_files_and_another_seed_others(tmp_path: Path) -> None:
    def files(name: str, seed: int) -> dict[str, bytes]:
        folder = build_model(tmp_path / name, [CONVERSATION] * 3, seed=seed)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    first, again, other = files("a", 1), files("b", 1), files("c", 2)
    assert first == again
    assert first["tokenizer.json"] == other["tokenizer.json"]
    assert first["model.safetensors"] != other["model.safetensors"]


def test_building_leaves_the_callers_random_state_alone(tmp_path: Path) -> None:
    import torch

    before = torch.random.get_rng_state()
    build_model(tmp_path, [CONVERSATION], seed=7)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_building_prints_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils.logging import enable_progress_bar

    enable_progress_bar()  # as in a new process
    build_model(tmp_path, [CONVERSATION])
    assert capfd.readouterr() == ("", "")
