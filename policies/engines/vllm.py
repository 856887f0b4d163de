"""The vLLM adapter: token ids in, token ids out, with exact log-probabilities and policy version.

vLLM's engine runs in a thread of this process. Between two of its steps no request is being computed, so that
is where requests are added and weights are exchanged: an update is atomic without pausing anything, and every
token has exactly one version. Only ``tool_calls.py`` and ``actors/weights/nccl.py`` import vLLM too.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from environments.errors import ConfigError, PromptTooLongError, SamplerError, WeightsError
from policies.engines.base import Engine
from policies.engines.versions import VersionSpans
from policies.engines.vllm_settings import (
    check_gpus,
    check_options,
    check_step,
    engine_arguments,
    environment,
    without_own,
)
from policies.engines.weights import WeightBucket, WholeTensors
from policies.imports import large_imports
from policies.pictures import TOKEN_BIAS, open_picture, picture_reader
from policies.sampler import EngineStats, SamplingParams, TokenOutput
from policies.settings import EngineConfig, adapter_config

if TYPE_CHECKING:
    from vllm import LLMEngine, RequestOutput
    from vllm.lora.request import LoRARequest


FAILURE_SECONDS = 0.2
"""Time after which a load of weights finds out that the engine has ended."""


class VLLMEngine(Engine):
    """A vLLM engine in a thread of this process.

    ``config.options`` are further arguments of vLLM's ``EngineArgs``, and those of ``OwnOptions``.
    """

    settings = ("options", "num_threads")
    serves_adapters = True
    keeps_structure = True
    takes_options = True
    takes_pictures = True

    def __init__(self, model_path: str, config: EngineConfig, adapters: Mapping[str, str]) -> None:
        for name, value in environment(config).items():
            os.environ.setdefault(name, value)
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        self.version = 0
        self.max_model_tokens = config.max_model_tokens
        self._ids = itertools.count()
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outputs: dict[str, asyncio.Queue[TokenOutput | BaseException]] = {}
        self._running: dict[str, _Running] = {}
        self._keeps_cache = config.options.get("cache_after_publish") == "keep"
        self._start = time.monotonic()
        self._counted = EngineStats()
        self._failure: BaseException | None = None
        self._pictures = picture_reader(model_path)
        self._published = _Published()
        self._engine = _start_vllm(model_path, config, _adapter_args(adapters))
        self._adapters = _load_adapters(self._engine, adapters)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken = threading.Event()
        threading.Thread(target=self._run, name="vllm-engine", daemon=True).start()

    @classmethod
    def check_config(cls, config: EngineConfig, adapters: Collection[str] = ()) -> None:
        super().check_config(config, adapters)
        check_options(config.options)
        check_gpus(config)
        check_step(config)

    @classmethod
    def environment(cls, config: EngineConfig) -> Mapping[str, str]:
        return environment(config)

    # -- used from the asyncio loop ------------------------------------------------------------------

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        """Exchange the weights between two engine steps; requests in flight go on under the new ones.

        ``cache_after_publish`` says what becomes of their keys and values. A load that fails leaves the
        engine with a mixture of weights: it counts as lost then.

        Raises:
            WeightsError: they are not all that the model has.
        """

        def load(done: Callable[[], object]) -> None:
            self._exchange_weights(version, buckets)
            done()

        await self._until_done(load)

    async def sleep(self) -> None:
        """Free the cache, and on a GPU the weights, until ``wake``: see ``_rest``."""
        await self._until_done(self._rest)

    async def wake(self) -> None:
        """Sample again."""
        self._woken.set()

    async def _until_done(self, work: Callable[[Callable[[], object]], None]) -> None:
        """Have the engine's thread do ``work``, which calls its argument when the wait is over."""
        self._loop = loop = asyncio.get_running_loop()
        done = asyncio.Event()
        self._submit(lambda: work(partial(loop.call_soon_threadsafe, done.set)))
        while not done.is_set() and self._failure is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), FAILURE_SECONDS)
        if isinstance(self._failure, WeightsError):
            raise self._failure
        if not done.is_set():
            self.check_alive()

    def stats(self) -> EngineStats:
        """Return what this engine has done so far."""
        seconds = time.monotonic() - self._start
        return replace(self._counted, seconds=seconds, num_running=len(self._running))

    def check_alive(self) -> None:
        """Raise what ended the engine, if anything did."""
        if self._failure is not None:
            raise SamplerError(f"The vLLM engine has stopped: {self._failure!r}") from self._failure

    async def sample(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        in_pieces: bool,
        pictures: Sequence[str] = (),
    ) -> AsyncGenerator[TokenOutput, None]:
        room = self.max_model_tokens - len(prompt_ids)
        if room < 1:
            raise PromptTooLongError(
                f"The prompt has {len(prompt_ids)} tokens and the server's context holds "
                f"{self.max_model_tokens}: shorten the prompt or raise server.engine.max_model_tokens."
            )
        if params.adapter not in self._adapters:
            names = ", ".join(str(name) for name in self._adapters)
            raise ConfigError(f"adapter={params.adapter!r} is not served: use one of {names}.")
        ids = list(prompt_ids)
        prompt = self._prompt(ids, pictures)
        self._loop = loop = asyncio.get_running_loop()
        request_id = str(next(self._ids))
        outputs: asyncio.Queue[TokenOutput | BaseException] = asyncio.Queue()
        self._outputs[request_id] = outputs
        try:
            vllm_params = _vllm_params(params, room, in_pieces)
            if self._pictures is not None:
                vllm_params.logit_bias = {self._pictures.token_id: TOKEN_BIAS}
        except ValueError as error:
            raise ConfigError(f"vLLM rejects the sampling parameters: {error}") from error
        running = _Running(ids, prompt, vllm_params, self._adapters[params.adapter])
        finished = False

        def add() -> None:
            try:
                self._add(request_id, running)
            except Exception as error:  # noqa: BLE001  # this request is at fault, not the engine
                rejection = ConfigError(f"vLLM rejects the request: {error}")
                loop.call_soon_threadsafe(outputs.put_nowait, rejection)

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
            if not finished:  # the caller has gone away: end the request
                self._inbox.put(lambda: self._abort(request_id))

    def _prompt(self, prompt_ids: list[int], pictures: Sequence[str]) -> dict[str, Any]:
        """The prompt as vLLM takes it: with pictures it makes their tokens itself."""
        if self._pictures is None:
            if pictures:
                raise ConfigError("This server's model reads text only: leave pictures out of the messages.")
            return {"prompt_token_ids": prompt_ids}
        short = self._pictures.collapsed(prompt_ids, pictures)
        if (found := short.count(self._pictures.token_id)) != len(pictures):
            raise ConfigError(f"The prompt has tokens of {found} pictures, and {len(pictures)} come with it.")
        images = {"multi_modal_data": {"image": [*map(open_picture, pictures)]}} if pictures else {}
        return {"prompt_token_ids": short, **images}

    def _submit(self, work: Callable[[], None]) -> None:
        self.check_alive()
        self._inbox.put(work)

    # -- the engine's thread -------------------------------------------------------------------------

    def _run(self) -> None:
        """consumes requests and weights · waits for its inbox · produces tokens"""
        try:
            while True:
                self._drain_inbox()
                if self._engine.has_unfinished_requests():
                    if self._published.are_dropped:  # no newer ones have come
                        self._load(self._published.version, self._published.buckets)
                    start = time.monotonic()
                    outputs = self._engine.step()
                    self._counted.busy_seconds += time.monotonic() - start
                    self._deliver(outputs)
        except BaseException as error:  # noqa: BLE001  # a thread's end: hand the failure to all who wait
            self._failure = error
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._fail_all, error)

    def _drain_inbox(self) -> None:
        """Run the queued calls; wait for one if there is nothing to sample."""
        if not self._engine.has_unfinished_requests():
            self._inbox.get()()
        while not self._inbox.empty():
            self._inbox.get()()

    def _add(self, request_id: str, running: _Running) -> None:
        prompt = running.prompt
        if self._keeps_cache:  # what older weights have cached is never taken for a prefix of this request
            prompt["cache_salt"] = f"version {self.version}"
        running.vllm_id = self._engine.add_request(
            request_id, prompt, running.vllm_params, lora_request=running.adapter
        )
        state = self._engine.output_processor.request_states[running.vllm_id]
        if "multi_modal_data" in prompt and state.prompt_token_ids != running.prompt_ids:
            self._engine.abort_request([running.vllm_id], internal=True)
            raise ValueError("it has other tokens for a picture than the processor in the model's folder")
        running.versions = VersionSpans(self.version)
        self._running[request_id] = running

    def _abort(self, request_id: str) -> None:
        running = self._running.pop(request_id, None)
        if running is not None:  # else it ended in the meantime, or was rejected
            num_sampled = _num_sampled(self._engine, running)
            self._counted.num_tokens += num_sampled - running.versions.num_taken
            self._counted.num_aborted_tokens += num_sampled
            self._engine.abort_request([running.vllm_id], internal=True)

    def _load(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        missing: set[str] = set().union(*self._engine.collective_rpc(_load_into_worker, args=(buckets,)))
        if missing:
            raise WeightsError(
                f"The published weights lack {', '.join(sorted(missing))}, as vLLM names them."
            )
        self.version, self._published.are_dropped = version, False

    def _exchange_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        self._load(version, buckets)
        if self._pictures is not None:
            self._engine.reset_encoder_cache()
        if self._published_are_all():
            self._published = _Published(version, buckets)
        for request_id, running in list(self._running.items()):
            num_sampled = _num_sampled(self._engine, running)
            if num_sampled == 0 and self._keeps_cache:  # no cache to keep, and the old version's salt
                self._engine.abort_request([running.vllm_id], internal=True)
                self._add(request_id, running)
            else:
                running.versions.exchanged(num_sampled, version)
        if not self._keeps_cache:
            self._engine.reset_prefix_cache(reset_running_requests=True)

    def _rest(self, asleep: Callable[[], object]) -> None:
        """Sleep until ``wake``, with this thread: what comes meanwhile waits in the inbox.

        vLLM does nothing to sleep on a CPU, so there its cache is freed here. On a GPU, where this has never
        run, level 2 drops the weights: newer ones come before the next request, or the last published are
        loaded again, which lie on the host until then. Level 1, before a publish, keeps a copy there.
        """
        engine = self._engine
        self._woken.clear()
        engine.reset_prefix_cache(reset_running_requests=True)  # they are computed anew afterwards
        if engine.model_config.enable_sleep_mode:
            published = self._published
            is_dropped = bool(published.buckets) and published.version == self.version
            engine.sleep(level=2 if is_dropped else 1, mode="keep")
            asleep()
            self._woken.wait()
            engine.wake_up()
            published.are_dropped = is_dropped
        else:
            sizes = engine.collective_rpc(_free_cache)
            asleep()
            self._woken.wait()
            engine.collective_rpc(_allocate_cache, args=(sizes,))

    def _published_are_all(self) -> bool:
        """Return whether an engine that sleeps on a GPU gets all its weights by a publish: no adapters, no
        model that drafts, none that were quantized here."""
        given = self._engine.vllm_config
        is_plain = given.speculative_config is None and given.model_config.quantization is None
        return given.model_config.enable_sleep_mode and is_plain and len(self._adapters) == 1

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        ready = []
        for output in outputs:
            request_id = output.request_id
            sampled = output.outputs[0]
            running = self._running[request_id]
            if output.finished:
                del self._running[request_id]
                self._counted.num_prompt_tokens += len(running.prompt_ids)
                self._counted.num_cached_tokens += output.num_cached_tokens or 0
            self._counted.num_tokens += len(sampled.token_ids)
            ready.append((request_id, _token_output(sampled, output.prompt_logprobs, running)))
        if ready and self._loop is not None:
            self._loop.call_soon_threadsafe(self._hand_over, ready)

    def _hand_over(self, ready: list[tuple[str, TokenOutput]]) -> None:
        for request_id, output in ready:
            if request_id in self._outputs:
                self._outputs[request_id].put_nowait(output)

    def _fail_all(self, error: BaseException) -> None:
        for outputs in self._outputs.values():
            outputs.put_nowait(error)


@dataclass(slots=True)
class _Published:
    """The last published weights, which an engine on a GPU loads again if it drops them for a sleep."""

    version: int = 0
    buckets: Sequence[WeightBucket] = ()
    are_dropped: bool = False


@dataclass(slots=True)
class _Running:
    """A request in the engine's thread. ``vllm_id`` is vLLM's own name for it."""

    prompt_ids: list[int]
    prompt: dict[str, Any]
    vllm_params: Any
    adapter: LoRARequest | None
    vllm_id: str = ""
    versions: VersionSpans = field(default_factory=lambda: VersionSpans(0))


def _start_vllm(model_path: str, config: EngineConfig, adapter_args: dict[str, Any]) -> LLMEngine:
    with large_imports():
        from vllm import EngineArgs, LLMEngine
        from vllm.platforms import current_platform

    if config.num_gpus and (current_platform.is_cpu() or current_platform.is_unspecified()):
        raise ConfigError(
            f"server.engine.num_gpus={config.num_gpus:g}, and vLLM finds no GPU on {socket.gethostname()}: "
            "install the packages of launch/install/pins-cuda.txt there (make install DEVICE=cuda) and the "
            "GPU's driver, or set server.engine.num_gpus=0."
        )
    arguments = engine_arguments(model_path, config) | adapter_args | without_own(config.options)
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"vLLM rejects the model {model_path!r} or a setting in server.engine: {error}"
        ) from error


def _adapter_args(adapters: Mapping[str, str]) -> dict[str, Any]:
    if not adapters:
        return {}
    from vllm.config.lora import MaxLoRARanks

    largest = max(adapter_config(folder)["r"] for folder in adapters.values())
    return {
        "enable_lora": True,
        "max_lora_rank": next((rank for rank in get_args(MaxLoRARanks) if rank >= largest), largest),
        # On a CPU vLLM 0.29 gives requests without an adapter the last slot's, where others of their batch
        # have one: so the last slot stays empty.
        "max_loras": len(adapters) + 1,
    }


def _load_adapters(engine: LLMEngine, adapters: Mapping[str, str]) -> dict[str | None, LoRARequest | None]:
    """Return what vLLM needs with a request, by the adapter that is to answer; ``None`` is the
    model."""
    from vllm.lora.request import LoRARequest

    requests: dict[str | None, LoRARequest | None] = {None: None}
    for number, (name, folder) in enumerate(adapters.items(), start=1):
        requests[name] = request = LoRARequest(name, number, folder)
        try:
            engine.add_lora(request)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(f"vLLM rejects the adapter {name!r} in {folder!r}: {error}") from error
    return requests


def _vllm_params(params: SamplingParams, room: int, in_pieces: bool) -> Any:
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    structure = params.structure and StructuredOutputsParams(structural_tag=params.structure)
    options = {} if params.options is None else asdict(params.options)
    return VLLMSamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=min(params.max_tokens or room, room),
        stop=list(params.stop) or None,
        seed=params.seed,
        logprobs=options.pop("top_logprobs", 0),  # the sampled token's always comes first
        flat_logprobs=True,  # lists of numbers, not an object for each token
        skip_clone=True,  # made for this request alone: the deep copy was 15 % of the thread in a profile
        detokenize=bool(params.stop),
        structured_outputs=structure or None,
        output_kind=RequestOutputKind.DELTA if in_pieces else RequestOutputKind.FINAL_ONLY,
        **options,
    )


def _token_output(sampled: Any, prompt_logprobs: Any, running: _Running) -> TokenOutput:
    versions = running.versions.take(len(sampled.token_ids))
    flat = sampled.logprobs
    logprobs: Sequence[float] = flat.logprobs if flat else ()
    top = running.vllm_params.logprobs > 0 and bool(flat)
    return TokenOutput(
        token_ids=tuple(sampled.token_ids),
        logprobs=tuple(logprobs[start] for start in flat.start_indices) if top else tuple(logprobs),
        finish_reason=sampled.finish_reason,
        policy_version=min(versions, default=running.versions.newest),
        token_versions=versions,
        top_logprobs=_by_token(flat) if top else (),
        prompt_logprobs=_by_token(prompt_logprobs) if prompt_logprobs else (),
    )


def _by_token(flat: Any) -> tuple[dict[int, float], ...]:
    """The log-probabilities of each position, without those of tokens that could not come."""
    places = zip(flat.start_indices, flat.end_indices, strict=True)
    pairs = list(zip(flat.token_ids, flat.logprobs, strict=True))
    return tuple(
        {token: logprob for token, logprob in pairs[start:end] if math.isfinite(logprob)}
        for start, end in places
    )


def _num_sampled(engine: LLMEngine, running: _Running) -> int:
    """Number of tokens that were sampled so far, also of a request that is delivered as one output.

    Without asynchronous scheduling every token that was computed is counted here before the step returns.
    """
    detokenizer = engine.output_processor.request_states[running.vllm_id].detokenizer
    assert detokenizer is not None
    return detokenizer.num_output_tokens()


def _cache_of(worker: Any) -> list[Any]:
    """The storages of all layers' keys and values, each once: layers may share one."""
    storages = (cache.untyped_storage() for cache in worker.model_runner.kv_caches)
    return list({storage._cdata: storage for storage in storages}.values())


def _free_cache(worker: Any) -> list[int]:
    """Give the cache back to the system; return the sizes that it had. Its tensors keep their shapes."""
    storages = _cache_of(worker)
    sizes = [storage.nbytes() for storage in storages]
    for storage in storages:
        storage.resize_(0)
    return sizes


def _allocate_cache(worker: Any, sizes: Sequence[Sequence[int]]) -> None:
    """Allocate the cache that ``_free_cache`` has freed, full of zeros as vLLM makes it.

    Args:
        sizes: of each worker's storages, by its rank.
    """
    for storage, size in zip(_cache_of(worker), sizes[worker.rank], strict=True):
        storage.resize_(size)
        storage.fill_(0)


def _load_into_worker(worker: Any, buckets: Sequence[WeightBucket]) -> set[str]:
    """Load all buckets into one vLLM worker; return the weights of the model that they lack, by vLLM's names.
    A worker in a process of its own could raise no error that keeps its class.

    vLLM packs linear weights when it loads a model, so they are loaded layer by layer through the same
    path. On a CPU a tied output layer owns a packed copy of the embedding which that path forgets:
    without the last loop it would silently keep the old weights.

    A quantized model has other weights than were published, so none counts as missing there.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    runner = worker.model_runner
    missing, tensors = {name for name, _ in runner.model.named_parameters()}, WholeTensors(buckets)
    initialize_layerwise_reload(runner.model)
    # Those of latent attention that vLLM makes of the loaded ones are gone by now.
    missing &= {name for name, _ in runner.model.named_parameters()}
    loaded = runner.model.load_weights(tensors.items())
    missing -= missing if loaded is None else loaded  # a model of somebody's own may not say
    missing |= {name for name, module in runner.model.named_modules() if _is_incomplete(module)}
    if missing and runner.model_config.quantization is None:
        return missing
    finalize_layerwise_reload(runner.model, runner.model_config)
    for module in runner.model.modules():
        if isinstance(module, VocabParallelEmbedding):
            module.quant_method.process_weights_after_loading(module)
    return set()


def _is_incomplete(module: Any) -> bool:
    """True for a linear layer that got a part of its weights: vLLM makes one of q, k and v, for example.

    Others may have padding, which nothing fills.
    """
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    if not isinstance(module, LinearBase):
        return False
    info = get_layerwise_info(module)
    return info.can_load() and info.load_numel < (info.load_numel_total or 0)
