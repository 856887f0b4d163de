"""A whole training's data path without processes: the real classes, and the CPU time of each process.

Real are the fleet with its slots, the sampling actors with their queues, the directory, a replica's workers,
the stream and the choice of groups with their credit. Simulated are Ray, nodes, engines, environments and
time. What a call carries between two processes is pickled and read again, as Ray does it.
"""

from __future__ import annotations

import asyncio
import functools
import pickle
import random
import time
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakSet

import pytest
import ray
from ray.exceptions import ActorUnavailableError, RayActorError
from simulated_cluster import HEAD, Actor, Cluster, Node, SimulatedLoop, simulated_fleet
from simulated_rollouts import SimulatedPlan

from actors.rollouts import fleet_report, stream
from actors.rollouts.player import Attempt
from actors.rollouts.rollout import RolloutRequest
from actors.rollouts.stream import TrajectoryQueue, TrajectoryStream
from actors.sampling import directory, queue_worker, request_queue, sampler_actor
from actors.sampling.directory import SamplerDirectory
from actors.sampling.request_queue import RequestQueue
from actors.sampling.sampler_actor import SamplerActor
from actors.sampling.serve_sampler import ServeSampler
from actors.sampling.served_queues import ServedQueues
from actors.timing import SAMPLER_RETRY_SECONDS
from environments.types import Completion, Step, TerminationReason, Trajectory
from launch.run_folder.checkpoint import Progress, StreamState
from launch.settings.tree import TrainConfig
from launch.training.rollouts import Rollouts
from launch.training.selection import Selection, place
from launch.training.task_plan import TaskPlan
from policies.engines.base import Engine
from policies.engines.weights import WeightBucket
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.credit import assign_credit
from policies.learning.samples import training_samples
from policies.sampler import EngineStats, SampleRequest, SamplingParams, TokenOutput, Turn

FLEET, SAMPLER, DIRECTORY, STREAM, DRIVER, REPLICA, ACTOR = ROLES = (
    *("fleet", "sampling actor", "directory", "stream", "driver", "replica", "rollout actor"),
)
APP = "simulated"
CARRIED = {"sample", "poll", "put", "get", "submit", "record_turn"}
"""Calls whose arguments and results are pickled: they hold data, and no handles."""
TRAINED = "trained"
"""Name by which the driver's rollouts are counted among its calls."""
DELIVERED = "delivered"
"""Name by which those of the stream are."""
_PROCESS: ContextVar[Process] = ContextVar("process")
_METHOD = ContextVar("method", default="")
"""Name of the call that is being served, also in the tasks that it has started."""


class CountingLoop(SimulatedLoop):
    """A simulated loop that counts the CPU seconds of each process, also of its tasks in the background."""

    def __init__(self) -> None:
        super().__init__()
        self.set_task_factory(_task_of_process)  # type: ignore[arg-type]

    def call_soon(self, callback: Any, *args: Any, context: Context | None = None) -> asyncio.Handle:
        return super().call_soon(_counted, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, _counted, callback, *args, context=context)


def _counted(callback: Callable[..., Any], *args: Any) -> None:
    process = _PROCESS.get(None)
    if process is None:
        callback(*args)
        return
    start = time.process_time()
    callback(*args)
    process.cpu[_METHOD.get()] += time.process_time() - start


def _task_of_process(
    loop: asyncio.AbstractEventLoop, work: Any, context: Context | None = None
) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context)
    process = _PROCESS.get(None) if context is None else context.get(_PROCESS)
    if process is not None:
        process.tasks.add(task)
    return task


@contextmanager
def _not_counted() -> Iterator[None]:
    """The work of the simulation itself in the block is nobody's."""
    start = time.process_time()
    yield
    if (process := _PROCESS.get(None)) is not None:
        process.cpu[_METHOD.get()] -= time.process_time() - start


class Process:
    """A process with an actor in it, and a handle to that: ``handle.method.remote()`` runs in its tasks."""

    def __init__(self, role: str, make: Callable[[], Any], name: str = "") -> None:
        self.role, self.name, self._make = role, name, make
        self.cpu: defaultdict[str, float] = defaultdict(float)
        """CPU seconds by the method that was called."""
        self.calls: Counter[str] = Counter()
        self.tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.has_ended = False
        self._answers: set[asyncio.Future[Any]] = set()
        self.context = copy_context()
        self.context.run(_PROCESS.set, self)
        self.target = self.context.run(make)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        method = SimpleNamespace(remote=functools.partial(self._call, name))
        method.options = lambda **_: method
        self.__dict__[name] = method
        return method

    def run(self, work: Callable[[], Any], name: str = "") -> asyncio.Task[Any]:
        """Run a coroutine of its own."""
        context = self.context.copy()
        context.run(_METHOD.set, name)
        return asyncio.get_running_loop().create_task(work(), context=context)

    def _call(self, name: str, *args: Any) -> asyncio.Future[Any]:
        is_carried = name in CARRIED
        data = pickle.dumps(args) if is_carried else b""
        with _not_counted():
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            if self.has_ended:
                _fail(answer, RayActorError())
                return answer
            self.calls[name] += 1
            self._answers.add(answer)
            self.run(functools.partial(self._work, name, args, data, answer), name)
        return answer

    async def _work(self, name: str, args: Any, data: bytes, answer: asyncio.Future[Any]) -> None:
        if data:
            args = pickle.loads(data)
        try:
            result = await getattr(self.target, name)(*args)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is the caller's
            _fail(answer, error)
        else:
            if name in CARRIED and result is not None:
                result = pickle.loads(pickle.dumps(result))
            if not answer.done():
                answer.set_result(result)
        finally:
            self._answers.discard(answer)

    def end(self) -> None:
        """Kill it for good."""
        self.has_ended = True
        self._end_work(RayActorError())

    def restart(self) -> None:
        """Kill it; Ray starts it anew."""
        self._end_work(ActorUnavailableError("it is started anew", None))
        self.target = self.context.run(self._make)

    def _end_work(self, error: Exception) -> None:
        for task in list(self.tasks):
            task.cancel()
        for answer in list(self._answers):
            _fail(answer, error)
        self._answers.clear()


def _fail(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()


@dataclass
class Size:
    """How large a simulated training is, and what its rollouts are."""

    num_pairs: int
    num_replicas: int
    num_nodes: int
    num_turns: int = 4
    turn_seconds: float = 2.0
    """Mean seconds of a turn, of which sampling takes half."""
    groups_per_step: int = 8
    group_size: int = 8
    num_updates: int = 4
    update_seconds: float = 1.0
    max_staleness: int = 1
    retries: int = 100
    pairs_per_actor: int = 1
    gives_credit: bool = True
    """False leaves out what takes seconds to import."""


@dataclass
class Usage:
    """CPU seconds and calls of all processes, until a moment or between two."""

    seconds: float
    """Of the simulated clock."""
    cpu: defaultdict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """CPU seconds by role and method."""
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    num_processes: Counter[str] = field(default_factory=Counter)
    """Processes by role."""

    def since(self, before: Usage) -> Usage:
        """What was used since an earlier moment."""
        between = Usage(self.seconds - before.seconds, num_processes=self.num_processes)
        between.cpu.update({key: seconds - before.cpu[key] for key, seconds in self.cpu.items()})
        between.calls.update({key: count - before.calls[key] for key, count in self.calls.items()})
        return between


class WordRenderer:
    """Stands in for ``ChatRenderer``: a message is a token."""

    def request_ids(self, request: SampleRequest) -> tuple[int, ...]:
        return tuple(range(1, len(request.messages) + 1))

    def completion_text(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> str:
        return "word"


REPLY = (7, 8, 9)


class System:
    """The processes of a training on a cluster, and what happens to them."""

    def __init__(
        self,
        size: Size,
        seed: int = 0,
        renderer: Any = None,
        reply: tuple[int, ...] = REPLY,
        question: str = "Go on.",
    ) -> None:
        self.size, self.reply, self.question = size, reply, question
        self.rng = random.Random(seed)
        self._renderer = renderer or WordRenderer()
        self.version = 0
        self.ended: list[Process] = []
        self.turns_played: Counter[tuple[str, int]] = Counter()
        """Turns that have ended, by rollout and index."""
        self.rollouts_ended: set[str] = set()
        # As many nodes as the others, and their rollout actors.
        capacity = -(-size.num_pairs // size.pairs_per_actor // max(1, size.num_nodes - 1)) + 1
        self.cluster = Cluster(self.rng, size.num_nodes - 1, capacity)
        if size.num_pairs > 100:
            self.cluster.check_start = _unchecked  # type: ignore[method-assign]
        self.directory = Process(DIRECTORY, _class_of(SamplerDirectory))
        self.first = self._sampler()
        self.samplers = [self.first]
        self.stream = Process(STREAM, lambda: Deliveries(self))
        self.replicas: dict[str, Process] = {}
        self._num_replicas = 0
        for _ in range(size.num_replicas):
            self.start_replica()
        self.driver = Process(DRIVER, lambda: Driver(self))
        self.actors = Process(ACTOR, lambda: None)
        self.fleet: Any = None

    def usage(self) -> Usage:
        """What its processes have used until now."""
        usage = Usage(asyncio.get_running_loop().time())
        for each in self.processes:
            usage.num_processes[each.role] += 1
            for method, seconds in each.cpu.items():
                usage.cpu[each.role, method] += seconds
            usage.calls.update({(each.role, method): count for method, count in each.calls.items()})
        return usage

    @property
    def processes(self) -> list[Process]:
        each = [self.fleet, self.directory, self.stream, self.driver, self.actors]
        return [*each, *self.samplers, *self.replicas.values(), *self.ended]

    # -- sampling ------------------------------------------------------------------------------------

    def _sampler(self) -> Process:
        recipe = functools.partial(SimulatedSampler, self)
        return Process(SAMPLER, lambda: _class_of(SamplerActor)(recipe))

    def start(self, node: Node | None, _: Any) -> Process:
        """Start the sampling actor of a node, for ``NodeSamplers``."""
        with _not_counted():
            sampler = self._sampler()
            self.samplers.append(sampler)
            if node is None or node.name not in self.cluster.nodes:
                sampler.end()
            else:
                node.probes.add(cast(Any, sampler))
            return sampler

    def start_replica(self) -> None:
        """Have another replica serve, with the newest version."""
        self._num_replicas += 1
        name = f"replica-{self._num_replicas}"
        process = Process(REPLICA, lambda: Replica(self, name), name)
        self.replicas[name] = process
        process.run(process.target.follow)

    def end_replica(self, name: str) -> None:
        """Kill a replica."""
        process = self.replicas.pop(name)
        process.end()
        self.ended.append(process)

    def publish(self) -> None:
        """Have all replicas load the next version, each in its own time."""
        self.version += 1
        loop = asyncio.get_running_loop()
        for process in self.replicas.values():
            seconds = self.rng.uniform(0.05, 0.5)
            loop.call_later(seconds, process.target.load, self.version, context=process.context.copy())

    def sampling_seconds(self) -> float:
        return self.size.turn_seconds * self.rng.uniform(0.25, 0.75)


class SimulatedSampler(ServeSampler):
    """A sampler whose application is the simulation."""

    def __init__(self, system: System) -> None:
        self._apps, self._queues = {"": APP}, {APP: RequestQueue(APP)}
        self._renderer, self._directories = system._renderer, {APP: cast(Any, system.directory)}


class SimulatedEngine(Engine):
    """Takes its time, and replies the same to all."""

    max_model_tokens = 1 << 20

    def __init__(self, system: System) -> None:
        self._system, self.version = system, system.version

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, in_pieces: bool
    ) -> AsyncGenerator[TokenOutput, None]:
        begun, reply = self.version, self._system.reply
        await asyncio.sleep(self._system.sampling_seconds())
        yield TokenOutput(
            token_ids=reply,
            logprobs=(-0.5,) * len(reply),
            finish_reason="stop",
            policy_version=begun,
            token_versions=(begun,) + (self.version,) * (len(reply) - 1),
        )

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        self.version = version

    def stats(self) -> EngineStats:
        return EngineStats(num_running=self.requests_in_flight)

    def check_alive(self) -> None:
        pass


class Replica:
    """A replica that samples for sampling actors as the real one does, and nothing else."""

    def __init__(self, system: System, name: str) -> None:
        self._engine = SimulatedEngine(system)
        store: Any = None  # which nothing is reported to
        directory: Any = system.directory
        self._queues = ServedQueues(name, APP, store, directory, self._engine, queue_worker._as_sampled)

    async def follow(self) -> None:
        await self._queues.run()

    def load(self, version: int) -> None:
        """Sample with this version from now on."""
        self._engine.version = max(version, self._engine.version)
        self._queues.wake()


# -- rollouts ------------------------------------------------------------------------------------------


class PlayingActor(Actor):
    """A rollout actor that samples its turns."""

    def __init__(self, system: System, cluster: Cluster, avoided: Collection[str]) -> None:
        with _not_counted():
            super().__init__(cluster, avoided)
        self._system, self._sampler = system, system.first
        self._play_tasks: set[asyncio.Task[None]] = set()

    def _connect(self, sampler: Any) -> asyncio.Future[Any]:
        self._sampler = sampler
        return super()._connect(sampler)

    def _play(self, node: Node, place: int, call: asyncio.Future[Any], attempt: Attempt) -> None:
        with _not_counted():
            play = functools.partial(self._turns, node, place, call, attempt)
            task = self._system.actors.run(play)
            self._play_tasks.add(task)
            task.add_done_callback(self._play_tasks.discard)

    async def _turns(self, node: Node, place: int, call: asyncio.Future[Any], attempt: Attempt) -> None:
        system, size, request = self._system, self._system.size, attempt.request
        steps: list[Step] = [pickle.loads(each) for each in attempt.entries]
        messages: list[Any] = [{"role": "user", "content": system.question}]
        previous: Turn | None = None
        for index in range(size.num_turns):
            if index == len(steps):
                order = SampleRequest(
                    messages=list(messages),
                    session_id=request.rollout_id,
                    min_version=request.min_version,
                    previous=previous,
                )
                completion = await self._sample(order)
                assert completion.policy_version >= request.min_version, "a version that may sample it"
                assert completion.policy_version <= system.version
                await asyncio.sleep(size.turn_seconds * system.rng.uniform(0.25, 0.75))
                if previous is not None:
                    completion = completion.sharing(previous.completion)
                steps.append(Step(completion=completion, reward=system.rng.random()))
                entry = pickle.dumps(steps[-1])
                system.turns_played[request.rollout_id, index] += 1
                system.fleet.record_turn.remote(request.rollout_id, attempt.number, index, entry)
            completion = steps[index].completion
            previous = Turn(messages=list(messages), completion=completion)
            messages += [
                {"role": "assistant", "content": completion.text},
                {"role": "user", "content": system.question},
            ]
        trajectory = Trajectory(
            task=request.task,
            rollout_id=request.rollout_id,
            steps=steps,
            reward=sum(each.reward for each in steps),
            termination_reason=TerminationReason.ENV_DONE,
        )
        system.rollouts_ended.add(request.rollout_id)
        self._end(node, place, call, request, pickle.loads(pickle.dumps(trajectory)))

    async def _sample(self, order: SampleRequest) -> Completion:
        """One completion, as ``RayLink`` has it."""
        while True:
            try:
                completion: Completion = await self._sampler.sample.remote(order)
                return completion
            except ActorUnavailableError:
                await asyncio.sleep(SAMPLER_RETRY_SECONDS)
            except RayActorError:
                assert self._sampler is not self._system.first
                self._sampler = self._system.first

    def end(self, is_placed_again: bool = False) -> None:
        for task in self._play_tasks:
            task.cancel()
        super().end(is_placed_again)


def _class_of(actor: Any) -> Any:
    return actor.__ray_metadata__.modified_class


class Deliveries(_class_of(TrajectoryQueue)):  # type: ignore[misc]
    """The stream's queue, which notes what it was given."""

    def __init__(self, system: System) -> None:
        super().__init__(1024)
        self._system = system

    async def put(self, trajectories: Sequence[Trajectory]) -> None:
        self._system.cluster.delivered.extend(trajectories)
        self._system.stream.calls[DELIVERED] += len(trajectories)
        # The others are of nobody's group: tests have such.
        await super().put([each for each in trajectories if each.rollout_id[0].isdigit()])


class NotYetError(Exception):
    """Nothing more has arrived."""


@dataclass
class ArrivedStream(TrajectoryStream):
    """The stream, which ends a ``take`` where it would wait."""

    system: System
    arrived: deque[Trajectory] = field(default_factory=deque)
    members: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    """Trajectories of each group that have arrived, of those that were not taken."""

    def __post_init__(self) -> None:
        self._groups, self._complete, self._before_wait, self._judgement = {}, set(), None, None
        self._no_actor = fleet_report.NoActorWarning()

    def _send(self, requests: Sequence[RolloutRequest]) -> None:
        self.system.fleet.submit.remote(list(requests))

    def _arrived(self, seconds: float) -> Trajectory | None:
        if not self.arrived:
            raise NotYetError
        return self.arrived.popleft()

    def note(self, trajectory: Trajectory) -> None:
        """Take in what has come."""
        self.arrived.append(trajectory)
        self.members[trajectory.rollout_id.rpartition("/")[0]] += 1

    def has_group(self) -> bool:
        """True if a group is whole."""
        whole = (name for name, count in self.members.items() if count == self.system.size.group_size)
        if (name := next(whole, None)) is not None:
            del self.members[name]
        return name is not None


class Driver:
    """The training loop: takes groups, gives credit, publishes, and requests the next."""

    def __init__(self, system: System) -> None:
        self._system, size = system, system.size
        self.config = TrainConfig()
        self.config.rollout.max_staleness = size.max_staleness
        self.config.rollout.groups_per_step = size.groups_per_step
        self.config.rollout.group_order = "completion" if size.max_staleness else "tasks"
        self._algorithm: Algorithm = resolve(self.config.algorithm, 8192, size.max_staleness, 1)
        self._stream = ArrivedStream(system)
        self._progress = Progress()
        plan = cast(TaskPlan, SimulatedPlan(size.group_size))
        self._rollouts = Rollouts(self._stream, plan, self.config.rollout, self._progress, size.num_updates)
        self.updates: list[Selection] = []

    async def train(self) -> None:
        """Make all updates."""
        system, size = self._system, self._system.size
        self._rollouts.begin(StreamState())
        for _ in range(size.num_updates):
            selection = Selection()
            while len(selection.groups) < size.groups_per_step:
                try:
                    group = self._rollouts.take()
                except NotYetError:
                    while not self._stream.has_group():
                        for each in await system.stream.get.remote():
                            self._stream.note(each)
                    continue
                reason = place(selection, group, self._progress.version, self.config, self._algorithm)
                assert reason is None, f"{group.group_id}: {reason}"
            self.updates.append(selection)
            system.driver.calls[TRAINED] += sum(len(group.trajectories) for group in selection.groups)
            if size.gives_credit:
                self._credit(selection)
            await asyncio.sleep(size.update_seconds)
            system.publish()
            self._progress.step += 1
            self._progress.version += 1
            self._rollouts.commit()

    def _credit(self, selection: Selection) -> None:
        trajectories = [each for group in selection.groups for each in group.trajectories]
        samples = {each.rollout_id: training_samples(each) for each in trajectories}
        assign_credit(selection.groups, samples, self._algorithm, 0.0)


def _unchecked(*_: Any) -> None:
    """Checks that walk over the whole cluster are for small ones."""


@contextmanager
def simulated_system(loop: CountingLoop, make: Callable[[], System]) -> Iterator[System]:
    """A training whose processes are there, with as many rollout actors as it is to have still to start."""
    clock = SimpleNamespace(monotonic=loop.time)
    with pytest.MonkeyPatch.context() as patch:
        for module in (request_queue, queue_worker, directory, sampler_actor, stream, fleet_report):
            patch.setattr(module, "time", clock)
        system = make()
        with simulated_fleet(
            system.cluster,
            loop,
            system.size.retries,
            system.size.pairs_per_actor,
            functools.partial(PlayingActor, system),
            system,
            system.stream,
            pairs_of_fleet=system.size.num_pairs,
        ) as fleet:
            patch.setattr(
                ray,
                "get_runtime_context",
                lambda: SimpleNamespace(get_node_id=lambda: HEAD, current_actor=_PROCESS.get()),
            )
            system.fleet = Process(FLEET, lambda: fleet)
            yield system
