"""Things of API keys: the newest stay, and no key pushes out another's."""

from __future__ import annotations

from actors.served_agents.store import PerKeyLRU


def test_thing_that_has_not_changed_for_longest_time_goes_first() -> None:
    tasks: PerKeyLRU[str] = PerKeyLRU(most=2)
    for name in ("a", "b", "a", "c"):
        tasks.keep("alice", name, name.upper())
    assert tasks.all_kept("alice") == ["A", "C"] and tasks.kept("alice", "b") is None


def test_key_sees_its_own_things_and_pushes_out_no_others() -> None:
    tasks: PerKeyLRU[int] = PerKeyLRU(most=2)
    tasks.keep("bob", "a", 0)
    for number in range(3):
        tasks.keep("alice", f"task {number}", number)
    assert tasks.kept("bob", "a") == 0 and tasks.kept("alice", "a") is None
    assert not tasks.forget("alice", "a") and tasks.forget("bob", "a") and tasks.all_kept("bob") == []
