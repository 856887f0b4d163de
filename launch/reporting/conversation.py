"""A trajectory as text for the terminal: its conversation, its rewards and its end."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from environments.types import Message, Trajectory
from launch.reporting.inspect_messages import content_text

INDENT = "  "
MAX_LINES = 12
"""Lines of one message; the middle of a longer one is left out."""
MAX_WIDTH = 160


def conversation(trajectory: Trajectory) -> str:
    """The messages of the last step, the reward and the end; every line is indented."""
    lines = [_ending(trajectory)]
    for message in trajectory.steps[-1].chat_completions if trajectory.steps else ():
        role = str(message["role"])
        first, *rest = _shortened([*_content(message)])
        lines += [f"{role:>9} | {first}", *(f"{'':>9} | {line}" for line in rest)]
    return "\n".join(INDENT + line for line in lines)


def best_and_worst(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The best of the trajectories and the worst one; one alone is both."""
    best, *others = sorted(trajectories, key=lambda each: -each.reward)
    return [best, *others[-1:]]


def _ending(trajectory: Trajectory) -> str:
    turns = f"{len(trajectory.steps)} turn{'' if len(trajectory.steps) == 1 else 's'}"
    judged = ""
    if trajectory.is_correct is not None:
        judged = f", {'correct' if trajectory.is_correct else 'wrong'} by {trajectory.judged_by}"
    error = f"; {trajectory.error.splitlines()[0]}" if trajectory.error else ""
    return f"reward {trajectory.reward:g}, {turns}, ended by {trajectory.termination_reason}{judged}{error}"


def _content(message: Message) -> Iterator[str]:
    content = message.get("content") or ""
    text = content if isinstance(content, str) else content_text(content)
    calls = [json.dumps(call.get("function", call)) for call in message.get("tool_calls") or ()]
    yield from [*text.splitlines(), *calls] or [""]


def _shortened(lines: Sequence[str]) -> list[str]:
    # A model may say what a terminal obeys.
    lines = ["".join(c if c.isprintable() else "\ufffd" for c in line) for line in lines]
    cut = [line if len(line) <= MAX_WIDTH else f"{line[: MAX_WIDTH - 4]} ..." for line in lines]
    if len(cut) <= MAX_LINES:
        return cut
    half = MAX_LINES // 2
    return [*cut[:half], f"[... {len(cut) - 2 * half} lines ...]", *cut[-half:]]
