"""Data to learn from in recordings with feedback: groups with rewards, demonstrations, and preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from environments.data.recordings import Recording
from environments.types import Message, Trajectory, TrajectoryGroup

Prompt = tuple[str, tuple[int, ...], tuple[str, ...]]
"""The agent or policy, whichever its version was, and the tokens and pictures that it was given."""


def judged_groups(recordings: Sequence[Recording]) -> list[TrajectoryGroup]:
    """Groups of the answers with feedback, with the score as their reward, to learn from off-policy.

    Answers to the same prompt, token for token, are compared with each other. Each has the tokens,
    log-probabilities and versions with which it was sampled.
    """
    groups = []
    for number, members in enumerate(_by_prompt(recordings)):
        group_id, task = f"{number:08d}", members[0].trajectory.task
        rollouts = tuple(_rewarded(each, f"{group_id}/{index:04d}") for index, each in enumerate(members))
        groups.append(TrajectoryGroup(group_id=group_id, task=task, trajectories=rollouts))
    return groups


def liked_conversations(recordings: Sequence[Recording]) -> list[list[Message]]:
    """Conversations up to each answer with a score above 0, as demonstrations of that answer.

    The texts of the assistant before it have OpenAI's ``weight`` of 0: a client may have disliked them, or
    written them. Left out are answers that messages do not give token for token: with calls beside their
    text, with pictures or a client's tools in the prompt, or cut by a limit, as messages have an end.
    """
    liked = (each.trajectory for each in _exact(recordings) if each.feedback.score > 0)
    return list(filter(None, map(_demonstration, liked)))


def _demonstration(trajectory: Trajectory) -> list[Message]:
    """The last conversation of a trajectory; empty where its messages are other tokens."""
    task, messages = trajectory.task, trajectory.steps[-1].chat_completions
    texts = [each for each in messages if each["role"] == "assistant"]
    prompts = (step.chat_completions[:-1] for step in trajectory.steps if step.completion is not None)
    given = next((each for each in prompts if messages[: len(each)] == each), None)
    if (
        given is None
        or (isinstance(task, dict) and task.get("tools"))
        or any(turn.pictures or turn.finish_reason == "length" for turn in trajectory.completions)
        or not all(isinstance(each.get("content"), str) and not each.get("tool_calls") for each in texts)
    ):
        return []
    shown = [{**each, "weight": 0} if each["role"] == "assistant" else each for each in given]
    return shown + messages[len(given) :]


def preferred_answers(recordings: Sequence[Recording]) -> list[tuple[Trajectory, Trajectory]]:
    """Pairs of answers to the same prompt, the better one first.

    The best is paired with the worst, the second best with the second worst: no answer stands in two pairs.
    """
    pairs = []
    for members in _by_prompt(recordings):
        ranked = sorted(members, key=lambda each: -each.feedback.score)
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            is_better = better.feedback.score > worse.feedback.score
            if is_better and _sampled(better.trajectory) != _sampled(worse.trajectory):
                pairs.append((better.trajectory, worse.trajectory))
    return pairs


def _exact(recordings: Sequence[Recording]) -> list[Recording]:
    """The recordings whose tokens are the engine's."""
    return [
        each
        for each in recordings
        if each.trajectory.completions and not any(turn.retokenized for turn in each.trajectory.completions)
    ]


def _by_prompt(recordings: Sequence[Recording]) -> list[list[Recording]]:
    groups: dict[Prompt, list[Recording]] = {}
    for each in _exact(recordings):
        first = each.trajectory.completions[0]
        prompt = each.answer.model.partition("@")[0], tuple(first.prompt_ids), first.pictures
        groups.setdefault(prompt, []).append(each)
    return list(groups.values())


def _sampled(trajectory: Trajectory) -> list[tuple[int, ...]]:
    """The tokens of an answer."""
    return [tuple(each.completion_ids) for each in trajectory.completions]


def _rewarded(judged: Recording, rollout_id: str) -> Trajectory:
    """The trajectory with the score as its reward, which its last step gets."""
    trajectory, score = judged.trajectory, judged.feedback.score
    *earlier, last = (replace(step, reward=0.0, mc_return=score) for step in trajectory.steps)
    return replace(
        trajectory,
        steps=[*earlier, replace(last, reward=score)],
        reward=score,
        is_correct=score > 0,
        by_reward_function=False,
        rollout_id=rollout_id,
    )
