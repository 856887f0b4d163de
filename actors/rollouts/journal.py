"""The journal of an episode: its finished turns, stored in the fleet, so that another actor can go on.

A rollout actor writes it by ``Journal``; the fleet holds the entries in ``JournalStore`` until the episode is
delivered. Where somebody lives on elsewhere, the environment keeps them, each before an answer is sent. This
module is imported in every rollout worker and must stay light.
"""

from __future__ import annotations

import logging
import pickle
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import cloudpickle

from actors.rollouts.env_calls import Opening, Outcome, in_env, take_action
from environments.base import BaseEnv
from environments.contract import comparable
from environments.errors import ContractError
from environments.types import Completion

logger = logging.getLogger(__name__)

Record = Callable[[int, bytes], None]
NO_OPENING: Opening = (None, {})
NO_OUTCOME: Outcome = (None, 0.0, False, {})
MAX_STORE_BYTES = 256 << 20
"""Most bytes of all journals of a fleet. An episode whose entry does not fit has none, and starts again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedTurn:
    """One turn: the completion that was sampled, and the outcome in the environment.

    As an entry it is without the ``num_repeated`` ids and ``num_pictures`` pictures with which its prompt
    repeats the turn before. The opening is that of an episode's first turn; answers need none.
    """

    opening: Opening
    completion: Completion
    num_repeated: int
    num_pictures: int
    action: Any
    outcome: Outcome
    snapshot: Any = None
    """Value of ``BaseEnv.snapshot`` after the turn, for environments that are restored; before its outcome,
    which is none, for those that resume by their answers."""


class Journal:
    """Records the turns of one episode, and gives back those that an earlier actor has finished.

    Those are taken again, for environments that give the same answers: the way ``"replay"``.

    Args:
        record: called with the index and the bytes of a finished turn. ``None`` records nothing.
        entries: the bytes of the turns that are finished, in their order.
        name: of the episode, the same for all attempts that go on with it.
        attempt: number of this one.
    """

    num_kept = 0
    """Number of finished turns that the environment has kept."""

    def __init__(
        self,
        record: Record | None = None,
        entries: Sequence[bytes] = (),
        name: str = "",
        attempt: int = 1,
    ) -> None:
        self._record, self._name, self._attempt = record, name, attempt
        self._finished: list[FinishedTurn] = []
        self._last: Completion | None = None
        """Completion of the last turn that was recorded."""
        self._read(entries)
        self._opening = self._finished[0].opening if self._finished else NO_OPENING

    def _read(self, entries: Sequence[bytes]) -> None:
        for entry in entries:
            turn: FinishedTurn = pickle.loads(entry)
            if self._last is not None:
                beginning = self._last.tokens.part(0, turn.num_repeated)
                pictures = self._last.pictures[: turn.num_pictures]
                turn = replace(turn, completion=turn.completion.behind(beginning, pictures))
            self._finished.append(turn)
            self._last = turn.completion

    def open(self, env: BaseEnv, begin: Callable[[BaseEnv], Opening], name: str = "reset()") -> Opening:
        """The first observation and info; ``env`` begins, or stands after the last finished turn.

        ``name`` is the method of ``env`` that ``begin`` calls.
        """
        before, self._opening = self._opening, begin(env)
        if self._finished:
            _check_same(env, name, before[0], self._opening[0])
        return self._opening

    def completion(self, turn: int) -> Completion | None:
        """The completion of ``turn``, if that is finished."""
        return self._finished[turn].completion if turn < len(self._finished) else None

    def step(self, turn: int, env: BaseEnv, completion: Completion, action: Any) -> Outcome:
        """The environment's answer to ``action``, which the agent has made of ``completion``; it is recorded.

        Raises:
            ContractError: the agent or the environment does not repeat a finished turn.
        """
        if turn < len(self._finished):
            _check_same(env, f"the action of turn {turn + 1}", self._finished[turn].action, action)
            return self._repeat(turn, env, action)
        outcome = take_action(env, action)
        self._write(turn, env, completion, action, outcome)
        return outcome

    def _repeat(self, turn: int, env: BaseEnv, action: Any) -> Outcome:
        before, outcome = self._finished[turn].outcome, take_action(env, action)
        _check_same(env, f"step() of turn {turn + 1}", before[:3], outcome[:3])
        return outcome

    def _snapshot(self, env: BaseEnv) -> Any:
        """The state from which ``open`` goes on, if it needs one."""

    def _write(self, turn: int, env: BaseEnv, completion: Completion, action: Any, outcome: Outcome) -> None:
        if self._record is None:
            return
        num_repeated = 0 if self._last is None else completion.num_repeated(self._last)
        shown = () if self._last is None else self._last.pictures
        num_pictures = len(shown) if completion.pictures[: len(shown)] == shown else 0
        with in_env(env, "snapshot"):
            snapshot = self._snapshot(env)
        finished = FinishedTurn(
            opening=NO_OPENING if turn else self._opening,
            completion=completion.without_beginning(num_repeated, num_pictures),
            num_repeated=num_repeated,
            num_pictures=num_pictures,
            action=action,
            outcome=outcome,
            snapshot=snapshot,
        )
        self._last = completion
        try:
            entry = cloudpickle.dumps(finished)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            logger.warning("An episode of %s cannot be resumed: %s", type(env).__name__, error)
            self._record = None
        else:
            self._record(turn, entry)


class SnapshotJournal(Journal):
    """Restores the environment as it was after the last turn, the way ``"snapshot"``: none is taken again."""

    def open(self, env: BaseEnv, begin: Callable[[BaseEnv], Opening], name: str = "reset()") -> Opening:
        if not self._finished:
            return super().open(env, begin, name)
        env.restore(self._finished[-1].snapshot)
        return self._opening

    def _repeat(self, turn: int, env: BaseEnv, action: Any) -> Outcome:
        return self._finished[turn].outcome

    def _snapshot(self, env: BaseEnv) -> Any:
        return env.snapshot()


@runtime_checkable
class KeepsAnswers(Protocol):
    """An environment that keeps its journal itself, where those are whom it answers."""

    def kept(self, name: str, attempt: int) -> Sequence[bytes]:
        """Begin the episode ``name``; return the entries of the attempts before, which answer no more."""

    def keep(self, index: int, entry: bytes) -> None:
        """Keep the entry of a turn, before the step that answers."""


class AnswersJournal(SnapshotJournal):
    """Records a turn before its answer is given to somebody who lives on, the way ``"answers"``."""

    def open(self, env: BaseEnv, begin: Callable[[BaseEnv], Opening], name: str = "reset()") -> Opening:
        assert isinstance(env, KeepsAnswers)
        self._record = env.keep
        self._read(env.kept(self._name, self._attempt))
        self.num_kept = len(self._finished)
        env.restore([turn.snapshot for turn in self._finished])
        return begin(env)

    def step(self, turn: int, env: BaseEnv, completion: Completion, action: Any) -> Outcome:
        if turn >= len(self._finished):
            self._write(turn, env, completion, None, NO_OUTCOME)
        return take_action(env, action)


JOURNALS = {None: Journal, "replay": Journal, "snapshot": SnapshotJournal, "answers": AnswersJournal}
"""Classes of journals by ``BaseEnv.resumes_by``."""


class JournalStore:
    """The entries of the episodes in flight, at most ``max_bytes`` of them."""

    def __init__(self, max_bytes: int = MAX_STORE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: dict[str, dict[int, bytes]] = {}
        self._attempts: dict[str, int] = {}
        self._names: dict[str, str] = {}

    def name_of(self, rollout_id: str) -> str:
        """Return the name of an open episode, which no other one has: not of another fleet either."""
        return self._names[rollout_id]

    def open(self, rollout_id: str, attempt: int, beginning: Sequence[bytes] = ()) -> list[bytes]:
        """The finished turns of an episode; from now on only this attempt may add to them.

        Args:
            beginning: turns that are finished before the first attempt.
        """
        self._attempts[rollout_id] = attempt
        if rollout_id not in self._entries:
            self._entries[rollout_id] = dict(enumerate(beginning))
            self._names[rollout_id] = secrets.token_urlsafe(12)
            self._num_bytes += sum(map(len, beginning))
        entries = self._entries[rollout_id]
        num_leading = _num_leading(entries)
        for index in [each for each in entries if each > num_leading]:  # they follow a turn that is lost
            self._num_bytes -= len(entries.pop(index))
        return [entries[index] for index in range(num_leading)]

    def record(self, rollout_id: str, attempt: int, index: int, entry: bytes) -> None:
        """Store an entry; one of an attempt that is over is ignored."""
        if self._attempts.get(rollout_id) != attempt:
            return
        if self._num_bytes + len(entry) > self._max_bytes:
            logger.warning("Rollout %s has no journal: all journals together are full.", rollout_id)
            self.drop(rollout_id)
            return
        self._entries[rollout_id][index] = entry
        self._num_bytes += len(entry)

    def drop(self, rollout_id: str) -> None:
        """Forget an episode."""
        self._attempts.pop(rollout_id, None)
        self._names.pop(rollout_id, None)
        self._num_bytes -= sum(map(len, self._entries.pop(rollout_id, {}).values()))


def _num_leading(entries: dict[int, bytes]) -> int:
    """Number of entries before the first gap: calls of another process may overtake each other."""
    return next(index for index in range(len(entries) + 1) if index not in entries)


def _check_same(env: BaseEnv, name: str, before: Any, now: Any) -> None:
    if comparable(before) != comparable(now):
        raise ContractError(
            f"{type(env).__name__} cannot be resumed: {name} was {before!r:.300} before its process died and "
            f"is {now!r:.300} now. Make it repeatable, or set resumes_by = None."
        )
