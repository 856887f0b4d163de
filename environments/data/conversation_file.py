"""Conversations to imitate, read from a file: rows of messages, or of a prompt and its completion."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from environments.data.dataset_files import Row, plain_rows, read_rows
from environments.data.task_columns import ANSWERS, EMPTY, QUESTIONS, column_of, is_conversation
from environments.data.trajectory_file import is_trajectory_file, read_trajectories
from environments.errors import DatasetError
from environments.types import Message

CONVERSATIONS = ("messages", "conversations", "conversation", "chat", "dialogue")
COMPLETIONS = ("completion", "response", "output", *ANSWERS)
PROMPTS = tuple(name for name in QUESTIONS if name not in CONVERSATIONS)
TOOLS = ("tools",)
ROLES = ("system", "developer", "user", "assistant", "tool")
SHAREGPT = {"human": "user", "gpt": "assistant"}
"""Roles of messages in the form ``{"from": "human", "value": ...}``, which are others in OpenAI's."""


class ToolConversation(list[Message]):
    """A conversation, and the tools that its model may call, as OpenAI's schemas."""

    def __init__(self, messages: Iterable[Message], tools: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(messages)
        self.tools = [dict(each) for each in tools]


def read_conversations(path: Path) -> tuple[list[list[Message]], str]:
    """Read the conversations of a ``.json``, ``.jsonl``, ``.csv`` or ``.parquet`` file, or those of an
    evaluation's trajectories that have succeeded: so the policy that was evaluated is imitated.

    The first of ``CONVERSATIONS`` that the first row has is taken for all rows, also as JSON text; else the
    first of ``PROMPTS``, a text or messages, with the first of ``COMPLETIONS``. Alpaca's ``input`` stands
    below its ``instruction``. ``tools`` are those of a row. An answer with OpenAI's ``weight`` of 0
    is shown, and not imitated.

    Returns:
        The conversations, and a sentence about what was taken.

    Raises:
        DatasetError: names the row that cannot be imitated, and the remedy.
    """
    if path.is_file() and is_trajectory_file(path):
        return _successes(path)
    rows = list(plain_rows(read_rows(path)))
    if not rows:
        raise DatasetError(f"{path} has no rows: there is nothing to imitate.")
    columns = list(rows[0])
    whole, tools = column_of(columns, CONVERSATIONS), column_of(columns, TOOLS)
    prompt, completion = column_of(columns, PROMPTS), column_of(columns, COMPLETIONS)
    beside = f", tools from {tools!r}" if tools else ""
    if whole is not None:
        found = [row.get(whole) for row in rows]
        taken = f"the messages from {whole!r}"
    elif prompt is not None and completion is not None:
        below = column_of(columns, ("input",)) if prompt.lower() == "instruction" else None
        found = [[*_prompt_of(row, prompt, below), *_completion_of(row.get(completion))] for row in rows]
        taken = f"the prompt from {prompt!r}, the completion from {completion!r}"
        beside += f", what stands below the prompt from {below!r}" if below else ""
    else:
        raise DatasetError(
            f"{path} has no conversations: its columns are {', '.join(columns)}. Name the column of messages "
            f"as one of {', '.join(CONVERSATIONS)}, or that of a prompt as one of {', '.join(PROMPTS)} and "
            f"that of its completion as one of {', '.join(COMPLETIONS)}."
        )
    conversations = [
        _checked(messages, row.get(tools) if tools else None, f"{path}, row {index}")
        for index, (row, messages) in enumerate(zip(rows, found, strict=True))
    ]
    return conversations, f"{path}: {len(rows)} conversations, {taken}{beside}."


def is_imitated(message: Message) -> bool:
    """True for a message of the assistant, unless it has OpenAI's ``weight`` of 0."""
    return message["role"] == "assistant" and message.get("weight") != 0


def _successes(path: Path) -> tuple[list[list[Message]], str]:
    """The conversation of the last step that is not left out, of each trajectory that has succeeded.

    Raises:
        DatasetError: there is none.
    """
    trajectories = read_trajectories(path)
    successes = [each for each in trajectories if each.succeeded]
    learned = [[step for step in each.steps if not step.is_left_out] for each in successes]
    ends = [steps[-1].chat_completions for steps in learned if steps]
    if not ends:
        raise DatasetError(f"{path} has {len(trajectories)} trajectories, and none has succeeded.")
    found = [_checked(list(each), None, f"{path}, success {number}") for number, each in enumerate(ends)]
    return found, f"{path}: the {len(found)} of {len(trajectories)} trajectories that have succeeded."


def _prompt_of(row: Row, prompt: str, below: str | None) -> list[Any]:
    text = _parsed(row.get(prompt))
    if is_conversation(text) and text:
        return list(text)
    parts = [str(row.get(name)) for name in (prompt, below) if name and row.get(name) not in EMPTY]
    return [{"role": "user", "content": "\n\n".join(parts) or None}]  # None is refused below


def _completion_of(completion: Any) -> list[Any]:
    messages = _parsed(completion)
    if is_conversation(messages):
        return list(messages)
    return [{"role": "assistant", "content": completion}]


def _parsed(value: Any) -> Any:
    """A list that stands as JSON text, as CSV files and many data sets have it; any other value as it is."""
    if not (isinstance(value, str) and value.lstrip().startswith(("[{", "[]"))):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _checked(given: Any, tools: Any, place: str) -> list[Message]:
    """The conversation of a row. Raises ``DatasetError`` where it cannot be imitated."""
    messages = _parsed(given)
    if not (isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)):
        raise DatasetError(f"{place} has no list of messages: {given!r:.100}. Repair it, or leave it out.")
    messages = [_message(each, f"{place}: message {number}") for number, each in enumerate(messages)]
    if not any(map(is_imitated, messages)):
        raise DatasetError(
            f"{place} has no message of the role 'assistant' without 'weight': 0, so there is nothing to "
            "imitate: add its answer, or leave the row out."
        )
    offered = _parsed(tools)
    if offered in EMPTY:
        return messages
    if not (isinstance(offered, list) and all(isinstance(each, dict) for each in offered)):
        raise DatasetError(f"{place} has tools that are no list of schemas: {tools!r:.100}. Repair them.")
    return ToolConversation(messages, offered)


def _message(given: Row, place: str) -> Message:
    message = given
    if "role" not in given and "from" in given:
        role = SHAREGPT.get(str(given["from"]), given["from"])
        message = {"role": role, "content": given.get("value")}
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role not in ROLES:
        raise DatasetError(f"{place} has the role {role!r}: write one of {', '.join(ROLES)}.")
    if isinstance(content, list):
        texts: list[Any] = [part.get("text") if isinstance(part, dict) else None for part in content]
        content = "\n".join(texts) if all(isinstance(text, str) for text in texts) else content
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or (role == "assistant" and not (content or calls)):
        raise DatasetError(f"{place}, of the role {role!r}, has the content {content!r:.90}: write a text.")
    for call in calls if isinstance(calls, list) else filter(None, [calls]):
        _check_call(call, place)
    # A row of Arrow has null where another one has calls.
    return {name: value for name, value in message.items() if value is not None} | {"content": content}


def _check_call(call: Any, place: str) -> None:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    try:
        known = isinstance(json.loads(arguments) if isinstance(arguments, str) else arguments, dict)
    except ValueError:
        known = False
    if function is None or not known or not function.get("name"):
        raise DatasetError(
            f"{place} has the tool call {call!r:.200}: write it as {{'type': 'function', 'function': "
            "{'name': ..., 'arguments': ...}}, with the arguments as an object or its JSON text."
        )
