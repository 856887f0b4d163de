"""The training loop, and the whole system around it on one page.

``w:`` says what a part waits for. Each of these waits ends by itself or with the error of what it waits for::

      driver                          :   nodes of the cluster
                                      :
      TaskPlan                        :
         │ the task of each group     :
         ▼                            :
    ┌─▶ Rollouts ───── request ───────:─▶ RolloutFleet ─── a rollout ───▶ RolloutActor, N of them
    │    w: a free slot               :    w: an idle actor, and           an agent, an environment
    │    │ take                       :    │  room in the stream           w: the completion
    │    ▼                            :    ▼ trajectories                  │ messages   ▲ completion
    │   Stage.step ◀─── groups ───────:── TrajectoryStream                 ▼            │
    │    w: a group's last rollout    :    a bounded queue                SamplerActor
    │    │                            :                                    w: the poll of a replica
    │    ├─── score, update ──────────:─▶ Learners                         │ requests   ▲ tokens
    │    │    w: all ranks            :    ranks of verl: policy, critic   ▼            │
    │    │                            :    │ weights                      PolicyServer ◀── clients,
    │    ├─── publish ────────────────:─▶  ▼                               replicas         evaluation
    │    │                            :   WeightStore ─ newest version ─▶  w: requests, weights
    │    │ commit: the slots are free :
    └────┘
     Milestones    evaluates and saves between two updates
     UpdateReport  metrics of each update, and the number of rollout actors that follows from them

A group holds its slot from its request until the weights that it trained are copied, which are published
beside the next update. With (max_staleness + 1) * groups_per_step slots, no group is more than max_staleness
versions old when it is used. A lost rollout actor, replica or node costs time and no rollout. A lost learner
is rebuilt from the published weights, or the run goes on from its checkpoint (``trainer.py``), as it does
where the newest were still under way. In a replay ``RecordedRollouts`` stands in the place of all on the
right but the learner and the store. With ``server.colocated`` the engines sleep from a call of the learner
until a group is waited for (``actors/weights/turns.py``). Where an agent names several policies, each has a
learner, a store and a policy server; a version is one of all of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from actors.rollouts.service import RolloutService
from environments.command_name import command_name
from environments.errors import LearnerLostError, SamplerError
from launch.cluster.serve_address import check_answers, client_url
from launch.health.death import describe_death
from launch.health.restart_budget import RestartBudget
from launch.run_folder.checkpoint import LATEST, CheckpointFolder
from launch.training.activity import Activity, Clock
from launch.training.components import Components
from launch.training.milestones import Milestones
from launch.training.run_state import RunState
from launch.training.stages.base import Stage
from launch.training.task_plan import TaskPlan

SERVER_REMIND_SECONDS = 120.0
"""Seconds between two lines that say what a run waits for."""


@dataclass(frozen=True)
class TrainingLoop:
    """Takes the stages of a run through their steps.

    Args:
        run: parts that the stages work with.
        state: progress, and the checkpoints from which a run goes on.
        milestones: evaluations and checkpoints.
        plan: tasks of the groups.
        services: the training's, and that of the evaluations where these have engines of their own; none in a
            replay.
        activity: what this loop is doing, for those who watch it.
    """

    run: Components
    state: RunState
    milestones: Milestones
    plan: TaskPlan
    services: Sequence[RolloutService]
    activity: Activity

    def train(self, stages: Sequence[Stage], budget: RestartBudget) -> None:
        """Train the policy through ``stages``, from where the run's progress is to their last step, or to the
        update or evaluation that reaches ``run.stop_at``.

        Args:
            budget: how often a lost learner may be rebuilt.

        Raises:
            LearnerLostError: it was lost, and could not be rebuilt, or too often.
        """
        run = self.run
        for stage in stages:
            while stage.num_done(self.state) < stage.num_steps and not run.tracker.goal.reached:
                run.interrupts.raise_if_interrupted()
                try:
                    self._train_stage(stage)
                except LearnerLostError as error:
                    self._rebuild_learner(error, stage, budget)
        self._begin_rollouts()  # not begun yet where no stage rolls out: its policy is evaluated all the same
        run.interrupts.raise_if_interrupted()
        self.milestones.evaluate_and_save(Clock(self.activity))
        with self.activity.during("time/checkpoint"):
            self.milestones.finish_save()
            self.milestones.finish_copy()
        run.learner.finish_publish()  # else Ray would end under it
        self.plan.announce_set_aside()
        run.tracker.summary()
        # The agent with its tools too, if it can answer.
        agent = "" if run.workload.task_from_message is None else f"workload={run.config.workload} "
        for policy in run.learner.policies:
            folder = self.state.directory / (f"checkpoints/{LATEST}/{policy}" if policy else "")
            run.tracker.announce(f"Serve it: {command_name('serve')} {agent}model.path={folder}")

    def _train_stage(self, stage: Stage) -> None:
        """Do the steps of ``stage`` that are left."""
        run, state = self.run, self.state
        if stage.num_done(state) == 0:  # else the checkpoint has brought optimizer, schedule and reference
            with run.interrupts.atomic_section():
                run.learner.begin_phase(stage.optimizer, stage.num_schedule_steps)
        if stage.rolls_out:
            self._begin_rollouts()
        elif run.config.server.colocated:  # whose start cannot go on beside the stage
            self._wait_for_servers()
        while stage.num_done(state) < stage.num_steps and not run.tracker.goal.reached:
            run.interrupts.raise_if_interrupted()
            clock = Clock(self.activity)
            if stage.rolls_out:
                self.milestones.evaluate_and_save(clock)
                if run.tracker.goal.reached:
                    break
            before = stage.num_done(state)
            stage.step(run, state, clock)
            if not stage.rolls_out:  # else the wait for rollouts finds out
                self.milestones.save_offline(before, stage.num_done(state))
                for service in self.services:
                    service.check_start()

    # -- the first rollouts --------------------------------------------------------------------------

    def _begin_rollouts(self) -> None:
        """Wait for the policy server and request the first rollouts, unless that was done before."""
        run = self.run
        if run.rollouts.have_begun:
            return
        self._wait_for_servers()
        for service in self.services[:1]:
            self._announce_server()
            service.stream.watch(run.learner.check_ranks)
        run.report.begin()
        run.rollouts.begin(self.plan.still_wanted(self.state.saved_stream()))
        run.tracker.begin_steps()

    def _wait_for_servers(self) -> None:
        """Let the training's engines have their turn, and wait until they have started."""
        for service in self.services[:1]:
            with self.activity.during("server"):
                service.wake()
                self._wait_for_server(service)

    def _wait_for_server(self, service: RolloutService) -> None:
        """Return when rollouts can be requested. Raises the error that has kept the service from starting."""
        if not service.is_up:
            self.run.tracker.announce("Waiting for the policy server.")
        while not service.wait_until_up(SERVER_REMIND_SECONDS):
            self.run.tracker.announce(
                "Still waiting for it: its replicas load the model, or wait for room (`ray status` shows "
                "what is free, Serve's logs what keeps them)."
            )

    def _announce_server(self) -> None:
        """Announce what serves the policy, and where OpenAI clients find it if they do: a run needs none."""
        announce, fleet, server = self.run.tracker.announce, self.run.config.fleet, self.run.config.server
        policies = self.run.learner.policies
        of_each = f" for each of {', '.join(policies)}" if len(policies) > 1 else ""
        announce(
            f"Policy server: {server.num_replicas} replica(s){of_each}; {fleet.num_actors} rollout actors."
        )
        if server.http_port is None:
            return
        url = client_url(server.http_host, server.http_port)
        try:
            check_answers(url)
            announce(f"OpenAI clients find {', '.join(server.model_names)} at {url}.")
        except SamplerError as error:
            announce(str(error))

    # -- a lost learner ------------------------------------------------------------------------------

    def _rebuild_learner(self, error: LearnerLostError, stage: Stage, budget: RestartBudget) -> None:
        """Rebuild the learner from the published weights, while engines and fleet go on; the step is done
        again, so no update is lost.

        Raises:
            error: the run has to go on from its checkpoint as a whole, or to end.
            LearnerLostError: the published weights make no learner, or a rank has died again. Then, too, the
                run has to go on from its checkpoint.
        """
        run, state = self.run, self.state
        self.milestones.finish_save_after_loss()
        folder = state.checkpoints.latest()
        if folder is None or not self._can_rebuild(stage, CheckpointFolder.progress(folder).stage_steps):
            raise error
        if run.interrupts.is_pending or not budget.allow(time.monotonic()):
            raise error
        lost = describe_death(error)
        run.tracker.announce(f"{lost} The learner is being rebuilt; engines and rollout actors go on.")
        with run.interrupts.atomic_section(), Clock(self.activity).measure("time/rebuild"):
            try:
                version = run.learner.rebuild(stage.optimizer, stage.num_schedule_steps, str(folder))
            except LearnerLostError:
                budget.take_back()  # the run goes on from its checkpoint, and that is counted
                raise
            run.kl.go_back(state.progress.kl_coef)
            run.rollouts.put_back()
            run.interrupts.was_cut = False  # learner and rollouts are whole again
        behind = state.progress.step - state.saved_step
        dtype = run.config.server.engine.half_dtype
        rounded = f", rounded to {dtype}" if dtype else ""
        weights = (
            f"weights of {folder.name}"
            if version is None
            else f"published weights of version {version}{rounded}"
        )
        run.tracker.announce(
            f"The learner has the {weights}, and its optimizer's moments from {folder.name}, {behind} "
            "update(s) earlier. No update is lost."
        )

    def _can_rebuild(self, stage: Stage, saved_steps: dict[str, int]) -> bool:
        """True if the published weights and the newest checkpoint make a learner.

        Not where a run promises to repeat (``rollout.max_staleness=0``): moments that are older than the
        weights change what comes after. Not with adapters: they are published merged with the weights. Not
        with several policies: some may have been published before the loss. And not before the stage has a
        checkpoint, which has the moments and the reference policy.

        Args:
            saved_steps: of the stages, in the newest checkpoint.
        """
        config = self.run.config
        return (
            config.rollout.max_staleness > 0
            and stage.rolls_out
            and config.learner.lora.rank == 0
            and len(self.run.learner.policies) == 1
            and saved_steps.get(stage.name, 0) > 0
        )
