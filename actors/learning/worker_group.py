"""A group of ranks that hold one model together: the policy's, or the critic's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.learning.call_timeouts import CallTimeouts, Limit
from actors.learning.rank_worker import RankWorker
from actors.timing import CALL_ANSWER_SECONDS, PLACE_RETURN_SECONDS
from environments.errors import LearnerLostError, TroupeError
from policies.learning.settings import LearnerConfig, OptimizerConfig


class WorkerGroup:
    """Methods of the model, called by name on all ranks at once and answered by the first.

    Args:
        worker: the class of a rank.
        places: of ``create_placement_group``. Two groups may have the same.
        settings: of the learner.
        arguments: of ``worker``.
    """

    def __init__(
        self, worker: type[RankWorker], places: PlacementGroup, settings: LearnerConfig, **arguments: Any
    ) -> None:
        self._worker, self._places, self._settings, self._arguments = worker, places, settings, arguments
        self._start()

    def _start(self) -> None:
        settings = self._settings
        self._timeouts = CallTimeouts(settings.max_call_seconds)
        actor_class = ray.remote(self._worker)
        # Without any number a rank takes its CPU while it starts only, so that a critic fits beside it.
        devices = {} if settings.device == "cpu" else {"num_gpus": 1}
        self._ranks = [
            actor_class.options(
                **devices,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._places, rank),
                runtime_env={"env_vars": rank_environment(settings, rank)},
            ).remote(**self._arguments)
            for rank in range(settings.num_workers)
        ]
        meeting = self._ranks[0].listen.remote()
        self._opened = [rank.open.remote(meeting) for rank in self._ranks]

    def start_anew(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """End the ranks that are left, and start as many where those had their place.

        Raises:
            LearnerLostError: a place was lost with its node, and no other node has room for it.
        """
        self._kill()
        if not self._places.wait(PLACE_RETURN_SECONDS):
            raise LearnerLostError("A learner rank was lost with its node, and no other has room for it.")
        learner = replace(self._arguments["learner"], optimizer=optimizer)
        self._arguments |= {"learner": learner, "num_schedule_steps": num_schedule_steps}
        self._start()

    def begin(self, method: str, *args: Any, num_tokens: int = 0) -> Callable[[], Any]:
        """Call all ranks, and return a function that waits for their answers and returns the first rank's.

        Raises the error of loading the model, if any.

        Args:
            num_tokens: that go through the model in this call: its time limit grows with them.
        """
        self._wait_for(self._opened, None)
        references = [rank.work.remote(method, *args) for rank in self._ranks]
        since = time.monotonic()

        def answer() -> Any:
            first = self._wait_for(references, self._timeouts.limit(method, num_tokens))
            self._timeouts.record(method, time.monotonic() - since, num_tokens)
            return first

        return answer

    def call(self, method: str, *args: Any, num_tokens: int = 0) -> Any:
        """The first rank's answer, when all have answered."""
        return self.begin(method, *args, num_tokens=num_tokens)()

    def check_ranks(self) -> None:
        """Raise ``LearnerLostError`` if a rank has died or hangs."""
        self._wait_for(self._opened, None)  # first: a rank that loads its model for minutes does not hang
        self._wait_for(
            self._questions(), Limit(seconds=CALL_ANSWER_SECONDS, origin="for a question without work")
        )

    def _questions(self) -> list[ray.ObjectRef]:
        return [rank.__ray_ready__.remote() for rank in self._ranks]

    def _wait_for(self, references: list[ray.ObjectRef], limit: Limit | None) -> Any:
        try:
            return ray.get(references, timeout=limit and limit.seconds)[0]
        except GetTimeoutError as error:
            assert limit is not None  # without one nothing times out
            raise LearnerLostError(limit.exceeded) from error
        except RayActorError as error:
            raise LearnerLostError("A learner rank has died.") from error
        except RayTaskError as error:
            if isinstance(error.cause, TroupeError):  # without Ray's traceback: its text is for the user
                raise error.cause from error
            self._raise_if_dead()  # the ranks that are left report the lost connection first
            raise

    def _raise_if_dead(self) -> None:
        try:
            ray.get(self._questions(), timeout=CALL_ANSWER_SECONDS)
        except RayActorError as error:
            raise LearnerLostError("A learner rank has died.") from error
        except GetTimeoutError:  # it waits for the rank that has raised an error, which is what is to be told
            return

    def _kill(self) -> None:
        for rank in self._ranks:
            ray.kill(rank)

    def close(self) -> None:
        """End the ranks and give back their places, those of another group in the same places too."""
        self._kill()
        ray.util.remove_placement_group(self._places)


def rank_environment(settings: LearnerConfig, rank: int) -> dict[str, str]:
    """The variables in which torch and verl find their rank, their device and their threads."""
    num_threads = str(settings.num_threads or 1)
    on_cpu = {"OMP_NUM_THREADS": num_threads, "MKL_NUM_THREADS": num_threads, "VERL_PLATFORM": "cpu"}
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(settings.num_workers),
        "VERL_LOGGING_LEVEL": "WARNING",  # verl tells which platform it was given
        **(on_cpu if settings.device == "cpu" else {}),
    }


def create_placement_group(settings: LearnerConfig) -> PlacementGroup:
    """Places for the ranks, on nodes that ``learner.nodes`` allows. Returns when the cluster has them."""
    on_gpu = settings.device != "cpu"
    place = {"CPU": 1.0, **({"GPU": 1.0} if on_gpu else {}), **settings.nodes.resources}
    places = placement_group(
        [place] * settings.num_workers,
        strategy="PACK",  # ranks may spread over nodes
        bundle_label_selector=[dict(settings.nodes.labels)] * settings.num_workers,
    )
    try:
        ray.get(places.ready())
    except BaseException:  # an interrupt, for example: no other part of the program knows of them yet
        ray.util.remove_placement_group(places)
        raise
    return places
