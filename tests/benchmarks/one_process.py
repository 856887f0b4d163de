"""Trainings in one process, without Ray and Serve: vLLM's engine, rollouts in threads, a learner of one rank.

What is between them is the library's: sampling, rollouts, selection of groups, the stage with its
mini-batches, credit and losses. A run has no start of its own: an engine takes the weights of the next run as
those of a next version.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import repository

from policies.engines.vllm_settings import environment
from policies.settings import EngineConfig

os.environ.update(environment(EngineConfig()))
os.environ.update({"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"})

sys.path.insert(0, str(repository.ROOT / "tests"))
from machine import free_port
from whole_batches import WholeBatches

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from actors.sampling.serve_sampler import ServeSampler
from environments import Dataset
from environments.data.curriculum import Curriculum
from environments.disk import replaced
from environments.named_module import load_class
from environments.types import Completion, Trajectory, TrajectoryGroup
from launch.settings.tree import TrainConfig, algorithm_of
from launch.training.activity import Activity, Clock
from launch.training.components import UpdateParts
from launch.training.engine_comparison import EngineComparison
from launch.training.selection import Selection, place
from launch.training.stages.base import Stage
from launch.training.stages.chosen import STAGES
from launch.training.stages.policy_update import PolicyUpdateStage, learn
from launch.workload import Workload
from policies.engines.vllm import VLLMEngine
from policies.engines.weights import WeightBucket, pack
from policies.learning.algorithm import Algorithm
from policies.learning.kl import KLController
from policies.learning.samples import LearnerUpdate, TrainBatch
from policies.learning.verl.critic import VerlCritic
from policies.learning.verl.learner import VerlLearner
from policies.sampler import SampleRequest, SamplingParams, TokenOutput, TokenRequest

THREADS = 128
"""Rollouts that are played at a time."""
ENGINE = EngineConfig(max_model_tokens=256)


class EngineSampler(ServeSampler):
    """Samples an engine of this process in the place of a server's queue."""

    def __init__(self, engine: VLLMEngine, model_path: str) -> None:
        super().__init__("engine", model_path)
        self._engine = engine

    async def sample_tokens(self, request: TokenRequest) -> TokenOutput:
        return await self._engine.generate(request.prompt_ids, request.params)


class Player:
    """Plays rollouts by the weights that it was given last."""

    def __init__(
        self,
        model_path: str,
        workload: Workload,
        limits: RolloutLimits,
        engine: EngineConfig = ENGINE,
    ) -> None:
        self._pair = workload.pair
        self._limits = limits
        self._engine = VLLMEngine(model_path, engine, {})
        self._sampler = EngineSampler(self._engine, model_path)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def load(self, version: int, weights: Sequence[WeightBucket]) -> None:
        """Sample by these weights from now on."""
        self._await(self._engine.load_weights(version, weights))

    def play(self, requests: Sequence[RolloutRequest]) -> list[Trajectory]:
        """The rollouts of ``requests``, in their order."""
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(self._play, requests))

    def _play(self, request: RolloutRequest) -> Trajectory:
        agent, env = self._pair.make_agent(), self._pair.make_env(request)
        return run_rollout(agent, env, self._sample, request, self._limits, Journal())

    def _sample(self, request: SampleRequest) -> Completion:
        return self._await(self._sampler.sample(request))

    def _await(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class Learner:
    """The policy and, where the algorithm has one, its critic."""

    def __init__(self, model_path: str, config: TrainConfig, stage: Stage, algorithm: Algorithm) -> None:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
        os.environ.setdefault("MASTER_PORT", str(free_port()))
        steps, seed = stage.num_schedule_steps, config.seed
        settings = replace(config.learner, optimizer=stage.optimizer)
        self.policy = WholeBatches(VerlLearner(model_path, settings, algorithm, steps, seed))
        self._critic = None
        if algorithm.uses_critic:
            self._critic = WholeBatches(VerlCritic(model_path, settings, steps, seed))

    def score(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        """See ``LearnerGroup.score``."""
        scored = self.policy.score(batches)
        if self._critic is None:
            return scored
        values = self._critic.values(scored)
        return [batch.with_column("values", rows) for batch, rows in zip(scored, values, strict=True)]

    def update(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """See ``LearnerGroup.update``."""
        learned: LearnerUpdate = self.policy.update(batches)
        if self._critic is not None:
            self._critic.update(batches)
        return learned

    def fit(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        """See ``LearnerGroup.fit``."""
        learned: LearnerUpdate = self.policy.fit(batches)
        return learned

    def logprobs(self, batch: TrainBatch) -> list[list[float]]:
        """See ``LearnerGroup.logprobs``."""
        return self.policy.logprobs(batch)

    def weights(self) -> list[WeightBucket]:
        """A copy of the present weights."""
        return list(pack(self.policy.weights()))


class Kept:
    """What a run goes on from: the state of its policy, and the mean reward of each update.

    For runs without a critic, a curriculum and staleness, whose updates replace no group.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self._folder, self._every = folder, every
        self._rewards = folder / "rewards.json"

    def restore(self, policy: Any) -> list[float]:
        """Let the policy go on; return the rewards."""
        if not self._rewards.exists():
            return []
        rewards: list[float] = json.loads(self._rewards.read_text(encoding="utf-8"))
        policy.load(str(self._folder / str(len(rewards))))
        return rewards

    def keep(self, policy: Any, rewards: list[float]) -> None:
        """Write state and model after some of the updates, and remove those of before."""
        if len(rewards) % self._every:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        state = self._folder / str(len(rewards))
        shutil.rmtree(state, ignore_errors=True)  # of a call that was cut while it wrote
        policy.begin_save(str(state))()
        policy.export(str(state))
        with replaced(self._rewards) as unfinished:
            unfinished.write_text(json.dumps(rewards), encoding="utf-8")
        for each in self._folder.iterdir():
            if each.is_dir() and each != state:
                shutil.rmtree(each)


def train(
    config: TrainConfig, workload: Workload, model_path: str, player: Player, kept: Kept | None = None
) -> Iterator[float]:
    """Make the updates of a run's only stage, and yield the mean reward of the groups of each.

    They are sampled by the version that is ``rollout.max_staleness`` updates old, or by the first one. In the
    end the player has the last version. ``kept`` lets the run go on where it was cut; its rewards of before
    are yielded too.
    """
    [name] = config.stages
    stage = load_class("stages", name, STAGES, PolicyUpdateStage)(config)
    algorithm = algorithm_of(config)
    learner: Any = Learner(model_path, config, stage, algorithm)
    comparison = EngineComparison(config, algorithm, learner, None, print)
    parts = UpdateParts(
        algorithm=algorithm, learner=learner, kl=KLController(algorithm), comparison=comparison
    )
    rewards = [] if kept is None else kept.restore(learner.policy)
    yield from rewards
    versions = deque([learner.weights()], maxlen=config.rollout.max_staleness + 1)
    num_drawn = len(rewards) * config.rollout.groups_per_step
    curriculum = workload.curriculum or Curriculum()
    tasks = islice(
        enumerate(turns(workload.train_dataset or Dataset([]), curriculum, config.seed)), num_drawn, None
    )
    selecting, clock = stage.selecting(algorithm), Clock(Activity())
    for version in range(len(rewards), stage.num_steps):
        player.load(version + 1 - len(versions), versions[0])
        selection = Selection()
        supply = groups(config, algorithm.uses_greedy_baseline, tasks, player)
        wanted, most = config.rollout.groups_per_step, config.selection.max_dropped
        while len(selection.groups) < wanted and len(selection.all_dropped) < most:
            place(selection, next(supply), version, config, selecting)
        prepared = stage.prepare(parts, selection, version, version, clock)
        learn(stage, learner, prepared, version)
        versions.append(learner.weights())
        for group in selection.taken:
            curriculum.observe(group.task, group.trajectories)
        played = [each.reward for group in selection.taken for each in group.trajectories]
        rewards.append(sum(played) / len(played))
        if kept is not None:
            kept.keep(learner.policy, rewards)
        yield rewards[-1]
    player.load(stage.num_steps, versions[-1])


def turns(tasks: Dataset, curriculum: Curriculum, seed: int) -> Iterator[Any]:
    """The tasks that a curriculum chooses when they are wanted; without one all of them in turn."""
    places = cycle(range(len(tasks)))
    for number in count():
        yield tasks[curriculum.select(tasks, places, random.Random(f"{seed}/curriculum/{number}"))]


def groups(
    config: TrainConfig, with_baseline: bool, tasks: Iterator[tuple[int, Any]], player: Player
) -> Iterator[TrajectoryGroup]:
    """Groups of the next ``tasks`` without end; as many as an update has are played at a time."""
    size, number = config.rollout.group_size, config.rollout.groups_per_step
    temperatures = [config.rollout.temperature] * size + [0.0] * with_baseline
    while True:
        drawn = [next(tasks) for _ in range(number)]
        requests = [
            request(f"{index:06d}", f"{member:04d}", task, config.seed, temperature)
            for index, task in drawn
            for member, temperature in enumerate(temperatures)
        ]
        played = iter(player.play(requests))
        for index, task in drawn:
            members = [next(played) for _ in temperatures]
            yield TrajectoryGroup(
                group_id=f"{index:06d}",
                task=task,
                trajectories=tuple(members[:size]),
                baseline=members[size] if with_baseline else None,
            )


def request(group: str, member: str, task: Any, seed: int, temperature: float = 1.0) -> RolloutRequest:
    """A rollout whose tokens and environment are drawn by ``seed`` and its names."""
    draws = [random.Random(f"{seed}/{name}").getrandbits(30) for name in (f"{group}/{member}", group)]
    return RolloutRequest(
        rollout_id=f"{group}/{member}",
        group_id=group,
        task=task,
        params=SamplingParams(temperature=temperature),
        seed=draws[0],
        env_seed=draws[1],
    )
