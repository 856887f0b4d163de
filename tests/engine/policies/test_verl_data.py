"""Which rank takes which samples, and in what layout verl gets them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from learner_samples import ragged_samples, with_random_columns

from environments.errors import LearnerError
from policies.learning.samples import TrainBatch, TrainingSample

if TYPE_CHECKING:
    from policies.learning.verl.data import RankShard

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def shares(samples: Sequence[TrainingSample], num_ranks: int, max_tokens: int = 1000) -> list[RankShard]:
    from policies.learning.verl.data import RankShard

    batch = TrainBatch(samples=tuple(samples))
    return [RankShard(batch, rank, num_ranks, max_tokens, pairs_per_token=384) for rank in range(num_ranks)]


def test_one_rank_keeps_the_order() -> None:
    assert shares(ragged_samples(9), 1)[0].samples == list(ragged_samples(9))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("number", [1, 2, 9])
def test_sample_is_in_one_share_and_shares_have_equal_rows(number: int, num_ranks: int) -> None:
    samples = ragged_samples(number)
    parts = shares(samples, num_ranks)
    assert len({len(part.samples) for part in parts}) == 1
    rows = [row for part in parts for row in part.samples]
    assert sorted(row.sample_id for row in rows if any(row.loss_mask)) == sorted(
        sample.sample_id for sample in samples
    )
    assert len(rows) < number + num_ranks
    assert all(part.unscored()["global_batch_size"] == number for part in parts)


def test_ranks_have_equally_much_to_do() -> None:
    samples = ragged_samples(40, most=400)
    sizes = [sum(map(len, part.samples)) for part in shares(samples, 4)]
    by_turns = [sum(map(len, samples[rank::4])) for rank in range(4)]
    assert max(sizes) - min(sizes) < 20
    assert max(by_turns) - min(by_turns) > 200


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_trees_stay_whole_until_a_rank_would_wait(num_ranks: int) -> None:
    """One tree of eight is cut for as many ranks; of six, each with as much to do, each stays on one."""

    def group(number: int, size: int) -> list[TrainingSample]:
        prompt = (number,) * 60
        return [replace(sample, prompt_ids=prompt) for sample in ragged_samples(size, most=20)]

    def beginnings(samples: Sequence[TrainingSample]) -> list[set[int]]:
        parts = shares(samples, num_ranks)
        assert len({len(part.unscored()["row"].unique()) for part in parts}) == 1
        return [{row.prompt_ids[0] for row in part.samples if any(row.loss_mask)} for part in parts]

    assert beginnings(group(1, 8)) == [{1}] * num_ranks
    whole = beginnings([sample for number in range(6) for sample in group(number, 4)])
    assert sorted(number for part in whole for number in part) == list(range(6))


def test_models_outputs_are_cut_to_response_and_keep_their_place() -> None:
    samples = ragged_samples(5)
    outputs: dict[int, torch.Tensor] = {}
    for part in shares(samples, 2):
        # What the model says at a token is about the next one: here, the next one itself.
        rows = [torch.tensor((*row.prompt_ids, *row.response_ids, -1)[1:]) for row in part.samples]
        outputs |= part.responses(torch.nested.as_nested_tensor(rows, layout=torch.jagged))
    assert {index: tuple(row.tolist()) for index, row in outputs.items()} == {
        index: sample.response_ids for index, sample in enumerate(samples)
    }


def test_masked_sample_counts_in_no_mean() -> None:
    samples = with_random_columns(ragged_samples(3))
    masked = replace(samples[0], loss_mask=(0,) * len(samples[0].loss_mask), advantages=())
    data = shares([masked, *samples[1:]], 1)[0].scored({"advantages": "advantages"})
    assert data["global_batch_size"] == 2
    assert int(data["loss_mask"].values().sum()) == sum(sample.num_sampled_tokens for sample in samples[1:])
    assert not data["advantages"].unbind()[0].any()


def test_trajectory_counts_once_however_many_samples_it_has() -> None:
    names = ["a/0#0", "a/1#0", "a/0#1", "a/1#1", "a/2#0"]
    samples = [replace(sample, sample_id=name) for sample, name in zip(ragged_samples(5), names, strict=True)]
    samples[3] = replace(samples[3], loss_mask=(0,) * len(samples[3].loss_mask))
    samples[4] = replace(samples[4], loss_mask=(0,) * len(samples[4].loss_mask))
    sizes = [sample.num_sampled_tokens for sample in samples]
    parts = shares(samples, 2)
    tables = [part.unscored() for part in parts]
    assert [data["global_batch_size"] for data in tables] == [2, 2], "a/2 was masked altogether"
    found = {
        row.sample_id: share
        for part, data in zip(parts, tables, strict=True)
        for row, share in zip(part.samples, data["trajectory_share"].tolist(), strict=True)
    }
    first = sizes[0] / (sizes[0] + sizes[2])
    expected = {"a/0#0": first, "a/1#0": 1.0, "a/0#1": 1 - first, "a/1#1": 1.0, "a/2#0": 1.0, "padding": 1.0}
    assert found == pytest.approx(expected)


def test_supervised_mask_trains_the_response() -> None:
    sample = ragged_samples(1)[0]
    data = shares([sample], 1)[0].supervised()
    mask = data["loss_mask"].unbind()[0].tolist()
    assert mask == [0] * len(sample.prompt_ids) + list(sample.loss_mask)


def test_sample_of_the_wrong_length_or_too_long_is_refused() -> None:
    sample = ragged_samples(1)[0]
    short = replace(sample, advantages=(1.0,))
    with pytest.raises(LearnerError, match=r"Sample '0' has 1 advantages for \d+ response tokens"):
        shares([short], 1)[0].scored({"advantages": "advantages"})
    with pytest.raises(LearnerError, match=f"has {len(sample)} tokens, .*=10 is all .* raise it"):
        shares([sample], 1, max_tokens=10)
