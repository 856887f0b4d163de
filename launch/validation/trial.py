"""One step of the first task, played in this process: it shows an agent or environment that is broken."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

from actors.gateway.remote_program import RemoteProgram
from actors.rollouts.env_calls import check_sent, in_env
from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments.background import in_background
from environments.data.datasets import Dataset
from environments.errors import ContractError, EnvironmentFailure
from launch.workload import Workload
from policies.sampler import SampleRequest, ScriptedSampler

logger = logging.getLogger(__name__)

TRIAL_SECONDS = 60.0
"""Longest trial; an environment that takes longer is left to the first rollouts."""


def try_first_task(workload: Workload, tasks: Dataset, seconds: float = TRIAL_SECONDS) -> None:
    """``check_agent`` with a time limit in ``seconds``.

    Raises:
        AgentError: the agent broke its contract.
        ContractError: the environment broke its own.
        ConfigError: the agent cannot be played by a policy server.
    """
    try:
        in_background(partial(check_agent, workload, tasks), "check").result(seconds)
    except TimeoutError:
        logger.warning(
            "The first task could not be tried out in this process within %g s: the first rollouts will show "
            "whether it works.",
            seconds,
        )


def check_agent(workload: Workload, tasks: Dataset) -> None:
    """Play one step of the first of ``tasks`` with a made-up reply. Programs elsewhere are not called for it.

    Raises:
        AgentError: the agent broke its contract.
        ContractError: the environment broke its own, for example by a reward that is not finite.
        ConfigError: the agent cannot be played by a policy server, or its arguments cannot be sent to it.
    """
    from actors.sampling.backends import check_calls
    from actors.sampling.serve_sampler import ServeSampler  # both load Ray: --help would wait for it

    if isinstance(workload.rollout, RemoteProgram):
        return
    pair = workload.pair
    check_sent(pair.agent_args, pair.env_args, tasks[0])
    sampler = ScriptedSampler(lambda _messages: "0")

    def sample(request: SampleRequest) -> Any:
        return asyncio.run(sampler.sample(request))

    request = RolloutRequest(rollout_id="check/0", group_id="check", task=tasks[0])
    agent = pair.make_agent()
    check_calls(agent, ServeSampler)
    try:
        env = pair.make_env(request)
        try:
            run_rollout(agent, env, sample, request, RolloutLimits(max_steps=1), Journal())
        finally:
            with in_env(env, "close"):
                env.close()
    except ContractError:
        raise
    except EnvironmentFailure as error:
        # It may need what only the cluster's nodes have: the first rollouts will show whether it works there.
        logger.warning("The environment could not be tried out in this process: %s", error)
