"""Data to learn from in recordings with feedback: groups with rewards, demonstrations, and preferences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from environments.data.recordings import RecordedAnswer, Recording, earlier_answers
from environments.types import Message, Trajectory, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class _Judged:
    """A recording that has feedback."""

    answer: RecordedAnswer
    trajectory: Trajectory
    score: float

    @property
    def prompt(self) -> tuple[str, tuple[int, ...]]:
        """The agent or policy, whichever its version was, and the tokens that it was given."""
        return self.answer.model.partition("@")[0], tuple(self.trajectory.completions[0].prompt_ids)

    @property
    def sampled(self) -> list[tuple[int, ...]]:
        """The tokens of the answer."""
        return [tuple(each.completion_ids) for each in self.trajectory.completions]

    @property
    def messages(self) -> list[Message]:
        """The conversation with the whole answer."""
        return self.trajectory.steps[-1].chat_completions

    @property
    def is_text(self) -> bool:
        """True if the messages alone give the tokens that the model has read and sampled."""
        task = self.trajectory.task
        answers = [each for each in self.messages if each["role"] == "assistant"]
        return not (isinstance(task, dict) and task.get("tools")) and all(
            isinstance(each.get("content"), str) and not each.get("tool_calls") for each in answers
        )


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
    """Conversations whose last answer has a score above 0, as demonstrations.

    All answers of a demonstration are learned from. So a conversation is left out if an answer in it was
    disliked, and one that another goes on from is a part of that one. Answers whose calls stand beside their
    text are left out, and those to prompts that a client's tools are in: as texts they are not what was said.
    """
    scores = {each.answer.answer_id: each.feedback.score for each in recordings if each.feedback is not None}
    recorded = {each.answer.answer_id: each.answer for each in recordings}
    liked: dict[str, list[Message]] = {}
    for each in _judged(recordings):
        earlier = list(earlier_answers(each.answer, recorded))
        if each.score > 0 and all(scores.get(one, 1.0) > 0 for one in earlier) and each.is_text:
            for one in earlier:
                liked.pop(one, None)
            liked[each.answer.answer_id] = each.messages
    return list(liked.values())


def preferred_answers(recordings: Sequence[Recording]) -> list[tuple[Trajectory, Trajectory]]:
    """Pairs of answers to the same prompt, the better one first.

    The best is paired with the worst, the second best with the second worst: no answer stands in two pairs.
    """
    pairs = []
    for members in _by_prompt(recordings):
        ranked = sorted(members, key=lambda each: -each.score)
        for better, worse in zip(ranked[: len(ranked) // 2], reversed(ranked), strict=False):
            if better.score > worse.score and better.sampled != worse.sampled:
                pairs.append((better.trajectory, worse.trajectory))
    return pairs


def _judged(recordings: Sequence[Recording]) -> list[_Judged]:
    """The recordings with feedback whose tokens are the engine's."""
    return [
        _Judged(each.answer, each.trajectory, each.feedback.score)
        for each in recordings
        if each.feedback is not None
        and each.trajectory.completions
        and not any(turn.retokenized for turn in each.trajectory.completions)
    ]


def _by_prompt(recordings: Sequence[Recording]) -> list[list[_Judged]]:
    groups: dict[tuple[str, tuple[int, ...]], list[_Judged]] = {}
    for each in _judged(recordings):
        groups.setdefault(each.prompt, []).append(each)
    return list(groups.values())


def _rewarded(judged: _Judged, rollout_id: str) -> Trajectory:
    """The trajectory with the score as its reward, which its last step gets."""
    trajectory, score = judged.trajectory, judged.score
    *earlier, last = (replace(step, reward=0.0, mc_return=score) for step in trajectory.steps)
    return replace(
        trajectory,
        steps=[*earlier, replace(last, reward=score)],
        reward=score,
        is_correct=score > 0,
        by_reward_function=False,
        rollout_id=rollout_id,
    )
