"""An engine on the CPU that samples, sleeps, wakes and samples again.

Run by test_sleeping_engine, which reads the JSON that this prints: bytes of this process before, during and
after its sleep, and the answers.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

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
    print(json.dumps({"sizes": sizes, "answers": answers, "answers_asleep": answers_asleep}), flush=True)


if __name__ == "__main__":
    os.environ.update(environment(EngineConfig()))
    asyncio.run(main(sys.argv[1]))
    os._exit(0)  # the engine's thread has no end
