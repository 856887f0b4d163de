"""What a learner of pictures finds with adapters, in bfloat16 and on two ranks, beside one in float32."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch.distributed as dist
from machine import free_port
from picture_models import build, picture, shown
from two_ranks import on_two_ranks
from whole_batches import WholeBatches

from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, LoRAConfig
from policies.pictures import BLANK, open_picture, picture_reader

if TYPE_CHECKING:
    from learner_samples import MakeRank

pytestmark = pytest.mark.slow

SIZE = 9
SMALL = LearnerConfig(micro_batch_tokens=160)
"""So that there are several micro-batches, of which some have no picture."""
Found = tuple[list[float], float]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("pictures"))


def samples(model: Path) -> TrainBatch:
    """Samples of no picture, one and two."""
    renderer, rng = ChatRenderer(load_tokenizer(model)), random.Random(0)
    red, blue = picture("red"), picture("blue")
    return TrainBatch(
        samples=tuple(
            TrainingSample(
                sample_id=str(number),
                prompt_ids=tuple(renderer.prompt_ids([shown(*pictures)])),
                response_ids=tuple(rng.randrange(30, 60) for _ in range(SIZE)),
                loss_mask=(1,) * SIZE,
                rollout_logprobs=(-6.0,) * SIZE,
                turns=(0,) * SIZE,
                advantages=((-1.0) ** number,) * SIZE,
                pictures=pictures,
            )
            for number, pictures in enumerate([(red,), (), (red, blue), (), (), (blue,), ()])
        )
    )


def found(rank: Any, model: Path) -> Found:
    """Log-probabilities of all samples, and the norm of an update's gradient."""
    batch = samples(model)
    logprobs = [each for row in rank.logprobs(batch) for each in row]
    update = rank.update(rank.score([batch]))  # the first rank answers
    return logprobs, update.metrics["learn/grad_norm"] if update else 0.0


@pytest.fixture(scope="module")
def usual(make_rank: MakeRank, model: Path) -> Found:
    return found(make_rank(model=model), model)


def test_adapters_begin_as_the_model(make_rank: MakeRank, model: Path, usual: Found) -> None:
    logprobs, norm = found(make_rank(LearnerConfig(lora=LoRAConfig(rank=4)), model=model), model)
    assert logprobs == usual[0] and norm > 0.1


def test_bfloat16_is_as_near_as_its_rounding(make_rank: MakeRank, model: Path, usual: Found) -> None:
    for lora in (LoRAConfig(), LoRAConfig(rank=4)):
        logprobs, _ = found(make_rank(LearnerConfig(dtype="bfloat16", lora=lora), model=model), model)
        far = [abs(one - other) for one, other in zip(logprobs, usual[0], strict=True)]
        assert 1e-4 < sum(far) / len(far) < 0.02 and max(far) < 0.1


def be_a_rank(model: Path, folder: Path) -> None:
    from policies.learning.verl.learner import VerlLearner

    rank = WholeBatches(VerlLearner(str(model), SMALL, resolve(AlgorithmConfig(), 160), 100, 0))
    given = found(rank, model)
    reader = picture_reader(str(model))
    assert reader is not None
    assert reader._ids.get(open_picture(BLANK).size) is not None, "this rank has passed a blank one"
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(given))


def test_two_ranks_wait_for_no_picture(model: Path, usual: Found, tmp_path: Path) -> None:
    """A rank or a micro-batch without one passes a blank one, and learns nothing from it."""
    on_two_ranks(be_a_rank, free_port(), model, tmp_path)
    logprobs, norm = json.loads((tmp_path / "found.json").read_text())
    assert logprobs == pytest.approx(usual[0], abs=1e-5) and norm == pytest.approx(usual[1], rel=1e-4)
