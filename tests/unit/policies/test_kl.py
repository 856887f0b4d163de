from __future__ import annotations

import math

import pytest

from environments.errors import ConfigError, LearnerError
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import resolve
from policies.learning.kl import KL_HORIZON, KLController
from policies.learning.settings import AlgorithmConfig, KLConfig


def algorithm(**kl: object) -> Algorithm:
    return resolve(AlgorithmConfig(kl=KLConfig(**kl)), 64)


def test_fixed_weight_stays_where_it_is() -> None:
    controller = KLController(algorithm(place="reward", coef=0.05))
    assert controller.update({"learn/reward_kl": 3.0}, 64) == {"learn/kl_coef": 0.05}
    assert controller.coef == 0.05


@pytest.mark.parametrize("kl", [0.0, 0.009, 0.011, 5.0, -1.0])
def test_adaptive_weight_follows_the_clipped_relative_error(kl: float) -> None:
    """Ziegler et al. 2019, section 2.2."""
    controller = KLController(algorithm(place="reward", coef=0.1, target=0.01))
    error = min(max(kl / 0.01 - 1, -0.2), 0.2)
    assert controller.update({"learn/reward_kl": kl}, 64) == {"learn/kl_coef": 0.1}
    assert controller.coef == pytest.approx(0.1 * (1 + error * 64 / KL_HORIZON))


def test_weight_is_all_that_has_to_be_kept() -> None:
    settings = algorithm(place="reward", target=0.01)
    whole, first = KLController(settings), KLController(settings)
    whole.update({"learn/reward_kl": 0.2}, 64)
    first.update({"learn/reward_kl": 0.2}, 64)
    resumed = KLController(settings, first.coef)
    whole.update({"learn/reward_kl": 0.001}, 64)
    resumed.update({"learn/reward_kl": 0.001}, 64)
    assert resumed.coef == whole.coef != settings.kl_coef


def test_without_a_penalty_there_is_nothing_to_say() -> None:
    assert KLController(algorithm()).update({}, 64) == {}


def test_kl_that_is_not_finite_ends_the_run() -> None:
    controller = KLController(algorithm(place="reward", target=0.01))
    with pytest.raises(LearnerError, match="KL to the reference policy is nan"):
        controller.update({"learn/reward_kl": math.nan}, 64)


@pytest.mark.parametrize("num_trajectories", [KL_HORIZON, 5 * KL_HORIZON, 10**9])
def test_weight_stays_positive_in_the_largest_update(num_trajectories: int) -> None:
    controller = KLController(algorithm(place="reward", coef=0.1, target=0.01))
    controller.update({"learn/reward_kl": 0.0}, num_trajectories)
    assert controller.coef == pytest.approx(0.1 * 0.8)


def test_usual_values_of_the_two_places() -> None:
    assert (algorithm(place="loss").kl_estimator, algorithm(place="reward").kl_estimator) == ("k3", "k1")
    assert algorithm(place="loss").kl_coef == 1e-3
    assert algorithm(place="loss", estimator="k1+").kl_estimator == "k1+"


@pytest.mark.parametrize(
    ("kl", "message"),
    [
        ({"place": "los"}, r"kl\.place='los' is not one of none, loss, reward. Did you mean 'loss'"),
        ({"coef": 0.1}, r"kl\.coef=0\.1 has no effect with algorithm\.kl\.place=none"),
        ({"estimator": "k3"}, r"kl\.estimator='k3' has no effect with algorithm\.kl\.place=none"),
        ({"target": 0.1}, r"kl\.target=0\.1 has no effect with algorithm\.kl\.place=none"),
        ({"place": "loss", "target": 0.1}, r"target=0\.1 with algorithm\.kl\.place=loss: only .* reward"),
        ({"place": "reward", "target": 0.0}, r"target=0\.0 has to be above 0"),
        ({"place": "loss", "coef": 0.0}, r"kl\.coef=0\.0 has to be above 0"),
        ({"place": "loss", "estimator": "k1"}, r"estimator='k1' is not one of abs, k2, k3, k1\+"),
        ({"place": "reward", "estimator": "k3+"}, r"estimator='k3\+' is not one of k1, abs, k2, k3"),
        ({"place": "loss", "estimator": "full"}, r"estimator='full' is not one of"),
    ],
)
def test_what_makes_no_sense_of_a_penalty_is_refused(kl: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(**kl)
