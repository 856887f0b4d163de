"""A client's next message in the episode's agent and environment, in this process, with scripted replies."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import FollowUp, RolloutLimits, RolloutRequest, run_rollout
from environments import ToolEnvironment, math_reward_fn
from environments.base import BaseEnv
from environments.errors import EnvironmentFailure
from environments.types import Completion, TerminationReason, Trajectory
from policies import GameAgent, ToolAgent
from policies.agents.base import BaseAgent
from policies.sampler import SampleRequest, ScriptedSampler

TASK = {"question": "What is 12+34?", "ground_truth": "46"}
FIRST = RolloutRequest(rollout_id="1/0", group_id="1", task=TASK)
NEXT = RolloutRequest(
    rollout_id="2/0", group_id="2", task={}, follow_up=FollowUp(after="1/0", message="And twice that?")
)


def play(
    agent: BaseAgent, env: BaseEnv, request: RolloutRequest, replies: list[str], **limits: int
) -> tuple[Trajectory, list[SampleRequest]]:
    scripted, requests = ScriptedSampler(replies), []

    def sample(request: SampleRequest) -> Completion:
        requests.append(request)
        return asyncio.run(scripted.sample(request))

    return run_rollout(agent, env, sample, request, RolloutLimits(**limits), Journal()), requests


def call(expression: str) -> str:
    tool_call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    return f"<tool_call>\n{tool_call}\n</tool_call>"


def test_next_message_goes_on_in_the_same_agent_and_environment() -> None:
    agent = ToolAgent(tools=["calculator"])
    env = ToolEnvironment(FIRST.task, tools=["calculator"], reward_fn=math_reward_fn, max_steps=2)
    replies = [call("12+34"), "\\boxed{46}", call("2*46"), "\\boxed{92}"]
    play(agent, env, FIRST, replies)
    said = agent.chat_completions
    trajectory, requests = play(agent, env, NEXT, replies)
    assert requests[0].messages == [*said, {"role": "user", "content": "And twice that?"}]
    assert [step.model_response for step in trajectory.steps] == replies[2:]
    assert requests[1].messages[-1]["content"] == "92"
    assert (trajectory.rollout_id, trajectory.termination_reason) == ("2/0", TerminationReason.ENV_DONE)
    assert trajectory.metrics == {"called": 1.0, "success_when_called": 0.0}  # of this message alone


class TalkEnv(BaseEnv):
    """Every answer ends an episode."""

    def __init__(self, returned: Any = None) -> None:
        self._returned = returned

    def reset(self) -> tuple[dict[str, str], dict[str, Any]]:
        return {"question": "Begin."}, {}

    def follow_up(self, message: str) -> Any:
        return self._returned or (message, {})

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        return "", 1.0, True, {}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> TalkEnv:
        return TalkEnv()


def test_message_has_the_whole_budget_in_any_conversation() -> None:
    agent, env = GameAgent(), TalkEnv()
    limits = {"max_prompt_tokens": 60, "max_response_tokens": 30}
    lengths = []
    for request in (FIRST, *[NEXT] * 5):
        trajectory, _ = play(agent, env, request, ["x" * 29] * 9, **limits)
        assert trajectory.termination_reason is TerminationReason.ENV_DONE
        (completion,) = trajectory.completions
        lengths.append(completion.num_prompt_tokens)
        assert completion.num_completion_tokens == 30
    assert lengths[-1] > 60 + 30


def test_message_over_the_prompt_limit_does_not_begin() -> None:
    agent, env = GameAgent(), TalkEnv()
    play(agent, env, FIRST, ["yes"], max_prompt_tokens=60)
    long = RolloutRequest(
        rollout_id="2/0", group_id="2", task={}, follow_up=FollowUp(after="1/0", message="x" * 60)
    )
    trajectory, _ = play(agent, env, long, ["no"], max_prompt_tokens=60)
    assert trajectory.termination_reason is TerminationReason.PROMPT_TOO_LONG
    assert trajectory.steps == [] and not trajectory.has_answer


@pytest.mark.parametrize(
    ("returned", "words"),
    [("And now?", "follow_up() returned"), (("And now?", "no dict"), "follow_up()")],
)
def test_nonsense_of_follow_up_is_named_with_the_remedy(returned: Any, words: str) -> None:
    agent, env = GameAgent(), TalkEnv(returned)
    play(agent, env, FIRST, ["yes"])
    with pytest.raises(EnvironmentFailure) as raised:
        play(agent, env, NEXT, ["no"])
    assert words in str(raised.value) and "TalkEnv" in str(raised.value)
