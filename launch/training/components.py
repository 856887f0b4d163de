"""The components of a run: all that is started for it. ``start`` makes them, stages and loop use them."""

from __future__ import annotations

from dataclasses import dataclass

from actors.learning.learner_group import LearnerGroup
from actors.rollouts.scaling import ScalingPolicy
from actors.rollouts.service import RolloutService
from launch.health.interrupt import Interrupts
from launch.reporting.tracker import Tracker
from launch.reporting.utilization import Utilization
from launch.settings.tree import TrainConfig
from launch.training.activity import Activity
from launch.training.evaluator import Evaluator
from launch.training.logprob_probe import LogprobProbe
from launch.training.recording import RecordedService
from launch.training.rollouts import Rollouts
from launch.workload import Workload
from policies.learning.algorithm import Algorithm
from policies.learning.kl import KLController


@dataclass(frozen=True, kw_only=True)
class Components:
    """What runs during a training, wired together."""

    config: TrainConfig
    workload: Workload
    algorithm: Algorithm
    model_path: str
    """Folder of the model that the training starts from."""
    num_updates: int
    """Policy updates of all stages that learn from rollouts."""
    tracker: Tracker
    interrupts: Interrupts
    learner: LearnerGroup
    services: tuple[RolloutService | RecordedService, ...]
    """The training's, and that of the evaluations where these have engines of their own."""
    rollouts: Rollouts
    evaluator: Evaluator
    probe: LogprobProbe
    kl: KLController
    utilization: Utilization
    scaling: ScalingPolicy
    activity: Activity

    def check_services(self) -> None:
        """Raise the error that has kept a policy server or a fleet from starting, if there was one."""
        for service in self.services:
            service.check_start()
