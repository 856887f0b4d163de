"""Which samples share a row, what each token of it sees, and that it teaches what flat rows teach."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learner_samples import batches
from whole_batches import shards

from environments.types import Completion, Step, Trajectory
from policies.learning.samples import TrainBatch, TrainingSample, training_samples

if TYPE_CHECKING:
    from learner_samples import MakeRank
    from tensordict import TensorDict

    from policies.learning.verl.token_trees import Layout

pytestmark = pytest.mark.usefixtures("verl_on_cpu")

PAIRS = 384
ANY = 10**9
"""Enough tokens, or pairs, for whatever is shared here."""


# -- what each token sees ------------------------------------------------------------------------------


def micro_batch(rows: Sequence[Sequence[Sequence[int]]], num_prompt: int = 1) -> TensorDict:
    """Rows of samples in the order of their ids, all of whose tokens but the first ones were sampled."""
    from policies.learning.verl.data import unscored

    samples = [sample(ids[:num_prompt], ids[num_prompt:]) for row in rows for ids in row]
    data = unscored(shards(TrainBatch(samples=tuple(samples)), 1, ANY, ANY)[0])
    assert data["row"].tolist() == [number for number, row in enumerate(rows) for _ in row]
    return data


def sample(prompt: Sequence[int], response: Sequence[int]) -> TrainingSample:
    return TrainingSample(
        sample_id="0",
        prompt_ids=tuple(prompt),
        response_ids=tuple(response),
        loss_mask=(1,) * len(response),
        rollout_logprobs=(0.0,) * len(response),
    )


def test_token_sees_its_path_in_place() -> None:
    """The picture at the head of the module, and a row beside it."""
    from policies.learning.verl.token_trees import NO_END, Layout

    tree = [[1, 1, 1, 2, 3], [1, 1, 1, 4, 5, 6], [1, 1, 1, 4, 7]]
    layout = Layout.of(micro_batch([tree, [[9, 8]]]))
    assert layout.input_ids.tolist() == [[1, 1, 1, 2, 3, 4, 5, 6, 7], [9, 8, 0, 0, 0, 0, 0, 0, 0]]
    assert layout.positions.tolist() == [[0, 1, 2, 3, 4, 3, 4, 5, 4], [0, 1, 0, 0, 0, 0, 0, 0, 0]]
    assert [-1 if end == NO_END else end for end in layout.ends[0].tolist()] == [-1] * 3 + [
        5,
        5,
        -1,
        8,
        8,
        -1,
    ]
    assert layout.parents()[1:9].tolist() == [0, 1, 2, 3, 2, 5, 6, 5]
    sees = seen(layout)[0]
    assert [row.nonzero().flatten().tolist() for row in sees[[4, 7, 8]]] == [
        [0, 1, 2, 3, 4],
        [0, 1, 2, 5, 6, 7],
        [0, 1, 2, 5, 8],
    ]
    assert seen(layout).any(-1).all(), "a token that sees nothing would be NaN"


def seen(layout: Layout) -> torch.Tensor:
    """All blocks of the attention, of four tokens each, as one mask [rows, query, key]."""
    from policies.learning.verl import token_trees

    num_rows, width = layout.input_ids.shape
    mask = torch.zeros(num_rows, width, width, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_trees, "BLOCK", 4)
        for block in token_trees.blocks(layout.attention_mask()):
            mask[:, block.queries, block.keys] = block.sees[:, 0]
    return mask


@given(st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), min_size=1, max_size=12))
@settings(deadline=None, max_examples=60)
def test_each_prefix_is_one_token_and_sees_itself(ids: list[list[int]]) -> None:
    from policies.learning.verl.data import unscored
    from policies.learning.verl.token_trees import Layout

    batch = TrainBatch(samples=tuple(sample(each[:1], each[1:]) for each in ids))
    [shard] = shards(batch, 1, ANY, ANY)
    layout = Layout.of(unscored(shard))
    prefixes = {tuple(each[:end]) for each in ids for end in range(1, len(each) + 1)}
    assert int(layout.lengths.sum()) == len(prefixes)
    tokens, width, start = layout.input_ids.flatten(), layout.input_ids.shape[1], 0
    mask = seen(layout) if layout.has_branches else None
    for row in shard.samples:
        path = layout.paths[start : start + len(row)]
        start += len(row)
        assert tuple(tokens[path].tolist()) == row.prompt_ids + row.response_ids
        assert layout.positions.flatten()[path].tolist() == list(range(len(row)))
        if mask is not None:
            for depth, place in enumerate(path.tolist()):
                row_of, column = divmod(place, width)
                sees = mask[row_of, column].nonzero().flatten() + row_of * width
                assert sees.tolist() == path[: depth + 1].tolist()


# -- what is learned -----------------------------------------------------------------------------------


def rewriting(rollout_id: str, num_turns: int, seed: int) -> Trajectory:
    """An agent whose thoughts are taken out of its history after each turn."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(60) for _ in range(count))

    history: tuple[int, ...] = (1, 2, 3, 4, 5)
    steps = []
    for _ in range(num_turns):
        thought, answer, said = tokens(12), tokens(8), tokens(8)
        completion = Completion(
            prompt_ids=history,
            completion_ids=thought + answer,
            logprobs=(-4.0,) * 20,
            text="",
            finish_reason="stop",
        )
        steps.append(Step(completion=completion))
        history += answer + said
    return Trajectory(rollout_id=rollout_id, steps=steps)


def forked(depth: int, seed: int) -> list[TrainingSample]:
    """The leaves of a binary tree; a turn is trained in the first of the leaves that share it."""
    rng = random.Random(seed)

    def grow(path: tuple[int, ...], mask: tuple[int, ...], levels: int) -> list[tuple[Any, Any]]:
        if not levels:
            return [(path, mask)]
        found: list[tuple[Any, Any]] = []
        for _ in range(2):
            turn = tuple(rng.randrange(60) for _ in range(8))
            leaves = grow(path + turn, (*mask, 1, 1, 1, 1, 1, 1, 1, 0), levels - 1)
            if found:  # what is before the fork is trained in its first branch
                leaves = [(ids, (0,) * len(mask) + own[len(mask) :]) for ids, own in leaves]
            found += leaves
        return found

    leaves = grow((1, 2, 3, 4, 5), (), depth)
    return [
        TrainingSample(
            sample_id=f"fork/{number}#0",
            prompt_ids=ids[:5],
            response_ids=ids[5:],
            loss_mask=mask,
            rollout_logprobs=(0.0,) * len(mask),
        )
        for number, (ids, mask) in enumerate(leaves)
    ]


def trees() -> TrainBatch:
    """Turns with stripped thoughts, members of a group that say the same at first, forks, and one alone."""
    samples = [
        *training_samples(rewriting("a", 8, seed=0)),
        *training_samples(rewriting("b", 6, seed=1)),
        *(sample((7, 8, 9, 10), (11, 12, 13, *end)) for end in ((14, 15), (14, 16, 17), (18,))),
        *forked(4, seed=2),
        sample((50, 51), (52, 53)),
    ]
    random.Random(0).shuffle(samples)
    return TrainBatch(samples=tuple(samples))


def gradient(
    model: Any, batch: TrainBatch, most: int, pairs: int, is_packed: bool = False
) -> tuple[list[torch.Tensor], int]:
    """The gradient of a clipped loss with advantages and ratios by token, and the tokens computed for it."""
    from policies.learning.verl.data import unscored
    from policies.learning.verl.engine import Predicted, model_inputs
    from policies.learning.verl.micro_batches import prepare_micro_batches
    from policies.learning.verl.token_trees import Layout

    # isort: split
    from verl.utils import tensordict_utils as tu

    [shard] = shards(batch, 1, most, pairs)
    data, count = unscored(shard), 0
    tu.assign_non_tensor(data, max_token_len_per_gpu=most, packed=is_packed)
    model.zero_grad()
    for each, indices in zip(*prepare_micro_batches(data), strict=True):
        layout = Layout.of(each)
        assert layout.input_ids.numel() <= most
        count += layout.input_ids.numel()
        predicted = Predicted.of(layout, each)
        output = model(**model_inputs(layout, is_packed), logits_to_keep=predicted.columns, use_cache=False)
        logits = predicted.logits(output.logits)
        logprobs = -torch.nn.functional.cross_entropy(logits, predicted.labels, reduction="none")
        rows = torch.nested.nested_tensor_from_jagged(
            predicted.by_sample(logprobs), each["input_ids"].offsets()
        )
        loss = torch.zeros((), dtype=logits.dtype)
        for index, row in zip(indices, rows.unbind(), strict=True):
            own = shard.samples[index]
            rng = torch.Generator().manual_seed(hash(own.prompt_ids + own.response_ids) % 1000)
            new = row[len(own.prompt_ids) - 1 : len(own) - 1]
            advantage, away = torch.randn(2, len(new), generator=rng, dtype=torch.float64).to(new.dtype)
            ratio = (new - new.detach() + 0.3 * away).exp()
            lost = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
            loss = loss + (lost * torch.tensor(own.loss_mask)).sum()
        loss.backward()
    return [each.grad.clone() for each in model.parameters()], count


def distance(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def make_model() -> Callable[[torch.dtype], Any]:
    """A model all of whose layers compute in its own precision: most others' norms are in fp32."""
    import transformers

    def make(dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        config = transformers.PhiConfig(**SIZES, attn_implementation="sdpa")
        return transformers.PhiForCausalLM(config).to(dtype)

    return make


@pytest.mark.slow
@pytest.mark.parametrize("most", [140, 400, 2000])
@pytest.mark.parametrize(("block", "kept"), [(256, 3), (32, ANY), (32, 0)], ids=["one", "kept", "anew"])
def test_gradient_is_that_of_flat_rows(
    make_model: Callable[[torch.dtype], Any],
    monkeypatch: pytest.MonkeyPatch,
    most: int,
    block: int,
    kept: int,
) -> None:
    """In one block, and in several whose keys are kept or made anew in the backward pass."""
    from policies.learning.verl import token_trees

    monkeypatch.setattr(token_trees, "BLOCK", block)
    monkeypatch.setattr(token_trees, "KEPT_KEYS", kept)
    batch, model = trees(), make_model(torch.float64)
    flat, num_flat = gradient(model, batch, most, pairs=0)
    ours, count = gradient(model, batch, most, ANY)
    assert distance(ours, flat) < 1e-10
    assert max(float(each.abs().max()) for each in flat) > 0.1
    assert count < (0.9 if most == 140 else 0.65) * num_flat


@pytest.mark.slow
@pytest.mark.parametrize("most", [140, 2000])
def test_gradient_of_packed_rows_is_that_of_flat_ones(
    make_model: Callable[[torch.dtype], Any], most: int
) -> None:
    """As flash attention has them, by torch's own attention: transformers masks what positions tell apart."""
    batch, model = trees(), make_model(torch.float64)
    flat, num_flat = gradient(model, batch, most, pairs=0)
    ours, count = gradient(model, batch, most, pairs=0, is_packed=True)
    assert distance(ours, flat) < 1e-10
    assert count == sum(map(len, batch.samples)) <= num_flat, "no token is padding"


@pytest.mark.slow
def test_packed_rows_teach_what_flat_ones_do(make_rank: MakeRank, monkeypatch: pytest.MonkeyPatch) -> None:
    from policies.learning.verl import token_trees

    found = []
    monkeypatch.setattr(token_trees, "obstacle", lambda *_: "samples share nothing")
    for is_packed in (False, True):
        monkeypatch.setattr(token_trees, "packs", lambda *_, packed=is_packed: packed)
        rank = make_rank()
        [scored] = rank.score(batches(1))
        norm = rank.update([scored]).metrics["learn/grad_norm"]
        found.append(([*chain(*(each.old_logprobs for each in scored.samples))], norm))
    (flat, flat_norm), (packed, norm) = found
    assert packed == pytest.approx(flat, abs=1e-5) and norm == pytest.approx(flat_norm, rel=1e-5)


@pytest.mark.slow
def test_gradient_in_fp32_is_as_near_as_two_divisions(make_model: Callable[[torch.dtype], Any]) -> None:
    batch, model = trees(), make_model(torch.float32)
    flat, divided, ours = (gradient(model, batch, *how)[0] for how in ((2000, 0), (140, 0), (2000, ANY)))
    assert 0 < distance(ours, flat) <= 2 * distance(flat, divided)


# -- models that cannot --------------------------------------------------------------------------------


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
def test_models_with_windows_or_recurrence_have_flat_rows(
    name: str, settings: dict[str, object], shares: bool
) -> None:
    import transformers

    from policies.learning.verl.token_trees import obstacle

    config = getattr(transformers, f"{name}Config")(**SIZES, **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert (obstacle(model, config) is None) == shares


@pytest.mark.slow
def test_window_is_found_below_pictures_and_adapters() -> None:
    import peft
    import transformers

    from policies.learning.verl.token_trees import obstacle

    text = transformers.Gemma3Config(text_config={**SIZES, "sliding_window": 8})
    assert obstacle(torch.nn.Module(), text)
    config = transformers.Qwen3Config(**SIZES)
    model = transformers.Qwen3ForCausalLM(config)
    with_adapters = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert obstacle(with_adapters, config) is None


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_only_torchs_attention_leaves_out_what_the_mask_hides(attention: str) -> None:
    """Also of the text part of a model that reads pictures too."""
    import transformers

    from policies.learning.verl.token_trees import obstacle

    config = transformers.Qwen3Config(**SIZES)
    pictures = transformers.LlavaConfig(
        text_config=config, vision_config=transformers.CLIPVisionConfig(**SIZES, image_size=28, patch_size=14)
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        reader = transformers.LlavaForConditionalGeneration._from_config(
            pictures, attn_implementation=attention
        )
    assert (obstacle(model, config) is None) == (attention == "sdpa")
    assert (obstacle(reader, pictures) is None) == (attention == "sdpa")


@pytest.mark.slow
def test_positions_that_the_mask_counts_have_flat_rows() -> None:
    import transformers

    from policies.learning.verl.token_trees import obstacle

    config = transformers.FalconConfig(**SIZES, alibi=True)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    assert obstacle(model, config)
