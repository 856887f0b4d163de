"""Demonstrations as training samples: the tokens that the policy would have sampled to say them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from environments.data.conversation_file import ToolConversation, is_imitated
from environments.errors import DatasetError
from environments.types import Completion, Message, Step, Trajectory
from policies.chat import ChatRenderer
from policies.learning.samples import TrainingSample, training_samples
from policies.pictures import pictures_of
from policies.sampler import Turn

logger = logging.getLogger(__name__)


def demonstration_samples(
    renderer: ChatRenderer,
    conversations: Iterable[list[Message]],
    announce: Callable[[str], None] = logger.warning,
) -> list[TrainingSample]:
    """Make one sample per token sequence of the conversations; the mask covers what ``is_imitated``.

    What it says ends as the chat template ends its turns. Where the tokenizer has another end, ``announce``
    is called with a sentence that says what is trained.
    """
    samples: list[TrainingSample] = []
    end_ids: tuple[int, ...] = ()
    for index, messages in enumerate(conversations):
        end_ids = end_ids or end_of_turn(renderer, messages, announce)
        samples += training_samples(as_played(renderer, messages, f"demonstration {index}", end_ids))
    return samples


def end_of_turn(
    renderer: ChatRenderer, messages: Sequence[Message], announce: Callable[[str], None]
) -> tuple[int, ...]:
    """The tokens that end each message of the assistant."""
    end_ids = renderer.end_of_turn(messages)
    eos_id = renderer.eos_token_id
    turn, text = repr(renderer.text_of(end_ids)), repr(renderer.text_of([eos_id]))
    if not end_ids:
        announce(
            "The chat template ends the assistant's turns with no token, so training on texts learns the end "
            f"of a text, {text}, there."
        )
    elif end_ids[-1] != eos_id:
        ends = (
            "Sampling ends there too, since the model's configuration lists it."
            if renderer.is_end(end_ids[-1])
            else f"Sampling ends at {text} alone: set the tokenizer's eos_token, or list the token under "
            "eos_token_id in the model's generation_config.json."
        )
        announce(
            f"The chat template ends the assistant's turns with {turn}, and the tokenizer a text with "
            f"{text}: training on texts learns {turn}. {ends}"
        )
    return end_ids or (eos_id,)


def as_played(
    renderer: ChatRenderer, messages: list[Message], name: str, end_ids: tuple[int, ...], num_given: int = 0
) -> Trajectory:
    """The trajectory in which the policy sampled the assistant's messages: one path makes all samples.

    Args:
        name: of the conversation, for messages: "demonstration 3".
        end_ids: of ``end_of_turn``.
        num_given: first messages, which the policy did not sample, whoever wrote them.
    """
    from jinja2 import TemplateError

    trajectory = Trajectory(rollout_id=name.replace(" ", "-"))
    tools = messages.tools if isinstance(messages, ToolConversation) else None
    previous: Turn | None = None
    for position, message in enumerate(messages):
        if not is_imitated(message) or position < num_given:
            continue
        begun = messages[: position + 1]
        if unseen := renderer.template.unseen(begun, tools):
            raise DatasetError(
                f"The chat template shows no {unseen}, and {name} has some: let messages of a role that it "
                "shows hold their texts, as launch.recipes.demonstration.demonstrate writes calls."
            )
        try:
            if pictures_of(messages[:position]):
                raise ValueError("pictures are learned from where a policy plays, and from no text of others")
            prompt_ids = tuple(renderer.prompt_ids(messages[:position], previous, tools))
            text = answer_text(renderer, begun, tools, end_ids)
        except (TemplateError, TypeError, ValueError, LookupError) as error:
            raise DatasetError(
                f"The chat template does not take message {position} of {name}, or what stands before "
                f"({error}): {message!r:.200}. Change roles, order or content as it expects."
            ) from error
        completion_ids = (*renderer.encode(text), *end_ids)
        completion = Completion(
            prompt_ids=prompt_ids,
            completion_ids=completion_ids,
            logprobs=(0.0,) * len(completion_ids),
            text=text,
            finish_reason="stop",
        )
        previous = Turn(messages=messages[:position], completion=completion, tools=tools)
        trajectory.steps.append(Step(completion=completion))
    if not trajectory.steps:
        raise DatasetError(
            f"{name.capitalize()} has no message with role 'assistant': there is nothing to learn."
        )
    return trajectory


def answer_text(
    renderer: ChatRenderer,
    messages: list[Message],
    tools: list[dict[str, Any]] | None,
    end_ids: tuple[int, ...],
) -> str:
    """The text of the last message, as the policy would have sampled it, without its end.

    A message without calls and thoughts is its content as it stands; else it is what the chat template makes
    of it.

    Raises:
        ValueError: it has no text, or the template does not write it as an answer to what stands before.
    """
    message = messages[-1]
    if not (message.get("tool_calls") or message.get("reasoning_content")):
        if not isinstance(message.get("content"), str):
            raise ValueError("the answer has no text")
        return str(message["content"])
    prompt = renderer.template.render(messages[:-1], tools)
    whole = renderer.template.render(messages, tools, for_an_answer=False)
    text, end, _ = whole.removeprefix(prompt).rpartition(renderer.text_of(end_ids))
    if not whole.startswith(prompt) or not end:
        raise ValueError("its calls and thoughts are not written as an answer: write them into the content")
    return text


def check_demonstrations(renderer: ChatRenderer, conversations: Iterable[list[Message]]) -> None:
    """Make the sample of one conversation of each shape: its roles, calls and tools.

    Raises:
        DatasetError: the chat template does not take it, or drops a part of it.
    """
    shapes = set()
    for index, messages in enumerate(conversations):
        parts = [(each["role"], bool(each.get("content")), bool(each.get("tool_calls"))) for each in messages]
        shape = (type(messages), *parts)
        if shape not in shapes:
            shapes.add(shape)
            as_played(renderer, messages, f"demonstration {index}", (renderer.eos_token_id,))
