"""Updates of a past run, computed again by the steps of its stages, on a learner of their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from actors.learning.learners import Learners
from environments.types import TrajectoryGroup
from launch.run_folder.checkpoint import Progress
from launch.settings.tree import TrainConfig, algorithm_of
from launch.training.activity import Activity, Clock
from launch.training.components import UpdateParts
from launch.training.engine_comparison import EngineComparison
from launch.training.past_run import PastRun, stage_of_next_update
from launch.training.selection import Selection, place
from launch.training.stages.base import Stage
from launch.training.stages.chosen import chosen_stages
from launch.training.stages.policy_update import PolicyUpdateStage, PreparedUpdate, learn
from policies.learning.algorithm import Algorithm
from policies.learning.kl import KLController
from policies.learning.samples import TrainBatch, TrainingSample
from policies.model_files import HUGGINGFACE

TOKEN_MEAN = "token-mean"
"""The aggregation whose losses are divided by tokens; all others' are by trajectories."""


@contextmanager
def started_learner(run: PastRun, config: TrainConfig, stage: Stage) -> Iterator[Learners]:
    """The learner that a training of ``config`` has in ``stage``. It ends with the block."""
    import ray

    from actors.ray_tools.placement import beside_driver, start_actor
    from actors.weights.store import WeightStore
    from launch.cluster.threads import with_threads
    from launch.training.start import start_learners

    model_path = run.model_path()
    with ExitStack() as ending:
        store = start_actor(WeightStore, **beside_driver())  # ranks want one, and publish nothing here
        ending.callback(ray.kill, store)
        config = with_threads(config, model_path)
        learner = start_learners(config, stage, model_path, algorithm_of(config), {"": store})
        ending.callback(learner.close)
        yield learner


@dataclass(frozen=True, kw_only=True)
class Recomputed:
    """An update that was computed again."""

    selection: Selection
    metrics: dict[str, float]
    gradients: dict[str, float]
    """Norms of the gradient by group, where they were measured."""


class Recomputation(UpdateParts):
    """A past run that makes its updates once more, one after the other.

    Args:
        progress: of the run when this begins.
        state: of the learner then, as ``LearnerGroup.begin_save`` has had it written; ``None`` for its first.
    """

    def __init__(
        self, config: TrainConfig, learner: Learners, progress: Progress, state: Path | None
    ) -> None:
        if state is not None:
            learner.load(str(state))
        self.config, self.stages, self.learner = config, chosen_stages(config), learner
        self.algorithm = algorithm_of(config)
        self.kl = KLController(self.algorithm, progress.kl_coef)
        self.comparison = EngineComparison(config, self.algorithm, learner, None, print)
        self.progress = replace(progress, stage_steps=dict(progress.stage_steps))

    @property
    def stage(self) -> PolicyUpdateStage:
        """The stage that makes the next update."""
        return stage_of_next_update(self.stages, self.progress)

    def begin_stage(self) -> bool:
        """Begin the stage of the next update, unless that goes on; return whether it has begun."""
        stage = self.stage
        if stage.num_done(self):
            return False
        self.learner.begin_phase(stage.optimizer, stage.num_schedule_steps)
        return True

    def update(self, groups: Sequence[TrajectoryGroup], state: Path | None = None) -> Recomputed:
        """Make the next update, whose stage has begun, from the groups that it took.

        Args:
            state: of the learner now, to measure the gradients by group too; ``None`` leaves them out.
        """
        stage, progress = self.stage, self.progress
        selection, selecting = Selection(), stage.selecting(self.algorithm)
        for group in groups:
            if len(selection.groups) < self.config.rollout.groups_per_step:
                place(selection, group, progress.version, self.config, selecting)
        clock = Clock(Activity())
        prepared = stage.prepare(self, selection, progress.step, progress.version, clock)
        gradients = {} if state is None else self._gradients(prepared, state)
        learned = learn(stage, self.learner, prepared, progress.step)
        progress.version += bool(learned.num_optimizer_steps)
        stage.count_update(self, prepared)
        return Recomputed(selection=selection, metrics=prepared.metrics_with(learned), gradients=gradients)

    def _gradients(self, prepared: PreparedUpdate, state: Path) -> dict[str, float]:
        """Norm of the gradient that each group adds to the update's, at the weights that it begins with.

        All mini-batches count as one here: their optimizer steps have no gradient in common. None where a
        stage imitates, since nothing is credited there. The learner is in ``state`` again afterwards.
        """
        parts = group_parts(prepared.batches)
        norms = {}
        for group_id, part in parts.items():
            learned = self.learner.update([part])
            norm = learned.metrics.get("learn/grad_norm", 0.0)
            norms[group_id] = norm * share_of_loss(part, parts, self.algorithm)
            self.learner.load(str(state))
        return norms


def group_parts(batches: Sequence[TrainBatch]) -> dict[str, TrainBatch]:
    """The credited samples of each group, as a mini-batch of its own.

    Where the first mini-batch was left unscored, all are: the old log-probabilities are those of the learner
    that computes the gradient.
    """
    samples = {each.sample_id: each for batch in batches for each in batch.samples if each.advantages}
    is_scored = all(each.old_logprobs for each in samples.values() if each.num_sampled_tokens)
    by_group: dict[str, list[TrainingSample]] = defaultdict(list)
    for each in samples.values():
        own = each if is_scored else replace(each, old_logprobs=())
        by_group[each.rollout_id.rpartition("/")[0]].append(own)
    return {group_id: replace(batches[0], samples=tuple(by_group[group_id])) for group_id in sorted(by_group)}


def share_of_loss(part: TrainBatch, parts: dict[str, TrainBatch], algorithm: Algorithm) -> float:
    """The part of the update's loss that the loss of ``part`` alone is: each is a mean over its own."""
    count = _num_tokens if algorithm.loss_aggregation == TOKEN_MEAN else _num_trajectories
    return count(part) / max(1, sum(map(count, parts.values())))


def _num_tokens(batch: TrainBatch) -> int:
    return sum(each.num_sampled_tokens for each in batch.samples)


def _num_trajectories(batch: TrainBatch) -> int:
    return len({each.rollout_id for each in batch.samples if each.num_sampled_tokens})


# -- what differs --------------------------------------------------------------------------------------


def number_differences(recorded: dict[str, float], computed: dict[str, float]) -> list[str]:
    """Sentences on the numbers that are not the same to the last bit."""
    return [
        f"{name} is {computed[name]!r}, recorded was {recorded.get(name)!r}"
        for name in sorted(computed)
        if repr(float(computed[name])) != repr(float(recorded.get(name, float("inf"))))
    ]


def weight_differences(recorded: Path, computed: Path) -> list[str]:
    """Sentences on the tensors of two checkpoints that are not the same to the last bit."""
    import torch
    from safetensors import safe_open

    before, now = (
        {
            name: file
            for path in sorted((folder / HUGGINGFACE).glob("*.safetensors"))
            for file in [safe_open(path, "pt")]
            for name in file.keys()  # noqa: SIM118
        }
        for folder in (recorded, computed)
    )
    if different := sorted(set(before) ^ set(now)):
        return [f"only one of the two has the tensor {different[0]}"]
    found = []
    for name in sorted(before):
        one, other = before[name].get_tensor(name), now[name].get_tensor(name)
        if not torch.equal(one, other):
            most = (one.double() - other.double()).abs().max()
            found.append(f"{name} differs by {float(most):.3g} at most")
    return found
