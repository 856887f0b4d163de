"""Which version sampled which token."""

from __future__ import annotations

from policies.engines.versions import VersionSpans


def test_without_an_exchange_one_version_samples_all() -> None:
    assert VersionSpans(3).take(4) == (3, 3, 3, 3)


def test_version_samples_from_the_token_after_its_exchange() -> None:
    spans = VersionSpans(1)
    spans.exchanged(2, version=2)
    spans.exchanged(5, version=4)
    assert spans.take(6) == (1, 1, 2, 2, 2, 4)
    assert spans.newest == 4


def test_version_that_sampled_nothing_is_not_named() -> None:
    spans = VersionSpans(1)
    spans.exchanged(0, version=2)
    spans.exchanged(3, version=3)
    spans.exchanged(3, version=4)
    assert spans.take(4) == (2, 2, 2, 4)


def test_exchange_after_the_last_token_changes_nothing() -> None:
    spans = VersionSpans(1)
    spans.exchanged(3, version=2)
    assert spans.take(3) == (1, 1, 1)


def test_tokens_that_are_taken_in_pieces_have_the_same_versions() -> None:
    spans = VersionSpans(1)
    pieces = [spans.take(2)]
    spans.exchanged(3, version=2)
    pieces += [spans.take(2), spans.take(0)]
    spans.exchanged(4, version=3)
    pieces += [spans.take(3)]
    assert pieces == [(1, 1), (1, 2), (), (3, 3, 3)]
    assert spans.num_taken == 7
