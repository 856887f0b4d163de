"""Plays rollouts with one agent and one environment at a time, in the main thread of a process.

This module is imported in every rollout worker. It must stay light: no Ray, no torch, no transformers.
"""

from __future__ import annotations

import logging
import resource
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from actors.rollouts.env_calls import boundary, in_agent, in_env
from actors.rollouts.journal import JOURNALS, Journal
from actors.rollouts.rollout import FollowUp, Pair, RolloutLimits, RolloutRequest, failed, run_rollout
from actors.rollouts.time_limit import TimeLimit
from actors.timing import ENV_CLOSE_SECONDS
from environments.base import DEFAULT_MEMORY_BYTES, BaseEnv
from environments.errors import (
    AgentError,
    ContractError,
    EnvironmentFailure,
    PromptTooLongError,
    SamplerError,
    TroupeError,
)
from environments.types import Completion, Step, StepEvent, TerminationReason, Trajectory
from policies.agents.base import BaseAgent
from policies.sampler import SampleRequest

logger = logging.getLogger(__name__)

NODE_ADDRESS = "TROUPE_NODE_ADDRESS"
"""Variable with the address of this node, by which a rollout actor hands it on to its pairs' processes."""
UNUSABLE_AFTER = {TerminationReason.TIMEOUT, TerminationReason.OUT_OF_MEMORY, TerminationReason.CRASHED}
"""Endings that leave the process in an unknown state."""


class LostError(EnvironmentFailure):
    """The pair that a message goes on with could not be rebuilt."""


class PastMessage(NamedTuple):
    """An earlier message of a conversation, and the journal of all turns that it took."""

    request: RolloutRequest
    turns: tuple[bytes, ...]


class Attempt(NamedTuple):
    """An attempt at a request, and what was played before it."""

    request: RolloutRequest
    number: int = 1
    entries: Sequence[bytes] = ()
    """The journal of the attempts before."""
    name: str = ""
    """Name of the episode, which those attempts have begun."""
    history: Sequence[PastMessage] = ()
    """The messages before, which an actor repeats that does not retain their pair."""


class RolloutResult(NamedTuple):
    """A rollout as its actor returns it."""

    trajectory: Trajectory
    usable: bool
    """True if the process can be used again: what was interrupted at a time limit, or has used up its memory,
    leaves it in an unknown state."""
    retained: bool = False
    """True if agent and environment wait for a follow-up."""
    turns: tuple[bytes, ...] = ()
    """The journal of its turns, if it is retained and the environment can be rebuilt from it."""
    lost: bool = False
    """True if it failed because the pair that it goes on with could not be rebuilt."""
    beginnings: tuple[tuple[bytes, ...], ...] = ()
    """Journals with which the forks of this rollout begin, by their numbers."""
    num_kept: int = 0
    """Number of turns of attempts before that the environment has kept."""


class LivePair(NamedTuple):
    """Agent and environment after a rollout, for a client's next message."""

    rollout_id: str
    agent: BaseAgent
    env: BaseEnv


class Link(Protocol):
    """The way from a player to the other parts of a run."""

    is_followed: bool
    """True if somebody wants the steps of the rollouts."""

    def sample(self, request: SampleRequest, deadline: float) -> Completion:
        """Sample a completion; at ``deadline``, of ``time.monotonic``, nobody waits for it any more."""

    def record_turn(self, rollout_id: str, attempt: int, index: int, entry: bytes) -> None:
        """Let the fleet store a finished turn."""

    def on_step(self, rollout_id: str, step: StepEvent) -> None:
        """Pass a step on to who follows the rollouts."""


class Player:
    """One agent and one environment at a time, made from ``pair`` and used for one rollout after the other.

    After a client's message both may stay for the next one. Then the fleet sends that, or ``close_pair``.
    """

    def __init__(self, pair: Pair, limits: RolloutLimits, link: Link) -> None:
        self._pair, self._limits, self._link = pair, limits, link
        self._deadline = 0.0
        self._time_limit = TimeLimit()
        self._live_pair: LivePair | None = None
        limit_memory(pair.env_class.actor_needs.memory_bytes or DEFAULT_MEMORY_BYTES)

    def run(self, attempt: Attempt) -> RolloutResult:
        """Play a request, after the turns that its journal's entries hold.

        A follow-up goes on with the pair that is here, else with one that is rebuilt from the history.

        Whatever agent, environment or sampler raise is in the trajectory.
        """
        request, history = attempt.request, attempt.history
        start = time.monotonic()
        self._deadline = start + self._limits.timeout_seconds
        turns = list(attempt.entries)
        num_earlier, lost, journal = 0, False, Journal()
        agent: BaseAgent | None = None
        env: BaseEnv | None = None
        if self._live_pair is not None:
            (_, agent, env), self._live_pair = self._live_pair, None
        try:
            with self._time_limit.of(self._limits.timeout_seconds):
                if agent is None or env is None:
                    first = history[0].request if history else request
                    agent, env = self._pair.make_agent(), self._pair.make_env(first)
                    self._repeat(history, agent, env)
                    request = replayed(agent, env, request, self._limits)
                num_earlier = len(_played_steps(agent)) if request.follow_up is not None else 0
                journal = self._journal(request, attempt, turns)
                on_step = partial(self._link.on_step, request.rollout_id) if self._link.is_followed else None
                trajectory = run_rollout(agent, env, self._sample, request, self._limits, journal, on_step)
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  # whatever it is, the environment is closed
            lost = isinstance(error, LostError)
            reason, text = self._ending(error)
            trajectory = failed(request, reason, text, _played_steps(agent)[num_earlier:])
            trajectory.masked = reason is TerminationReason.TIMEOUT and self._limits.overlong_filter
        beginnings = self._beginnings(request, trajectory, turns)
        usable = trajectory.termination_reason not in UNUSABLE_AFTER
        is_retained = request.keep_seconds is not None and trajectory.has_answer
        if is_retained and agent is not None and env is not None:
            self._live_pair = LivePair(request.rollout_id, agent, env)
        elif env is not None:
            usable = self._close(env, trajectory) and usable
        trajectory.seconds = time.monotonic() - start
        if self._live_pair is None:
            return RolloutResult(
                trajectory, usable, lost=lost, beginnings=beginnings, num_kept=journal.num_kept
            )
        is_whole = len(turns) == len(trajectory.steps)
        return RolloutResult(trajectory, usable, retained=True, turns=tuple(turns) if is_whole else ())

    def _ending(self, error: Exception | KeyboardInterrupt) -> tuple[TerminationReason, str]:
        """Reason and text with which a rollout has ended that raised ``error``."""
        match error:
            case TroupeError():
                return _reason(error), _report(error)
            case KeyboardInterrupt():  # also Ray's own, which it raises instead when it was waiting
                text = f"The rollout ran longer than its limit of {self._limits.timeout_seconds:g} s.\n"
                return TerminationReason.TIMEOUT, text + _innermost(error)
            case _:  # a gap in the boundaries around the user's code
                return TerminationReason.ENV_ERROR, "".join(traceback.format_exception(error))

    def close_pair(self) -> bool:
        """Close the environment that waits for a follow-up, and return whether it was in time."""
        if self._live_pair is None:
            return True
        (rollout_id, _, env), self._live_pair = self._live_pair, None
        closing = Trajectory(rollout_id=rollout_id)
        in_time = self._close(env, closing)
        if closing.error is not None:
            logger.warning("The conversation of %s ended with an error: %s", rollout_id, closing.error)
        return in_time

    def _repeat(self, history: Sequence[PastMessage], agent: BaseAgent, env: BaseEnv) -> None:
        """Bring a new pair to where the one stood that has played ``history``: nothing is sampled.

        Raises:
            LostError: the agent or the environment does not repeat it.
        """
        for request, turns in history:
            journal = JOURNALS[self._pair.env_class.resumes_by](entries=turns)
            try:
                request = replayed(agent, env, request, self._limits)
                run_rollout(agent, env, _sample_nothing, request, self._limits, journal)
            except ContractError as error:
                raise LostError(str(error)) from error

    def _beginnings(
        self, request: RolloutRequest, trajectory: Trajectory, turns: Sequence[bytes]
    ) -> tuple[tuple[bytes, ...], ...]:
        """The journals with which the forks of a rollout begin: one that has ended before is shared whole.

        None where infrastructure has spoilt it, so that its forks begin with the task.
        """
        reason = trajectory.termination_reason
        if request.forked_at is None or (reason is not None and reason.is_infrastructure):
            return ()
        try:
            with boundary(
                EnvironmentFailure, "choice of turns", "rollout.forks", f"at={request.forked_at.at}"
            ):
                chosen = request.forked_at.turns(trajectory.steps, self._limits.max_steps)
        except TroupeError as error:
            trajectory.termination_reason, trajectory.error = _reason(error), _report(error)
            return ()
        return tuple(tuple(turns[:turn]) for turn in chosen)

    def _journal(self, request: RolloutRequest, attempt: Attempt, turns: list[bytes]) -> Journal:
        """A journal that the fleet stores. New turns of a conversation are added to ``turns``."""

        def record(index: int, entry: bytes) -> None:
            if request.keep_seconds is not None or request.forked_at is not None:
                turns.append(entry)
            self._link.record_turn(request.rollout_id, attempt.number, index, entry)

        resumes_by = self._pair.env_class.resumes_by
        return JOURNALS[resumes_by](
            record if resumes_by else None, tuple(turns), attempt.name, attempt.number
        )

    def _close(self, env: BaseEnv, trajectory: Trajectory) -> bool:
        """Close ``env``, and return whether it was in time.

        If that fails, the trajectory is as good as before, but has the error.
        """
        try:
            with self._time_limit.of(ENV_CLOSE_SECONDS), in_env(env, "close"):
                env.close()
        except TroupeError as error:
            trajectory.error = trajectory.error or _report(error)
        except KeyboardInterrupt:
            text = f"{type(env).__name__}.close ran longer than {ENV_CLOSE_SECONDS:g} s."
            trajectory.error = trajectory.error or text
            return False
        return True

    def _sample(self, request: SampleRequest) -> Completion:
        return self._link.sample(request, self._deadline)


def replayed(
    agent: BaseAgent, env: BaseEnv, request: RolloutRequest, limits: RolloutLimits
) -> RolloutRequest:
    """Bring a new pair to where ``request`` goes on, and return it as the follow-up that it then is.

    Its task is the first message's. Each answer is taken as a whole turn, since its client does not know the
    turns before it. A request without exchanges is returned as it is.

    Raises:
        LostError: the environment does not end with one of the answers.
    """
    follow_up = request.follow_up
    if follow_up is None or not follow_up.exchanges:
        return request
    for number, (message, answer) in enumerate(follow_up.exchanges):
        answers = _answers(message, answer)
        past = FollowUp(after=request.rollout_id, message=message) if number else None

        def sample(_: SampleRequest, answers: Iterator[Completion] = answers) -> Completion:
            return next(answers)

        run_rollout(agent, env, sample, replace(request, follow_up=past), limits, Journal())
    return replace(request, follow_up=FollowUp(after=request.rollout_id, message=follow_up.message))


def _answers(message: str, answer: str) -> Iterator[Completion]:
    yield Completion(text=answer, finish_reason="stop", retokenized=True)
    raise LostError(f"{answer[:100]!r} is not all that the agent has to say to {message[:100]!r}.")


def _sample_nothing(request: SampleRequest) -> Completion:
    """An episode that is repeated has no more turns: it had ended here for the same reason."""
    raise PromptTooLongError("This turn was not played: the prompt left no room for it.")


def limit_memory(num_bytes: int) -> None:
    """Let this process allocate ``num_bytes`` beyond what it has: more is a ``MemoryError``.

    Without a limit one environment would have the kernel end whatever process it likes best.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    present = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    wanted = present + num_bytes
    resource.setrlimit(
        resource.RLIMIT_DATA, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
    )


def _played_steps(agent: BaseAgent | None) -> list[Step]:
    if agent is None:
        return []
    try:
        with in_agent(agent, "trajectory"):
            return list(agent.trajectory.steps)
    except AgentError:  # it failed before it had one; what failed is reported already
        return []


def _reason(error: TroupeError) -> TerminationReason:
    if isinstance(error.__cause__, MemoryError):
        return TerminationReason.OUT_OF_MEMORY
    if isinstance(error.__cause__, SystemExit):
        return TerminationReason.CRASHED
    if isinstance(error, SamplerError):
        return TerminationReason.SAMPLER_ERROR
    if isinstance(error, AgentError):
        return TerminationReason.AGENT_ERROR
    return TerminationReason.ENV_ERROR


def _report(error: TroupeError) -> str:
    """The error's sentence, and below it the traceback of the user's code that caused it."""
    cause = error.__cause__
    details = "".join(traceback.format_exception(cause)) if cause is not None else ""
    return f"{type(error).__name__}: {error}\n{details}".rstrip()


def _innermost(error: BaseException) -> str:
    """Last calls of the stack in which the rollout was."""
    return "".join(traceback.format_tb(error.__traceback__)[-4:-1]).rstrip()
