"""Two ranks that compute each row together find and learn what one does alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from learner_samples import RESPONSE_TOKENS, batches, num_rows, with_random_columns
from machine import free_port
from torch.distributed.tensor import DTensor
from transformers import AutoTokenizer
from two_ranks import on_two_ranks
from whole_batches import WholeBatches, shards

from environments.errors import ConfigError
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, LoRAConfig, OptimizerConfig

if TYPE_CHECKING:
    from learner_samples import MakeRank

pytestmark = pytest.mark.slow

ALGORITHM = AlgorithmConfig(entropy_coef=0.01)
CHECKPOINTED = {"model": {"enable_gradient_checkpointing": True}}
SIZES = {"hidden_size": 96, "intermediate_size": 96, "num_hidden_layers": 2, "initializer_range": 0.1}
DEEPSEEK = {
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}


def flat() -> TrainBatch:
    """Rows of uneven length, with nothing in common."""
    [batch] = batches(1, size=5)
    assert num_rows(batch.samples) == 5
    return TrainBatch(samples=with_random_columns(batch.samples), temperature=0.8)


def tree() -> TrainBatch:
    """Two trees of samples with long and short beginnings in common, and a sample alone."""
    rng, samples = random.Random(0), list[TrainingSample]()
    for name, num_members in (("a", 5), ("b", 3), ("c", 1)):
        prompt = tuple(rng.randrange(300) for _ in range(rng.randint(20, 90)))
        said = tuple(rng.randrange(300) for _ in range(30))
        for member in range(num_members):
            own = tuple(rng.randrange(300) for _ in range(rng.randint(3, 40)))
            response = said[: 8 * member] + own
            mask = (0,) * len(said[: 8 * member]) + (1,) * len(own)
            samples.append(
                TrainingSample(
                    sample_id=f"{name}{member}",
                    prompt_ids=prompt,
                    response_ids=response,
                    loss_mask=mask,
                    rollout_logprobs=(0.0,) * len(mask),
                )
            )
    assert num_rows(samples) < len(samples)
    return TrainBatch(samples=with_random_columns(samples))


@dataclass(frozen=True)
class Case:
    """What is learned, and how. ``model``: a class of transformers and its sizes, for the tiny Qwen3."""

    batch: TrainBatch = field(default_factory=flat)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    model: tuple[str, dict[str, int]] | None = None


def llama(heads: int, shared: int) -> tuple[str, dict[str, int]]:
    return "Llama", {"num_attention_heads": heads, "num_key_value_heads": shared, "head_dim": 16}


CASES = {
    "flat": Case(),
    "trees": Case(tree()),
    "small micro-batches": Case(tree(), LearnerConfig(micro_batch_tokens=120, verl=CHECKPOINTED)),
    "adapters": Case(learner=LearnerConfig(lora=LoRAConfig(rank=4), verl={"engine": {"fsdp_size": 1}})),
    "adapter of the output layer": Case(
        learner=LearnerConfig(lora=LoRAConfig(rank=4), verl={"model": {"target_modules": "lm_head"}}),
        model=llama(4, 1),
    ),
    "one head of keys": Case(model=llama(4, 1)),
    "three heads of keys": Case(tree(), model=llama(6, 3)),
    "latent attention and experts": Case(tree(), model=("DeepseekV3", DEEPSEEK)),
}
CRITIC = "critic"


def settings(case: Case, num_ranks: int) -> LearnerConfig:
    engine = {**case.learner.verl.get("engine", {}), "ulysses_sequence_parallel_size": num_ranks}
    tokens = case.learner.micro_batch_tokens * 2 // num_ranks
    return replace(
        case.learner,
        num_workers=num_ranks,
        micro_batch_tokens=tokens,
        optimizer=OptimizerConfig(lr=1e-3),
        verl={**case.learner.verl, "engine": engine},
    )


def learned(worker: WholeBatches, batch: TrainBatch) -> dict[str, Any]:
    """What a worker finds for a batch, and what one update makes of it."""
    is_critic = not hasattr(worker._whole, "_algorithm")
    found = worker.values([batch])[0] if is_critic else worker.logprobs(batch)
    reported = worker.update([batch])
    metrics = (reported if is_critic else reported.metrics) if worker.rank == 0 else {}
    states = worker.engine.optimizer.state_dict()["state"].values()
    assert worker.engine.ulysses_sequence_parallel_size == worker._learner.num_workers
    return {
        "found": [torch.tensor(each) for each in found],
        "metrics": metrics,
        "gradient": [whole(state["exp_avg"]) for state in states],  # all of it that one step has left
        "weights": [whole(each) for each in worker.engine.module.parameters()],
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().clone()


def two_ranks_learn(models: Path, folder: Path) -> None:
    from policies.learning.verl.critic import VerlCritic
    from policies.learning.verl.learner import VerlLearner

    algorithm = resolve(ALGORITHM, RESPONSE_TOKENS)
    for name, case in CASES.items():
        worker = WholeBatches(VerlLearner(str(models / name), settings(case, 2), algorithm, 100, 0))
        torch.save(learned(worker, case.batch), folder / f"{name}_{worker.rank}")
    critic = WholeBatches(VerlCritic(str(models / "trees"), settings(CASES["trees"], 2), 100, 0))
    torch.save(learned(critic, tree()), folder / f"{CRITIC}_{critic.rank}")


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    folder = tmp_path_factory.mktemp("models")
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    for name, case in CASES.items():
        if case.model is None:
            (folder / name).symlink_to(tiny_model)
            continue
        torch.manual_seed(0)
        family, sizes = case.model
        config = getattr(transformers, f"{family}Config")(**SIZES, **sizes, vocab_size=len(tokenizer))
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def together(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("together")
    on_two_ranks(two_ranks_learn, free_port(), models, folder)
    return folder


@pytest.mark.parametrize("name", [*CASES, CRITIC])
def test_two_ranks_of_a_row_learn_what_one_does(
    together: Path, models: Path, make_rank: MakeRank, make_critic_rank: MakeRank, name: str
) -> None:
    if name == CRITIC:
        case = CASES["trees"]
        worker = make_critic_rank(settings(case, 1), model=models / "trees")
    else:
        case = CASES[name]
        worker = make_rank(settings(case, 1), ALGORITHM, model=models / name)
    alone = learned(worker, case.batch)
    for rank in range(2):
        both = torch.load(together / f"{name}_{rank}", weights_only=False)
        for ours, theirs in zip(both["found"], alone["found"], strict=True):
            assert (ours - theirs).abs().max() < 1e-5
        for kind in ("gradient", "weights"):
            pairs = zip(both[kind], alone[kind], strict=True)
            distance = sum(float((ours - theirs).square().sum()) for ours, theirs in pairs) ** 0.5
            size = sum(float(each.square().sum()) for each in alone[kind]) ** 0.5
            assert distance < 1e-5 * size, kind
        if rank == 0:
            assert both["metrics"] == pytest.approx(alone["metrics"], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "sizes", "pictures", "reason"),
    [
        ("Qwen3", {}, False, None),
        ("Qwen3", {"num_attention_heads": 3}, False, "it has 3 attention heads, which is no multiple of 2"),
        ("Qwen3", {}, True, "it reads pictures"),
        ("Llama", {"rope_parameters": DYNAMIC}, False, "its rope_type dynamic turns a token by its row"),
        ("Mistral", {"sliding_window": 8}, False, "its attention has a window of 8 tokens"),
        ("Lfm2", {"layer_types": ["conv", "full_attention"]}, False, "it has layers of conv"),
    ],
)
def test_model_whose_rows_no_ranks_share_is_refused(
    verl_on_cpu: None, family: str, sizes: dict[str, Any], pictures: bool, reason: str | None
) -> None:
    import transformers

    from policies.learning.verl.sequence_parallel import check_model

    heads = {"num_attention_heads": 4, "num_key_value_heads": 1}
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **heads, **sizes})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    if reason is None:
        check_model(model, config, 2, pictures)
    else:
        named = rf"parallel_size=2 cannot be for a model of type '{config.model_type}': {reason}.*\. Leave it"
        with pytest.raises(ConfigError, match=named):
            check_model(model, config, 2, pictures)


def test_logprob_of_minus_infinity_is_no_nan(process_group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from policies.learning.verl import sequence_parallel

    monkeypatch.setattr(
        sequence_parallel, "get_ulysses_sequence_parallel_group", lambda: torch.distributed.group.WORLD
    )
    values = torch.tensor([-float("inf"), -2.0], requires_grad=True)
    found = sequence_parallel.of_all_ranks(values)
    assert found.tolist() == [-float("inf"), -2.0]
    (found * torch.tensor([3.0, 5.0])).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [3.0, 5.0]


def test_parts_of_a_layout_are_its_columns_cut_evenly(verl_on_cpu: None) -> None:
    from policies.learning.verl.data import unscored
    from policies.learning.verl.engine import Predicted, model_inputs
    from policies.learning.verl.token_trees import Layout

    [shard] = shards(flat(), 1, 4096, 0)
    data = unscored(shard)
    alone = Layout.of(data)
    parts = [Layout.of(data, part=(number, 3)) for number in range(3)]
    inputs = [model_inputs(part) for part in parts]
    width, size = alone.input_ids.shape[1], inputs[0]["input_ids"].shape[1]
    assert 3 * size - 3 < width <= 3 * size
    for name in ("input_ids", "position_ids"):
        joined = torch.cat([each[name] for each in inputs], dim=1)
        assert torch.equal(joined[:, :width], model_inputs(alone)[name]) and not joined[:, width:].any()
    whole_rows = [each["attention_mask"] for each in inputs]
    assert all(each.shape[-1] == 3 * size for each in whole_rows)
    labels = torch.cat([Predicted.of(part, data).labels for part in parts])
    assert sorted(labels.tolist()) == sorted(Predicted.of(alone, data).labels.tolist())
