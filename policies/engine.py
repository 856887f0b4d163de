"""The vLLM adapter: token ids in, token ids out, with exact log-probabilities and policy version.

vLLM's engine runs in a thread of this process. Between two of its steps nothing is in motion, so that is
where requests are added and weights are exchanged: an update is atomic without pausing anything.
This is the only module that imports vLLM.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from environments.errors import ConfigError, PromptTooLongError, SamplerError
from policies.sampler import SamplingParams, TokenOutput
from policies.weights import WeightBucket

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in this process: see the module's head
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_ENVIRONMENT = ENVIRONMENT | {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every replica of a node binds to the same cores
    "OMP_NUM_THREADS": "1",  # measured: more threads than free cores spin and cost a factor of ten
    "TORCHDYNAMO_DISABLE": "1",  # else the first request waits for a C++ compiler
}


@dataclass
class EngineConfig:
    """How vLLM is started. ``vllm`` is passed to its EngineArgs unread, and checked there."""

    num_gpus: float = 0.0
    """GPUs of an engine; 0 runs vLLM's CPU build."""
    max_model_tokens: int = 1024
    """Longest prompt plus completion."""
    dtype: str = "float32"
    """float32 agrees with the learner to rounding; bfloat16 is what GPUs are fast at."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Further vLLM engine arguments."""


def environment(config: EngineConfig) -> dict[str, str]:
    """What has to be in a process's environment before it imports vLLM; a value already set wins."""
    return ENVIRONMENT if config.num_gpus else CPU_ENVIRONMENT


class VLLMEngine:
    """One vLLM engine in a thread of this process, used from one asyncio loop.

    Args:
        model_path: folder (or hub name) in Hugging Face format.
        config: engine settings.

    Raises:
        ConfigError: vLLM refuses a setting or the model.
    """

    def __init__(self, model_path: str, config: EngineConfig) -> None:
        for name, value in environment(config).items():
            os.environ.setdefault(name, value)
        self.version = 0
        self.max_model_tokens = config.max_model_tokens
        self._ids = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outputs: dict[str, asyncio.Queue[TokenOutput | BaseException]] = {}
        self._versions: dict[str, int] = {}
        self._failure: BaseException | None = None
        self._stopped = False
        self._engine = _start_vllm(model_path, config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

    # -- used from the asyncio loop ------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> TokenOutput:
        """Sample one completion, whole.

        Raises:
            PromptTooLongError: the prompt leaves no room for a token.
            SamplerError: the engine has failed.
        """
        async for output in self._request(prompt_ids, params, stream=False):
            return output
        raise SamplerError("The engine ended a request without an answer.")

    def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncIterator[TokenOutput]:
        """Sample one completion and yield its tokens as they come. Raises as ``generate`` does."""
        return self._request(prompt_ids, params, stream=True)

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        """Exchange the weights between two engine steps; requests in flight go on under the new ones.

        A load that fails leaves the engine with a mixture of weights: the engine counts as lost then.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()

        def load() -> None:
            _load_weights(self._engine, buckets)
            self.version = version
            loop.call_soon_threadsafe(_resolve, done)

        self._loop = loop
        self._submit(load)
        waiting = {done, loop.create_task(self._until_failure())}
        finished, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if done not in finished:
            self.check()

    def check(self) -> None:
        """Raise what ended the engine, if anything did."""
        if self._failure is not None:
            raise SamplerError(f"The vLLM engine has stopped: {self._failure!r}") from self._failure

    def stop(self) -> None:
        """End the engine's thread; requests in flight are abandoned."""
        self._inbox.put(self._set_stopped)
        self._thread.join(timeout=10)

    async def _until_failure(self) -> None:
        while self._failure is None:
            await asyncio.sleep(0.2)

    async def _request(
        self, prompt_ids: Sequence[int], params: SamplingParams, stream: bool
    ) -> AsyncIterator[TokenOutput]:
        room = self.max_model_tokens - len(prompt_ids)
        if room < 1:
            raise PromptTooLongError(
                f"The prompt has {len(prompt_ids)} tokens and the server's context holds "
                f"{self.max_model_tokens}: shorten the prompt or raise server.engine.max_model_tokens."
            )
        self._loop = loop = asyncio.get_running_loop()
        request_id = str(next(self._ids))
        outputs: asyncio.Queue[TokenOutput | BaseException] = asyncio.Queue()
        self._outputs[request_id] = outputs
        vllm_params = _vllm_params(params, room, stream)
        prompt = {"prompt_token_ids": list(prompt_ids)}
        finished = False

        def add() -> None:
            try:
                self._engine.add_request(request_id, prompt, vllm_params)
            except Exception as error:  # noqa: BLE001  # this request is at fault, not the engine
                refusal = ConfigError(f"vLLM refuses the request: {error}")
                loop.call_soon_threadsafe(outputs.put_nowait, refusal)
            else:
                self._versions[request_id] = self.version

        def abort() -> None:
            self._engine.abort_request([request_id])
            self._versions.pop(request_id, None)

        try:
            self._submit(add)
            while not finished:
                output = await outputs.get()
                if isinstance(output, ConfigError):
                    raise output
                if isinstance(output, BaseException):
                    raise SamplerError(f"The vLLM engine has stopped: {output!r}") from output
                finished = output.finish_reason is not None
                yield output
        finally:
            self._outputs.pop(request_id, None)
            if not finished:  # the caller went away: stop sampling for nobody
                self._inbox.put(abort)

    def _submit(self, work: Callable[[], None]) -> None:
        self.check()
        self._inbox.put(work)

    # -- the engine's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopped:
                self._drain_inbox()
                if self._engine.has_unfinished_requests():
                    self._deliver(self._engine.step())
        except BaseException as error:  # noqa: BLE001  # a thread's end: hand the failure to all who wait
            self._failure = error
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._fail_all, error)

    def _drain_inbox(self) -> None:
        """Do what was asked for; wait for work if there is nothing to sample."""
        if not self._engine.has_unfinished_requests():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        ready = []
        for output in outputs:
            request_id = output.request_id
            sampled = output.outputs[0]
            version = self._versions[request_id]
            if output.finished:
                del self._versions[request_id]
            ready.append((request_id, _token_output(sampled, version)))
        if ready and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hand_over, ready)

    def _hand_over(self, ready: list[tuple[str, TokenOutput]]) -> None:
        for request_id, output in ready:
            if request_id in self._outputs:
                self._outputs[request_id].put_nowait(output)

    def _fail_all(self, error: BaseException) -> None:
        for outputs in self._outputs.values():
            outputs.put_nowait(error)

    def _set_stopped(self) -> None:
        self._stopped = True


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _start_vllm(model_path: str, config: EngineConfig) -> LLMEngine:
    from vllm import EngineArgs, LLMEngine

    ours: dict[str, Any] = {
        "model": model_path,
        "dtype": config.dtype,
        "max_model_len": config.max_model_tokens,
        "max_num_seqs": 256,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        # The distribution that was sampled from, after temperature: what a policy gradient needs.
        "logprobs_mode": "processed_logprobs",
    }
    if not config.num_gpus:
        # vLLM 0.29 rewinds a seeded request's generator after a partial prefill by a call that CPU
        # generators refuse, which ends the engine: so here a prompt is never split.
        ours |= {
            "enforce_eager": True,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(8192, config.max_model_tokens),
        }
    try:
        return LLMEngine.from_engine_args(EngineArgs(**(ours | config.vllm)))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"vLLM refuses the model {model_path!r} or a setting in server.engine: {error}"
        ) from error


def _vllm_params(params: SamplingParams, room: int, stream: bool) -> Any:
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    return VLLMSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=min(params.max_tokens or room, room),
        stop=list(params.stop) or None,
        seed=params.seed,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,  # lists of numbers, not an object for each token
        skip_clone=True,  # made for this request alone: the deep copy was 15 % of the thread in a profile
        detokenize=bool(params.stop),
        output_kind=RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY,
    )


def _token_output(sampled: Any, version: int) -> TokenOutput:
    return TokenOutput(
        token_ids=tuple(sampled.token_ids),
        logprobs=tuple(sampled.logprobs.logprobs if sampled.logprobs else ()),
        finish_reason=sampled.finish_reason,
        policy_version=version,
    )


def _load_weights(engine: LLMEngine, buckets: Sequence[WeightBucket]) -> None:
    engine.collective_rpc(_load_into_worker, args=(buckets,))
    # Cached keys and values are the old weights'; those of running requests are computed anew.
    engine.reset_prefix_cache(reset_running_requests=True)


def _load_into_worker(worker: Any, buckets: Sequence[WeightBucket]) -> None:
    """Load all buckets into one vLLM worker.

    vLLM packs linear weights when it loads a model, so they are loaded layer by layer through the same
    path. On a CPU a tied output layer owns a packed copy of the embedding which that path forgets:
    without the last loop it would go on with the old weights, silently.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    initialize_layerwise_reload(runner.model)
    for bucket in buckets:
        runner.model.load_weights(bucket.tensors())
    finalize_layerwise_reload(runner.model, runner.model_config)
    for module in runner.model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
