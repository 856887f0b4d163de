"""Serves OpenAI requests with trained agents: a question in, an episode with tools, the last answer out."""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import replace

from pydantic import BaseModel

from environments.thoughts import is_unfinished, without_opening
from environments.types import StepEvent, TerminationReason, Trajectory
from policies.agent_api.context import (
    IdempotencyKey,
    RecordingNotice,
    ReplayedAnswer,
    RequestContext,
    TokenUsage,
)
from policies.agent_api.history import exchanges_before, history_of
from policies.agent_api.question import Question
from policies.model_api.dialects.base import Json, read
from policies.model_api.errors import InvalidRequestError, ServerError, unknown_model
from policies.model_api.protocol import ChatRequest
from policies.model_api.reply import choice_of, usage_of
from policies.sampler import SamplingParams

Part = StepEvent | Trajectory | ReplayedAnswer | RecordingNotice
Play = Callable[[str, SamplingParams, RequestContext], AsyncGenerator[Part | TokenUsage, None]]
"""Plays an episode on a client's message: its steps as they end, and the whole at last."""
OnStep = Callable[[str], Awaitable[None]]
"""Takes in the text of a step before the answer."""
ALONE = RequestContext()
"""Context of a message that belongs to no conversation."""
WHOLE = (TerminationReason.ENV_DONE, TerminationReason.JUDGED_LATER)
"""Ends of an episode that no limit has cut."""
PREFIX = "agent/"
"""Names of agents begin with it, so that no model has one."""


async def _ignore(_: str) -> None:
    """Nobody follows the steps."""


class AgentFrontend:
    """OpenAI's chat endpoint for agents. Tools run here, not at the client.

    Args:
        agents: by name, which begins with ``PREFIX``.
        temperature: of answers to messages that set none.
        instructions: what happens to a client's system prompt: ``server.agents.instructions``.
        count: takes in how each episode has ended, with the agent's name before.
    """

    def __init__(
        self,
        agents: Mapping[str, Play],
        temperature: float = 1.0,
        instructions: str = "reject",
        count: Callable[[str, str], None] = lambda agent, end: None,
    ) -> None:
        self._agents, self.temperature = dict(agents), temperature
        self._instructions, self._count = instructions, count

    def models(self) -> list[Json]:
        """The entries of ``GET /v1/models``."""
        return [self.model(name) for name in self._agents]

    def model(self, name: str) -> Json:
        """The body of ``GET /v1/models/{name}``. Raises ``RequestError`` if it is not served."""
        self._agent(name)
        return {"id": name, "object": "model", "created": 0, "owned_by": "troupe"}

    async def chat(
        self,
        body: ChatRequest,
        charge: Callable[[int], None] = lambda number: None,
        context: RequestContext = ALONE,
        on_step: OnStep = _ignore,
    ) -> AsyncGenerator[Json, None]:
        """Yield one ``chat.completion``, or with ``stream`` a chunk for each step and those of the answer.

        The steps before the answer are its ``reasoning_content``, as other servers call what comes first, and
        so is a thought that the answer does not finish; ``step`` has their parts. ``charge`` gets the
        tokens of each step as it ends, so that a client pays for what was played until it hung up; for an
        episode that has ended, that is its ``usage``. With a session in ``context`` only the last message is
        new to the agent. ``on_step`` takes in each step before the answer.

        Raises:
            RequestError: the request cannot be served, or the episode has failed.
            ConfigError: the sampling parameters are impossible.
        """
        head: Json = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": body.model}
        key = key_with_body(body, context)
        placed = replace(context, answer_id=head["id"], created=head["created"], idempotency=key)
        steps = ""
        async with aclosing(self.episode(Question.from_chat(body), charge, placed)) as parts:
            async for part in parts:
                if isinstance(part, ReplayedAnswer):
                    head |= {"id": part.answer_id, "created": part.created}
                elif isinstance(part, RecordingNotice):
                    head["recorded"] = part.is_recorded
                elif isinstance(part, Trajectory):
                    answer = _completion(head, part, "" if body.stream else steps)
                elif not part.done:
                    steps += _step_text(part)
                    await on_step(_step_text(part))
                    if body.stream:
                        yield _step_chunk(head, part)
        for event in _chunks(answer, body.includes_usage) if body.stream else [answer]:
            yield event

    async def answer(
        self,
        name: str,
        message: str,
        charge: Callable[[int], None],
        context: RequestContext = ALONE,
        on_step: OnStep = _ignore,
    ) -> Json:
        """The ``chat.completion`` that answers one message, for other protocols. Raises as ``chat`` does."""
        given = {"model": name, "messages": [{"role": "user", "content": message}]}
        body, _ = read(ChatRequest, given)
        async with aclosing(self.chat(body, charge, context, on_step)) as parts:
            return await anext(parts)

    async def episode(
        self, question: Question, charge: Callable[[int], None], context: RequestContext
    ) -> AsyncGenerator[Part, None]:
        """The episode that a request asks for: steps, and the whole at last. Raises as ``chat`` does."""
        play = self._agent(question.model)
        message, turns = question.new_message(context, self._instructions), question.turns
        has_earlier_turns = any(role == "assistant" for role, _ in turns)
        context = replace(context, has_earlier_turns=has_earlier_turns)
        if context.keeps_history and context.session is None:
            with_orders = self._instructions == "prepend"
            earlier = history_of(turns[:-1], with_orders)
            exchanges = exchanges_before(turns, with_orders)
            history = history_of(turns, with_orders)
            context = replace(context, earlier=earlier, history=history, exchanges=exchanges)
        params = SamplingParams(**{"temperature": self.temperature, **question.sampling})
        async with aclosing(play(message, params, context)) as parts:
            async for part in parts:
                if isinstance(part, TokenUsage):
                    charge(part.num_tokens)
                    continue
                if isinstance(part, Trajectory):
                    self._count(question.model, str(part.termination_reason))
                    _check_ended_well(part)
                yield part

    def _agent(self, name: str) -> Play:
        if name not in self._agents:
            served = ", ".join(map(repr, self._agents)) or "none"
            raise unknown_model(f"The agent {name!r} does not exist. Agents that are served here: {served}.")
        return self._agents[name]


def key_with_body(body: BaseModel, context: RequestContext) -> IdempotencyKey | None:
    """The request's idempotency key, if it has one, with the digest of the request."""
    return context.idempotency and replace(context.idempotency, body=digest(body, context))


def digest(body: BaseModel, context: RequestContext) -> str:
    """Digest of a request's body and session, equal for equal requests."""
    # In ASCII: a field that is ignored may hold half a surrogate pair, which has no UTF-8.
    text = f"{type(body).__name__} {context.session!r} {json.dumps(body.model_dump())}"
    return hashlib.sha256(text.encode()).hexdigest()


def _check_ended_well(trajectory: Trajectory) -> None:
    reason = trajectory.termination_reason
    assert reason is not None
    if reason is TerminationReason.TIMEOUT:
        raise ServerError("The agent took longer than its time limit.", status=504)
    if reason is TerminationReason.PROMPT_TOO_LONG and not trajectory.steps:
        raise InvalidRequestError(
            f"The message is too long: {trajectory.error}", param="messages", code="context_length_exceeded"
        )
    if reason.is_failure or not trajectory.steps:
        # The first line: what follows is a traceback, which is nothing for a client.
        error = (trajectory.error or "it has made no step").splitlines()[0]
        raise ServerError(f"The agent has failed ({reason}): {error}")


def _step_text(step: StepEvent) -> str:
    return f"{step.text}\n{step.observation}\n"


def _step_chunk(head: Json, step: StepEvent) -> Json:
    """A step before the answer as a chunk."""
    delta = {"role": "assistant", "reasoning_content": _step_text(step)}
    return {
        **head,
        "object": "chat.completion.chunk",
        "choices": [choice_of("delta", delta, None)],
        "policy_version": step.policy_version,
        "step": {"number": step.index + 1, "text": step.text, "observation": step.observation},
    }


def version_of(trajectory: Trajectory) -> int:
    """Return the oldest version of the policy that has sampled a step."""
    return min((each.policy_version for each in trajectory.completions), default=0)


def tokens_of(trajectory: Trajectory) -> tuple[int, int]:
    """Return the numbers of tokens that the model has read and sampled in all steps."""
    return sum(each.num_prompt_tokens for each in trajectory.completions), trajectory.num_sampled_tokens


def _completion(head: Json, trajectory: Trajectory, steps: str) -> Json:
    """An episode as a ``chat.completion``. ``num_steps`` and ``policy_version`` are Troupe's.

    Args:
        steps: the text of the steps before the answer, with which its thought begins.
    """
    last = trajectory.steps[-1]
    is_cut = last.completion is not None and last.completion.finish_reason == "length"
    is_whole = trajectory.termination_reason in WHOLE and not is_cut
    is_thought = is_unfinished(last.model_response)
    message = {"role": "assistant", "content": "" if is_thought else last.model_response}
    if reasoning := steps + (without_opening(last.model_response) if is_thought else ""):
        message["reasoning_content"] = reasoning
    return {
        **head,
        "object": "chat.completion",
        "choices": [choice_of("message", message, "stop" if is_whole else "length")],
        "policy_version": version_of(trajectory),
        "num_steps": len(trajectory.steps),
        "usage": usage_of(*tokens_of(trajectory)),
    }


def _chunks(completion: Json, includes_usage: bool) -> Iterator[Json]:
    """The chunks of a ``chat.completion``."""
    (choice,) = completion["choices"]
    head = {**completion, "object": "chat.completion.chunk"}
    usage = head.pop("usage")
    yield {**head, "choices": [choice_of("delta", choice["message"], None)]}
    yield {**head, "choices": [choice_of("delta", {}, choice["finish_reason"])]}
    if includes_usage:
        yield {**head, "choices": [], "usage": usage}
