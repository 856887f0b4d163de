"""One run: everything that is started for it, in the order that wastes no time, and ended with it."""

from __future__ import annotations

import os
import shutil
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import ray

from actors.fleet import RolloutFleet, actor_options, check_room
from actors.learner_group import LearnerGroup
from actors.policy_server import PolicyApp
from actors.rollout import RolloutLimits, RolloutOrder
from actors.sampling import SamplerActor, ServeSampler
from actors.stream import TrajectoryStream
from actors.weight_store import WeightStore
from environments.types import TrajectoryGroup
from launch import cluster
from launch.checkpoint import CheckpointFolder, Progress
from launch.config import RolloutConfig, TrainConfig
from launch.interrupt import Interrupts
from launch.model_folder import model_folder
from launch.tracking import Tracker
from launch.workload import Workload
from policies.learning.samples import TrainingSample

STREAM_CAPACITY = 1024


class Run:
    """The components of a run, wired together.

    The engine and the fleet start in the background while the warm start runs: nobody waits for them.
    """

    def __init__(self, config: TrainConfig, workload: Workload) -> None:
        self.config = config
        self.workload = workload
        self.directory = Path(config.run.directory).absolute()
        self.interrupts = Interrupts()
        self.checkpoints = CheckpointFolder(self.directory, config.run.checkpoints_kept)
        checkpoint = self.checkpoints.latest() if config.run.resume else None
        self._checkpoint = checkpoint
        self.progress = CheckpointFolder.progress(checkpoint) if checkpoint else Progress()
        self.tracker = Tracker(self.directory, config.run.num_steps, self.progress.step)
        self._started = False
        self._started_ray = False
        self._app: PolicyApp | None = None
        self._fleet: ray.actor.ActorHandle | None = None
        self._learner: LearnerGroup | None = None
        self._serving: Future[None] | None = None

    # -- start and end -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all components. Raises ``ConfigError`` for what the cluster cannot hold."""
        config = self.config
        self.tracker.announce(f"Run folder: {self.directory}")
        model_path = self._model_path()
        self._started_ray = cluster.connect()
        cluster.check_resources(config)
        check_room(actor_options(self.workload.pair, config.fleet))
        self.tracker.announce(
            "Ray: " + ("started here." if self._started_ray else "joined a running cluster.")
        )
        self._store = WeightStore.remote()  # type: ignore[attr-defined]
        self.stream = TrajectoryStream(STREAM_CAPACITY)
        in_warm_start = self.progress.warm_start_steps < config.warm_start.num_steps
        if not in_warm_start:
            self._serve_in_background(model_path)
        self._learner = LearnerGroup(
            model_path, config.learner, config.algorithm, config.run.num_steps, config.seed, self._store
        )
        if in_warm_start:
            # After the learner, not beside it: the warm start is what everybody waits for.
            self._serve_in_background(model_path)
            self.learner.begin_phase(config.warm_start.optimizer, config.warm_start.num_steps)
        if self._checkpoint is not None:
            self.learner.load(str(self._checkpoint))
            if self.progress.version:
                self.learner.publish(self.progress.version)
            self.tracker.announce(f"Resumed from {self._checkpoint.name}.")
        self._started = True
        self.tracker.announce(f"Learner: {config.learner.num_workers} rank(s) on {config.learner.device}.")

    def _serve_in_background(self, model_path: str) -> None:
        """Start server and fleet in a thread; a daemon, so that an interrupted run need not wait for it."""
        self._serving = started = Future[None]()

        def work() -> None:
            try:
                self._serve(model_path)
            except BaseException as error:  # noqa: BLE001  # a thread's end: whoever waits for it raises it
                started.set_exception(error)
            else:
                started.set_result(None)

        threading.Thread(target=work, name="serving", daemon=True).start()

    def _serve(self, model_path: str) -> None:
        config = self.config
        self._app = PolicyApp(f"policy-{uuid.uuid4().hex[:8]}", model_path, config.server, self._store)
        sampler = SamplerActor.remote(  # type: ignore[attr-defined]
            partial(ServeSampler, self._app.name, model_path, config.model.chat_template_kwargs)
        )
        self._fleet = RolloutFleet.remote(  # type: ignore[attr-defined]
            self.workload.pair, sampler, self.stream.queue, rollout_limits(config.rollout), config.fleet
        )
        ray.get(self._fleet.resize.remote(config.fleet.num_actors))  # they start while the engines load
        self._app.start()
        ray.get(sampler.open.remote())
        replicas = f"{config.server.num_replicas} replica(s)"
        self.tracker.announce(f"Policy server: {replicas}; {config.fleet.num_actors} rollout actors.")

    def close(self) -> None:
        """End everything that this run has started, and nothing else; then draw the learning curve."""
        if self._started_ray:
            cluster.end()
        elif ray.is_initialized():
            self._leave_cluster()
        self.tracker.close()

    def _leave_cluster(self) -> None:
        if self._fleet is not None:
            ray.kill(self._fleet)
        if self._app is not None:
            self._app.stop()
        if self._learner is not None:
            self._learner.close()

    # -- what the loop asks for ----------------------------------------------------------------------

    @property
    def learner(self) -> LearnerGroup:
        """The learner, once ``start`` has made it."""
        assert self._learner is not None
        return self._learner

    def check_serving(self) -> None:
        """Raise what kept the server or the fleet from starting, if anything has."""
        if self._serving is not None and self._serving.done():
            self._serving.result()

    def wait_until_serving(self) -> None:
        """Return when rollouts can be ordered."""
        assert self._serving is not None
        if not self._serving.done():
            self.tracker.announce("Waiting for the policy server.")
        self._serving.result()

    def groups(self, orders: Sequence[RolloutOrder]) -> Iterator[TrajectoryGroup]:
        """Have ``orders`` rolled out; the groups as they are complete."""
        assert self._fleet is not None
        ray.get(self._fleet.submit.remote(list(orders)))
        return self.stream.groups(orders, self._fleet)

    def publish(self) -> None:
        """Make the learner's weights the next version: rollouts ordered from now on wait for it."""
        self.learner.publish(self.progress.version + 1)
        self.progress.version += 1

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the present state."""
        with self.interrupts.whole():
            path = self.checkpoints.save(self.progress, self.learner.save)
        self.tracker.announce(f"Checkpoint: {path}")

    def save_on_interrupt(self) -> None:
        """Leave a checkpoint behind, unless the learner has not got its state yet."""
        if self._started:
            self.save_checkpoint()
            self.tracker.announce(f"Go on with run.directory={self.config.run.directory} run.resume=true")

    def demonstrations(self) -> list[TrainingSample]:
        """The workload's demonstrations as token sequences."""
        from policies.chat import ChatRenderer, load_tokenizer
        from policies.learning.demonstrations import demonstration_samples

        renderer = ChatRenderer(load_tokenizer(self._model_path()), self.config.model.chat_template_kwargs)
        return demonstration_samples(renderer, self.workload.demonstrations)

    def _model_path(self) -> str:
        """The model to start from: the configured one, or a tiny one built into the run's folder."""
        if self.config.model.path is not None:
            return model_folder(self.config.model.path)
        from policies.tiny import build_model

        folder = self.directory / "model"
        if not folder.exists():
            temporary = self.directory / ".model.tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            build_model(temporary, self.workload.demonstrations[:1000], seed=self.config.seed)
            os.replace(temporary, folder)
        return str(folder)


def rollout_limits(rollout: RolloutConfig) -> RolloutLimits:
    """The limits of one trajectory."""
    return RolloutLimits(
        max_steps=rollout.max_steps,
        max_prompt_tokens=rollout.max_prompt_tokens,
        max_response_tokens=rollout.max_response_tokens,
        max_turn_tokens=rollout.max_turn_tokens,
        timeout_seconds=rollout.timeout_seconds,
    )
