"""A sampler of somebody's own, in one file: ``engine_name="own_sampler:Parrot"``."""

from __future__ import annotations

from environments.types import Completion
from policies.sampler import Sampler, SampleRequest


class Parrot(Sampler):
    """Repeats the last message, ``times`` times. ``logprob`` is that of each byte."""

    reads_tool_calls = True

    def __init__(self, times: int, logprob: float = 0.0) -> None:
        self._times, self._logprob = times, logprob

    async def sample(self, request: SampleRequest) -> Completion:
        text = request.messages[-1]["content"] * self._times
        token_ids = tuple(text.encode())
        return Completion(
            prompt_ids=(1,),
            completion_ids=token_ids,
            logprobs=(self._logprob,) * len(token_ids),
            text=text,
            finish_reason="stop",
        )
