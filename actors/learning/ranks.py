"""Ranks of a learner: actors that hold one model together, the policy's or the critic's.

Importing this is light: verl and torch are imported where a rank loads its model. So the program that starts
the ranks, which computes nothing, has none of it: 4 s of CPU time and 0.4 GB.
"""

from __future__ import annotations

import ctypes
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.timing import CALL_ANSWER_SECONDS, PLACE_RETURN_SECONDS
from environments.disk import FileDigest
from environments.errors import ConfigError, LearnerError, LearnerLostError, TroupeError
from policies.imports import large_imports
from policies.learning.division import Columns, Division, Ids, RankShard
from policies.learning.samples import TrainBatch
from policies.learning.settings import LearnerConfig, OptimizerConfig
from policies.model_files import HUGGINGFACE, write_index
from policies.settings import node_labels, node_resources

if TYPE_CHECKING:
    from actors.learning.learner_calls import CriticCalls, PolicyCalls, RankCalls

DISK, PUBLISH = "disk", "publish"
"""Ray's groups of the calls that go on beside a rank's work."""

P = ParamSpec("P")
Result = TypeVar("Result")


class RankWorker(ABC):
    """One rank, as an actor. It loads its model in a call: Ray returns an exception as it was raised from a
    call, but not from a constructor.

    Args:
        shared_file: path and text of a file in the run's folder; ``None`` if there is no folder to share.
        gives_back: whether memory that is free after a piece of work goes back to the device.
        environment: variables for torch and verl, which are imported where a model is loaded. As those of
            the actor they would have Ray start its process twice.
        arguments: of the model.
    """

    def __init__(
        self,
        shared_file: tuple[str, str] | None,
        gives_back: bool = False,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> None:
        self._environment = environment or {}
        self._gives_back = gives_back
        self._shared_file = shared_file
        self._arguments = arguments
        self._failure: Exception | None = None
        self._ids: dict[ray.ObjectRef, list[Ids]] = {}
        """The ids of its samples that ``work_on`` keeps for the next call with them."""
        self._writes: dict[str, Callable[[], dict[str, FileDigest]]] = {}
        """The copy that waits to be written, by its folder."""

    def open_store(self) -> tuple[str, int]:
        """Open the store of torch's rendezvous, and return its address. The first rank's first call."""
        os.environ |= self._environment
        from torch.distributed import TCPStore

        host = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def open(self, rendezvous: tuple[str, int]) -> int:
        """Join the other ranks and load the model.

        Args:
            rendezvous: the address that ``open_store`` of the first rank has returned.

        Returns:
            ``pairs_per_token`` of the model.

        Raises:
            ConfigError: the run's folder on this node is not the one on the driver's node.
        """
        if self._shared_file is not None:
            check_shared(*self._shared_file)
        host, port = rendezvous
        # To torch, the store is one that was opened before the ranks: none of them opens another.
        os.environ |= {
            **self._environment,  # in this call: when another has ended, Ray takes OMP_NUM_THREADS back
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        self._model = self._load(**self._arguments)
        return self._model.pairs_per_token

    @abstractmethod
    def _load(self, **arguments: Any) -> RankCalls:
        """The model. This imports verl."""

    def work(self, method: str, *args: Any) -> Any:
        """Call ``method`` of the model, as all ranks do at the same time.

        Raises:
            LearnerError: the GPU's memory is full.
        """
        with self._at_work():
            return methodcaller(method, *args)(self._model)

    def work_on(
        self, method: str, ids_of_shards: list[ray.ObjectRef], shards: Sequence[RankShard], keeps: bool
    ) -> Any:
        """Call ``method`` of the model with this rank's shards. Raises as ``work`` does.

        Args:
            ids_of_shards: the reference, in a list: Ray would resolve an argument in each call.
            keeps: whether the next call comes with the same ids.
        """
        [reference] = ids_of_shards
        ids = self._ids.pop(reference, None) or ray.get(reference)
        if keeps:
            self._ids = {reference: ids}
        return self.work(method, [shard.with_ids(ids) for shard in shards])

    @ray.method(concurrency_group=PUBLISH)
    def stream(self, method: str, *args: Any) -> Iterator[Any]:
        """Call ``method`` beside other work, and yield what it yields. ``end_stream`` raises its error."""
        try:
            # Not yield from: Ray sends numbers into a stream, which the iterator of a list cannot take.
            for piece in methodcaller(method, *args)(self._model):  # noqa: UP028
                yield piece
        except Exception as error:  # noqa: BLE001  # Ray would take it for the last of what was yielded
            self._failure = error

    @ray.method(concurrency_group=PUBLISH)
    def end_stream(self) -> None:
        """Raise the error of the ``stream`` before this call, if it had one."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def begin_save(self, folder: str) -> None:
        """Copy the model's state, which ``write`` writes to ``folder``.

        A copy before it that waits is dropped: its save was given up, as another rank has failed in it.
        """
        self._writes = {}  # first: there is memory for one copy
        with self._at_work():
            self._writes = {folder: self._model.begin_save(folder)}

    @ray.method(concurrency_group=DISK)
    def write(self, folder: str) -> dict[str, FileDigest]:
        """Write the copy for ``folder`` beside the model's work; return digests of files by path."""
        write = self._writes.pop(folder, None)  # the copy goes with it
        if write is None:
            raise LearnerError(f"{folder} is written no more: another save has begun.")
        return write()

    @ray.method(concurrency_group=DISK)
    def export(self, folder: str) -> dict[str, FileDigest]:
        """Write this rank's share of the weights in Hugging Face's form, once all ranks have written."""
        return self._model.export(folder)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Name what a full GPU lacks; give free memory back afterwards, if the rank does so."""
        from torch import OutOfMemoryError

        try:
            yield
        except OutOfMemoryError as error:
            most = self._arguments["learner"].micro_batch_tokens
            raise LearnerError(
                f"The GPU of a learner rank on {socket.gethostname()} has no memory left ({error}). Lower "
                f"learner.micro_batch_tokens={most}, or raise learner.num_workers, which divide the model."
            ) from error
        finally:
            if self._gives_back:
                give_back_memory()


def give_back_memory() -> None:
    """Return to the device what this process has freed: glibc and torch keep it for the next work."""
    import torch

    torch.cuda.empty_cache()  # nothing without a GPU
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class LearnerWorker(RankWorker):
    """A rank of the policy."""

    def _load(self, **arguments: Any) -> PolicyCalls:
        with large_imports():
            from actors.learning.publishing_learner import PublishingLearner

        return PublishingLearner(**arguments)


class CriticWorker(RankWorker):
    """A rank of the critic."""

    def _load(self, **arguments: Any) -> CriticCalls:
        with large_imports():
            from policies.learning.verl.critic import VerlCritic

        return VerlCritic(**arguments)


def check_shared(path: str, text: str) -> None:
    """Raise ``ConfigError`` unless the file ``path`` holds ``text`` on this node, too."""
    try:
        seen = Path(path).read_text(encoding="utf-8")
    except OSError:
        seen = ""
    if seen != text:
        raise ConfigError(
            f"run.directory={Path(path).parent} is another folder on {socket.gethostname()}, where a rank of "
            "the learner is, than on the driver's node: put it on a disk that all nodes share."
        )


class Sent(NamedTuple):
    """Mini-batches as the ranks have them.

    Attributes:
        ids: of each group of ranks that share rows, mostly of one rank, a reference to what ``Division.ids``
            has made for it.
    """

    division: Division
    ids: list[ray.ObjectRef]


class RankGroup:
    """Calls methods of the model on all ranks at once, and returns the first rank's result.

    A method is given as that of ``PolicyCalls`` or ``CriticCalls``, which has its types.

    Args:
        worker: the class of a rank.
        places: of ``create_placement_group``. Two groups may have the same.
        settings: of the learner.
        num_gpus: that a rank reserves, where it is on a GPU.
        before_work: called before each piece of work.
        arguments: of ``worker``.
    """

    def __init__(
        self,
        worker: type[RankWorker],
        places: PlacementGroup,
        settings: LearnerConfig,
        num_gpus: float = 1.0,
        before_work: Callable[[], None] | None = None,
        **arguments: Any,
    ) -> None:
        self._num_gpus, self._before_work = num_gpus, before_work
        self._worker, self._places, self._settings, self._arguments = worker, places, settings, arguments
        self._sent: Sent | None = None
        """The mini-batches that were scored last, until the ranks learn from them."""
        self._start()

    def _start(self) -> None:
        settings = self._settings
        actor_class = ray.remote(concurrency_groups={DISK: 1, PUBLISH: 1})(self._worker)
        # Without any number a rank takes its CPU while it starts only, so that a critic fits beside it.
        devices = {} if settings.device == "cpu" else {"num_gpus": self._num_gpus}
        self._ranks = [
            actor_class.options(
                **devices,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._places, rank),
            ).remote(environment=rank_environment(settings, rank), **self._arguments)
            for rank in range(settings.num_workers)
        ]
        rendezvous = self._ranks[0].open_store.remote()
        self._opened = [rank.open.remote(rendezvous) for rank in self._ranks]

    def start_anew(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """End the ranks that are left, and start as many where those had their place.

        A place on a node whose death Ray does not know yet, for some seconds, takes a rank that dies with it:
        then they are started once more.

        Raises:
            LearnerLostError: a place was lost with its node, and no other node has room for it, or ranks have
                died again.
        """
        learner = replace(self._arguments["learner"], optimizer=optimizer)
        self._arguments |= {"learner": learner, "num_schedule_steps": num_schedule_steps}
        for is_last in (False, True):
            self._kill()
            if not self._places.wait(PLACE_RETURN_SECONDS):
                raise LearnerLostError("A learner rank was lost with its node, and no other has room for it.")
            self._start()
            try:
                self._wait_for(self._ping())
                return
            except LearnerLostError:
                if is_last:
                    raise

    def call(self, method: Callable[Concatenate[Any, P], Result], *args: P.args, **none: P.kwargs) -> Result:
        """The first rank's result, when all have returned. Raises as ``begin`` and its result do."""
        return self.begin(method, *args, **none)()

    def begin(
        self, method: Callable[Concatenate[Any, P], Result], *args: P.args, **none: P.kwargs
    ) -> Callable[[], Result]:
        """Call all ranks, and return a function that waits for their results and returns the first rank's.

        Raises the error of loading the model, if any.

        Args:
            none: methods take no keyword arguments.
        """
        self._be_ready()
        name, shared = method.__name__, [ray.put(each) for each in args]
        results = [rank.work.remote(name, *shared) for rank in self._ranks]
        return lambda: self._wait_for_work(results)[0]

    def begin_scoring(
        self,
        method: Callable[[Any, Sequence[RankShard]], list[Columns]],
        batches: Sequence[TrainBatch],
        keeps: bool,
    ) -> Callable[[Sequence[TrainBatch]], list[TrainBatch]]:
        """Call all ranks, each with its shards of ``batches``.

        Args:
            keeps: whether the ranks are to learn from the same: they keep the ids until then, and no others.

        Returns:
            A function that waits, and adds the columns that were found to the batches that it is given.
        """
        self._be_ready()
        sent = self._send(batches)
        if keeps:
            self._sent = sent
        results = self._work_on(method.__name__, sent, batches, (), keeps)
        size = self._settings.ranks_of_row  # each of a group has found the same
        return lambda given: sent.division.with_columns(given, self._wait_for_work(results)[::size])

    def begin_learning(
        self,
        method: Callable[[Any, Sequence[RankShard]], Result],
        batches: Sequence[TrainBatch],
        columns: Sequence[str] = (),
    ) -> Callable[[], Result]:
        """Call all ranks, each with its shards of ``batches`` and these columns; else as ``begin``.

        Ids that the ranks have from ``begin_scoring`` are not sent again.
        """
        self._be_ready()
        sent, self._sent = self._sent, None
        if sent is None or not sent.division.has(batches):
            sent = self._send(batches)
        results = self._work_on(method.__name__, sent, batches, columns, keeps=False)
        return lambda: self._wait_for_work(results)[0]

    def _send(self, batches: Sequence[TrainBatch]) -> Sent:
        num_groups = len(self._ranks) // self._settings.ranks_of_row
        division = Division(batches, num_groups, self._settings.row_tokens, self._wait_for(self._opened)[0])
        return Sent(division, [ray.put(division.ids(group)) for group in range(num_groups)])

    def _work_on(
        self, method: str, sent: Sent, batches: Sequence[TrainBatch], columns: Sequence[str], keeps: bool
    ) -> list[ray.ObjectRef]:
        size, shards = self._settings.ranks_of_row, sent.division.shards(batches, columns)
        return [
            rank.work_on.remote(method, [sent.ids[number // size]], shards[number // size], keeps)
            for number, rank in enumerate(self._ranks)
        ]

    def begin_save(self, folder: str) -> Callable[[], dict[str, FileDigest]]:
        """Have all ranks copy their state, and write it to ``folder`` beside their work.

        Returns:
            A function that waits until all is written and returns the digests of the files, by path.

        Raises:
            As ``call`` does; the function raises OSError for a file that could not be written.
        """
        self._be_ready()
        self._wait_for_work([rank.begin_save.remote(folder) for rank in self._ranks])
        ranks = self._ranks
        writes = [rank.write.remote(folder) for rank in ranks]

        def finish() -> dict[str, FileDigest]:
            written = self._wait_for_work(writes)
            written += self._wait_for_work([rank.export.remote(folder) for rank in ranks])
            write_index(Path(folder, HUGGINGFACE))
            return {path: digest for each in written for path, digest in each.items()}

        return finish

    def stream(
        self, method: Callable[Concatenate[Any, P], Iterator[Any]], *args: P.args, **none: P.kwargs
    ) -> list[ray.ObjectRef]:
        """References to what the ranks have yielded beside other work, the first one's first, when all are
        done. Raises as ``call`` does.

        The objects lie where their rank is, and belong to this process: they outlive the rank.
        """
        self._wait_for(self._opened)
        streams = [
            rank.stream.options(num_returns="streaming").remote(method.__name__, *args)
            for rank in self._ranks
        ]
        ends = [rank.end_stream.remote() for rank in self._ranks]
        self._wait_for_work([*ends, *(stream.completed() for stream in streams)])
        return [piece for stream in streams for piece in stream]

    def _be_ready(self) -> None:
        self._wait_for(self._opened)
        if self._before_work is not None:
            self._before_work()

    def _wait_for_work(self, references: list[ray.ObjectRef]) -> list[Any]:
        limit = "learner.max_call_seconds, which may be too low"
        return self._wait_for(references, self._settings.max_call_seconds, limit)

    def check_ranks(self) -> None:
        """Raise ``LearnerLostError`` if a rank has died or hangs."""
        self._wait_for(self._opened)  # first: a rank that loads its model for minutes does not hang
        self._wait_for(self._ping(), CALL_ANSWER_SECONDS, "for a call without work")

    def _ping(self) -> list[ray.ObjectRef]:
        return [rank.__ray_ready__.remote() for rank in self._ranks]

    def _wait_for(
        self, references: list[ray.ObjectRef], seconds: float | None = None, limit: str = ""
    ) -> list[Any]:
        """The ranks' results. ``limit`` says where the ``seconds`` of the time limit come from.

        Ray finds a rank that has died at once, and one that was stopped in seven minutes. The limit is for
        one that hangs in its work.
        """
        try:
            results: list[Any] = ray.get(references, timeout=seconds)
            return results
        except GetTimeoutError as error:
            raise LearnerLostError(
                f"A learner rank did not answer for {seconds:g} s ({limit}): it hangs or was stopped."
            ) from error
        except RayActorError as error:
            raise LearnerLostError("A learner rank has died, or Ray cannot reach it.") from error
        except RayTaskError as error:
            if isinstance(error.cause, TroupeError):  # without Ray's traceback: its text is for the user
                raise error.cause from error
            self.raise_if_dead()  # the ranks that are left report the lost connection first
            raise

    def raise_if_dead(self) -> None:
        """Raise ``LearnerLostError`` if a rank has died: for what has failed while ranks may be at work."""
        try:
            ray.get(self._ping(), timeout=CALL_ANSWER_SECONDS)
        except RayActorError as error:
            raise LearnerLostError("A learner rank has died.") from error
        except GetTimeoutError:  # it waits for the rank that has raised an error, which is the error to raise
            return

    def _kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)

    def close(self) -> None:
        """End the ranks and give back their places, those of another group in the same places too."""
        self._kill()
        ray.util.remove_placement_group(self._places)


def rank_environment(settings: LearnerConfig, rank: int) -> dict[str, str]:
    """Variables in which torch and verl find their rank, their device and their threads."""
    num_threads = str(settings.num_threads or 1)
    on_cpu = {"OMP_NUM_THREADS": num_threads, "MKL_NUM_THREADS": num_threads, "VERL_PLATFORM": "cpu"}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(settings.num_workers),
        "VERL_LOGGING_LEVEL": "WARNING",  # verl tells which platform it was given
        **(on_cpu if settings.device == "cpu" else {}),
    }


def create_placement_group(settings: LearnerConfig, num_gpus: float = 1.0) -> PlacementGroup:
    """Places for the ranks, on nodes that ``learner.nodes`` allows. Returns when the cluster has them."""
    on_gpu = settings.device != "cpu"
    place = {"CPU": 1.0, **({"GPU": num_gpus} if on_gpu else {}), **node_resources(settings.nodes)}
    places = placement_group(
        [place] * settings.num_workers,
        strategy="PACK",  # ranks may spread over nodes
        bundle_label_selector=[node_labels(settings.nodes)] * settings.num_workers,
    )
    try:
        ray.get(places.ready())
    except BaseException:  # an interrupt, for example: no other part of the program knows of them yet
        ray.util.remove_placement_group(places)
        raise
    return places
