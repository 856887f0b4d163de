"""Recording of the policy's answers in any dialect of chats, by a replica or by a pinned version."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import chain
from typing import Any

from actors.served_agents.recorder import is_recorded, write_recording
from environments.data.canary import conversation_name
from environments.data.recordings import RecordedAnswer, Recordings
from environments.types import Completion, Step, TerminationReason, Trajectory
from policies.model_api.dialects.base import CHAT_PREFIX
from policies.model_api.frontend import Charge, OpenAIFrontend
from policies.model_api.protocol import ChatRequest
from policies.model_api.reply import Piece

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AnswerPlace:
    """The place of a policy's answer among the recordings."""

    owner: str
    """The name of the key that it is given to."""
    prefix: str
    """The beginning of its id in its dialect."""
    after: str | None = None
    """The answer that it goes on from, where its request does not have that: both are recorded, or none."""


async def recorded_chat(
    recordings: Recordings, openai: OpenAIFrontend, body: ChatRequest, charge: Charge, place: AnswerPlace
) -> AsyncGenerator[Json, None]:
    """The parts of a policy's answer to a chat, which is recorded before the last of them."""
    will_be_recorded = place.after is None or await is_recorded(recordings, place.after)
    messages = [each.for_template for each in body.messages]
    created, conversation = int(time.time()), conversation_name(messages)

    async def record(answer_id: str, pieces: Sequence[Piece]) -> None:
        nonlocal will_be_recorded
        answer = RecordedAnswer(
            answer_id=place.prefix + answer_id.removeprefix(CHAT_PREFIX),
            owner=place.owner,
            model=body.model,
            created=created,
            conversation=conversation,
            after=place.after,
        )
        trajectory = _answer_trajectory(messages, body.tools or [], pieces)
        will_be_recorded = await write_recording(recordings, answer, trajectory)

    async with aclosing(openai.chat(body, charge, record if will_be_recorded else None)) as parts:
        async for part in parts:
            yield {**part, "recorded": will_be_recorded}


async def unrecorded(parts: AsyncGenerator[Json, None]) -> AsyncGenerator[Json, None]:
    """The parts of an answer that is not recorded by a server that records."""
    async with aclosing(parts):
        async for part in parts:
            yield {**part, "recorded": False}


def _answer_trajectory(messages: list[Json], tools: Sequence[Any], pieces: Sequence[Piece]) -> Trajectory:
    """A policy's answer as a trajectory of one step. Its text has the calls as the model wrote them."""
    outputs = [each.output for each in pieces]
    text = "".join(each.text for each in pieces)
    completion = Completion(
        text=text,
        prompt_ids=pieces[0].request.prompt_ids,
        completion_ids=tuple(chain.from_iterable(each.token_ids for each in outputs)),
        logprobs=tuple(chain.from_iterable(each.logprobs for each in outputs)),
        finish_reason=str(outputs[-1].finish_reason),
        policy_version=min(each.policy_version for each in outputs),
        token_versions=tuple(chain.from_iterable(each.token_versions for each in outputs)),
        pictures=pieces[0].request.pictures,
    )
    whole = [*messages, {"role": "assistant", "content": text}]
    step = Step(chat_completions=whole, model_response=text, action=text, completion=completion, done=True)
    return Trajectory(
        task={"messages": messages, "tools": list(tools)},
        steps=[step],
        termination_reason=TerminationReason.ENV_DONE,
    )
