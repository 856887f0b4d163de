"""The parts of a run that a stage of training works with. ``start`` makes them."""

from __future__ import annotations

from dataclasses import dataclass

from actors.learning.learners import Learners
from launch.health.interrupt import Interrupts
from launch.reporting.tracker import Tracker
from launch.settings.tree import TrainConfig
from launch.training.engine_comparison import EngineComparison
from launch.training.rollouts import Rollouts
from launch.training.update_report import UpdateReport
from launch.workload import Workload
from policies.learning.algorithm import Algorithm
from policies.learning.kl import KLController


@dataclass(kw_only=True)
class UpdateParts:
    """Parts of a training, or of a replay, that compute an update."""

    algorithm: Algorithm
    learner: Learners
    kl: KLController
    comparison: EngineComparison


@dataclass(kw_only=True)
class Components(UpdateParts):
    """Parts of a running training for its stages: each takes those that it needs."""

    config: TrainConfig
    workload: Workload
    model_path: str
    """Folder of the model that the training starts from."""
    rollouts: Rollouts
    report: UpdateReport
    tracker: Tracker
    interrupts: Interrupts
