"""Recorder of an agent's answers: each is kept with its tokens before its last byte leaves the server."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

from starlette.requests import Request

from actors.settings import RecordingConfig
from environments.data.recordings import RecordedAnswer, Recordings
from environments.types import Trajectory
from policies.agent_api.context import RequestContext
from policies.model_api.errors import InvalidRequestError

logger = logging.getLogger(__name__)

RECORD_HEADER, RECORDED_HEADER = "x-troupe-record", "x-troupe-recorded"
MAX_PLACES = 100_000
"""Answers that a later one may follow and be recorded."""


class AnswerRecorder:
    """Recorder of the answers of one agent.

    A message is recorded if its client allows it, and if the answer that it follows is recorded: its prompt
    has that one's text, which somebody may have kept out, or has deleted.

    Args:
        recordings: where they are kept.
        model: the agent's name for clients.
        policies: ``SamplingParams.policy`` of each version of its policy that is served beside the present
            one, by the name that a canary has.
    """

    def __init__(self, recordings: Recordings, model: str, policies: Mapping[str, str] | None = None) -> None:
        self._recordings, self._model, self._policies = recordings, model, dict(policies or {})
        self._answers: OrderedDict[str, str] = OrderedDict()
        """Ids of recorded answers by their rollouts."""

    def policy(self, owner: str, conversation: str) -> str:
        """The policy that samples for a message, now: the version on trial if that is to, else the present
        one, which has no name.
        """
        drawn = self._recordings.canary.drawn(owner, conversation, self._policies)
        return "" if drawn is None else self._policies[drawn]

    async def begin(
        self, context: RequestContext, conversation: str, policy: str, after: str | None
    ) -> RecordedAnswer | None:
        """The answer to come to a message of a conversation, if it may be recorded.

        Args:
            policy: that samples for it.
            after: the rollout that the message follows.
        """
        before = None if after is None else self._answers.get(after)
        if not context.may_be_recorded or (after is not None and before is None):
            return None
        if before is not None and not await is_recorded(self._recordings, before):
            return None
        return RecordedAnswer(
            answer_id=context.answer_id,
            owner=context.owner,
            model=self._model + policy,
            created=context.created,
            conversation=conversation,
            after=before,
        )

    async def write(self, answer: RecordedAnswer, trajectory: Trajectory) -> bool:
        """Write an answer that has come, and return whether it is on disk. It goes out without that too."""
        is_written = await write_recording(self._recordings, answer, trajectory)
        if is_written:
            self._answers[trajectory.rollout_id] = answer.answer_id
            if len(self._answers) > MAX_PLACES:
                self._answers.popitem(last=False)
        return is_written


async def is_recorded(recordings: Recordings, answer_id: str) -> bool:
    """Return whether an answer is recorded. A disk that does not say is in the log: it is taken as not."""
    try:
        return await asyncio.to_thread(recordings.has, answer_id)
    except OSError as error:
        logger.error("Nothing is recorded after the answer %s: %s", answer_id, error)
        return False


async def write_recording(recordings: Recordings, answer: RecordedAnswer, trajectory: Trajectory) -> bool:
    """Write an answer, and return whether it is on disk. What the disk does not take is in the log."""
    try:
        return await asyncio.to_thread(recordings.write, answer, trajectory)
    except OSError as error:
        logger.error("The answer %s is not recorded: %s", answer.answer_id, error)
        return False


def opened_recordings(config: RecordingConfig) -> Recordings | None:
    """The recordings of a server, whose folder can be written; ``None`` where none are kept.

    Raises:
        ConfigError: it cannot be written.
    """
    if config.folder is None:
        return None
    recordings = Recordings(Path(config.folder).resolve(), config.keep_days, tuple(config.readers))
    recordings.open()
    return recordings


def may_be_recorded(request: Request) -> bool:
    """Return whether a client allows that its answer is recorded.

    Raises:
        RequestError: its header has another word than yes or no.
    """
    given = request.headers.get(RECORD_HEADER, "yes").strip().lower()
    if given not in ("yes", "no"):
        raise InvalidRequestError(f"The header X-Troupe-Record is {given[:50]!r}: send yes or no.")
    return given == "yes"
