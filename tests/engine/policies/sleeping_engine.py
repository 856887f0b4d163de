"""An engine on the CPU that samples, sleeps, wakes and samples again; then with weights that sleep drops.

Run by test_sleeping_engine, which reads the JSON that this prints: bytes of this process before, during and
after its sleep, and the answers; then levels and answers where vLLM's sleep stands for that of a GPU, whose
level 2 leaves zeros in the place of the weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

from policies.engines.vllm_settings import environment
from policies.sampler import SamplingParams
from policies.settings import EngineConfig

CACHE_BYTES = 96 << 20
PROMPT = list(range(5, 25))


async def main(model: str) -> None:
    import psutil

    from policies.engines.vllm import VLLMEngine

    options = {"kv_cache_memory_bytes": CACHE_BYTES, "max_num_seqs": 8}
    engine = VLLMEngine(model, EngineConfig(max_model_tokens=256, options=options), {})
    params, process = SamplingParams(temperature=0.0, max_tokens=16), psutil.Process()
    before = await engine.generate(PROMPT, params)
    sizes = [process.memory_full_info().uss]
    await engine.sleep()
    sizes.append(process.memory_full_info().uss)
    waiting = asyncio.create_task(engine.generate(PROMPT, params))
    await asyncio.sleep(0.2)
    answers_asleep = waiting.done()
    await engine.wake()
    after = await waiting
    sizes.append(process.memory_full_info().uss)
    answers = [(each.token_ids, each.logprobs) for each in (before, after)]
    dropped = await as_on_a_gpu(engine, model)
    found = {"sizes": sizes, "answers": answers, "answers_asleep": answers_asleep, "dropped": dropped}
    print(json.dumps(found), flush=True)


def _drop(worker: Any) -> None:
    for parameter in worker.model_runner.model.parameters():
        parameter.data.zero_()


async def as_on_a_gpu(engine: Any, model: str) -> dict[str, Any]:
    """Levels of three sleeps, and log-probabilities: at first, after a sleep, after a publish, after a sleep
    in which nothing is published, after one in which something is, and when it is published once more.
    """
    from safetensors.torch import load_file

    from policies.engines.weights import pack

    levels: list[int] = []
    vllm = engine._engine

    def sleep(level: int, mode: str) -> None:
        levels.append(level)
        if level == 2:
            vllm.collective_rpc(_drop)

    vllm.sleep, vllm.wake_up, vllm.model_config.enable_sleep_mode = sleep, lambda: None, True
    weights = load_file(f"{model}/model.safetensors")
    params, answers = SamplingParams(temperature=0.0, max_tokens=4), []

    async def publish(version: int) -> None:
        changed = {name: tensor * (1 + 0.1 * version) for name, tensor in weights.items()}
        await engine.load_weights(version, [*pack(changed.items())])

    async def answer() -> None:
        answers.append((await engine.generate(PROMPT, params)).logprobs)

    async def turn(version: int) -> None:
        """A turn of the learner, which publishes if the version is a newer one."""
        await engine.sleep()
        publishing = [asyncio.create_task(publish(version))] if version > engine.version else []
        await asyncio.sleep(0.1)
        await engine.wake()
        await asyncio.gather(*publishing)
        await answer()

    await answer()
    await turn(0)
    await publish(1)
    await answer()
    await turn(1)
    await turn(2)
    await publish(2)
    await answer()
    return {"levels": levels, "answers": answers}


if __name__ == "__main__":
    os.environ.update(environment(EngineConfig()))
    asyncio.run(main(sys.argv[1]))
    os._exit(0)  # the engine's thread has no end
