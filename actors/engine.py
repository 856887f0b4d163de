"""``AgentExecutionEngine``: many tasks in, as many trajectories out, in the same order."""

from __future__ import annotations

import asyncio
import difflib
import logging
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import RayActorError

from actors.fleet import RolloutFleet
from actors.rollout import Pair, RolloutLimits, RolloutOrder, boundary
from actors.sampling import SamplerActor, ServeSampler
from actors.settings import FleetConfig
from actors.stream import TrajectoryStream
from environments.base import BaseEnv
from environments.datasets import Dataset
from environments.errors import AgentError, ConfigError, SamplerError
from environments.types import Trajectory
from policies.agents.base import BaseAgent
from policies.sampler import OpenAISampler, Sampler, SamplingParams

ENGINE_NAMES = ("openai", "serve", "verl")
LONGEST_SECONDS = 7200.0
"""Limit of a rollout that was given none: nothing waits for ever."""
STREAM_CAPACITY = 1024
SEED_BITS = 30
"""Many servers take a seed as a signed 32-bit number."""


@dataclass(frozen=True, slots=True)
class _Crew:
    """The Ray actors behind an engine."""

    sampler: ray.actor.ActorHandle
    stream: TrajectoryStream
    fleet: ray.actor.ActorHandle


class AgentExecutionEngine:
    """Plays tasks with agents in environments, many at a time, each pair in a process of its own.

    Ray is joined where it runs (``RAY_ADDRESS``, or a cluster on this machine) and started otherwise; the
    actors start with the first tasks and stay for the next ones, until ``close`` or the end of a ``with``.

    Args:
        agent_class, agent_args: the agent and its keyword arguments.
        env_class, env_args: the environment; ``from_dict`` is given the task with ``env_args`` over it.
        engine_name: "openai" samples an OpenAI-compatible server over HTTP; "serve" (also "verl") samples
            a policy server of this Ray cluster by its handle.
        rollout_engine_args: for "openai" ``base_url`` and optionally ``api_key`` and ``timeout_seconds``;
            for "serve" ``app_name`` and ``model_path``, the folder of the tokenizer.
        tokenizer: accepted for compatibility. Servers tokenize; only its ``name_or_path`` is used, for
            "serve" without a ``model_path``.
        sampling_params: fields of ``SamplingParams``, and for "openai" ``model``, by default the first one
            that the server lists. ``max_tokens`` limits one completion. ``seed`` makes calls repeatable;
            without it every call draws afresh.
        max_response_length: tokens after the first prompt, over the whole trajectory.
        max_prompt_length: tokens of the first prompt.
        n_parallel_agents: most pairs at a time. Each is a process of about 0.1 GB.
        max_steps: turns of a trajectory.
        trajectory_timeout: seconds after which a rollout is ended together with its process; ``None``
            is two hours.
        retry_limit: how often a rollout is begun anew when its process dies.
        api_retries: how often a request is repeated when the server is overloaded or unreachable.
        gamma: discount of ``Step.mc_return``.

    Raises:
        ConfigError: a value is unknown or impossible.
        AgentError: the agent cannot be made from ``agent_args``.
    """

    def __init__(
        self,
        *,
        agent_class: type[BaseAgent],
        env_class: type[BaseEnv],
        agent_args: Mapping[str, Any] | None = None,
        env_args: Mapping[str, Any] | None = None,
        engine_name: str = "openai",
        rollout_engine_args: Mapping[str, Any] | None = None,
        tokenizer: Any = None,
        sampling_params: Mapping[str, Any] | None = None,
        max_response_length: int = 8192,
        max_prompt_length: int = 1024,
        n_parallel_agents: int = 64,
        max_steps: int = 5,
        trajectory_timeout: float | None = None,
        retry_limit: int = 3,
        api_retries: int = 3,
        gamma: float = 1.0,
    ) -> None:
        _at_least("max_response_length", max_response_length, 1)
        _at_least("max_prompt_length", max_prompt_length, 1)
        _at_least("n_parallel_agents", n_parallel_agents, 1)
        _at_least("max_steps", max_steps, 1)
        _at_least("retry_limit", retry_limit, 0)
        _at_least("api_retries", api_retries, 0)
        sampling = dict(sampling_params or {})
        engine_args = dict(rollout_engine_args or {})
        if engine_name == "openai":
            self._make_sampler = _openai_sampler(engine_args, sampling.pop("model", None), api_retries)
        else:
            _one_of("engine_name", engine_name, ENGINE_NAMES)
            self._make_sampler = _serve_sampler(engine_args, tokenizer)
        for name in sampling:
            _one_of("sampling_params", name, [field.name for field in fields(SamplingParams)])
        self._params = SamplingParams(**sampling)
        self._pair = Pair(
            agent_class=agent_class,
            env_class=env_class,
            agent_args=dict(agent_args or {}),
            env_args=dict(env_args or {}),
        )
        with boundary(AgentError, "agent", agent_class.__name__, "__init__"):
            agent_class(**self._pair.agent_args)  # here it is one error, later one for each task
        self._limits = RolloutLimits(
            max_steps=max_steps,
            max_prompt_tokens=max_prompt_length,
            max_response_tokens=max_response_length,
            max_turn_tokens=self._params.max_tokens,
            timeout_seconds=LONGEST_SECONDS if trajectory_timeout is None else trajectory_timeout,
        )
        self._num_actors = n_parallel_agents
        self._retry_limit = retry_limit
        self._gamma = gamma
        self._crew: _Crew | None = None
        self._num_started = 0
        self._busy = False

    async def execute_tasks(self, tasks: Iterable[dict[str, Any]]) -> list[Trajectory]:
        """Play every task once and return the trajectories in the order of the tasks.

        A rollout that fails is a trajectory too: its ``termination_reason`` and ``error`` say why.

        Args:
            tasks: a ``Dataset`` or a list of dicts; the same task may occur several times.

        Raises:
            DatasetError: a task is no dict.
            ConfigError: the engine is still at an earlier call's tasks.
            SamplerError: the sampler did not start.
        """
        rows = Dataset(tasks).get_data()
        if self._busy:
            raise ConfigError(
                "execute_tasks is still running: await it before the next call, or pass all tasks at once."
            )
        if not rows:
            return []
        self._busy = True
        try:
            await asyncio.to_thread(self._start, min(self._num_actors, len(rows)))
            return await asyncio.to_thread(self._play, self._orders(rows))
        except BaseException:
            self.close()  # cancelled or broken: nothing of this call may end up among the next one's results
            raise
        finally:
            self._busy = False

    def close(self) -> None:
        """End the engine's actors. Ray itself goes on; a later ``execute_tasks`` starts new actors."""
        crew, self._crew = self._crew, None
        self._num_started = 0
        if crew is not None and ray.is_initialized():
            ray.kill(crew.fleet)  # Ray ends the rollout actors with the actor that has made them
            ray.kill(crew.sampler)
            crew.stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _orders(self, rows: Sequence[dict[str, Any]]) -> list[RolloutOrder]:
        seed = self._params.seed
        if seed is None:
            seed = random.SystemRandom().getrandbits(SEED_BITS)
        return [
            RolloutOrder(
                rollout_id=f"{index:06d}/0000",
                group_id=f"{index:06d}",
                task=row,
                params=self._params,
                # One for each order: equal tasks are repeated to see different attempts.
                seed=random.Random(f"{seed}/{index}").getrandbits(SEED_BITS),
            )
            for index, row in enumerate(rows)
        ]

    def _start(self, num_actors: int) -> None:
        """Have at least ``num_actors`` rollout actors."""
        if not ray.is_initialized():
            ray.init(log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
        if self._crew is None:
            sampler = SamplerActor.remote(self._make_sampler)  # type: ignore[attr-defined]
            try:
                ray.get(sampler.__ray_ready__.remote())
            except RayActorError as error:
                raise SamplerError(f"The sampler did not start: {error}") from error
            stream = TrajectoryStream(STREAM_CAPACITY)
            # No CPU is reserved: an actor that waits for one would keep its task waiting for ever.
            config = FleetConfig(num_actors=0, num_cpus_per_actor=0, retries=self._retry_limit)
            fleet = RolloutFleet.remote(  # type: ignore[attr-defined]
                self._pair, sampler, stream.queue, self._limits, config
            )
            self._crew = _Crew(sampler, stream, fleet)
        if num_actors > self._num_started:
            ray.get(self._crew.fleet.resize.remote(num_actors))
            self._num_started = num_actors

    def _play(self, orders: list[RolloutOrder]) -> list[Trajectory]:
        crew = self._crew
        assert crew is not None
        ray.get(crew.fleet.submit.remote(orders))
        finished = {each.rollout_id: each for each in crew.stream.trajectories(len(orders), crew.fleet)}
        trajectories = []
        for order in orders:
            trajectory = finished[order.rollout_id]
            trajectory.task = order.task  # the caller's own object, not the copy that has travelled
            fill_returns(trajectory, self._gamma)
            trajectories.append(trajectory)
        return trajectories


def fill_returns(trajectory: Trajectory, gamma: float) -> None:
    """Set every step's ``mc_return``: its reward and, discounted by ``gamma`` per step, the later ones."""
    following = 0.0
    for step in reversed(trajectory.steps):
        following = step.reward + gamma * following
        step.mc_return = following


def _openai_sampler(args: dict[str, Any], model: str | None, api_retries: int) -> Callable[[], Sampler]:
    _check_engine_args("openai", args, required=("base_url",), optional=("api_key", "timeout_seconds"))
    make = partial(OpenAISampler, model=model, api_retries=api_retries, **args)
    make()  # refuses a wrong address here, not in another process
    return make


def _serve_sampler(args: dict[str, Any], tokenizer: Any) -> Callable[[], Sampler]:
    if tokenizer is not None:
        args.setdefault("model_path", tokenizer.name_or_path)
    _check_engine_args("serve", args, required=("app_name", "model_path"))
    return partial(ServeSampler, **args)


def _check_engine_args(
    engine_name: str, args: dict[str, Any], required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> None:
    for name in args:
        _one_of(f"rollout_engine_args of engine_name={engine_name!r}", name, (*required, *optional))
    for name in required:
        if not args.get(name):
            raise ConfigError(
                f"engine_name={engine_name!r} needs rollout_engine_args={{{name!r}: ...}}; given: {args}."
            )


def _one_of(name: str, value: str, known: Collection[str]) -> None:
    if value not in known:
        near = difflib.get_close_matches(value, known, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}."
        raise ConfigError(f"{name}: there is no {value!r}. {hint}")


def _at_least(name: str, value: int, smallest: int) -> None:
    if value < smallest:
        raise ConfigError(f"{name}={value} is too small: use {smallest} and above.")
