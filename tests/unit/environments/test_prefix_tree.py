"""Sequences that share their beginnings, against plain tuples."""

from __future__ import annotations

import pickle
from itertools import takewhile

from hypothesis import given
from hypothesis import strategies as st

from environments.prefix_tree import PrefixTree, Repeats, Span

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=8).map(tuple), min_size=1, max_size=8)


def num_equal(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return len([*takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))])


@given(sequences=SEQUENCES, hops=st.booleans())
def test_sequences_read_as_stored_and_share_what_is_equal(
    sequences: list[tuple[int, ...]], hops: bool
) -> None:
    tree = PrefixTree()
    spans = [tree.root.extended(each) for each in sequences[:-1]]
    if hops:
        tree, spans = pickle.loads(pickle.dumps((tree, spans)))
    spans.append(tree.root.extended(sequences[-1]))
    assert [tuple(each.read()) for each in spans] == sequences
    for one, span in zip(sequences, spans, strict=True):
        for other, other_span in zip(sequences, spans, strict=True):
            assert span.num_shared(other_span) == num_equal(one, other) == span.num_shared(Span.of(other))
    beginnings = {each[:length] for each in sequences for length in range(1, len(each) + 1)}
    assert sum(map(len, tree.__getstate__()[2])) == len(beginnings), "a number is stored once"


@given(sequences=SEQUENCES, cut=st.integers(0, 8), more=st.lists(st.integers(0, 2), max_size=5).map(tuple))
def test_part_of_a_sequence_is_read_and_goes_on(
    sequences: list[tuple[int, ...]], cut: int, more: tuple[int, ...]
) -> None:
    root = PrefixTree().root
    spans = [root.extended(each) for each in sequences]
    for numbers, span in zip(sequences, spans, strict=True):
        assert tuple(span.part(cut, len(numbers)).read()) == numbers[cut:]
        assert tuple(span.part(0, cut).extended(more).read()) == numbers[:cut] + more
    assert [tuple(each.read()) for each in spans] == sequences


@given(sequences=SEQUENCES)
def test_longest_repeated_beginning_is_found_the_last_preferred(sequences: list[tuple[int, ...]]) -> None:
    root, repeats = PrefixTree().root, Repeats()
    for index, numbers in enumerate(sequences):
        origin, length = repeats.longest(root.extended(numbers))
        lengths = [num_equal(numbers, each) for each in sequences[:index]]
        assert length == max(lengths, default=0)
        if lengths:
            assert lengths[origin] == length and (origin == index - 1 or lengths[-1] < length)
        repeats.add(index, root.extended(numbers))
