"""One sampler before the policy servers of several policies."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from picture_models import build, picture, shown

from actors.sampling.backends import check_calls
from actors.sampling.request_queue import ReplicaReport
from actors.sampling.serve_sampler import ServeSampler
from environments.errors import AgentError, ConfigError
from policies import SeatsAgent
from policies.chat import ChatRenderer, load_tokenizer
from policies.openai_sampler import OpenAISampler
from policies.sampler import (
    EngineStats,
    SamplerDefaults,
    SampleRequest,
    SamplingParams,
    TokenOutput,
    TokenRequest,
)


def request(policy: str) -> TokenRequest:
    return TokenRequest((1, 2), SamplingParams(policy=policy))


@pytest.mark.slow
async def test_request_goes_to_the_server_of_its_policy(tiny_model: Path) -> None:
    sampler = ServeSampler({"one": "server-1", "two": "server-2"}, str(tiny_model))
    answer = asyncio.create_task(sampler.sample_tokens(request("two")))
    other = asyncio.create_task(sampler.poll("server-1", ReplicaReport("r1", 0, (), EngineStats())))
    assignment = await sampler.poll("server-2", ReplicaReport("r2", 0, (), EngineStats()))
    [(ticket, fetched)] = assignment.requests
    assert fetched == request("two") and not other.done()
    output = TokenOutput(token_ids=(7,), logprobs=(-1.0,), finish_reason="stop", policy_version=3)
    next_poll = sampler.poll("server-2", ReplicaReport("r2", 0, [(ticket, output)], EngineStats()))
    polls = [other, asyncio.create_task(next_poll)]
    assert (await answer).token_ids == (7,)
    assert set(sampler.status().replicas) == {"r1", "r2"}
    for each in polls:
        each.cancel()
    await asyncio.gather(*polls, return_exceptions=True)


async def test_policy_that_nobody_serves_is_named(tiny_model: Path) -> None:
    sampler = ServeSampler("server", str(tiny_model))
    with pytest.raises(AgentError, match="the policy 'two', and those that are sampled here are ''"):
        await sampler.sample_tokens(request("two"))


def test_server_of_one_model_is_refused_to_several_policies() -> None:
    agent = SeatsAgent(policies={"a": "one", "b": "two"})
    check_calls(agent, ServeSampler)
    given = {"app_name": {"one": "server-1", "two": "server-2"}, "model_path": "model"}
    assert ServeSampler.arguments(given, SamplerDefaults()) == given
    with pytest.raises(ConfigError, match="policies one, two, and OpenAISampler samples one model"):
        check_calls(agent, OpenAISampler)


@pytest.mark.slow
def test_process_of_a_sampler_renders_without_torch(tmp_path: Path) -> None:
    """Texts and pictures, by a tokenizer that was sent to it."""
    tokenizer = load_tokenizer(build(tmp_path / "model", has_weights=False))
    (tmp_path / "tokenizer").write_bytes(pickle.dumps(tokenizer))
    request = SampleRequest(messages=[shown(picture("red"))], params=SamplingParams())
    (tmp_path / "request").write_bytes(pickle.dumps(request))
    code = (
        "import pickle, sys; from pathlib import Path;"
        "from actors.sampling.serve_sampler import ServeSampler;"
        "renderer = ServeSampler('server', Path('tokenizer').read_bytes())._renderer;"
        "print(*renderer.request_ids(pickle.loads(Path('request').read_bytes())));"
        "sys.exit('torch' in sys.modules)"
    )
    path = {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [*map(str, ChatRenderer(tokenizer).request_ids(request))]
    assert "PyTorch" not in done.stderr
