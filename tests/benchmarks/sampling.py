"""Requests per second of the bare engine, of the policy server that fetches them, and of it over HTTP.

    python tests/benchmarks/sampling.py [--requests 1024] [--rounds 3]

Every arm gets the same prompts (64 random tokens, at most 64 new ones) and keeps the same number of requests
in flight. The bare engine and the server stay up side by side, the idle one asleep, and take turns: what
else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import models
import ray
import repository  # noqa: F401
from report import Report

from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.sampling.request_queue import Assignment, ReplicaReport
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.policy_app import PolicyApp
from actors.settings import ServedModel, ServerConfig
from actors.weights.store import WeightStore
from policies.engines.vllm import VLLMEngine
from policies.engines.vllm_settings import environment as engine_environment
from policies.sampler import SamplingParams, TokenRequest
from policies.settings import EngineConfig

PROMPT_TOKENS = 64
NEW_TOKENS = 64
VOCABULARY = range(3, 256)  # no special token
IN_FLIGHT = (64, 256)
HTTP_PORT = 8765
ENGINE = EngineConfig(max_model_tokens=PROMPT_TOKENS + NEW_TOKENS)
PARAMS = SamplingParams(max_tokens=NEW_TOKENS)

Prompts = list[tuple[int, ...]]
Sample = Callable[[tuple[int, ...]], Awaitable[int]]
"""Samples a completion of the prompt and returns its number of tokens."""


@dataclass(frozen=True)
class Rate:
    """How fast some prompts were answered."""

    requests_per_second: float
    tokens_per_second: float


async def measure(sample: Sample, prompts: Prompts, in_flight: int) -> Rate:
    """Answer all prompts, ``in_flight`` of them at a time."""
    waiting = iter(prompts)
    num_tokens = 0

    async def client() -> None:
        nonlocal num_tokens
        for prompt in waiting:
            count = await sample(prompt)  # on a line of its own: += reads its left side before it waits
            num_tokens += count

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(in_flight)))
    seconds = time.perf_counter() - start
    return Rate(len(prompts) / seconds, num_tokens / seconds)


# -- the arms ------------------------------------------------------------------------------------------


class BareArm:
    """``VLLMEngine`` in a process of its own, asked by a loop in that process."""

    def __init__(self, model: str, config: EngineConfig = ENGINE) -> None:
        self._process = ProcessPoolExecutor(1, get_context("spawn"), _start_bare_engine, (model, config))

    def __call__(self, prompts: Prompts, in_flight: int) -> Rate:
        return self._process.submit(_measure_bare_engine, prompts, in_flight).result()

    def close(self) -> None:
        self._process.shutdown()


_bare_engine: VLLMEngine


def _start_bare_engine(model: str, config: EngineConfig) -> None:
    global _bare_engine
    _bare_engine = VLLMEngine(model, config, {})


def _measure_bare_engine(prompts: Prompts, in_flight: int) -> Rate:
    async def sample(prompt: tuple[int, ...]) -> int:
        return len((await _bare_engine.generate(prompt, PARAMS)).token_ids)

    return asyncio.run(measure(sample, prompts, in_flight))


@ray.remote(num_cpus=0)
class FetchedArm:
    """What a node's ``SamplerActor`` does with token ids, asked by a loop in the actor."""

    def __init__(self, app_name: str, model: str) -> None:
        self._sampler = ServeSampler(app_name, model)

    async def poll(self, server: str, report: ReplicaReport) -> Assignment:
        return await self._sampler.poll(server, report)

    async def measure(self, prompts: Prompts, in_flight: int) -> Rate:
        await self._sampler.open()

        async def sample(prompt: tuple[int, ...]) -> int:
            return len((await self._sampler.sample_tokens(TokenRequest(prompt, PARAMS))).token_ids)

        return await measure(sample, prompts, in_flight)


def measure_http(prompts: Prompts, in_flight: int) -> Rate:
    """``POST /v1/completions`` from this process, on connections that stay open.

    By aiohttp: with 256 connections httpx used as much CPU time as the replica, and was the limit itself.
    """

    async def run() -> Rate:
        url = f"http://127.0.0.1:{HTTP_PORT}/v1/completions"
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=in_flight)) as session:

            async def sample(prompt: tuple[int, ...]) -> int:
                body = {"model": "policy", "prompt": prompt, "max_tokens": NEW_TOKENS}
                async with session.post(url, json=body, raise_for_status=True) as response:
                    return int((await response.json())["usage"]["completion_tokens"])

            return await measure(sample, prompts, in_flight)

    return asyncio.run(run())


def measure_llm_generate(model: str, prompts: Prompts) -> Rate:
    """vLLM's own offline loop with all prompts at once: what there is before any code of ours."""
    os.environ |= engine_environment(ENGINE)
    from vllm import LLM
    from vllm import SamplingParams as VLLMSamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=ENGINE.max_model_tokens,
        max_num_seqs=256,
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=8192,
    )
    params = VLLMSamplingParams(max_tokens=NEW_TOKENS, logprobs=0, detokenize=False)
    inputs: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    llm.generate(inputs[:16], params, use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Rate(len(inputs) / seconds, num_tokens / seconds)


# -- the program -----------------------------------------------------------------------------------------


def random_prompts(count: int, seed: int) -> Prompts:
    rng = random.Random(seed)
    return [tuple(rng.choices(VOCABULARY, k=PROMPT_TOKENS)) for _ in range(count)]


def median(rates: Sequence[Rate]) -> Rate:
    return Rate(
        statistics.median(rate.requests_per_second for rate in rates),
        statistics.median(rate.tokens_per_second for rate in rates),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=1024, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="of all arms; the median counts")
    arguments = parser.parse_args()
    report = Report(
        f"sampling: tiny model, {PROMPT_TOKENS} prompt tokens, at most {NEW_TOKENS} new ones, "
        f"{arguments.requests} requests, median of {arguments.rounds}",
        ("arm", "in flight", "requests/s", "tokens/s", "of bare", "all rounds"),
    )
    with tempfile.TemporaryDirectory() as folder:
        model = models.tiny(Path(folder))
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            prompts = random_prompts(arguments.requests, seed=0)
            offline = process.submit(measure_llm_generate, model, prompts).result()
        report.add("vLLM LLM.generate", "all", *_figures(offline), "", "")
        rates = _rounds(model, arguments.requests, arguments.rounds)
    for in_flight in IN_FLIGHT:
        bare = median(rates["bare engine", in_flight]).requests_per_second
        for arm in ("bare engine", "fetched", "over HTTP"):
            each = rates[arm, in_flight]
            middle = median(each)
            listed = " ".join(f"{rate.requests_per_second:.0f}" for rate in each)
            ratio = f"{middle.requests_per_second / bare:.2f}"
            report.add(arm, str(in_flight), *_figures(middle), ratio, listed)
    report.print()


def _figures(rate: Rate) -> tuple[str, str]:
    return f"{rate.requests_per_second:.0f}", f"{rate.tokens_per_second:.0f}"


def _rounds(model: str, num_requests: int, num_rounds: int) -> dict[tuple[str, int], list[Rate]]:
    """Rates of each arm at each number of requests in flight, round by round."""
    bare = BareArm(model)
    bare(random_prompts(16, seed=0), 16)  # starts it, before Ray's processes compete with it
    # Never a cluster that happens to run here: its work would be measured too.
    os.environ.update(RAYLET_ENVIRONMENT)
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    store = WeightStore.remote()  # type: ignore[attr-defined]
    app = PolicyApp(
        "benchmark", ServedModel(path=model), ServerConfig(http_port=HTTP_PORT, engine=ENGINE), store
    )
    app.start()
    arm_actor = FetchedArm.remote("benchmark", model)  # type: ignore[attr-defined]
    arms: dict[str, Callable[[Prompts, int], Rate]] = {
        "bare engine": bare,
        "fetched": lambda prompts, in_flight: ray.get(arm_actor.measure.remote(prompts, in_flight)),
        "over HTTP": measure_http,
    }
    rates: dict[tuple[str, int], list[Rate]] = {}
    for arm in arms.values():
        arm(random_prompts(64, seed=1), 64)
    for number in range(num_rounds):
        for in_flight in IN_FLIGHT:
            prompts = random_prompts(num_requests, seed=100 * number + in_flight)
            for name, arm in arms.items():
                rates.setdefault((name, in_flight), []).append(arm(prompts, in_flight))
    app.stop()
    ray.shutdown()
    bare.close()
    return rates


if __name__ == "__main__":
    main()
