"""Requests of programs as calls of a session: the run decides how it samples, the program what it asks."""

from __future__ import annotations

from collections.abc import Sequence

from policies.gateway.session import PolicyCall
from policies.model_api.errors import InvalidRequestError
from policies.model_api.protocol import NO_EFFECT, ChatRequest
from policies.sampler import SamplingParams

OF_THE_RUN = ("temperature", "top_p", "top_k", "min_p", "seed", "reasoning_effort")
"""Fields that programs always send, and that training sets for all of a run."""
REFUSED = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "structured_outputs", "continue_final_message", "policy_version", "logprobs"),
    "chat_template_kwargs",
)
"""Fields that would change the tokens, or ask for more than a message."""


def policy_call(body: ChatRequest, dropped: Sequence[str] = ()) -> PolicyCall:
    """The call that a request makes.

    Args:
        dropped: fields that its dialect has left out, since they change nothing.

    Raises:
        InvalidRequestError: a field asks for what a rollout cannot do.
        ConfigError: a value cannot be sampled with.
    """
    for name in REFUSED:
        if getattr(body, name) not in (None, *NO_EFFECT.get(name, ())):
            raise InvalidRequestError(f"A rollout takes no {name}: leave it out.", param=name)
    form = body.response_format.type if body.response_format else "text"
    if form == "json_schema":  # which nothing shows to the model
        raise InvalidRequestError(
            f"A rollout leaves the form of an answer to the model: leave response_format {form!r} out, and "
            "say the form in a message.",
            param="response_format",
        )
    overruled = [name for name in OF_THE_RUN if getattr(body, name) is not None]
    # The model is shown the tools, and told of JSON in a message: whether it writes them is learnt.
    if body.tool_choice not in (None, "auto", "none"):
        overruled.append("tool_choice")
    if form != "text":
        overruled.append("response_format")
    # Values that cannot be sampled with are an error of the call here, and of the rollout later.
    SamplingParams(max_tokens=body.max_tokens, stop=body.stops())
    sampling = {"max_tokens": body.max_tokens, "stop": body.stops() or None}
    return PolicyCall(
        messages=[message.for_template for message in body.messages],
        tools=None if body.tool_choice == "none" else body.tools or None,
        sampling={name: value for name, value in sampling.items() if value is not None},
        takes_one_tool_call=body.parallel_tool_calls is False,
        overruled=tuple(overruled),
        dropped=tuple(dropped),
    )
