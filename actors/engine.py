"""``AgentExecutionEngine``: many tasks in, as many trajectories out, in the same order."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import random
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, aclosing, closing, nullcontext
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, Never, Self

import ray
from tqdm import tqdm

from actors.fingerprint import digest, fingerprint
from actors.gateway.function import RolloutFunction, pair_of
from actors.ray_tools.connect import connect
from actors.rollouts.env_calls import check_sent
from actors.rollouts.rollout import RolloutLimits, RolloutRequest
from actors.rollouts.service import RolloutService
from actors.sampling.backends import SAMPLERS, check_calls
from actors.settings import FleetConfig
from environments.base import BaseEnv
from environments.bounds import Bound, check_choice, no_argument
from environments.data.datasets import Dataset
from environments.data.trajectory_file import TrajectoryFile
from environments.errors import ConfigError
from environments.named_module import load_class
from environments.types import Trajectory
from policies.agents.base import BaseAgent
from policies.engines.tool_calls import check_served_parsers
from policies.learning.samples import returns_to_go
from policies.sampler import Sampler, SamplerDefaults, SamplingParams

LONGEST_SECONDS = 7200.0
"""Limit of a rollout that was given none: nothing waits for ever."""
SEED_BITS = 30
"""Many servers take a seed as a signed 32-bit number."""
LOG_SECONDS = 30.0
"""Seconds between two lines of the progress bar where the output is no terminal."""

REFERENCE_ARGUMENTS = {
    "chat_parser": "Leave it out: the server renders messages with the chat template of its model.",
    "config": "Leave it out: the engine's own arguments say all, and training is launch.AgentTrainer.",
    "max_workers": "Leave it out: each of the n_parallel_agents pairs has a process of its own.",
    "rollout_engine": "Say engine_name, which 'module:Class' of your own may be, and rollout_engine_args.",
}
"""Replacements of arguments of rLLM v0.1 that the engine does not have."""


class AgentExecutionEngine:
    """Plays tasks with agents in environments, many at a time, each pair in a process of its own.

    Ray is joined where it runs (``RAY_ADDRESS``, or a cluster on this machine) and started otherwise, then
    with what the actors log in this program's output if the environment has ``TROUPE_WORKER_LOGS=1``. The
    actors start with the first tasks, or before them by ``start``, and stay for the next ones, until
    ``close`` or the end of a ``with``.

    A rollout that fails (the agent or the environment raises, its process dies, the policy cannot be
    sampled) is played again on a fresh environment, ``retry_limit`` times; with the same seed, if there is
    one, so that a policy's own mistake is not drawn anew. After that it is a result like any other: a
    trajectory whose ``termination_reason`` and ``error`` say what failed, with the steps that it had played.

    Args:
        agent_class: the agent.
        agent_args: its keyword arguments.
        env_class: the environment; ``from_dict`` is given the task with ``env_args`` over it.
        env_args: arguments of the environment.
        rollout: instead of both classes, a function of a task and a client that solves the task by itself.
        engine_name: "openai" samples an OpenAI-compatible server over HTTP; "serve" (also "verl") samples
            a policy server of this Ray cluster, whose replicas fetch the requests; "module:Class" is a
            ``Sampler`` of your own, made from ``rollout_engine_args``.
        rollout_engine_args: for "openai" ``base_url`` and optionally ``api_key``, ``timeout_seconds``,
            ``extra_body``, the server's own fields of a request, and ``default_headers``; for "serve"
            ``app_name`` and ``model_path``, the folder of the tokenizer. For both ``chat_template_kwargs``,
            such as ``{"enable_thinking": False}``.
        tokenizer: only its ``name_or_path`` is used: for "serve" without a ``model_path``, and to count the
            tokens of a server that does not return any. Tokens that were counted so cannot be trained on.
        sampling_params: fields of ``SamplingParams``, and for "openai" ``model``, by default the first one
            that the server lists. ``max_tokens`` limits one completion. ``seed`` makes calls repeatable;
            without it every call draws afresh.
        max_response_length: tokens after the first prompt, over the whole trajectory.
        max_prompt_length: tokens of the first prompt.
        enforce_max_prompt_length: whether both limits hold for each turn on its own instead, for agents
            that rewrite their history.
        n_parallel_agents: most pairs at a time. Each is a process of about 0.1 GB.
        max_steps: turns of a trajectory.
        trajectory_timeout: seconds after which a rollout is ended together with its process; ``None``
            is two hours. It is not played again.
        overlong_filter: whether a trajectory that a limit has ended is ``masked``: not judged by
            ``compute_final_reward``, and not to be trained on.
        retry_limit: how often a failed rollout is begun anew.
        api_retries: how often a request is repeated when the server is overloaded or unreachable.
        gamma: discount of ``Step.mc_return``.
        disable_thinking: short for ``chat_template_kwargs={"enable_thinking": False}``.

    Raises:
        ConfigError: a value is unknown or impossible, or rollouts cannot call one of the classes.
        AgentError: the agent's ``__init__`` raised.
    """

    def __init__(
        self,
        *,
        agent_class: type[BaseAgent] | None = None,
        env_class: type[BaseEnv] | None = None,
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        rollout: RolloutFunction | None = None,
        engine_name: str = "openai",
        rollout_engine_args: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        max_response_length: int = 8192,
        max_prompt_length: int = 1024,
        enforce_max_prompt_length: bool = False,
        n_parallel_agents: int = 64,
        max_steps: int = 5,
        trajectory_timeout: float | None = None,
        overlong_filter: bool = False,
        retry_limit: int = 3,
        api_retries: int = 3,
        gamma: float = 1.0,
        disable_thinking: bool = False,
        **unknown: Never,
    ) -> None:
        for name in unknown:
            known = list(inspect.signature(AgentExecutionEngine).parameters)[:-1]
            raise ConfigError(no_argument("AgentExecutionEngine", name, known, REFERENCE_ARGUMENTS.get(name)))
        if trajectory_timeout is not None and not 0 < trajectory_timeout < math.inf:
            raise ConfigError(
                f"trajectory_timeout={trajectory_timeout} is no duration: use seconds above 0, or None "
                "for two hours."
            )
        if not math.isfinite(gamma):
            raise ConfigError(f"gamma={gamma} is no discount: use a number between 0 and 1.")
        _at_least("max_response_length", max_response_length, 1)
        _at_least("max_prompt_length", max_prompt_length, 1)
        _at_least("n_parallel_agents", n_parallel_agents, 1)
        _at_least("max_steps", max_steps, 1)
        _at_least("retry_limit", retry_limit, 0)
        _at_least("api_retries", api_retries, 0)
        sampling = dict(sampling_params or {})
        policy = dict(rollout_engine_args or {})
        if disable_thinking:
            policy["chat_template_kwargs"] = {
                **policy.get("chat_template_kwargs", {}),
                "enable_thinking": False,
            }
        model = sampling.pop("model", None)
        if model is not None:
            policy["model"] = model
        self._sampler_class = load_class("engine_name", engine_name, SAMPLERS, Sampler)
        tokenizer_path = None if tokenizer is None else tokenizer.name_or_path
        self._sampler_args = policy
        self._sampler_defaults = SamplerDefaults(tokenizer_path=tokenizer_path, api_retries=api_retries)
        self._make_sampler()  # finds here what cannot work
        self._params = _sampling_params(sampling, self._sampler_class)
        self._pair = pair_of(agent_class, env_class, rollout, agent_args or {}, env_args or {})
        check_sent(self._pair.agent_args, self._pair.env_args)
        agent = self._pair.make_agent()  # here it is one error, later one for each task
        check_calls(agent, self._sampler_class)
        check_served_parsers([agent.served_parser], policy.get("model_path", tokenizer_path))
        self._limits = RolloutLimits(
            max_steps=max_steps,
            max_prompt_tokens=max_prompt_length,
            max_response_tokens=max_response_length,
            max_turn_tokens=self._params.max_tokens,
            budget_per_turn=enforce_max_prompt_length,
            overlong_filter=overlong_filter,
            timeout_seconds=LONGEST_SECONDS if trajectory_timeout is None else trajectory_timeout,
        )
        # No CPU is reserved: an actor that waits for one would keep its tasks waiting for ever.
        self._config = FleetConfig(num_actors=0, nodes={"CPU": 0}, retries=retry_limit)
        self._num_actors = n_parallel_agents
        self._gamma = gamma
        self._service: RolloutService | None = None
        self._busy = False

    async def execute_tasks(
        self, tasks: Iterable[dict[str, Any]], results_file: str | Path | None = None
    ) -> list[Trajectory]:
        """Play every task once and return the trajectories in the order of the tasks.

        Args:
            tasks: a ``Dataset`` or a list of dicts; the same task may occur several times.
            results_file: a file of JSON lines that keeps each trajectory as soon as it is there. If it
                exists, what it holds is not played again: an interrupted call goes on where it was. It has to
                be of the same evaluation: agent, environment and their arguments (see ``fingerprint``; the
                code of what has a name is not compared), model, sampling, limits and tasks.

        Raises:
            DatasetError: a task is no dict.
            ConfigError: the engine is still at an earlier call's tasks, the results file belongs to another
                evaluation, or no node of the cluster has what the environment needs.
            SamplerError: the sampler did not start, or no model is named and the server does not list any.
        """
        rows = Dataset(tasks).get_data()
        finished = {index: each async for index, each in self._execute(rows, results_file)}
        return [finished[index] for index in range(len(rows))]

    async def execute_tasks_stream(
        self, tasks: Iterable[dict[str, Any]], results_file: str | Path | None = None
    ) -> AsyncIterator[Trajectory]:
        """Play every task once and yield each trajectory as soon as it has ended; else as ``execute_tasks``.

        Those that ``results_file`` already holds come first. A loop that is left before its end has to close
        the stream (``contextlib.aclosing``): only then the engine's actors stop, and the next call works.
        """
        async with aclosing(self._execute(Dataset(tasks).get_data(), results_file)) as results:
            async for _, trajectory in results:
                yield trajectory

    def start(self) -> None:
        """Have the rollout actors start, and do not wait for them: they are up when the first tasks come.

        Raises:
            ConfigError: no node of the cluster has what the environment needs.
        """
        self._running_service().start_actors(self._num_actors)

    def close(self) -> None:
        """End the engine's actors. Ray itself goes on; a later ``execute_tasks`` starts new actors."""
        service, self._service = self._service, None
        if service is not None and ray.is_initialized():
            service.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _execute(
        self, rows: list[dict[str, Any]], results_file: str | Path | None
    ) -> AsyncGenerator[tuple[int, Trajectory], None]:
        """The position and the trajectory of each task, in the order in which they end."""
        if self._busy:
            raise ConfigError(
                "The engine is still at an earlier call's tasks: await that call, or pass all tasks at once."
            )
        self._busy = True
        try:
            if results_file is not None:
                await self._settle_model()
            with self._open(results_file, rows) as file, closing(RolloutProgress(len(rows))) as progress:
                finished = file.finished if file is not None else {}
                for index, trajectory in finished.items():
                    self._complete(trajectory, rows[index])
                    progress.add(trajectory, replayed=True)
                    yield index, trajectory
                waiting = [index for index in range(len(rows)) if index not in finished]
                async with aclosing(self._play(rows, waiting)) as playing:
                    async for index, trajectory in playing:
                        self._complete(trajectory, rows[index])
                        if file is not None:
                            file.append(index, trajectory)
                        progress.add(trajectory)
                        yield index, trajectory
        finally:
            self._busy = False

    async def _settle_model(self) -> None:
        """Name the model that a server plays if none is asked for: the next time it may be another one."""
        if self._sampler_args.get("model") is None:
            model = await self._sampler_class.default_model(self._sampler_arguments())
            if model is not None:
                self._sampler_args["model"] = model

    def _make_sampler(self) -> Callable[[], Sampler]:
        """A function that makes the sampler, in whichever process calls it."""
        return partial(self._sampler_class, **self._sampler_arguments())

    def _sampler_arguments(self) -> dict[str, Any]:
        return self._sampler_class.arguments(self._sampler_args, self._sampler_defaults)

    def _policy(self) -> dict[str, Any]:
        """Record of the policy that is sampled, and of how it is prompted, for a results file."""
        names = self._sampler_class.policy_arguments
        if names is None:  # any of them may be a secret
            kept: dict[str, Any] = {"arguments": digest(self._sampler_args)}
        else:
            kept = {name: value for name, value in self._sampler_args.items() if name in names}
        return {**kept, "tokenizer": self._sampler_defaults.tokenizer_path}

    def _open(
        self, results_file: str | Path | None, rows: list[dict[str, Any]]
    ) -> AbstractContextManager[TrajectoryFile | None]:
        if results_file is None:
            return nullcontext()
        evaluation = {
            "agent": fingerprint(self._pair.agent_class),
            "agent_args": fingerprint(self._pair.agent_args),
            "environment": fingerprint(self._pair.env_class),
            "env_args": fingerprint(self._pair.env_args),
            "policy": self._policy(),
            "sampling": asdict(self._params),
            "limits": asdict(self._limits),
        }
        return TrajectoryFile(results_file, evaluation, rows)

    def _complete(self, trajectory: Trajectory, task: dict[str, Any]) -> None:
        trajectory.task = task  # the caller's own object, not the copy that has travelled
        fill_returns(trajectory, self._gamma)

    async def _play(
        self, rows: list[dict[str, Any]], indices: list[int]
    ) -> AsyncGenerator[tuple[int, Trajectory], None]:
        requests = _requests(rows, indices, self._params)
        if not requests:
            return
        waiting = {request.rollout_id: index for request, index in zip(requests, indices, strict=True)}
        try:
            service = await asyncio.to_thread(self._running_service)
            await asyncio.to_thread(service.start, min(self._num_actors, len(requests)))
            await asyncio.to_thread(service.submit, requests)
            arriving = service.stream.trajectories(len(requests))
            while waiting:
                trajectory = await asyncio.to_thread(next, arriving)
                yield waiting.pop(trajectory.rollout_id), trajectory
        finally:
            if waiting:  # given up or broken: none of these may end up among the next call's results
                self.close()

    def _running_service(self) -> RolloutService:
        """The service of the first call, or a new one. Its actors start with its own ``start``."""
        connect(len(os.sched_getaffinity(0)))
        if self._service is None:
            self._service = RolloutService(self._pair, self._make_sampler(), self._limits, self._config)
        return self._service


class RolloutProgress:
    """The progress bar: rollouts that are done, those a second, and the successful ones.

    Written to the standard error stream; ``TQDM_DISABLE=1`` in the environment leaves it out.

    Args:
        num_rollouts: how many there will be.
    """

    def __init__(self, num_rollouts: int) -> None:
        seconds = 0.5 if sys.stderr.isatty() else LOG_SECONDS
        self._bar = tqdm(total=num_rollouts, desc="rollouts", unit="rollout", mininterval=seconds)
        self._num_done = self._num_passed = self._num_failed = self._num_tokens = 0

    def add(self, trajectory: Trajectory, replayed: bool = False) -> None:
        """Count a rollout; ``replayed`` says that it was played in an earlier call."""
        reason = trajectory.termination_reason
        self._num_done += 1
        self._num_passed += trajectory.succeeded
        self._num_failed += reason is not None and reason.is_infrastructure
        self._num_tokens += 0 if replayed else trajectory.num_sampled_tokens
        if replayed and not self._bar.disable:  # one that is left out has no such attribute
            self._bar.initial += 1  # it must not count as speed
        tokens_per_second = self._num_tokens / max(self._bar.format_dict["elapsed"], 1e-3)
        self._bar.set_postfix_str(
            f"pass rate {self._num_passed / self._num_done:.3f}, {self._num_failed} failed, "
            f"{tokens_per_second:.0f} tokens/s",
            refresh=False,
        )
        self._bar.update()

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


def _requests(rows: list[dict[str, Any]], indices: list[int], params: SamplingParams) -> list[RolloutRequest]:
    seed = random.SystemRandom().getrandbits(SEED_BITS) if params.seed is None else params.seed
    return [
        RolloutRequest(
            rollout_id=f"{index:06d}/0000",
            group_id=f"{index:06d}",
            task=rows[index],
            params=params,
            # One for each request: equal tasks are repeated to see different attempts. Servers are asked for
            # repeatable sampling only by those who want it: it costs them, and vLLM on a CPU may die.
            seed=None if params.seed is None else random.Random(f"{seed}/{index}").getrandbits(SEED_BITS),
            env_seed=random.Random(f"{seed}/{index}/environment").getrandbits(SEED_BITS),
            index=index,
        )
        for index in indices
    ]


def fill_returns(trajectory: Trajectory, gamma: float) -> None:
    """Set every step's ``mc_return``: its reward and, discounted by ``gamma`` per step, the later ones."""
    returns = returns_to_go([step.reward for step in trajectory.steps], gamma)
    for step, value in zip(trajectory.steps, returns, strict=True):
        step.mc_return = value


def _sampling_params(given: dict[str, Any], sampler: type[Sampler]) -> SamplingParams:
    """The parameters ``given``, if there are such and ``sampler`` knows them. Raises ``ConfigError``."""
    more = " What only your server knows goes into rollout_engine_args={'extra_body': {...}}."
    for name in given:
        check_choice("sampling_params key", name, [field.name for field in fields(SamplingParams)], more)
    if given.get("adapter") is not None and not sampler.serves_adapters:
        raise ConfigError(
            f"sampling_params={{'adapter': {given['adapter']!r}}} is for engine_name='serve': an "
            "OpenAI-compatible server is asked for an adapter by its name as 'model'."
        )
    return SamplingParams(**given)


def _at_least(name: str, value: int, smallest: int) -> None:
    if not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} has to be a whole number.")
    Bound(at_least=smallest).check_value(name, value)
