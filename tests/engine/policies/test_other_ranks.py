"""A checkpoint of one rank goes on with two, and theirs with one: weights, moments, reference, schedule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from learner_samples import RESPONSE_TOKENS, batches, save, with_random_columns
from machine import free_port
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor
from transformers_reference import weights_of
from two_ranks import on_two_ranks
from whole_batches import WholeBatches

from environments.errors import ConfigError
from policies.engines.weights import WholeTensors, pack
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch
from policies.learning.settings import (
    AlgorithmConfig,
    KLConfig,
    LearnerConfig,
    LoRAConfig,
    OptimizerConfig,
)

if TYPE_CHECKING:
    from learner_samples import MakeRank

pytestmark = pytest.mark.slow

OPTIMIZER = OptimizerConfig(lr=1e-3, warmup_steps=4)
WITH_REFERENCE = AlgorithmConfig(kl=KLConfig(place="loss", coef=0.1, estimator="k3"))
IN_FOUR_BITS = {"override_config": {"quantization_config": {"load_in_4bit": True}}}
POLICIES = {
    "all weights": LearnerConfig(),
    "adapters of an odd rank": LearnerConfig(lora=LoRAConfig(rank=3)),  # shards of 2 rows and of 1
    "a base in four bits": LearnerConfig(lora=LoRAConfig(rank=3), verl={"model": IN_FOUR_BITS}),
    "a copy on each rank": LearnerConfig(verl={"engine": {"fsdp_size": 1}}),
}
KINDS = [*POLICIES, "critic"]
"""The critic's last layer is a single row, so that one of two ranks has nothing of it."""


def samples() -> list[TrainBatch]:
    """One mini-batch, with all that policy and critic learn from."""
    return [TrainBatch(samples=with_random_columns(batch.samples)) for batch in batches(1)]


def two_ranks_go_on(model: Path, folder: Path) -> None:
    """Load what one rank has saved, save it again, learn from it, and save that."""
    from policies.learning.verl.critic import VerlCritic
    from policies.learning.verl.learner import VerlLearner

    for kind in KINDS:
        worker = WholeBatches(
            VerlCritic(str(model), LearnerConfig(), 100, 1)
            if kind == "critic"
            else VerlLearner(str(model), POLICIES[kind], resolve(WITH_REFERENCE, RESPONSE_TOKENS), 100, 1)
        )
        if kind == "a copy on each rank":
            assert worker.engine.device_mesh.mesh_dim_names == ("ddp", "fsdp"), "copies, and shards of each"
        worker.begin_phase(OPTIMIZER, 100)
        worker.load(str(folder / kind / "one"))
        save(worker, folder / kind / "two")
        shards = {name: tensor.contiguous() for name, tensor in worker.weights()}
        save_file(shards, folder / kind / f"shards_of_{worker.rank}.safetensors")
        worker.update(samples())
        save(worker, folder / kind / "updated")


@pytest.fixture(scope="module")
def make(make_rank: MakeRank, make_critic_rank: MakeRank) -> MakeRank:
    def make_worker(kind: str) -> Any:
        return make_critic_rank() if kind == "critic" else make_rank(POLICIES[kind], WITH_REFERENCE, seed=1)

    return make_worker


@dataclass(frozen=True)
class Saved:
    """What one rank has saved, and two have made of it."""

    folder: Path
    alone: dict[str, Any]
    """The ranks that have saved it, as they were then."""


@pytest.fixture(scope="module")
def saved(make: MakeRank, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    folder, alone = tmp_path_factory.mktemp("ranks"), {}
    for kind in KINDS:
        alone[kind] = make(kind)
        alone[kind].begin_phase(OPTIMIZER, 100)
        for _ in range(2):
            alone[kind].update(samples())
        save(alone[kind], folder / kind / "one")
    on_two_ranks(two_ranks_go_on, free_port(), tiny_model, folder)
    return Saved(folder, alone)


def optimizer_state(worker: Any) -> dict[tuple[int, str], torch.Tensor]:
    state = worker.engine.optimizer.state_dict()["state"]
    return {
        (index, name): value.full_tensor() if isinstance(value, DTensor) else value
        for index, values in state.items()
        for name, value in values.items()
    }


def assert_same(ours: dict[Any, torch.Tensor], theirs: dict[Any, torch.Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((tensor - theirs[name]).detach().abs().max()) for name, tensor in ours.items())


@pytest.mark.parametrize("kind", KINDS)
def test_state_from_one_rank_to_two_and_back_is_bit_identical(
    saved: Saved, make: MakeRank, kind: str
) -> None:
    alone, back = saved.alone[kind], make(kind)
    back.begin_phase(OPTIMIZER, 100)
    left_out = back.load(str(saved.folder / kind / "two"))
    assert left_out is not None
    assert "written by 2 learner rank(s) and is loaded by 1" in left_out
    assert left_out.endswith("are as they were; the random generators begin anew.")
    moments = optimizer_state(back)
    assert {name for _, name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert all(value == 2 for (_, name), value in moments.items() if name == "step")
    assert_same(moments, optimizer_state(alone))
    assert_same(dict(back.weights()), dict(alone.weights()))
    assert back.schedule() == alone.schedule()
    if kind != "critic":
        assert back.score(samples()) == alone.score(samples())


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_learn_from_it_what_one_would(saved: Saved, make: MakeRank, kind: str) -> None:
    """And would not with moments that begin anew."""
    updated = weights_of(saved.folder / kind / "updated" / "huggingface")
    differences = []
    for moments_are_kept in (True, False):
        worker = make(kind)
        worker.begin_phase(OPTIMIZER, 100)
        worker.load(str(saved.folder / kind / "one"))
        schedule = worker.schedule()
        if not moments_are_kept:
            worker.begin_phase(OPTIMIZER, 100)
            worker.set_schedule(schedule)
        worker.update(samples())
        differences.append(largest_difference(dict(worker.weights()), updated))
    assert differences[0] < 1e-6
    assert differences[1] > 1e-4


def test_checkpoint_that_lacks_a_rank_names_its_file(saved: Saved, make: MakeRank, tmp_path: Path) -> None:
    lacking = "state_00001_of_00002.safetensors"
    for path in (saved.folder / "all weights" / "two").iterdir():
        if path.name != lacking:
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(ConfigError, match=f"{lacking} is not the state of a learner"):
        make("all weights").load(str(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_two_ranks_make_the_weights_of_one(saved: Saved, kind: str) -> None:
    """Adapters are merged in each shard, and what both ranks have alike comes from the first."""
    of_ranks = [load_file(saved.folder / kind / f"shards_of_{rank}.safetensors") for rank in (0, 1)]
    whole = WholeTensors([bucket for shards in of_ranks for bucket in pack(shards.items())])
    assert_same(dict(whole), dict(saved.alone[kind].weights()))
    sizes = [sum(map(torch.numel, shards.values())) for shards in of_ranks]
    assert sizes[1] == 0 if kind == "a copy on each rank" else max(sizes) < 1.1 * min(sizes)


def test_each_of_two_ranks_writes_half_of_the_files(saved: Saved) -> None:
    folder = saved.folder / "all weights" / "two"
    sizes = [path.stat().st_size for path in sorted(folder.glob("state_*"))]
    assert len(sizes) == 2 and max(sizes) < 1.1 * min(sizes)
    exported = sorted((folder / "huggingface").glob("*.safetensors"))
    assert [each.name for each in exported] == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    assert_same(weights_of(folder / "huggingface"), dict(saved.alone["all weights"].weights()))
