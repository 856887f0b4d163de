"""Demonstrations as training samples: the tokens that the policy would have sampled to say them."""

from __future__ import annotations

from collections.abc import Iterable

from environments.errors import DatasetError
from environments.types import Completion, Message, Step, Trajectory
from policies.chat import ChatRenderer
from policies.learning.samples import TrainingSample, training_samples
from policies.sampler import Turn


def demonstration_samples(
    renderer: ChatRenderer, conversations: Iterable[list[Message]]
) -> list[TrainingSample]:
    """One sample per token sequence of the conversations; the mask covers what the assistant says."""
    return [
        sample
        for index, messages in enumerate(conversations)
        for sample in training_samples(_as_played(renderer, messages, index))
    ]


def _as_played(renderer: ChatRenderer, messages: list[Message], index: int) -> Trajectory:
    """The trajectory in which the policy sampled the assistant's messages: one path makes all samples."""
    trajectory = Trajectory(rollout_id=f"demonstration-{index}")
    previous: Turn | None = None
    for position, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        if not isinstance(message.get("content"), str) or message.get("tool_calls"):
            raise DatasetError(
                f"Message {position} of demonstration {index} has tool_calls or a content that is no text: "
                f"{message!r:.200}. Write its calls into the content, as the model would say them, which "
                "launch.recipes.demonstration.demonstrate does."
            )
        prompt_ids = tuple(renderer.prompt_ids(messages[:position], previous))
        completion_ids = (*renderer.encode(message["content"]), renderer.eos_token_id)
        completion = Completion(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=(0.0,) * len(completion_ids),
            text=message["content"],
            finish_reason="stop",
        )
        previous = Turn(messages=messages[:position], completion=completion)
        trajectory.steps.append(Step(completion=completion))
    if not trajectory.steps:
        raise DatasetError(
            f"Demonstration {index} has no message with role 'assistant': there is nothing to learn."
        )
    return trajectory
