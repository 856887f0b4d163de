"""The sandbox that an environment is given judges in the process of the rollout."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray

from actors.rollouts.player import Attempt
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.rollout_actor import RolloutActor
from actors.sampling.sampler_actor import SamplerActor
from environments import CodeEnvironment
from environments.sandbox.base import DEFAULT_LIMITS, SandboxLimits, SandboxResult
from environments.sandbox.command import CommandSandbox
from environments.sandbox.local import LocalSandbox
from environments.types import TerminationReason, Trajectory
from policies.agents.answering import CodingAgent
from policies.sampler import ScriptedSampler

STAND_IN = Path(__file__).parents[2] / "container_stand_in.py"
ANSWER = "```python\nprint(sum(map(int, input().split())))\n```"
TASK = {"question": "Add.", "tests": [{"input": "1 2", "output": "3"}]}


@dataclass(frozen=True)
class LoggingSandbox:
    """The local sandbox, which writes a line to ``log`` for each program."""

    log: str

    def run(self, source: str, stdin: str = "", limits: SandboxLimits = DEFAULT_LIMITS) -> SandboxResult:
        with open(self.log, "a") as log:
            log.write("a program\n")
        return replace(LocalSandbox().run(source, stdin, limits), isolated=None)


def play(sandbox: Any) -> Trajectory:
    arguments = {"sandbox": sandbox, "max_turns": 1}
    pair = Pair(agent_class=CodingAgent, env_class=CodeEnvironment, env_args=arguments)
    sampler = SamplerActor.remote(partial(ScriptedSampler, [ANSWER]))
    actor = RolloutActor.remote(pair, sampler, RolloutLimits(), fleet=sampler)  # no journal: it is not called
    request = RolloutRequest(rollout_id="1/1", group_id="1", task=TASK)
    trajectory = ray.get(actor.run.remote(0, Attempt(request)), timeout=120).trajectory
    for started in (actor, sampler):
        ray.kill(started)
    return trajectory


def container_sandbox(engine: Path, image: str) -> CommandSandbox:
    stand_in = ("env", f"STAND_IN_STATE={engine}", sys.executable, str(STAND_IN))
    run = (*stand_in, "run", "-i", "--name={name}", "--memory={memory_bytes}", image, sys.executable)
    return CommandSandbox(run, stop=(*stand_in, "kill", "{name}"))


def test_sandbox_of_ones_own_judges_a_rollout(ray_cluster: None, tmp_path: Path) -> None:
    trajectory = play(LoggingSandbox(str(tmp_path / "log")))
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    assert (tmp_path / "log").read_text() == "a program\n"


def test_container_judges_a_rollout(ray_cluster: None, tmp_path: Path) -> None:
    trajectory = play(container_sandbox(tmp_path, "python"))
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    assert len((tmp_path / "calls").read_text().splitlines()) == 1


def test_engine_that_does_not_run_fails_the_rollout(ray_cluster: None, tmp_path: Path) -> None:
    trajectory = play(container_sandbox(tmp_path, "no-engine"))
    assert trajectory.termination_reason is TerminationReason.ENV_ERROR
    assert "Cannot connect to the daemon" in str(trajectory.error)
    assert trajectory.failed
