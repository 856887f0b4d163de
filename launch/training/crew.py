"""A policy server with a fleet that samples it: what rolls out, for training or for an evaluation."""

from __future__ import annotations

import uuid
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial

import ray

from actors.ray_tools.get_soon import answers
from actors.ray_tools.placement import beside_driver
from actors.rollouts.fleet import FleetStatus, RolloutFleet
from actors.rollouts.rollout import RolloutLimits
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.request_queue import QueueStatus
from actors.sampling.sampler_actor import SamplerActor, ServeSampler
from actors.serving.policy_server import PolicyApp
from launch.config import RolloutConfig, TrainConfig
from launch.process.background import in_background
from launch.workload import Workload
from policies.sampler import TokenRequest

STREAM_CAPACITY = 1024


class Crew:
    """Engines, fleet and stream, wired together.

    Args:
        store: the ``WeightStore`` that the engines follow.
    """

    def __init__(
        self, config: TrainConfig, workload: Workload, model_path: str, store: ray.actor.ActorHandle
    ) -> None:
        self._config, self._workload = config, workload
        self._model_path, self._store = model_path, store
        self.stream = TrajectoryStream(STREAM_CAPACITY)
        self._app: PolicyApp | None = None
        self._fleet: ray.actor.ActorHandle | None = None
        self._sampler: ray.actor.ActorHandle | None = None
        self._serving = Future[None]()

    def start_in_background(self) -> None:
        """Start, and let nobody wait for it; ``wait_until_up`` does."""
        self._serving = in_background(self._start, "serving")

    def _start(self) -> None:
        config = self._config
        name = f"policy-{uuid.uuid4().hex[:8]}"
        self._app = PolicyApp(name, self._model_path, config.server, self._store)
        self._sampler = sampler = SamplerActor.options(**beside_driver()).remote(  # type: ignore[attr-defined]
            partial(ServeSampler, name, self._model_path, config.model.chat_template_kwargs)
        )
        self._fleet = RolloutFleet.options(**beside_driver()).remote(  # type: ignore[attr-defined]
            self._workload.pair, sampler, self.stream.queue, rollout_limits(config.rollout), config.fleet
        )
        self.stream.connect(self._fleet)
        ray.get(self._fleet.resize.remote(config.fleet.num_actors))  # they start while the engines load
        self._app.start()
        ray.get(sampler.open.remote())

    @property
    def is_up(self) -> bool:
        """Whether rollouts can be requested."""
        return self._serving.done() and self._serving.exception() is None

    def check(self) -> None:
        """Raise what kept server or fleet from starting, if anything has."""
        if self._serving.done():
            self._serving.result()

    def wait_until_up(self, seconds: float | None = None) -> bool:
        """Return when rollouts can be requested, or after ``seconds``; and whether they can.

        Raises:
            What kept server or fleet from starting.
        """
        wait([self._serving], seconds)
        self.check()
        return self.is_up

    def sample(self, request: TokenRequest) -> ray.ObjectRef:
        """Ask for one completion outside any rollout; the reference is to a ``TokenOutput``."""
        assert self._sampler is not None, "wait_until_up() comes first"
        return self._sampler.sample_tokens.remote(request)

    def ask_status(self) -> list[ray.ObjectRef]:
        """Ask fleet and engines what they are doing: ``status`` waits for the answers."""
        assert self._fleet is not None and self._sampler is not None, "wait_until_up() comes first"
        return [self._fleet.status.remote(), self._sampler.status.remote()]

    @staticmethod
    def status(asked: list[ray.ObjectRef]) -> tuple[FleetStatus, QueueStatus]:
        """What the fleet was doing when it was asked, and what the engines were."""
        fleet, board = answers(asked, "Fleet or sampling actor")
        return fleet, board

    def stop(self) -> None:
        """End what was started here."""
        with ExitStack() as ending:
            ending.callback(self.stream.close)
            if self._sampler is not None:
                ending.callback(ray.kill, self._sampler)
            if self._app is not None:
                ending.callback(self._app.stop)
            if self._fleet is not None:
                ending.callback(ray.kill, self._fleet)


def rollout_limits(rollout: RolloutConfig) -> RolloutLimits:
    """The limits of one trajectory."""
    return RolloutLimits(
        max_steps=rollout.max_steps,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        max_turn_tokens=rollout.max_turn_tokens,
        overlong_filter=rollout.overlong_filter,
        timeout_seconds=rollout.timeout_seconds,
    )
