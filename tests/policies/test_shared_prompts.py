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


def test_a_row_ends_where_the_bound_or_the_attention_would_make_it_dearer_than_two() -> None:
    from policies.learning.verl.shared_prompts import PAIRS_PER_TOKEN, share_prompts

    prompt = [1] * 100
    assert share_prompts([prompt] * 4, [50] * 4, 200) == [[0, 1], [2, 3]]
    long = int((PAIRS_PER_TOKEN * len(prompt)) ** 0.5)
    assert share_prompts([prompt] * 2, [long] * 2, 10_000) == [[0, 1]]
    assert share_prompts([prompt] * 2, [long + 2] * 2, 10_000) == [[0], [1]]


def test_a_response_sees_its_prompt_and_itself_at_the_positions_that_it_would_have_alone() -> None:
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


@pytest.mark.parametrize(
    ("config", "shares"),
    [
        ({}, True),
        ({"layer_types": ["full_attention"] * 2, "sliding_window": None}, True),
        ({"layer_types": ["full_attention", "linear_attention"]}, False),
        ({"sliding_window": 4096}, False),
    ],
)
def test_models_with_windows_or_recurrent_layers_compute_every_prompt(
    config: dict[str, object], shares: bool
) -> None:
    from policies.learning.verl.shared_prompts import can_share

    assert can_share(config) == shares
