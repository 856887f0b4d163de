"""Which samples share a row, and what each token of it sees."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def test_neighbours_with_one_prompt_share_a_row() -> None:
    from policies.learning.verl.shared_prompts import share_prompts

    first, second = [1] * 100, [2] * 100
    assert share_prompts([first] * 3 + [second] * 2, [10] * 5, 1000) == [[0, 1, 2], [3, 4]]
    assert share_prompts([first, second, first], [10] * 3, 1000) == [[0], [1], [2]]


def test_row_ends_where_it_would_cost_more_than_two() -> None:
    from policies.learning.verl.shared_prompts import PAIRS_PER_TOKEN, share_prompts

    prompt = [1] * 100
    assert share_prompts([prompt] * 4, [50] * 4, 200) == [[0, 1], [2, 3]]
    long = int((PAIRS_PER_TOKEN * len(prompt)) ** 0.5)
    assert share_prompts([prompt] * 2, [long] * 2, 10_000) == [[0, 1]]
    assert share_prompts([prompt] * 2, [long + 2] * 2, 10_000) == [[0], [1]]


def test_response_sees_its_prompt_and_itself_in_place() -> None:
    from policies.learning.verl.shared_prompts import Layout

    nested = torch.nested.nested_tensor
    prompts, responses = ([1, 2, 3], [1, 2, 3], [4]), ([5, 6], [7, 8, 9], [1])
    columns = {
        "prompts": nested([torch.tensor(row) for row in prompts], layout=torch.jagged),
        "responses": nested([torch.tensor(row) for row in responses], layout=torch.jagged),
        "row": torch.tensor([0, 0, 1]),
    }
    layout = Layout.of(columns)  # type: ignore[arg-type]
    assert layout.input_ids.tolist() == [[1, 2, 3, 5, 6, 7, 8, 9], [4, 1, 0, 0, 0, 0, 0, 0]]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5], [0, 1, 0, 0, 0, 0, 0, 0]]
    assert layout.labels.tolist() == [5, 6, 7, 8, 9, 1]
    assert layout.row_of.tolist() == [0, 0, 0, 0, 0, 1]
    assert layout.column_of.tolist() == [2, 3, 2, 5, 6, 0]
    sees = layout.attention_mask()[0, 0]
    assert sees[4].nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert sees[6].nonzero().flatten().tolist() == [0, 1, 2, 5, 6]
    assert layout.attention_mask().any(-1).all()


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings", "shares"),
    [
        ("Qwen3", {}, True),
        ("Llama", {}, True),
        ("Mistral", {"sliding_window": 4096}, False),
        ("Gemma3Text", {"sliding_window": 8}, False),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, False),
        ("FalconH1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}, False),
        ("Jamba", {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2}, False),
        ("RecurrentGemma", {}, False),
    ],
)
def test_models_with_windows_or_recurrence_compute_each_prompt(
    name: str, settings: dict[str, object], shares: bool
) -> None:
    import transformers

    from policies.learning.verl.shared_prompts import can_share

    config = getattr(transformers, f"{name}Config")(**SIZES, **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert can_share(model, config) == shares


@pytest.mark.slow
def test_window_is_found_below_pictures_and_adapters() -> None:
    import peft
    import transformers

    from policies.learning.verl.shared_prompts import can_share

    text = transformers.Gemma3Config(text_config={**SIZES, "sliding_window": 8})
    assert not can_share(torch.nn.Module(), text)
    config = transformers.Qwen3Config(**SIZES)
    model = transformers.Qwen3ForCausalLM(config)
    with_adapters = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert can_share(with_adapters, config)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_only_torchs_attention_leaves_out_what_the_mask_hides(attention: str) -> None:
    """Also of the text part of a model that reads pictures too."""
    import transformers

    from policies.learning.verl.shared_prompts import can_share

    config = transformers.Qwen3Config(**SIZES)
    pictures = transformers.LlavaConfig(
        text_config=config, vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=28, patch_size=14)
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        reader = transformers.LlavaForConditionalGeneration._from_config(
            pictures, attn_implementation=attention
        )
    assert can_share(model, config) == (attention == "sdpa")
    assert can_share(reader, pictures) == (attention == "sdpa")


@pytest.mark.slow
def test_positions_that_are_counted_by_the_mask_are_not_shared() -> None:
    import transformers

    from policies.learning.verl.shared_prompts import can_share

    config = transformers.FalconConfig(**SIZES, alibi=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    assert not can_share(model, config)
