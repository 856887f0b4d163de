"""All seats of a game, each with a history and a reward of its own, played by one policy or by several."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from environments.errors import AgentError
from environments.rewards.base import is_reward
from environments.steps import PLAYED_SEAT
from environments.types import Action, Message, Step, Trajectory
from policies.agents.base import BaseAgent
from policies.agents.game import GameAgent


class SeatsAgent(BaseAgent):
    """Plays each seat of a game by an agent of its own, which sees what that seat sees.

    One policy plays all of them (self-play), or several do that ``policies`` names: a training has a learner
    and a policy server for each, and a policy learns from the turns of its own seats alone.

    The environment names the seat to move in its observation, ``{"seat": "1", "question": text}``, and with
    a move that earns something for others the rewards of all, ``info["seat_rewards"] = {"0": -1.0, "1":
    1.0}``. Without these a reward is the mover's.

    The rollout stays one trajectory, with the moves in the order in which they were made. Their steps name
    their seats, and a seat's rewards stand on its last move so far: a seat is trained on its own history, and
    compared with the same seat in the other rollouts of the task. What a seat earns that has never moved is
    nobody's; the environment's ``compute_metrics`` may report it.

    Args:
        agent_class: the class of the agents of the seats.
        policies: the policy of each seat, such as ``{"0": "proposer", "1": "solver"}``.
        agent_args: arguments of ``agent_class``.

    Raises:
        AgentError: an observation names no seat, or one without a policy, or a seat's reward is no number.
    """

    def __init__(
        self,
        agent_class: type[BaseAgent] = GameAgent,
        policies: Mapping[str, str] | None = None,
        **agent_args: Any,
    ) -> None:
        self._make = partial(agent_class, **agent_args)
        self._policy_of = dict(policies or {})
        self.policies = tuple(dict.fromkeys(self._policy_of.values())) or ("",)
        anyone = self._make()
        self.needs_tool_calls = anyone.needs_tool_calls
        self.served_parser = anyone.served_parser
        self.wants_completion = anyone.wants_completion
        self.reset()

    def reset(self) -> None:
        self._trajectory = Trajectory()
        self._agents: dict[str, BaseAgent] = {}
        self._seat = ""

    @property
    def chat_completions(self) -> list[Message]:
        return self._agents[self._seat].chat_completions

    @property
    def tool_schemas(self) -> list[dict[str, Any]] | None:
        return self._agents[self._seat].tool_schemas

    @property
    def sampling(self) -> dict[str, Any]:
        own = {"policy": self._policy_of.get(self._seat, "")} if self._policy_of else {}
        return {**self._agents[self._seat].sampling, **own}

    def update_from_env(
        self, observation: Any, reward: float, done: bool, info: dict[str, Any], **kwargs: Any
    ) -> None:
        """Give each seat its reward, and the observation to the next one to move, or at the end to all."""
        if self.trajectory.steps:
            self.trajectory.steps[-1].reward = 0.0  # the engine has put there what step() returned
            given = info.get("seat_rewards", {})
            if not isinstance(given, Mapping) or not all(map(is_reward, given.values())):
                raise AgentError(
                    f"info['seat_rewards']={given!r} gives no finite number to each seat: write "
                    '{"0": -1.0, "1": 1.0}.'
                )
            rewards = {self._seat: reward} | {str(seat): earned for seat, earned in given.items()}
            for seat, earned in rewards.items():
                if step := self._last_step(seat):
                    step.reward += earned
        if done:
            for seat in self._agents:
                self._show(seat, observation, done, info)
            return
        if not isinstance(observation, dict) or "seat" not in observation:
            raise AgentError(
                f"SeatsAgent plays several seats, and the observation {observation!r} names none: return "
                '{"seat": "0", "question": text}.'
            )
        self._seat = str(observation["seat"])  # as its steps and the rewards of all name it
        if self._policy_of and self._seat not in self._policy_of:
            raise AgentError(
                f"The seat {self._seat!r} has no policy in policies={self._policy_of}: name that of every "
                "seat, or leave policies out to play all by one."
            )
        if self._seat not in self._agents:
            self._agents[self._seat] = self._make()
            self._agents[self._seat].reset()
        own = {name: value for name, value in observation.items() if name != "seat"}
        self._show(self._seat, own, done, info)

    def update_from_model(self, response: str, **kwargs: Any) -> Action:
        agent = self._agents[self._seat]
        num_before = len(agent.trajectory.steps)
        action = agent.update_from_model(response, **kwargs)
        new = agent.trajectory.steps[num_before:]
        for step in new:
            step.info[PLAYED_SEAT] = self._seat
        self.trajectory.steps += new
        return action

    def _show(self, seat: str, observation: Any, done: bool, info: dict[str, Any]) -> None:
        last = self._last_step(seat)
        reward = last.reward if last else 0.0
        self._agents[seat].update_from_env(observation=observation, reward=reward, done=done, info=info)

    def _last_step(self, seat: str) -> Step | None:
        return self._agents[seat].get_current_state() if seat in self._agents else None
