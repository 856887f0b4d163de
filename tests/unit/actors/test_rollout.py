"""One rollout, in this process, with scripted replies."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import numpy as np
import pytest

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest, TokenBudget, failed, run_rollout
from environments.base import BaseEnv, SingleTurnEnvironment
from environments.errors import AgentError, EnvironmentFailure, SamplerError
from environments.rewards.base import RewardOutput
from environments.types import Action, Completion, Step, TerminationReason, Trajectory
from policies import GameAgent
from policies.sampler import SampleRequest, SamplingParams, ScriptedSampler

ORDER = RolloutRequest(rollout_id="7/2", group_id="7", task={"level": 1}, seed=100, min_version=3)


class CountdownEnv(BaseEnv):
    """Gives 0.5 per step and is done after ``size`` steps. ``raises`` names a method that fails."""

    def __init__(self, size: int = 3, raises: str = "") -> None:
        self.size, self.raises = size, raises

    def reset(self) -> tuple[dict, dict]:
        self._fail("reset")
        self.left = self.size
        return {"question": "Begin."}, {}

    def step(self, action: Any) -> tuple[Any, float, bool, dict]:
        self._fail("step")
        self.left -= 1
        return f"{self.left} left", 0.5, self.left == 0, {"seen": action}

    def _fail(self, method: str) -> None:
        if self.raises == method:
            raise RuntimeError(f"no {method} today")

    @staticmethod
    def from_dict(info: dict) -> CountdownEnv:
        return CountdownEnv()


def play(
    env: BaseEnv, replies: list[str], agent: GameAgent | None = None, **limits: int
) -> tuple[Trajectory, list[SampleRequest]]:
    scripted, requests = ScriptedSampler(replies), []

    def sample(request: SampleRequest) -> Completion:
        requests.append(request)
        return asyncio.run(scripted.sample(request))

    return run_rollout(agent or GameAgent(), env, sample, ORDER, RolloutLimits(**limits), Journal()), requests


def test_finished_game_is_env_done_with_everything_filled_in() -> None:
    trajectory, _ = play(CountdownEnv(2), ["one", "two"])
    assert trajectory.termination_reason is TerminationReason.ENV_DONE
    assert (trajectory.rollout_id, trajectory.task, trajectory.reward) == ("7/2", {"level": 1}, 1.0)
    assert [(step.reward, step.done, step.action) for step in trajectory.steps] == [
        (0.5, False, "one"),
        (0.5, True, "two"),
    ]
    assert [step.info["seen"] for step in trajectory.steps] == ["one", "two"]
    assert [step.completion.text for step in trajectory.steps if step.completion] == ["one", "two"]
    assert trajectory.error is None


def test_step_limit_ends_a_rollout() -> None:
    trajectory, requests = play(CountdownEnv(9), ["a", "b", "c"], max_steps=2)
    assert trajectory.termination_reason is TerminationReason.MAX_STEPS
    assert len(trajectory.steps) == len(requests) == 2


def test_first_prompt_over_its_limit_ends_a_rollout_at_once() -> None:
    trajectory, _ = play(CountdownEnv(), ["a"], max_prompt_tokens=5)
    assert trajectory.termination_reason is TerminationReason.PROMPT_TOO_LONG
    assert trajectory.steps == []
    assert trajectory.reward == 0
    assert "max_prompt_tokens=5" in str(trajectory.error)


def test_later_prompts_may_grow_over_the_limit_of_the_first() -> None:
    first = len("user\nBegin.") + 1 + len("assistant\n")
    trajectory, _ = play(CountdownEnv(3), ["a", "b", "c"], max_prompt_tokens=first, max_response_tokens=500)
    assert trajectory.termination_reason is TerminationReason.ENV_DONE


def test_observation_that_overflows_the_budget_ends_a_rollout() -> None:
    class Talkative(CountdownEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, dict]:
            return "x" * 1000, *super().step(action)[1:]

    trajectory, requests = play(Talkative(), ["a", "b"], max_response_tokens=100)
    assert trajectory.termination_reason is TerminationReason.PROMPT_TOO_LONG
    assert (len(trajectory.steps), len(requests)) == (1, 2)
    assert trajectory.reward == 0.5


def test_spent_budget_ends_a_rollout_and_is_never_exceeded() -> None:
    trajectory, _ = play(CountdownEnv(), ["long" * 10, "never"], max_response_tokens=20)
    assert trajectory.termination_reason is TerminationReason.RESPONSE_BUDGET_SPENT
    (step,) = trajectory.steps
    assert step.completion is not None
    assert (len(step.completion.completion_ids), step.completion.finish_reason) == (20, "length")


def test_turn_is_limited_on_its_own() -> None:
    trajectory, requests = play(CountdownEnv(1), ["long" * 10], max_turn_tokens=7)
    assert requests[0].params.max_tokens == 7
    assert trajectory.steps[0].model_response == "longlon"


def test_every_request_carries_what_a_server_needs() -> None:
    _, requests = play(CountdownEnv(3), ["a", "b", "c"])
    assert [request.params.seed for request in requests] == [100, 101, 102]
    assert {request.session_id for request in requests} == {"7/2"}
    assert {request.min_version for request in requests} == {3}
    assert requests[0].previous is None
    for earlier, later in itertools.pairwise(requests):
        assert later.previous is not None
        assert later.previous.messages == earlier.messages
        assert later.messages[: len(earlier.messages)] == earlier.messages


def test_later_turns_do_not_change_messages_of_earlier_requests() -> None:
    class Sharing(GameAgent):
        @property
        def chat_completions(self) -> list[dict[str, Any]]:
            return self.messages  # not a copy, as in many agents

    _, requests = play(CountdownEnv(3), ["a", "b", "c"], Sharing())
    assert [len(request.messages) for request in requests] == [1, 3, 5]


def test_agent_plays_one_rollout_after_the_other() -> None:
    agent = GameAgent()
    first, _ = play(CountdownEnv(2), ["a", "b"], agent)
    second, _ = play(CountdownEnv(1), ["c"], agent)
    assert [step.model_response for step in first.steps] == ["a", "b"]
    assert [step.model_response for step in second.steps] == ["c"]


def test_agent_that_appends_no_step_is_named_with_the_remedy() -> None:
    class Forgetful(GameAgent):
        def update_from_model(self, response: str, **kwargs: Any) -> Any:
            action = super().update_from_model(response)
            self.trajectory.steps.pop()
            return action

    message = r"Forgetful\.update_from_model has left 0 steps .* turn 1: .*exactly one Step to self\.traj"
    with pytest.raises(AgentError, match=message):
        play(CountdownEnv(), ["a"], Forgetful())


def test_agent_with_steps_of_another_kind_is_named_too() -> None:
    class Ported(GameAgent):
        def update_from_model(self, response: str, **kwargs: Any) -> Action:
            self.trajectory.steps.append({"response": response})  # type: ignore[arg-type]
            return Action(action=response)

    with pytest.raises(AgentError, match=r"Ported.* has appended {'response': 'a'} .*environments\.Step"):
        play(CountdownEnv(), ["a"], Ported())


def test_agent_that_appends_two_steps_is_named_too() -> None:
    class Eager(GameAgent):
        def update_from_model(self, response: str, **kwargs: Any) -> Any:
            self.trajectory.steps.append(Step())
            return super().update_from_model(response)

    with pytest.raises(AgentError, match=r"Eager\.update_from_model has left 2 steps"):
        play(CountdownEnv(), ["a"], Eager())


@pytest.mark.parametrize("method", ["reset", "update_from_env", "update_from_model"])
def test_agent_that_raises_is_named_with_its_method(method: str) -> None:
    def fail(self: GameAgent, *args: Any, **kwargs: Any) -> None:
        raise ValueError("of its own")

    agent = GameAgent()
    agent.__class__ = type("Broken", (GameAgent,), {method: fail})
    with pytest.raises(AgentError, match=rf"agent raised in Broken\.{method}: ValueError: of its own"):
        play(CountdownEnv(), ["a"], agent)


@pytest.mark.parametrize("method", ["reset", "step"])
def test_environment_that_raises_is_named_with_its_method(method: str) -> None:
    message = rf"environment raised in CountdownEnv\.{method}: RuntimeError: no {method} today"
    with pytest.raises(EnvironmentFailure, match=message) as raised:
        play(CountdownEnv(raises=method), ["a"])
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_sampler_that_fails_ends_the_rollout_with_its_own_error() -> None:
    with pytest.raises(SamplerError, match=re.escape("has 1 replies and was asked for number 2")):
        play(CountdownEnv(), ["a"])


def test_failed_rollout_is_a_trajectory_of_its_request() -> None:
    trajectory = failed(ORDER, TerminationReason.TIMEOUT, "Too slow.")
    assert (trajectory.rollout_id, trajectory.task) == ("7/2", {"level": 1})
    assert (trajectory.termination_reason, trajectory.error) == (TerminationReason.TIMEOUT, "Too slow.")
    assert (trajectory.steps, trajectory.reward) == ([], 0)


def test_sampling_parameters_of_the_request_are_kept() -> None:
    requests: list[SampleRequest] = []

    def sample(request: SampleRequest) -> Completion:
        requests.append(request)
        return Completion(text="a", finish_reason="stop")

    request = RolloutRequest(
        rollout_id="0/0", group_id="0", task={}, params=SamplingParams(temperature=0.7, top_p=0.9)
    )
    run_rollout(GameAgent(), CountdownEnv(1), sample, request, RolloutLimits(), Journal())
    assert (requests[0].params.temperature, requests[0].params.top_p) == (0.7, 0.9)


@pytest.mark.parametrize("returned", ["an answer", None])
def test_agent_that_returns_no_action_is_told_what_to_return(returned: Any) -> None:
    class Bare(GameAgent):
        def update_from_model(self, response: str, **kwargs: Any) -> Any:
            super().update_from_model(response)
            return returned

    with pytest.raises(AgentError, match=r"Bare\.update_from_model returned .*return Action\(action="):
        play(CountdownEnv(), ["a"], Bare())


def test_environment_that_exits_is_named_and_ends_no_process() -> None:
    class Quitting(CountdownEnv):
        def step(self, action: Any) -> Any:
            raise SystemExit(3)

    with pytest.raises(EnvironmentFailure, match=r"Quitting\.step: SystemExit: 3"):
        play(Quitting(), ["a"])


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ("nonsense", r"step\(\) returned 'nonsense': write return observation, reward, done, info"),
        (("", 1.0, True, False, {}), r"returned 5 values, as Gymnasium's do"),
        (("", "much", True, {}), r"returned 'much' as reward"),
        (("", float("nan"), True, {}), r"reward nan: it has to be finite"),
        (("", -1e16, True, {}), r"reward -1e\+16: it has to be finite, and at most 1e\+15"),
        (("", 1.0, "no", {}), r"returned 'no' as done"),
        (("", 1.0, True, None), r"returned None as info"),
    ],
)
def test_nonsense_of_an_environment_is_named_with_the_remedy(returned: Any, words: str) -> None:
    class Babbling(CountdownEnv):
        def step(self, action: Any) -> Any:
            return returned

    with pytest.raises(
        EnvironmentFailure, match=r"Babbling\." + (words if words.startswith("step") else ".*" + words)
    ):
        play(Babbling(), ["a"])


def test_verdict_on_the_whole_episode_replaces_the_last_reward() -> None:
    class Judging(CountdownEnv):
        def compute_final_reward(self) -> float:
            return 10.0

    trajectory, _ = play(Judging(2), ["a", "b"])
    assert ([step.reward for step in trajectory.steps], trajectory.reward) == ([0.5, 10.0], 10.5)
    masked, _ = play(Judging(9), ["a", "b"], max_steps=1, overlong_filter=True)
    assert (masked.masked, masked.reward) == (True, 0.5)


class Winning(CountdownEnv):
    """Says ``said`` of its success."""

    said: Any = None

    def is_correct(self) -> Any:
        return self.said


@pytest.mark.parametrize(
    ("said", "is_correct", "judge", "succeeded"),
    [
        (True, True, "environment", True),
        (np.bool_(False), False, "environment", False),
        (None, None, "reward above 0", True),
    ],
)
def test_environment_says_whether_it_was_a_success(
    said: Any, is_correct: bool | None, judge: str, succeeded: bool
) -> None:
    env = Winning(2)
    env.said = said
    trajectory, _ = play(env, ["a", "b"])
    assert (trajectory.reward, trajectory.is_correct) == (1.0, is_correct)
    assert (trajectory.judged_by, trajectory.succeeded) == (judge, succeeded)
    cut, _ = play(env, ["a", "b"], max_steps=1, overlong_filter=True)
    assert (cut.is_correct, cut.reward) == (is_correct, 0.5), "where a limit has ended it, too"


class Reckless(SingleTurnEnvironment):
    def is_correct(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("verdict", "is_correct", "judge"),
    [
        (RewardOutput(0.1, is_correct=False), False, "reward function"),
        (RewardOutput(0.0, is_correct=True), True, "reward function"),
        (RewardOutput(0.1), True, "environment"),
    ],
)
def test_reward_function_is_asked_before_the_environment(
    verdict: RewardOutput, is_correct: bool, judge: str
) -> None:
    env = Reckless({"question": "q"}, reward_fn=lambda task_info, action: verdict)
    trajectory, _ = play(env, ["a"])
    assert (trajectory.reward, trajectory.is_correct) == (verdict.reward, is_correct)
    assert (trajectory.judged_by, trajectory.succeeded) == (judge, is_correct)


@pytest.mark.parametrize("said", ["yes", 1, 0.5])
def test_success_that_is_no_bool_is_an_error_of_the_environment(said: Any) -> None:
    env = Winning(1)
    env.said = said
    with pytest.raises(EnvironmentFailure, match=r"Winning\.is_correct\(\) returned .*True, False or None"):
        play(env, ["a"])


def test_is_correct_attribute_of_an_older_environment_is_read() -> None:
    env = CountdownEnv(1)
    env.is_correct = False  # type: ignore[method-assign,assignment]
    trajectory, _ = play(env, ["a"])
    assert (trajectory.is_correct, trajectory.judged_by) == (False, "environment")


def test_metrics_of_an_environment_come_whatever_ends_it() -> None:
    class Measuring(CountdownEnv):
        def compute_metrics(self) -> dict[str, Any]:
            return {"left": np.int64(self.left), "in_time": True}

    finished, _ = play(Measuring(1), ["a"])
    assert finished.metrics == {"left": 0.0, "in_time": 1.0}
    assert {type(value) for value in finished.metrics.values()} == {float}
    cut, _ = play(Measuring(9), ["a"], max_steps=1, overlong_filter=True)
    assert cut.metrics == {"left": 8.0, "in_time": 1.0}
    assert play(CountdownEnv(1), ["a"])[0].metrics == {}


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (None, r"returned None: it has to be a dict of numbers by name"),
        ({"share": float("nan")}, r"returned nan as 'share': it has to be a finite number. Leave it out"),
        ({"share": "0.5"}, r"returned '0.5' as 'share'"),
        ({"a share": 1.0}, r"names a metric 'a share': use letters, digits and underscores"),
        ({7: 1.0}, r"names a metric 7"),
    ],
)
def test_metrics_that_cannot_be_averaged_fail_the_rollout(returned: Any, words: str) -> None:
    class Measuring(CountdownEnv):
        def compute_metrics(self) -> Any:
            return returned

    with pytest.raises(EnvironmentFailure, match=r"Measuring\.compute_metrics\(\) " + words):
        play(Measuring(1), ["a"])


def test_what_the_environment_says_counts_against_the_budget() -> None:
    class Talkative(CountdownEnv):
        def step(self, action: Any) -> tuple[Any, float, bool, dict]:
            return "x" * 40, *super().step(action)[1:]

    trajectory, _ = play(Talkative(9), ["a" * 30] * 9, max_steps=9, max_response_tokens=200)
    first, last = trajectory.steps[0].completion, trajectory.steps[-1].completion
    assert first is not None and last is not None
    total = len(last.prompt_ids) + len(last.completion_ids) - len(first.prompt_ids)
    assert 150 < total <= 200


class Forgetting(GameAgent):
    """Shows the model nothing but the last message: every prompt is about as long as the first."""

    @property
    def chat_completions(self) -> list[dict[str, Any]]:
        return super().chat_completions[-1:]


def test_sampled_tokens_count_even_if_the_agent_drops_them() -> None:
    trajectory, requests = play(
        CountdownEnv(9), ["a" * 29] * 9, Forgetting(), max_steps=9, max_response_tokens=100
    )
    assert trajectory.termination_reason is TerminationReason.RESPONSE_BUDGET_SPENT
    assert trajectory.num_sampled_tokens == 100
    assert [request.params.max_tokens for request in requests] == [100, 70, 40, 10]
    assert [step.info["cur_tokens"] for step in trajectory.steps] == [30, 60, 90, 100]


def test_prompt_that_shrinks_gives_no_budget_back() -> None:
    budget, trajectory = TokenBudget(RolloutLimits(max_response_tokens=100)), Trajectory()
    for prompt, sampled, left, most in ((20, 30, 70, 120), (15, 10, 60, 85), (40, 5, 40, 85)):
        completion = Completion(text="", finish_reason="stop", usage=(prompt, sampled))
        budget.count(completion)
        trajectory.steps.append(Step(completion=completion))
        assert (budget.max_tokens, budget.max_total_tokens, budget.spent) == (left, most, False)
        assert trajectory.num_response_tokens == 100 - left  # the overlong penalty counts as the limit does
    assert budget.report({})["cur_tokens"] == 60


def test_history_that_only_grows_has_one_limit_for_all_its_turns() -> None:
    budget = TokenBudget(RolloutLimits(max_response_tokens=100))
    for prompt, sampled in ((20, 30), (57, 10), (80, 40)):
        budget.count(Completion(text="", finish_reason="stop", usage=(prompt, sampled)))
        assert budget.max_total_tokens == 20 + 100
        assert budget.report({})["cur_tokens"] == prompt + sampled - 20
    assert budget.spent


def test_conversation_of_two_rollouts_has_the_limit_of_one() -> None:
    """The second one's first prompt is longer than that of a rollout's beginning may be, by 40 tokens."""
    budget = TokenBudget(RolloutLimits(max_prompt_tokens=20, max_response_tokens=100), goes_on=True)
    assert (budget.max_prompt_tokens, budget.max_total_tokens) == (None, 120)
    budget.count(Completion(text="", finish_reason="stop", usage=(60, 10)))
    assert (budget.max_tokens, budget.max_total_tokens) == (50, 120)


def test_budgets_per_turn_start_anew_with_each_turn() -> None:
    trajectory, requests = play(
        CountdownEnv(3), ["long" * 5] * 3, max_response_tokens=12, max_prompt_tokens=200, budget_per_turn=True
    )
    assert trajectory.termination_reason is TerminationReason.ENV_DONE
    assert [request.params.max_tokens for request in requests] == [12, 12, 12]
    assert [request.max_prompt_tokens for request in requests] == [200, 200, 200]


def test_agents_hear_of_their_limits_as_in_the_reference() -> None:
    trajectory, _ = play(CountdownEnv(2), ["one", "two"], max_steps=7)
    assert [step.info["max_steps"] for step in trajectory.steps] == [7, 7]
    assert trajectory.steps[0].info["cur_tokens"] == len("one") + 1


@pytest.mark.parametrize("wanted", [True, False])
def test_only_an_environment_that_wants_a_seed_is_given_one(wanted: bool) -> None:
    class Picky(CountdownEnv):
        wants_seed = wanted

        @staticmethod
        def from_dict(info: dict) -> CountdownEnv:
            env = CountdownEnv()
            env.info = info
            return env

    request = RolloutRequest(rollout_id="0/0", group_id="0", task={"level": 1}, env_seed=5)
    env = Pair(agent_class=GameAgent, env_class=Picky).make_env(request)
    assert env.info == ({"seed": 5, "level": 1} if wanted else {"level": 1})


def test_environment_has_the_index_of_its_task_or_its_own() -> None:
    class Numbered(CountdownEnv):
        @staticmethod
        def from_dict(info: dict) -> CountdownEnv:
            env = CountdownEnv()
            env.idx = info["own"]
            return env

    def index_of(env_class: type[BaseEnv], index: int | None) -> int | None:
        request = RolloutRequest(rollout_id="0/0", group_id="0", task={"own": 7}, index=index)
        return Pair(agent_class=GameAgent, env_class=env_class).make_env(request).idx

    assert [index_of(CountdownEnv, 3), index_of(CountdownEnv, None), index_of(Numbered, 3)] == [3, None, 7]
