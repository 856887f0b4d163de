"""The actor between the rollout actors and a server: it renders, batches and decodes for all of them.

Rollout actors stay light because everything that needs a tokenizer or Serve lives here, and one Serve
call carries what arrives within a few milliseconds: a call per request would cost the engine a third of
its throughput.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import ray

from environments.errors import SamplerError
from environments.types import Completion
from policies.sampler import Sampler, SampleRequest, TokenOutput, TokenRequest

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

BATCH_SECONDS = 0.01
MAX_BATCH = 32
MAX_ATTEMPTS = 4


@ray.remote(num_cpus=0, max_restarts=-1)
class SamplerActor:
    """Hosts one sampler for all rollout actors of a fleet.

    Args:
        make_sampler: called in the actor's process, so that only this process imports what it needs.
    """

    def __init__(self, make_sampler: Callable[[], Sampler]) -> None:
        self._sampler = make_sampler()

    async def open(self) -> None:
        """Connect. Raises ``SamplerError`` if there is nothing to sample."""
        await self._sampler.open()

    async def sample(self, request: SampleRequest) -> Completion:
        """One completion. Raises ``AgentError``, ``PromptTooLongError`` or ``SamplerError``."""
        await self._sampler.open()  # where Ray has started this actor anew, nobody else does
        return await self._sampler.sample(request)


class ServeSampler:
    """Samples the policy server by its Serve handle.

    Args:
        app_name: the Serve application.
        model_path: folder of the tokenizer and its chat template.
        chat_template_kwargs: options of the template, such as ``{"enable_thinking": False}``.
    """

    def __init__(
        self, app_name: str, model_path: str, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> None:
        from policies.chat import ChatRenderer, load_tokenizer

        self._app_name = app_name
        self._handle: DeploymentHandle | None = None
        self._renderer = ChatRenderer(load_tokenizer(model_path), chat_template_kwargs)
        self._waiting: list[_Pending] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Get the application's handle, once. Raises ``SamplerError`` if there is no such application."""
        if self._handle is not None:
            return
        from ray import serve
        from ray.serve.exceptions import RayServeException

        try:
            handle = serve.get_app_handle(self._app_name)
        except RayServeException as error:
            raise SamplerError(f"No policy server is called {self._app_name!r} here: {error}") from error
        self._handle = handle.options(method_name="sample", stream=True)

    async def sample(self, request: SampleRequest) -> Completion:
        """Render, sample, decode. Raises ``AgentError``, ``PromptTooLongError`` or ``SamplerError``."""
        prompt_ids = self._renderer.request_ids(request)
        params = request.params_within(len(prompt_ids))
        output = await self.sample_tokens(TokenRequest(prompt_ids, params, request.min_version))
        return Completion(
            prompt_ids=prompt_ids,
            completion_ids=output.token_ids,
            logprobs=output.logprobs,
            text=self._renderer.decode(output.token_ids),
            finish_reason=str(output.finish_reason),
            policy_version=output.policy_version,
        )

    async def sample_tokens(self, request: TokenRequest) -> TokenOutput:
        """Token ids in, token ids out; shares a Serve call with the requests that arrive with it."""
        pending = _Pending(request, asyncio.get_running_loop().create_future())
        self._waiting.append(pending)
        if len(self._waiting) == 1:
            self._start(self._flush_soon())
        elif len(self._waiting) == MAX_BATCH:
            self._flush()
        return await pending.answer

    async def _flush_soon(self) -> None:
        await asyncio.sleep(BATCH_SECONDS)
        self._flush()

    def _flush(self) -> None:
        batch, self._waiting = self._waiting, []
        if batch:
            self._start(self._call(batch))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._calls.add(task)  # asyncio itself keeps no reference to a running task
        task.add_done_callback(self._calls.discard)

    async def _call(self, batch: list[_Pending]) -> None:
        """One Serve call. What a replica that dies leaves unanswered is asked of another one."""
        assert self._handle is not None, "open() comes first"
        for attempt in range(MAX_ATTEMPTS):
            try:
                async for lot in self._handle.remote([pending.request for pending in batch]):
                    for index, answer in lot:
                        batch[index].resolve(answer)
                return
            except Exception as error:  # noqa: BLE001  # whatever Serve raises reaches those who wait
                batch = [pending for pending in batch if not pending.answer.done()]
                if attempt == MAX_ATTEMPTS - 1:
                    for pending in batch:
                        pending.resolve(
                            SamplerError(f"The policy server failed {MAX_ATTEMPTS} times: {error}")
                        )
                await asyncio.sleep(2**attempt)


class _Pending:
    """A request and the future that its caller waits for."""

    def __init__(self, request: TokenRequest, answer: asyncio.Future[TokenOutput]) -> None:
        self.request = request
        self.answer = answer

    def resolve(self, answer: TokenOutput | BaseException) -> None:
        if self.answer.done():
            return
        if isinstance(answer, BaseException):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)
