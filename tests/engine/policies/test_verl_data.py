"""Which rank takes which samples, and in what layout verl gets them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from learner_samples import ragged_samples, with_random_columns
from whole_batches import shards

from environments.errors import LearnerError
from policies.learning.division import Division, RankShard, balanced
from policies.learning.samples import TrainBatch, TrainingSample

pytestmark = pytest.mark.usefixtures("verl_on_cpu")


def shares(
    samples: Sequence[TrainingSample], num_ranks: int, max_tokens: int = 1000, columns: Sequence[str] = ()
) -> list[RankShard]:
    return shards(TrainBatch(samples=tuple(samples)), num_ranks, max_tokens, 384, columns)


def test_one_rank_keeps_the_order() -> None:
    assert [each.response_ids for each in shares(ragged_samples(9), 1)[0].samples] == [
        each.response_ids for each in ragged_samples(9)
    ]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("number", [1, 2, 9])
def test_sample_is_in_one_share_and_shares_have_equal_rows(number: int, num_ranks: int) -> None:
    from policies.learning.verl.data import unscored

    samples = ragged_samples(number)
    parts = shares(samples, num_ranks)
    assert len({len(part.samples) for part in parts}) == 1
    rows = [row for part in parts for row in part.samples]
    assert sorted(row.sample_id for row in rows if any(row.loss_mask)) == sorted(
        sample.sample_id for sample in samples
    )
    assert len(rows) < number + num_ranks
    assert all(unscored(part)["global_batch_size"] == number for part in parts)


def test_ranks_have_equally_much_to_do() -> None:
    samples = ragged_samples(40, most=400)
    sizes = [sum(map(len, part.samples)) for part in shares(samples, 4)]
    by_turns = [sum(map(len, samples[rank::4])) for rank in range(4)]
    assert max(sizes) - min(sizes) < 20
    assert max(by_turns) - min(by_turns) > 200


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_trees_stay_whole_until_a_rank_would_wait(num_ranks: int) -> None:
    """One tree of eight is cut for as many ranks; of six, each with as much to do, each stays on one."""
    from policies.learning.verl.data import unscored

    def group(number: int, size: int) -> list[TrainingSample]:
        prompt = (number,) * 60
        return [replace(sample, prompt_ids=prompt) for sample in ragged_samples(size, most=20)]

    def beginnings(samples: Sequence[TrainingSample]) -> list[set[int]]:
        parts = shares(samples, num_ranks)
        assert len({len(unscored(part)["row"].unique()) for part in parts}) == 1
        return [{row.prompt_ids[0] for row in part.samples if any(row.loss_mask)} for part in parts]

    assert beginnings(group(1, 8)) == [{1}] * num_ranks
    whole = beginnings([sample for number in range(6) for sample in group(number, 4)])
    assert sorted(number for part in whole for number in part) == list(range(6))


def test_models_outputs_are_cut_to_response_and_keep_their_place() -> None:
    from policies.learning.verl.data import as_column, responses

    batch, results = TrainBatch(samples=ragged_samples(5)), []
    division = Division([batch], 2, 1000, 384)
    for rank, part in enumerate(shares(batch.samples, 2)):
        # What the model puts out at a token is about the next one: here, the next one itself.
        rows = [torch.tensor((*row.prompt_ids, *row.response_ids, -1)[1:]) for row in part.samples]
        outputs = responses(part, torch.nested.as_nested_tensor(rows, layout=torch.jagged))
        results.append([{"values": as_column(part, outputs)}])
        assert division.shards([batch], ())[rank][0].rows == part.rows
    [filled] = division.with_columns([batch], results)
    for sample in filled.samples:
        ids = zip(sample.response_ids, sample.loss_mask, strict=True)
        assert sample.values == tuple(token * bit for token, bit in ids)


def test_masked_sample_counts_in_no_mean() -> None:
    from policies.learning.verl.data import scored

    samples = with_random_columns(ragged_samples(3))
    masked = replace(samples[0], loss_mask=(0,) * len(samples[0].loss_mask), advantages=())
    [share] = shares([masked, *samples[1:]], 1, columns=["advantages"])
    data = scored(share, {"advantages": "advantages"})
    assert data["global_batch_size"] == 2
    assert int(data["loss_mask"].values().sum()) == sum(sample.num_sampled_tokens for sample in samples[1:])
    assert not data["advantages"].unbind()[0].any()


def test_trajectory_counts_once_however_many_samples_it_has() -> None:
    from policies.learning.verl.data import unscored

    names = ["a/0#0", "a/1#0", "a/0#1", "a/1#1", "a/2#0"]
    samples = [replace(sample, sample_id=name) for sample, name in zip(ragged_samples(5), names, strict=True)]
    samples[3] = replace(samples[3], loss_mask=(0,) * len(samples[3].loss_mask))
    samples[4] = replace(samples[4], loss_mask=(0,) * len(samples[4].loss_mask))
    sizes = [sample.num_sampled_tokens for sample in samples]
    parts = shares(samples, 2)
    tables = [unscored(part) for part in parts]
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
    from policies.learning.verl.data import supervised

    sample = ragged_samples(1)[0]
    data = supervised(shares([sample], 1)[0])
    mask = data["loss_mask"].unbind()[0].tolist()
    assert mask == [0] * len(sample.prompt_ids) + list(sample.loss_mask)


def test_sample_of_the_wrong_length_or_too_long_is_refused() -> None:
    from policies.learning.verl.data import scored

    sample = ragged_samples(1)[0]
    short = replace(sample, advantages=(1.0,))
    with pytest.raises(LearnerError, match=r"Sample '0' has 1 advantages for \d+ response tokens"):
        scored(shares([short], 1, columns=["advantages"])[0], {"advantages": "advantages"})
    with pytest.raises(LearnerError, match=f"has {len(sample)} tokens, .*lets 10 through .* raise it"):
        shares([sample], 1, max_tokens=10)


def test_parts_of_equal_size_are_those_of_verl() -> None:
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

    rng = random.Random(0)
    for num_parts in (1, 2, 3, 8):
        for most in (3, 5000):  # with many that are equal, and few
            sizes = [rng.randint(1, most) for _ in range(num_parts * rng.randint(1, 20))]
            work = calculate_workload(torch.tensor(sizes)).tolist()
            expected = get_seqlen_balanced_partitions(work, num_parts, equal_size=True)
            assert balanced(work, num_parts) == expected
