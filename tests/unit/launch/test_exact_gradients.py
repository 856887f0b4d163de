"""Mean gradients of a policy in a table against the exact one: all groups of two, each with its probability.

``tests/benchmarks/evidence/exact_gradients.py`` is the long form, by samples.
"""

from __future__ import annotations

from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.learning.algorithms import resolve
from policies.learning.settings import AlgorithmConfig, CorrectionConfig

UNCUT = CorrectionConfig(level="sequence", truncate_above=1e6)
TASK = "long"


@pytest.fixture(scope="module")
def world(verl_on_cpu: None) -> Any:
    """Module ``table_updates``, which imports verl."""
    import table_updates

    return table_updates


def learner(world: Any, staleness: int = 0, **settings: Any) -> Any:
    tables = world.versions()
    algorithm = resolve(AlgorithmConfig(**settings), world.RESPONSE_TOKENS, staleness)
    return world.Learner(tables[world.LEARNER], tables[-1], algorithm, staleness)


def mean_gradient(world: Any, staleness: int, **settings: Any) -> np.ndarray:
    """The mean over all groups of two of one task."""
    older, rank = world.versions()[world.LEARNER - staleness], learner(world, staleness, **settings)
    total = np.zeros_like(older.logits)
    episodes = list(zip(*older.draws(TASK), strict=True))
    for (one, chance), (other, chance_of_other) in product(episodes, episodes):
        if world.environment(TASK, one) != world.environment(TASK, other):  # else all advantages are 0
            group = world.group_of(older, TASK, (one, other), "0")
            total += chance * chance_of_other * rank.update(iter([group]), 1).gradient
    return total


def share_across(mean: np.ndarray, exact: np.ndarray) -> float:
    """The part across ``exact``, over the part along it."""
    along = float((mean * exact).sum() / (exact**2).sum())
    return float(np.linalg.norm(mean - along * exact) / np.linalg.norm(along * exact))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "staleness", "length"),
    [
        ({"name": "rloo"}, 0, 1.0),
        ({"name": "dr_grpo"}, 0, 1 / 2 / 20),  # a mean with oneself halves, and the longest response divides
        ({"name": "rloo", "zero_signal_groups": "drop"}, 0, 1.0),
        ({"name": "rloo", "correction": UNCUT}, 4, 1.0),
        ({"name": "dr_grpo", "correction": UNCUT}, 4, 1 / 2 / 20),
    ],
)
def test_mean_gradient_is_exact(settings: dict[str, Any], staleness: int, length: float, world: Any) -> None:
    exact = world.exact_gradient(world.versions()[world.LEARNER], tasks=[TASK])
    found = mean_gradient(world, staleness, **settings)
    np.testing.assert_allclose(found, length * exact, atol=1e-5 * length * np.abs(exact).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "staleness"),
    [
        ({"name": "grpo"}, 0),  # token-mean
        ({"name": "rloo", "correction": CorrectionConfig(level="none")}, 4),
        ({"name": "rloo", "correction": CorrectionConfig(level="token")}, 4),
    ],
    ids=["divided by drawn lengths", "uncorrected", "corrected by token"],
)
def test_biased_gradient_is_seen(settings: dict[str, Any], staleness: int, world: Any) -> None:
    exact = world.exact_gradient(world.versions()[world.LEARNER], tasks=[TASK])
    assert share_across(mean_gradient(world, staleness, **settings), exact) > 0.02


@pytest.mark.parametrize("level", ["token", "sequence", "bypass"])
@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo"])
def test_correction_of_fresh_groups_changes_nothing(name: str, level: str, world: Any) -> None:
    groups = list(islice(world.drawn_groups(world.versions()[world.LEARNER], 4, 0), 8))
    plain = learner(world, name=name).update(iter(groups), 8).gradient
    corrected = learner(world, name=name, correction=CorrectionConfig(level=level))
    np.testing.assert_allclose(corrected.update(iter(groups), 8).gradient, plain, atol=1e-6)
    assert np.abs(plain).max() > 1e-3


def test_groups_without_signal_change_length_alone(world: Any) -> None:
    groups = list(islice(world.drawn_groups(world.versions()[world.LEARNER], 4, 0), 30))
    found = {
        treatment: learner(world, name="rloo", zero_signal_groups=treatment).update(iter(groups), 8)
        for treatment in ("keep", "drop", "refill")
    }
    rewards = [{each.reward for each in group.trajectories} for group in groups[:8]]
    useful = sum(len(each) > 1 for each in rewards)
    assert 0 < useful < 8
    np.testing.assert_allclose(found["drop"].gradient, 8 / useful * found["keep"].gradient, atol=1e-6)
    assert found["refill"].num_groups > 8 == found["drop"].num_groups


def test_sampled_bias_has_an_interval(monkeypatch: pytest.MonkeyPatch, world: Any) -> None:
    evidence = Path(__file__).resolve().parents[2] / "benchmarks" / "evidence"
    monkeypatch.syspath_prepend(str(evidence))
    from exact_gradients import measured

    rng = np.random.default_rng(0)
    exact, across = np.eye(20)[0], 0.2 * np.eye(20)[1]
    control = exact + rng.normal(size=(400, 20))
    noise = 0.3 * rng.normal(size=(400, 20))
    fair, biased = (measured(2 * (control + shift) + noise, control, exact, 1.0) for shift in (0, across))
    assert not fair.is_biased
    assert fair.high < 0.05
    assert biased.is_biased
    assert biased.low < 0.2 < biased.high
    assert fair.length == pytest.approx(2.0, abs=4 * fair.length_error)
