"""The journals of sessions in the session server, without one; ``test_session_server.py`` has some."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.gateway.entries import Part, SessionJournals, checked, signed
from actors.gateway.function import RemoteEnv
from actors.gateway.remote_program import RemoteProgram
from actors.rollouts.journal import AnswersJournal
from environments.errors import EnvironmentFailure

KEY = "the key of the rollouts"
SIGNED = [signed(KEY, "a", index, entry) for index, entry in enumerate((b"one", b"two"))]


def test_entries_go_behind_a_body_and_come_apart_again() -> None:
    for sent in (
        Part(b"an answer", 7, [b"one", b"", b"three"]),
        Part(b"", 0, [b""]),
        Part(b"none new", 7, []),
    ):
        assert Part.of(sent.content, sent.headers) == sent
    assert Part.of(b"an error", {}) == Part(b"an error", None)


@pytest.mark.parametrize(
    "entries",
    [
        [SIGNED[0], signed("another key", "a", 1, b"two")],
        [SIGNED[0], signed(KEY, "b", 1, b"two")],
        [SIGNED[0], SIGNED[0]],
        [SIGNED[0], SIGNED[1] + b"s"],
        [SIGNED[0], b""],
    ],
    ids=["key", "session", "number", "text", "none"],
)
def test_entry_that_no_rollout_has_signed_is_refused(entries: Sequence[bytes]) -> None:
    assert checked(KEY, "a", SIGNED) == [b"one", b"two"]
    with pytest.raises(EnvironmentFailure, match=r"Turn 2 of session a was not recorded"):
        checked(KEY, "a", entries)


def test_forged_entry_is_never_unpickled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Forgery:
        def __reduce__(self) -> tuple[object, tuple[object, ...]]:
            return Path.touch, (tmp_path / "was here",)

    forged = signed("a key of its own", "a", 0, pickle.dumps(Forgery()))
    monkeypatch.setattr(RemoteProgram, "entries", lambda self, session: [forged])
    env = RemoteEnv(RemoteProgram("", KEY, silent_seconds=9), {})
    with pytest.raises(EnvironmentFailure, match="was not recorded"):
        AnswersJournal(name="a", attempt=2).open(env, lambda env: (None, {}))
    assert not (tmp_path / "was here").exists()
    pickle.loads(checked("a key of its own", "a", [forged])[0])
    assert (tmp_path / "was here").exists()


def test_answers_of_calls_at_once_bring_each_entry_once() -> None:
    """Each has all from the number that was kept when it was sent."""
    journals = SessionJournals()
    assert journals.open("a", 1)
    for first, entries in ((0, [b"1"]), (1, [b"2", b"3"]), (1, [b"2"]), (1, [b"2", b"3", b"4"])):
        assert journals.add("a", 1, Part(b"", first, entries))
    assert journals.of("a") == [b"1", b"2", b"3", b"4"]
    assert not journals.add("a", 1, Part(b"", 5, [b"6"])), "the one before is missing"
    assert journals.add("a", 1, Part(b"", None)), "an error has none"


def test_attempt_that_another_one_has_gone_on_from_adds_nothing() -> None:
    journals = SessionJournals()
    assert journals.open("a", 1) and journals.add("a", 1, Part(b"", 0, [b"1"]))
    assert journals.open("a", 3) and not journals.open("a", 1) and not journals.is_open("a", 2)
    assert not journals.add("a", 1, Part(b"", None)) and not journals.add("a", 1, Part(b"", 1, [b"2"]))
    assert journals.add("a", 3, Part(b"", 1, [b"3"])) and journals.of("a") == [b"1", b"3"]
    journals.drop("a")
    assert not journals.is_open("a", 3) and not journals.of("a")


def test_session_that_has_not_grown_for_longest_makes_room() -> None:
    journals = SessionJournals(max_bytes=10)
    for session, size in (("a", 4), ("b", 4), ("a", 1), ("c", 4)):
        assert journals.open(session, 1)
        assert journals.add(session, 1, Part(b"", len(journals.of(session)), [b"x" * size]))
    assert [len(journals.of(each)) for each in "abc"] == [2, 0, 1]
    assert journals.add("b", 1, Part(b"", 0, [b"x" * 4, b"x"])), "it comes again, as a whole"
    assert [len(journals.of(each)) for each in "abc"] == [0, 2, 1]
    for each in "bc":
        journals.drop(each)
    assert journals.add("a", 1, Part(b"", 0, [b"x" * 10])), "nothing else is there"
    assert journals.add("a", 1, Part(b"", 1, [b"x"])) and not journals.of("a"), "larger than all room"
