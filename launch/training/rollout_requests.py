"""Requests of rollouts: a function of configuration, tasks and numbers, so that runs repeat."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from actors.rollouts.forks import Fork, ForkPoints
from actors.rollouts.rollout import RolloutRequest
from actors.rollouts.stream import BASELINE
from environments.data.dataset_files import Row
from environments.data.datasets import Dataset
from environments.errors import TroupeError
from launch.settings.tree import TrainConfig
from launch.workload import Workload
from policies.sampler import SamplingParams

if TYPE_CHECKING:
    from actors.engine import AgentExecutionEngine


def group_name(number: int) -> str:
    """The id of the training group ``number``."""
    return f"{number:08d}"


def group_requests(
    config: TrainConfig, task: Row, greedy_baseline: bool, number: int, version: int
) -> list[RolloutRequest]:
    """``group_size`` rollouts of a task, and, for ReMax, a greedy one beside them.

    With ``rollout.forks`` the first ones begin with the task, and the others fork from them.

    Args:
        greedy_baseline: whether there is one.
        number: of the group.
        version: the oldest policy version that may sample for it.
    """
    name = group_name(number)
    ids = [f"{name}/{member:04d}" for member in range(config.rollout.group_size)]
    temperatures = dict.fromkeys(ids, config.rollout.temperature)
    if greedy_baseline:
        temperatures[f"{name}/{BASELINE}"] = 0.0
    forks = _forks(ids, config.rollout.forks.roots or len(ids))
    counts = Counter(fork.parent for fork in forks.values())
    points = {each: ForkPoints(num_forks=count, at=config.rollout.forks.at) for each, count in counts.items()}
    return [
        RolloutRequest(
            rollout_id=rollout_id,
            group_id=name,
            task=task,
            params=SamplingParams(temperature=temperature),
            seed=derived_seed(config.seed, rollout_id),
            env_seed=environment_seed(config.seed, name),
            min_version=version,
            fork=forks.get(rollout_id),
            forked_at=points.get(rollout_id),
        )
        for rollout_id, temperature in temperatures.items()
    ]


def _forks(ids: Sequence[str], num_roots: int) -> dict[str, Fork]:
    """The members of a group that fork from another one: all but the first, dealt out among those."""
    return {
        rollout_id: Fork(parent=ids[position % num_roots], number=position // num_roots)
        for position, rollout_id in enumerate(ids[num_roots:])
    }


def task_index(config: TrainConfig, tasks: Dataset, number: int, set_aside: Mapping[str, int]) -> int:
    """The task that the group ``number`` plays: the one whose turn it is, or the next that is not set aside.

    Args:
        set_aside: positions of tasks, as text, and the first group that must not play each.

    Raises:
        TroupeError: all tasks of the epoch are set aside.
    """
    epoch, position = divmod(number, len(tasks))
    order = epoch_order(tasks, config.rollout.task_weights, config.seed, epoch)
    for place in range(len(order)):
        index = order[(position + place) % len(order)]
        if str(index) not in set_aside or number < set_aside[str(index)]:
            return index
    raise TroupeError(f"All of {len(set(order))} tasks failed everywhere: none is left to play.")


def evaluation_requests(
    config: TrainConfig, tasks: Dataset, step: int, version: int, name: str = ""
) -> list[RolloutRequest]:
    """One rollout of each of the first ``evaluation.num_tasks`` tasks of the set ``name``, the same at every
    evaluation.
    """
    params, prefix = evaluation_params(config), f"{name}-" if name else ""
    return [
        RolloutRequest(
            rollout_id=f"eval-{step}-{prefix}{index:06d}/0000",
            group_id=f"eval-{step}-{prefix}{index:06d}",
            task=tasks[index],
            params=params,
            seed=derived_seed(config.seed, f"eval/{prefix}{index}"),
            env_seed=environment_seed(config.seed, f"eval/{prefix}{index}"),
            min_version=version,
            urgent=True,
        )
        for index in range(min(config.evaluation.num_tasks, len(tasks)))
    ]


def evaluation_params(config: TrainConfig) -> SamplingParams:
    """Sampling parameters of an evaluation, without its limits."""
    own = config.evaluation.temperature
    temperature = config.rollout.temperature if own is None else own
    return SamplingParams(temperature=temperature, top_p=config.evaluation.top_p)


def execution_engine(
    config: TrainConfig,
    workload: Workload,
    num_tasks: int,
    params: SamplingParams,
    engine_name: str,
    engine_args: Mapping[str, Any],
) -> AgentExecutionEngine:
    """The engine that plays tasks of a workload by another policy than a training's, within its limits."""
    from actors.engine import AgentExecutionEngine

    rollout = config.rollout
    return AgentExecutionEngine(
        agent_class=workload.agent_class,
        env_class=workload.env_class,
        rollout=workload.rollout,
        agent_args=workload.agent_args,
        env_args=workload.env_args,
        engine_name=engine_name,
        rollout_engine_args=engine_args,
        sampling_params={
            "temperature": params.temperature,
            "top_p": params.top_p,
            "max_tokens": rollout.max_turn_tokens,
            "seed": params.seed,
        },
        max_response_length=rollout.max_response_tokens,
        max_prompt_length=rollout.max_prompt_tokens,
        n_parallel_agents=max(1, min(config.fleet.num_actors, num_tasks)),
        max_steps=rollout.max_steps,
        trajectory_timeout=rollout.timeout_seconds,
        retry_limit=config.fleet.retries,
    )


def tasks_digest(config: TrainConfig, tasks: Dataset) -> str:
    """Equal for runs in which every group has the same task, seeds, temperature and forks."""
    rollout = config.rollout
    digest = hashlib.sha256(f"{config.seed} {rollout.task_weights} {rollout.temperature}".encode())
    if rollout.forks.roots:
        digest.update(f"{rollout.group_size} {rollout.forks}".encode())
    for task in tasks:
        digest.update(repr(task).encode())
    return digest.hexdigest()


def derived_seed(seed: int, name: str) -> int:
    """A 62-bit seed for ``name``: neighbouring names have unrelated seeds."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "big") >> 2


def environment_seed(seed: int, name: str) -> int:
    """A 30-bit seed for the environments of a group: many libraries take no larger one."""
    return derived_seed(seed, f"environment/{name}") & (1 << 30) - 1


@lru_cache(maxsize=2)
def epoch_order(tasks: Dataset, weights_key: str | None, seed: int, epoch: int) -> tuple[int, ...]:
    """The tasks of ``epoch``, as many as there are. Made once: every group needs it.

    Equal weights play each task once, in an order of the epoch's own. Else each place is drawn on its own,
    by the weights: what weighs 0 is never played.
    """
    rng = random.Random(f"{seed}/epoch/{epoch}")
    weights = [] if weights_key is None else [float(task[weights_key]) for task in tasks]
    if len(set(weights)) > 1:
        return tuple(rng.choices(range(len(weights)), weights, k=len(weights)))
    order = list(range(len(tasks)))
    rng.shuffle(order)
    return tuple(order)
