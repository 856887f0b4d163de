"""Start of a run's parts, in the order that wastes no time, and their end with it."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import ray

from actors.learning.learner_group import LearnerGroup
from actors.learning.learners import Learners
from actors.ray_tools.placement import beside_driver, start_actor
from actors.rollouts.service import RolloutService
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.policy_app import PolicyApp, start_serve
from actors.settings import ServedModel, ServerConfig
from actors.timing import FLEET_START_SECONDS
from actors.weights.store import WeightStore
from actors.weights.transport import make_transport
from actors.weights.turns import take_turn
from environments.background import end_background_work, in_background
from environments.rewards.base import unjudged
from launch.cluster import session
from launch.cluster.threads import with_threads
from launch.cluster.turns import Turn
from launch.health.heartbeat import HeartbeatSender
from launch.health.interrupt import Interrupts
from launch.reporting.tracker import Tracker
from launch.run_folder.lock import RunLock
from launch.run_folder.model_paths import model_folder
from launch.settings.tree import OVERLONG, TrainConfig, algorithm_of
from launch.training.activity import STARTING, Activity
from launch.training.components import Components
from launch.training.engine_comparison import EngineComparison, LogprobProbe
from launch.training.evaluator import Evaluator, evaluation_server
from launch.training.loop import TrainingLoop
from launch.training.milestones import Milestones
from launch.training.recording import RecordedRollouts, check_tokenizer
from launch.training.rollouts import Rollouts, RolloutSource
from launch.training.run_state import RunState
from launch.training.stages.base import Stage
from launch.training.task_plan import TaskPlan
from launch.training.update_report import UpdateReport
from launch.training.watch import present_heartbeat, run_name, watch
from launch.validation.memory_plan import memory_notice
from launch.validation.policies import for_all_policies
from launch.workload import Workload
from policies.chat import load_tokenizer
from policies.learning.algorithm import Algorithm
from policies.learning.kl import KLController

End = Callable[[Callable[[], None]], None]
"""Function that takes note of a component's end, to end it with the run."""


def start(
    config: TrainConfig,
    workload: Workload,
    stages: Sequence[Stage],
    lock: RunLock,
    state: RunState,
    tracker: Tracker,
    interrupts: Interrupts,
    ending: ExitStack,
) -> TrainingLoop:
    """Start everything that the run needs. Engines and fleet start in the background: nothing waits for them.
    A run that plays nothing has neither: its ``config`` is one of ``parts_needed``.

    Args:
        ending: ends what is started here when it is closed, and nothing else.

    Raises:
        ConfigError: the cluster cannot hold the run, or the checkpoint is not of this configuration.
    """
    if config.run.resume and state.checkpoint is None:
        tracker.announce(f"No checkpoint to go on from in {state.directory}: a new run begins.")
    tracker.announce(f"Run folder: {state.directory}")
    start_model = model_in_background(config, workload, state, ending)
    activity, services = Activity(), list[RolloutService]()
    of_all = for_all_policies(config, policies := workload.policies)
    end, turn = join_cluster(of_all, state, activity, services, tracker, interrupts, ending)
    ending.callback(state.finish_log)  # before the cluster ends, and with it what threads are at
    model_path = start_model()
    config = with_turns(with_threads(config, model_path))
    if notice := memory_notice(config, model_path):
        tracker.announce(notice)
    algorithm = algorithm_of(config)
    stores = weight_stores(config, state, policies, "training", ending, end)
    if config.run.replay is not None:
        check_tokenizer(Path(config.run.replay), model_path)
    source: RolloutSource = RecordedRollouts(Path(config.run.replay or state.directory))  # or of nothing
    evaluator = pinned = None
    if config.server.num_replicas:
        services.append(rollout_service(config, config.server, workload, model_path, stores))
        source = services[0].stream
        end(services[0].stop)
        if config.evaluation.num_replicas:
            pinned = weight_stores(config, state, policies, "evaluation", ending, end)
            services.append(rollout_service(config, evaluation_server(config), workload, model_path, pinned))
            end(services[1].stop)
        if workload.held_out:
            evaluator = Evaluator(config, workload.held_out, services[-1], stores, pinned)
    stage = next((each for each in stages if each.num_done(state) < each.num_steps), stages[-1])
    if not (learner_first := config.server.colocated or not stage.rolls_out):
        start_services(config, services)
    with activity.during("learner"):
        learner = start_learners(config, stage, model_path, algorithm, stores, lock)
    end(learner.close)
    if learner_first:  # its steps come first, or it has to have its GPUs, of which engines get the rest
        start_services(config, services)
    if turn is not None:
        in_background(partial(end_when_up, turn, tuple(services), config.fleet.num_actors), "turn")
    with activity.during("checkpoint"):
        restore(learner, state, stages, tracker)
    tracker.announce(f"Learner: {config.learner.num_workers} rank(s) on {config.learner.device}.")
    num_updates = sum(each.num_steps for each in stages if each.rolls_out)
    plan = TaskPlan(config, workload, algorithm.uses_greedy_baseline, state, tracker)
    rollouts = Rollouts(source, plan, config.rollout, state.progress, num_updates)
    milestones = Milestones(config, num_updates, state, evaluator, learner, rollouts, tracker, interrupts)
    service = services[0] if services else None
    probe = None if service is None else LogprobProbe(service.sample, config.rollout.temperature)
    run = Components(
        config=config,
        workload=workload,
        algorithm=algorithm,
        model_path=model_path,
        learner=learner,
        rollouts=rollouts,
        comparison=EngineComparison(config, algorithm, learner, probe, tracker.announce),
        kl=KLController(algorithm, state.progress.kl_coef),
        report=UpdateReport(config, state, tracker, service),
        tracker=tracker,
        interrupts=interrupts,
    )
    return TrainingLoop(run, state, milestones, plan, services, activity)


def weight_stores(
    config: TrainConfig, state: RunState, policies: Sequence[str], purpose: str, ending: ExitStack, end: End
) -> dict[str, ray.actor.ActorHandle]:
    """A weight store for each policy, with the transport of ``server.weights``. They end with the run.

    Raises:
        ConfigError: the transport cannot work here.
    """
    stores = {}
    for policy in policies:
        of_policy = f"{purpose}_{policy}" if policy else purpose
        transport = make_transport(config.server.weights, str(state.directory), of_policy)
        ending.callback(transport.close)
        stores[policy] = start_actor(WeightStore, transport, **beside_driver())
        end(partial(ray.kill, stores[policy]))
    return stores


def join_cluster(
    config: TrainConfig,
    state: RunState,
    activity: Activity,
    services: Sequence[RolloutService],
    tracker: Tracker,
    interrupts: Interrupts,
    ending: ExitStack,
) -> tuple[End, Turn | None]:
    """Connect to Ray, and send it heartbeats of the run from now on.

    A cluster that is started here ends as a whole. In another one each component is ended by itself, and the
    run waits for its turn to start.

    Raises:
        ConfigError: the cluster does not answer, or can never hold the run.
    """
    started_here = ending.enter_context(session.connected())
    interrupts.install()  # Ray has put a handler of its own in the place of SIGTERM's

    def end_with_run(close: Callable[[], None]) -> None:
        if not started_here:
            ending.callback(lambda: close() if ray.is_initialized() else None)

    heartbeat = partial(present_heartbeat, state, activity, services)
    sender = HeartbeatSender(heartbeat)
    ending.callback(sender.stop)
    session.wait_for_nodes(config, tracker.announce)
    tracker.announce("Ray: " + ("started here." if started_here else "joined a running cluster."))
    turn = None
    if not started_here:
        turn = session.start_turn(config, run_name(state), activity.begin, tracker.announce)
        end_with_run(turn.end)
        activity.begin(STARTING)
    watch(config, heartbeat, sender, tracker, interrupts, ending)
    return end_with_run, turn


def end_when_up(turn: Turn, services: Sequence[RolloutService], num_actors: int) -> None:
    """End the turn when all that the run needs has its place, or will not get it."""
    try:
        deadline = math.inf
        for service in services:
            service.wait_until_up()
            deadline = min(deadline, time.monotonic() + FLEET_START_SECONDS)
            while time.monotonic() < deadline:
                if service.status(service.request_status())[0].num_ready >= num_actors:
                    break
                time.sleep(0.5)
    finally:
        turn.end()


def model_in_background(
    config: TrainConfig, workload: Workload, state: RunState, ending: ExitStack
) -> Callable[[], str]:
    """A function that returns the model to start from: the configured one, or a tiny one.

    A tiny one is built while Ray starts: most of the seconds that each takes are imports and waiting.
    """
    if config.model.path is not None:
        folder = model_folder(config.model.path)
        return lambda: folder
    ending.callback(end_background_work)
    return in_background(partial(build_tiny_model, workload, state, config.seed), "model").result


def build_tiny_model(workload: Workload, state: RunState, seed: int) -> str:
    """A tiny model in the run's folder, from the tokens of the demonstrations."""
    from policies.tiny import NUM_CONVERSATIONS, build_model

    folder = state.directory / "model"
    if state.checkpoint is None or not folder.exists():  # else it may be of a start that failed
        temporary = state.directory / ".model.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        build_model(temporary, workload.demonstrations[:NUM_CONVERSATIONS], seed=seed)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(temporary, folder)
    return str(folder)


def rollout_service(
    config: TrainConfig,
    server: ServerConfig,
    workload: Workload,
    model_path: str,
    stores: Mapping[str, ray.actor.ActorHandle],
) -> RolloutService:
    """A rollout service with a policy server of its own for each of ``stores``, whose engines follow it."""
    options = config.model.chat_template_kwargs
    names = {policy: f"policy-{uuid.uuid4().hex[:8]}" for policy in stores}
    model = ServedModel(path=model_path, chat_template_kwargs=options)
    apps = [PolicyApp(names[policy], model, server, store) for policy, store in stores.items()]
    make_sampler = partial(ServeSampler, names, pickle.dumps(load_tokenizer(model_path)), options)
    limits = config.rollout.limits(OVERLONG in config.selection.masked_reasons)
    reward = workload.group_reward
    if reward is not None:  # no rollout sees the others of its group: the stream has them judged
        workload = replace(workload, env_args=workload.env_args | {"reward_fn": unjudged})
    return RolloutService(workload.pair, make_sampler, limits, config.fleet, apps, reward)


def start_learners(
    config: TrainConfig,
    stage: Stage,
    model_path: str,
    algorithm: Algorithm,
    stores: Mapping[str, ray.actor.ActorHandle],
    lock: RunLock | None = None,
) -> Learners:
    """The learners, which begin with ``stage``: one for each of ``stores``, to which it publishes.

    Args:
        algorithm: names the teacher, if it has one, as the settings do.
        lock: of the run's folder, which all ranks have to see; ``None`` where nothing is written there.
    """
    if algorithm.loaded_teacher is not None:
        folder = model_folder(algorithm.loaded_teacher, "algorithm.options.teacher")
        algorithm = replace(algorithm, options={**algorithm.options, "teacher": folder})
    with ExitStack() as half:
        groups = {}
        for policy, store in stores.items():
            groups[policy] = LearnerGroup(
                model_path,
                replace(config.learner, optimizer=stage.optimizer),
                algorithm,
                stage.num_schedule_steps,
                config.seed,
                store,
                shared_file=None if lock is None else (str(lock.path), lock.text),
                engine_dtype=config.server.engine.half_dtype,
                num_gpus=config.server.gpus_of_rank,
                before_work=partial(take_turn, store, asleep=True) if config.server.colocated else None,
            )
            half.callback(groups[policy].close)
        half.pop_all()
    return Learners(groups)


def with_turns(config: TrainConfig) -> TrainConfig:
    """The configuration with what learner and engines need to take turns on GPUs: verl's offload between any
    two calls, and vLLM's sleep. Nobody has run it. On CPUs neither does anything.
    """
    learner, server = config.learner, config.server
    if not server.colocated or learner.device == "cpu":
        return config
    offload = {"param_offload": True, "optimizer_offload": True} | learner.verl.get("engine", {})
    learner = replace(learner, verl=learner.verl | {"engine": offload})
    engine = replace(server.engine, options=server.engine.options | {"enable_sleep_mode": True})
    return replace(config, learner=learner, server=replace(server, engine=engine))


def start_services(config: TrainConfig, services: Sequence[RolloutService]) -> None:
    """Start the rollout services in the background."""
    if len(services) > 1:  # their threads would both start Serve, and one of them fail
        start_serve(config.server)
    for service in services:
        service.start_in_background(config.fleet.num_actors)


def restore(learner: Learners, state: RunState, stages: Sequence[Stage], tracker: Tracker) -> None:
    """Give the learner the state of the checkpoint that the run goes on from, and publish its weights."""
    progress = state.progress
    if state.checkpoint is None:
        if progress.version:  # the model's folder has other weights
            learner.publish(progress.version)
        return
    not_restored = learner.load(str(state.checkpoint))
    unfinished = [each for each in stages if 0 < each.num_done(state) < each.num_steps]
    if progress.version:
        # A stage without rollouts learns beyond the version that it began with, which no file has any more.
        if all(each.rolls_out for each in unfinished):
            learner.publish(progress.version)
    elif progress.stage_steps and not unfinished:
        # What was learned came from a stage that ends sooner now than the one that was interrupted.
        learner.publish(progress.version + 1)
        progress.version += 1
    note = f" {not_restored}" if not_restored else ""
    if all(each.num_done(state) >= each.num_steps for each in stages):
        note += " All of its steps are made: raise run.num_steps, or those of a stage, to train on."
    tracker.announce(f"Resumed from {state.checkpoint.name}.{note}")
