"""One run: everything that is started for it, in the order that wastes no time, and ended with it."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import ray
from ray.exceptions import ActorUnavailableError

from actors.learning.learner_group import LearnerGroup
from actors.ray_tools.placement import beside_driver
from actors.rollouts.rollout import RolloutLimits
from actors.rollouts.service import RolloutService
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.policy_server import PolicyApp, start_serve
from actors.settings import ServerConfig
from actors.weights.store import WeightStore
from environments.errors import ConfigError, SamplerError
from environments.types import TrajectoryGroup
from launch.config import RolloutConfig, TrainConfig
from launch.process import cluster
from launch.process.interrupt import Interrupts
from launch.reporting.metrics import evaluation_metrics
from launch.reporting.tracker import Tracker
from launch.reporting.utilization import Utilization
from launch.run_folder.checkpoint import CheckpointFolder, Progress, StreamState
from launch.run_folder.consumed_log import ConsumedLog
from launch.run_folder.lock import RunLock
from launch.run_folder.model_paths import model_folder
from launch.serve import reachable, served_models
from launch.training.evaluator import Evaluation, Evaluator, evaluation_server
from launch.training.group_scheduler import GroupScheduler
from launch.training.logprob_probe import LogprobProbe
from launch.training.rollout_requests import group_requests, tasks_digest
from launch.validation.notices import notices
from launch.workload import Workload
from policies.learning.algorithms import resolve
from policies.learning.kl import KLController
from policies.learning.samples import TrainingSample

REMIND_SECONDS = 120.0
"""Between two lines on what is waited for."""


class Run:
    """The components of a run, wired together.

    The engine and the fleet start in the background while the warm start runs: nobody waits for them.

    Args:
        lock: of the run's folder, held for as long as the run lives.
    """

    def __init__(self, config: TrainConfig, workload: Workload, lock: RunLock) -> None:
        self.config = config
        self.workload = workload
        rollout = config.rollout
        self.algorithm = resolve(config.algorithm, rollout.max_response_tokens, rollout.max_staleness)
        self.directory = lock.directory
        self._lock = lock
        self.interrupts = Interrupts()
        self.checkpoints = CheckpointFolder(self.directory, config.run.checkpoints_kept)
        self._checkpoint = self.checkpoints.latest()
        if self._checkpoint is not None and not config.run.resume:
            raise ConfigError(
                f"run.directory={config.run.directory} holds a run already: set run.resume=true to go on "
                "with it, or name another directory."
            )
        self.progress = CheckpointFolder.progress(self._checkpoint) if self._checkpoint else Progress()
        self._saved_step = self.progress.step if self._checkpoint else -1
        self.kl = KLController(self.algorithm, self.progress.kl_coef)
        self.tracker = Tracker(self.directory, config.run.num_steps, self.progress.step)
        self.journal = ConsumedLog(self.directory, self.progress.step)
        self._started = False
        self._is_rolling = False
        self._started_ray = False
        self._services: list[RolloutService] = []
        self._learner: LearnerGroup | None = None
        self._utilization = Utilization()
        self._asked: list[ray.ObjectRef] = []

    # -- start and end -------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all components. Raises ``ConfigError`` for what the cluster cannot hold."""
        config = self.config
        self.tracker.announce(f"Run folder: {self.directory}")
        for notice in notices(config):
            self.tracker.announce(notice)
        if config.run.resume and self._checkpoint is None:
            self.tracker.announce("It holds no checkpoint to resume from: a new run begins.")
        self._model_path = model_path = self._start_model()
        self._started_ray = cluster.connect()
        self.interrupts.install()  # Ray has put a handler of its own in the place of SIGTERM's
        cluster.check_resources(config)
        self.tracker.announce(
            "Ray: " + ("started here." if self._started_ray else "joined a running cluster.")
        )
        if waits := cluster.shortage(config):
            self.tracker.announce(waits)
        self._store = WeightStore.options(**beside_driver()).remote()  # type: ignore[attr-defined]
        self._make_services(model_path)
        in_warm_start = self.progress.warm_start_steps < config.warm_start.num_steps
        if not in_warm_start:
            self._start_services()
        self._learner = LearnerGroup(
            model_path,
            config.learner,
            self.algorithm,
            config.run.num_steps,
            config.seed,
            self._store,
            shared_file=(str(self._lock.path), self._lock.text),
        )
        if in_warm_start:
            # After the learner, not beside it: the warm start is what everybody waits for.
            self._start_services()
            self.learner.begin_phase(config.warm_start.optimizer, config.warm_start.num_steps)
        if self._checkpoint is not None:
            self._restore(self._checkpoint)
        self._started = True
        self.tracker.announce(f"Learner: {config.learner.num_workers} rank(s) on {config.learner.device}.")

    def _make_services(self, model_path: str) -> None:
        config, workload = self.config, self.workload
        self.service = rollout_service(config, config.server, workload, model_path, self._store)
        self._services.append(self.service)
        service, pinned = self.service, None
        if config.evaluation.num_replicas:
            pinned = WeightStore.options(**beside_driver()).remote()  # type: ignore[attr-defined]
            service = rollout_service(config, evaluation_server(config), workload, model_path, pinned)
            self._services.append(service)
        self.evaluator = Evaluator(config, workload, service, self._store, pinned)
        self.probe = LogprobProbe(self.service.sample, config.rollout.temperature)
        make_requests = partial(
            group_requests, config, workload.train_dataset, self.algorithm.uses_greedy_baseline
        )
        num_slots = (config.rollout.max_staleness + 1) * config.rollout.groups_per_step
        self.feed = GroupScheduler(self.service.stream, make_requests, num_slots, self.progress.num_groups)

    def _start_services(self) -> None:
        if len(self._services) > 1:  # their threads would both start Serve, and one of them fail
            start_serve(self.config.server)
        for service in self._services:
            service.start_in_background(self.config.fleet.num_actors)

    def _restore(self, checkpoint: Path) -> None:
        not_restored = self.learner.load(str(checkpoint))
        if self.progress.version:
            self.learner.publish(self.progress.version)
        self.tracker.announce(f"Resumed from {checkpoint.name}.{f' {not_restored}' if not_restored else ''}")

    def close(self) -> None:
        """End everything that this run has started, and nothing else; then draw the pictures."""
        with ExitStack() as ending:  # from the last to the first, each whatever becomes of the others
            ending.callback(self.tracker.close)
            ending.callback(self.journal.close)
            if self._started_ray:
                ending.callback(cluster.end)
            elif ray.is_initialized():
                if self._learner is not None:
                    ending.callback(self._learner.close)
                for service in self._services:
                    ending.callback(service.stop)

    # -- what the loop asks for ----------------------------------------------------------------------

    @property
    def learner(self) -> LearnerGroup:
        """The learner, once ``start`` has made it."""
        assert self._learner is not None
        return self._learner

    def check_serving(self) -> None:
        """Raise what kept a server or a fleet from starting, if anything has."""
        for service in self._services:
            service.check_start()

    def begin_rollouts(self) -> None:
        """Wait until rollouts can be requested, and request the first ones, or those that were under way."""
        if not self.service.is_up:
            self.tracker.announce("Waiting for the policy server.")
        while not self.service.wait_until_up(REMIND_SECONDS):
            self.tracker.announce(
                "Still waiting for it: its replicas load the model, or wait for room (`ray status` shows "
                "what is free, Serve's logs what keeps them)."
            )
        self.service.stream.watch(self.learner.check_ranks)
        self.tracker.announce(
            f"Policy server: {self.config.server.num_replicas} replica(s); "
            f"{self.config.fleet.num_actors} rollout actors."
        )
        self._announce_address()
        self._restore_stream()
        self.ask_utilization()  # from here on
        self.utilization()
        self.request_rollouts()
        self.tracker.begin_steps()

    def _announce_address(self) -> None:
        """Say where OpenAI clients find the policy, or that they do not: a run needs no clients."""
        if self.config.server.http_port is None:
            return
        url = f"http://{reachable(self.config.server.http_host)}:{self.config.server.http_port}/v1"
        try:
            self.tracker.announce(f"OpenAI clients find {', '.join(served_models(url))} at {url}.")
        except SamplerError as error:
            self.tracker.announce(str(error))

    def _restore_stream(self) -> None:
        digest = tasks_digest(self.config, self.workload.train_dataset)
        waiting = self._stream_state()
        if digest == self.progress.tasks_digest:
            self.feed.restore(waiting, self.progress.version)
        elif waiting.ready:
            self.tracker.announce(
                f"The tasks, their order or the temperature have changed: {len(waiting.ready)} finished "
                "rollouts of the old ones are not used."
            )
        self.progress.tasks_digest = digest
        self._is_rolling = True

    def _stream_state(self) -> StreamState:
        """What a checkpoint has to hold of the stream: until rollouts begin, what the last one held."""
        if self._is_rolling:
            return self.feed.state()
        return self.checkpoints.stream(self._checkpoint) if self._checkpoint else StreamState()

    def request_rollouts(self, num_selected: int = 0) -> None:
        """Order groups for the free slots; ``num_selected`` are there for the update that is being made."""
        left = (self.config.run.num_steps - self.progress.step) * self.config.rollout.groups_per_step
        self.feed.fill(self.progress.version, left - num_selected)

    def publish(self) -> None:
        """Make the learner's weights the next version: rollouts requested from now on wait for it."""
        self.learner.publish(self.progress.version + 1)
        self.progress.version += 1

    def commit(
        self, trained: Sequence[TrajectoryGroup], dropped: Mapping[str, Sequence[TrajectoryGroup]]
    ) -> None:
        """What was taken is used up: write it down, free its slots, and request what comes next."""
        self.feed.commit()
        self.progress.num_groups = self.feed.num_committed
        self.progress.kl_coef = self.kl.coef
        self.journal.record(
            self.progress.step,
            _rollout_ids(trained),
            {reason: _rollout_ids(groups) for reason, groups in dropped.items()},
        )
        self.request_rollouts()

    def ask_utilization(self) -> None:
        """Ask how busy fleet and engines are; not when they have just been given work, which comes first."""
        self._asked = self.service.ask_status()

    def utilization(self) -> dict[str, float]:
        """How idle they were between the last two questions; nothing while Ray starts an actor anew."""
        try:
            return self._utilization.since_last(*self.service.status(self._asked))
        except ActorUnavailableError:
            self._utilization = Utilization()
            return {}

    # -- evaluations and checkpoints -----------------------------------------------------------------

    def evaluation_due(self) -> bool:
        """Whether the policy is to be evaluated after this many updates, and was not yet."""
        step, every = self.progress.step, self.config.evaluation.every
        if self.workload.val_dataset is None or step in self.tracker.evaluated:
            return False
        return step in (0, self.config.run.num_steps) or (every > 0 and step % every == 0)

    def checkpoint_due(self) -> bool:
        """Whether a checkpoint is to be written after this many updates, and was not yet."""
        step = self.progress.step
        due = step == self.config.run.num_steps or (step > 0 and step % self.config.run.checkpoint_every == 0)
        return due and step != self._saved_step

    def save_checkpoint(self) -> None:
        """Write a checkpoint of the present state."""
        with self.interrupts.atomic_section():
            path = self.checkpoints.save(self.progress, self._stream_state(), self.learner.save)
            self._saved_step = self.progress.step
        self.tracker.announce(f"Checkpoint: {path}")

    def save_on_interrupt(self) -> None:
        """Leave a checkpoint behind, unless the learner has not got its state yet, or is in between two."""
        if self._started and not self.interrupts.was_forced:
            self.save_checkpoint()
        if self._started and self.evaluator.is_running:
            self.tracker.announce("Waiting for the evaluation that is under way; Ctrl-C leaves it out.")
            self.record_evaluation(self.evaluator.collect(wait=True))
        if self.checkpoints.latest() is not None:
            self.tracker.announce(f"Go on with run.directory={self.config.run.directory} run.resume=true")

    def record_evaluation(self, evaluation: Evaluation | None) -> None:
        """Write an evaluation down that is finished, and whether its policy is the best one so far."""
        if evaluation is None:
            return
        self.tracker.failures(evaluation.groups)
        numbers = evaluation_metrics(evaluation.groups) | {"time/evaluate": evaluation.seconds}
        metric = self.config.run.best_metric
        # First: a run that is killed here evaluates once more.
        if metric is not None and self.checkpoints.mark_best(evaluation.step, numbers[metric]):
            value = f"{metric}={numbers[metric]:.3f}"
            self.tracker.announce(f"The best policy so far: step {evaluation.step}, {value}.")
        self.tracker.evaluation(evaluation.step, numbers)

    # -- data ----------------------------------------------------------------------------------------

    def demonstrations(self) -> list[TrainingSample]:
        """The workload's demonstrations as token sequences."""
        from policies.chat import ChatRenderer, load_tokenizer
        from policies.learning.demonstrations import demonstration_samples

        renderer = ChatRenderer(load_tokenizer(self._model_path), self.config.model.chat_template_kwargs)
        return demonstration_samples(renderer, self.workload.demonstrations)

    def _start_model(self) -> str:
        """The model to start from: the configured one, or a tiny one built into the run's folder."""
        if self.config.model.path is not None:
            return model_folder(self.config.model.path)
        from policies.tiny import build_model

        folder = self.directory / "model"
        if self._checkpoint is None or not folder.exists():  # what is there is of a run that came to nothing
            temporary = self.directory / ".model.tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            build_model(temporary, self.workload.demonstrations[:1000], seed=self.config.seed)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(temporary, folder)
        return str(folder)


def rollout_service(
    config: TrainConfig,
    server: ServerConfig,
    workload: Workload,
    model_path: str,
    store: ray.actor.ActorHandle,
) -> RolloutService:
    """A rollout service with a policy server of its own, whose engines follow ``store``."""
    app = PolicyApp(f"policy-{uuid.uuid4().hex[:8]}", model_path, server, store)
    make_sampler = partial(ServeSampler, app.name, model_path, config.model.chat_template_kwargs)
    return RolloutService(workload.pair, make_sampler, rollout_limits(config.rollout), config.fleet, app)


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


def _rollout_ids(groups: Sequence[TrajectoryGroup]) -> list[str]:
    return [trajectory.rollout_id for group in groups for trajectory in group.rollouts]
