"""A tiny LLaVA in vLLM's engine and in the learner, in this process: what each finds for the same pictures.

Writes, as the last line, a row for each answer: version of the weights, prompt, number of pictures, answer,
and its log-probabilities by the engine, the learner and plain transformers; in the first row the norms of the
gradient of their mean, the learner's and that of transformers, and the answer that a client's chat gets.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from policies.engines.vllm_settings import environment
from policies.settings import EngineConfig

os.environ.update(environment(EngineConfig()))
os.environ.update(VERL_PLATFORM="cpu", HF_HUB_OFFLINE="1")

import torch
from machine import free_port
from picture_models import build, picture, shown
from safetensors.torch import load_file
from transformers_reference import load, logprobs_of_pictures
from whole_batches import WholeBatches

from environments.types import Completion, Message
from policies.chat import ChatRenderer, load_tokenizer
from policies.engines.vllm import VLLMEngine
from policies.engines.weights import pack
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig
from policies.learning.verl.learner import VerlLearner
from policies.model_api.frontend import OpenAIFrontend
from policies.model_api.protocol import ChatRequest
from policies.pictures import pictures_of
from policies.sampler import SamplingParams, Turn

NUM_TOKENS = 12


async def played(engine: VLLMEngine, renderer: ChatRenderer, colour: str) -> list[Completion]:
    """Two turns, each about a picture."""
    messages: list[Message] = [shown(picture(colour))]
    turns: list[Completion] = []
    previous = None
    for seed in range(2):
        prompt_ids, pictures = renderer.prompt_ids(messages, previous), pictures_of(messages)
        params = SamplingParams(max_tokens=NUM_TOKENS, seed=seed)
        output = await engine.generate(prompt_ids, params, pictures)
        text = renderer.completion_text(prompt_ids, output.token_ids)
        turns.append(
            Completion(
                prompt_ids=prompt_ids,
                completion_ids=output.token_ids,
                logprobs=output.logprobs,
                text=text,
                finish_reason=str(output.finish_reason),
                policy_version=output.policy_version,
                pictures=pictures,
            )
        )
        previous = Turn(messages=list(messages), completion=turns[-1])
        messages += [{"role": "assistant", "content": text}, shown(picture("green"), text="And this?")]
    assert turns[1].extends(turns[0])
    return turns


async def chatted(engine: VLLMEngine, renderer: ChatRenderer) -> list[int]:
    """The tokens that a client is answered to the first turn about red."""
    fields = {"max_tokens": NUM_TOKENS, "seed": 0, "return_token_ids": True}
    body = ChatRequest.model_validate({"model": "tiny", "messages": [shown(picture("red"))], **fields})
    answer = await anext(OpenAIFrontend("tiny", renderer, engine).chat(body))
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def sample_of(turn: Completion) -> TrainingSample:
    size = turn.answer_size
    return TrainingSample(
        sample_id="",
        prompt_ids=turn.prompt_ids,
        response_ids=turn.completion_ids,
        loss_mask=(1,) * size,
        rollout_logprobs=turn.logprobs,
        turns=(0,) * size,
        pictures=turn.pictures,
    )


async def main(folder: Path) -> list[dict[str, Any]]:
    path = build(folder)
    renderer = ChatRenderer(load_tokenizer(path))
    engine = VLLMEngine(str(path), EngineConfig(max_model_tokens=512), {})
    config = LearnerConfig(optimizer=OptimizerConfig(lr=1e-3))
    learner = WholeBatches(VerlLearner(str(path), config, resolve(AlgorithmConfig(), NUM_TOKENS), 10, 0))
    weights, rows = load_file(path / "model.safetensors"), []
    for version in range(2):
        turns = [turn for colour in ("red", "blue") for turn in await played(engine, renderer, colour)]
        batch = TrainBatch(samples=tuple(map(sample_of, turns)))
        model = load(path, weights)
        expected = [logprobs_of_pictures(model, path, turn) for turn in turns]
        for turn, own, theirs in zip(turns, learner.logprobs(batch), expected, strict=True):
            rows.append(
                {
                    "version": turn.policy_version,
                    "prompt": turn.prompt_ids,
                    "pictures": len(turn.pictures),
                    "answer": turn.completion_ids,
                    "engine": list(turn.logprobs),
                    "learner": own,
                    "transformers": theirs.tolist(),
                }
            )
        if not version:
            rows[0]["chatted"] = await chatted(engine, renderer)
            torch.cat(expected).mean().backward()
            norms = [each.grad.norm() for each in model.parameters() if each.grad is not None]
            update = learner.fit([batch])
            rows[0]["grad_norms"] = [update.metrics["learn/grad_norm"], float(torch.stack(norms).norm())]
            weights = {name: each.detach().clone() for name, each in learner.weights()}
            await engine.load_weights(1, list(pack(weights.items())))
    return rows


if __name__ == "__main__":
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    print(json.dumps(asyncio.run(main(Path(sys.argv[1])))), flush=True)
    os._exit(0)  # the engine's thread has no end
