"""A user's own estimator and loss, with settings of their own, from a module outside of the library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from learner_samples import batches

from environments.errors import ConfigError
from environments.types import Completion, Step, Trajectory, TrajectoryGroup
from policies.learning.algorithms import register_algorithm, resolve
from policies.learning.credit import assign_credit
from policies.learning.registry import Definition, register_estimator, register_loss
from policies.learning.samples import training_samples
from policies.learning.settings import AlgorithmConfig, CorrectionConfig, LearnerConfig, OptimizerConfig

if TYPE_CHECKING:
    from learner_samples import MakeRank


def own(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig(name="own", module="own_algorithm", **settings)


def advantage(config: AlgorithmConfig) -> float:
    """Of the tokens of a trajectory with reward 3."""
    completion = Completion(
        prompt_ids=(1,), completion_ids=(2, 3), logprobs=(-1.0, -1.0), text="", finish_reason="stop"
    )
    played = Trajectory(rollout_id="g/0", steps=[Step(completion=completion, reward=3.0)], reward=3.0)
    group = TrajectoryGroup(group_id="g", task={}, trajectories=(played,))
    scored = [replace(each, old_logprobs=each.rollout_logprobs) for each in training_samples(played)]
    (credited,) = assign_credit([group], {"g/0": scored}, resolve(config, 64), 0.0)[0]["g/0"]
    assert len(set(credited.advantages)) == 1
    return credited.advantages[0]


def test_estimator_gets_its_option() -> None:
    assert advantage(own()) == pytest.approx(6.0)
    assert advantage(own(options={"factor": 5.0})) == pytest.approx(15.0)
    assert advantage(own(options={"factor": 5.0}, gamma=0.5)) == pytest.approx(7.5)


@pytest.mark.slow
def test_loss_gets_its_option(make_rank: MakeRank) -> None:
    frozen = LearnerConfig(optimizer=OptimizerConfig(lr=0.0))
    ranks = [make_rank(frozen, own(options={"power": power})) for power in (1.0, 3.0)]
    norms = [rank.update(rank.score(batches(1))).metrics["learn/grad_norm"] for rank in ranks]
    np.testing.assert_allclose(norms[1], 3 * norms[0], rtol=1e-4)


def test_estimator_and_loss_combine_with_those_of_verl() -> None:
    custom = {"name": "custom", "module": "own_algorithm"}
    ours = resolve(AlgorithmConfig(**custom, advantage="scaled_reward", loss="vanilla"), 64)
    assert ours.options == {"factor": 2.0}
    theirs = resolve(AlgorithmConfig(**custom, advantage="grpo", loss="ratio_to_a_power"), 64)
    assert theirs.options == {"normalize_by_std": True, "power": 1.0}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"options": {"factr": 1.0}}, r"'factr' is not one of factor, power\. Did you mean 'factor'\?"),
        ({"options": {"factor": 0.0}}, r"algorithm\.options\.factor=0\.0 has to be above 0"),
        ({"options": {"factor": "much"}}, r"options\.factor='much' has to be of type float"),
        ({"clip_high": 0.3}, "its loss ratio_to_a_power does not clip"),
        ({"zero_signal_groups": "drop"}, "scaled_reward learns from groups"),
        (
            {"correction": CorrectionConfig(level="token")},
            r"level=token has no effect .* ratio_to_a_power has no importance weights",
        ),
    ],
)
def test_what_has_no_effect_or_is_unknown_is_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(own(**settings), 64)


def test_loss_without_importance_weights_gets_none_by_default() -> None:
    assert resolve(own(), 64, max_staleness=2, is_exact=False).correction_level is None


@dataclass
class Misnamed:
    exponent: float = 1.0


@dataclass
class Reserved:
    gamma: float = 1.0


def test_row_that_cannot_work_is_error_when_it_is_registered() -> None:
    def function(advantages: Any, gamma: float) -> None: ...

    with pytest.raises(ConfigError, match="The estimator 'grpo' comes with Troupe or verl"):
        register_estimator("grpo")(function)
    with pytest.raises(ConfigError, match="The loss 'kl_cov' comes with Troupe or verl"):
        register_loss("kl_cov")(function)
    with pytest.raises(ConfigError, match="'exponent' of the loss 'mine' has to be a parameter of function"):
        register_loss("mine", options=Misnamed)(function)
    with pytest.raises(ConfigError, match=r"'gamma' of the estimator 'mine' .* none of token_level_rewards"):
        register_estimator("mine", options=Reserved)(function)
    with pytest.raises(ConfigError, match=r"estimator 'mine' uses a teacher, and no option names it"):
        register_estimator("mine", uses_teacher=True)(function)
    with pytest.raises(ConfigError, match=r"loss of the algorithm 'mine'='gpgg' .* Did you mean 'gpg'"):
        register_algorithm("mine", Definition(advantage="grpo", loss="gpgg"))
    with pytest.raises(ConfigError, match="'lam' is not one of normalize_by_std"):
        register_algorithm("mine", Definition(advantage="grpo", options={"lam": 1.0}))
    with pytest.raises(ConfigError, match="The algorithm 'ppo' comes with Troupe"):
        register_algorithm("ppo", Definition(advantage="grpo"))
