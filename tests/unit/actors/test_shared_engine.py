"""Rollouts and clients over HTTP share one engine: clients do not take all of its places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from policies.chat import ChatRenderer, load_tokenizer
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.protocol import ChatRequest, CompletionRequest
from policies.sampler import SamplingParams
from policies.settings import EngineConfig
from policies.tiny import build_tokenizer

MESSAGES = [{"role": "user", "content": "What is 12+34?"}]


@pytest.fixture
def engine(tmp_path: Path) -> ScriptedEngine:
    build_tokenizer([MESSAGES]).save_pretrained(tmp_path)
    options = {"replies": ["1111"], "seconds_per_token": 0.01}
    config = EngineConfig(name="scripted_engine:ScriptedEngine", max_model_tokens=100, options=options)
    return ScriptedEngine(str(tmp_path), config, {})


def frontend(engine: ScriptedEngine, folder: Path) -> OpenAIFrontend:
    renderer = ChatRenderer(load_tokenizer(str(folder)))
    return OpenAIFrontend("tiny", renderer, engine, max_sampled=2)


async def last(parts: AsyncIterator[dict[str, Any]]) -> dict[str, Any]:
    return [part async for part in parts][-1]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_outside_requests_leave_room_for_rollouts(
    engine: ScriptedEngine, tmp_path: Path, stream: bool
) -> None:
    served = frontend(engine, tmp_path)
    body = ChatRequest.model_validate({"model": "tiny", "messages": MESSAGES, "n": 5, "stream": stream})
    outside = [asyncio.create_task(last(served.chat(body))) for _ in range(4)]
    await asyncio.sleep(0.02)
    running = engine.num_running
    await engine.generate([1, 2], SamplingParams())
    unanswered = sum(not task.done() for task in outside)
    answers = await asyncio.gather(*outside)
    assert running == 2, "of 20"
    assert unanswered >= 3, "the rollout did not wait for them"
    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}


async def test_places_of_clients_that_have_gone_are_free_again(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    served = frontend(engine, tmp_path)
    body = ChatRequest.model_validate({"model": "tiny", "messages": MESSAGES, "n": 5, "stream": True})
    one = ChatRequest.model_validate({"model": "tiny", "messages": MESSAGES})
    parts = served.chat(body)
    await anext(parts)
    await parts.aclose()
    assert engine.num_running == 0
    answer = await asyncio.wait_for(last(served.chat(one)), 30)
    assert answer["choices"][0]["message"]["content"] == "1111"


def test_tokens_in_flight_are_of_prompts_and_answers_to_come(engine: ScriptedEngine) -> None:
    with engine.in_flight([1, 2, 3], SamplingParams(max_tokens=2)):
        assert engine.tokens_in_flight == 3 + 2
        with engine.in_flight([1, 2, 3], SamplingParams()):
            assert engine.tokens_in_flight == 5 + 100, "an answer without a limit may fill the context"
    assert engine.tokens_in_flight == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_answers_that_wait_for_the_engine_are_in_flight_too(
    engine: ScriptedEngine, tmp_path: Path, stream: bool
) -> None:
    served = frontend(engine, tmp_path)
    body = CompletionRequest(model="tiny", prompt=[1, 2, 3], max_tokens=2, n=5, stream=stream)
    counts = []
    answer = asyncio.create_task(last(served.complete(body)))
    while not answer.done():
        await asyncio.sleep(0)
        counts.append(engine.tokens_in_flight)
    answer.result()
    assert max(counts) == 5 * (3 + 2), "of which the engine has two"
    assert engine.tokens_in_flight == 0
