from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from environments.errors import ConfigError
from environments.types import Completion, Step, Trajectory, TrajectoryGroup
from policies.learning.algorithms import (
    Algorithm,
    check_group_size,
    register_own,
    resolve,
)
from policies.learning.credit import assign_credit
from policies.learning.registry import ALGORITHMS, LOSSES
from policies.learning.samples import training_samples
from policies.learning.settings import AlgorithmConfig, CorrectionConfig, KLConfig

LIMIT = 100


def algorithm(name: str = "grpo", **settings: object) -> Algorithm:
    return resolve(AlgorithmConfig(name=name, **settings), LIMIT)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_every_named_algorithm_needs_nothing_but_its_name(name: str) -> None:
    named = algorithm(name)
    assert named.name == name
    assert named.loss in LOSSES
    assert named.kl_place == "none" and not named.uses_reference
    assert named.uses_critic == (name == "ppo")
    assert named.uses_greedy_baseline == (name == "remax")


def test_what_is_left_open_is_as_it_was_before_there_were_names() -> None:
    grpo = resolve(AlgorithmConfig())
    assert (grpo.advantage, grpo.normalize_by_std) == ("grpo", True)
    assert (grpo.loss, grpo.loss_aggregation) == ("vanilla", "token-mean")
    assert (grpo.clip_low, grpo.clip_high, grpo.entropy_coef) == (0.2, 0.2, 0.0)
    assert (grpo.zero_signal_groups, grpo.credit, grpo.bypass) == ("keep", "broadcast", False)


def test_papers_values() -> None:
    dapo, gspo, cispo = algorithm("dapo"), algorithm("gspo"), algorithm("cispo")
    assert (dapo.clip_low, dapo.clip_high, dapo.zero_signal_groups) == (0.2, 0.28, "refill")
    assert (dapo.overlong_penalty, dapo.overlong_buffer_tokens) == (1.0, LIMIT // 5)
    others = [algorithm(name).zero_signal_groups for name in ALGORITHMS if name != "dapo"]
    assert set(others) == {"keep"}, "their objectives are means over all groups"
    assert (gspo.clip_low, gspo.clip_high, gspo.loss_aggregation) == (3e-4, 4e-4, "seq-mean-token-mean")
    assert cispo.clip_low == 1.0, "a ratio has no lower bound but 0"
    dr_grpo = algorithm("dr_grpo")
    assert (dr_grpo.loss_aggregation, dr_grpo.max_response_tokens) == ("seq-mean-token-sum-norm", LIMIT)
    assert (algorithm("ppo").gamma, algorithm("ppo").lam) == (1.0, 0.95)


def test_what_is_set_is_what_is_used() -> None:
    config = AlgorithmConfig(
        loss_aggregation="token-sum",
        normalize_by_std=False,
        clip_low=0.1,
        clip_high=0.3,
        entropy_coef=0.01,
        credit="per_step",
        gamma=0.9,
        zero_signal_groups="keep",
        overlong_penalty=0.5,
        overlong_buffer_tokens=20,
        kl=KLConfig(place="reward", coef=0.1, estimator="k3", target=0.05, horizon=500),
        correction=CorrectionConfig(level="sequence", truncate_above=2.0, mask_below=0.1, mask_above=5.0),
    )
    grpo = resolve(config, LIMIT)
    assert (grpo.loss_aggregation, grpo.normalize_by_std) == ("token-sum", False)
    assert (grpo.clip_low, grpo.clip_high, grpo.entropy_coef) == (0.1, 0.3, 0.01)
    assert (grpo.credit, grpo.gamma, grpo.zero_signal_groups) == ("per_step", 0.9, "keep")
    assert (grpo.overlong_penalty, grpo.overlong_buffer_tokens) == (0.5, 20)
    assert (grpo.kl_place, grpo.kl_coef, grpo.kl_estimator) == ("reward", 0.1, "k3")
    assert (grpo.kl_target, grpo.kl_horizon, grpo.uses_reference) == (0.05, 500, True)
    assert (grpo.correction_level, grpo.truncate_above) == ("sequence", 2.0)
    assert (grpo.mask_below, grpo.mask_above) == (0.1, 5.0)
    assert algorithm("ppo", lam=0.9, gamma=0.99).lam == 0.9


@pytest.mark.parametrize(
    ("name", "setting", "value", "why"),
    [
        ("grpo", "advantage", "rloo", r"'grpo': that is part of .* Or set algorithm\.name=rloo"),
        ("grpo", "loss", "gspo", r"algorithm\.name=custom lets you choose"),
        ("grpo", "module", "my_module", "only algorithm.name=custom uses"),
        ("grpo", "gamma", 0.9, r"nothing is discounted unless algorithm\.credit=per_step"),
        ("grpo", "lam", 0.9, "only GAE"),
        ("grpo", "overlong_buffer_tokens", 5, "no penalty without algorithm.overlong_penalty"),
        ("dr_grpo", "normalize_by_std", True, "false by definition"),
        ("rloo", "normalize_by_std", False, "divides by no group's standard deviation"),
        ("gpg", "clip_low", 0.1, "its loss gpg does not clip"),
        ("gpg", "clip_high", 0.1, "its loss gpg does not clip"),
        ("ppo", "zero_signal_groups", "refill", "its estimator gae learns from groups"),
        ("ppo", "credit", "per_step", "gae does not compare.*takes rewards at the turn that earned them"),
        ("reinforce_plus_plus", "credit", "broadcast", "does not compare a turn"),
        ("remax", "credit", "per_step", "remax does not compare a turn"),
        ("remax", "gamma", 0.5, "nothing is discounted"),
        ("reinforce_plus_plus", "lam", 0.5, "only GAE"),
    ],
)
def test_a_setting_without_effect_is_refused(name: str, setting: str, value: object, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{setting}={value!r} has no effect in .*{why}"):
        algorithm(name, **{setting: value})


def test_a_loss_with_its_own_aggregation_takes_no_other() -> None:
    with pytest.raises(ConfigError, match=r"loss_aggregation='token-mean' has no effect.*sapo has its own"):
        algorithm("custom", advantage="grpo", loss="sapo", loss_aggregation="token-mean")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "reinforce++"},
            r"algorithm\.name='reinforce\+\+' is not one of .*Did you mean 'reinforce_plus",
        ),
        ({"loss_aggregation": "mean"}, "loss_aggregation='mean' is not one of token-mean"),
        ({"credit": "per_turn"}, "credit='per_turn' is not one of broadcast, per_step"),
        ({"zero_signal_groups": "refil"}, "Did you mean 'refill'"),
        ({"clip_low": -0.1}, r"clip_low=-0\.1 has to be above 0"),
        ({"clip_high": math.inf}, "clip_high=inf"),
        ({"entropy_coef": math.nan}, "entropy_coef=nan"),
        ({"credit": "per_step", "gamma": 1.1}, r"gamma=1\.1 has to be at least 0 and at most 1"),
        ({"name": "ppo", "lam": -1.0}, r"lam=-1\.0"),
        ({"overlong_penalty": 1.0}, r"overlong_penalty=1\.0 without algorithm\.overlong_buffer_tokens"),
        (
            {"overlong_penalty": 1.0, "overlong_buffer_tokens": 101},
            r"overlong_buffer_tokens=101 has to be from 1 to rollout\.max_response_tokens=100",
        ),
        ({"name": "dapo", "overlong_penalty": 0.0, "overlong_buffer_tokens": 5}, "has no effect in"),
        ({"name": "custom", "advantage": "grpo"}, r"algorithm\.loss=None: it needs both"),
        ({"name": "custom", "loss": "gpg"}, r"algorithm\.advantage=None.*it needs both"),
        (
            {"name": "custom", "advantage": "rlo", "loss": "vanilla"},
            r"advantage='rlo' is not one of .*Did you mean 'rloo'\? For one of your own, name its module",
        ),
        ({"name": "custom", "advantage": "grpo", "loss": "vanila"}, "Did you mean 'vanilla'"),
        ({"name": "custom", "advantage": "gdpo", "loss": "vanilla"}, "gdpo' cannot be used"),
        ({"name": "custom", "advantage": "grpo", "loss": "kl_cov"}, r"learner\.micro_batch_tokens"),
        ({"name": "custom", "advantage": "grpo", "loss": "bypass_mode"}, r"correction\.mode=bypass"),
        ({"name": "custom", "advantage": "grpo", "loss": "dppo_kl"}, "no usual value. Set both"),
        (
            {"name": "custom", "advantage": "grpo", "loss": "vanilla", "module": "os"},
            "module='os' has no effect",
        ),
        (
            {"name": "custom", "advantage": "mine", "loss": "vanilla", "module": "no_such_module"},
            "module='no_such_module' cannot be imported: No module named",
        ),
        (
            {"name": "custom", "advantage": "mine", "loss": "vanilla", "module": "json"},
            "advantage='mine' is not one of .*module='json' was to register it",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(**settings)


def test_a_kl_in_the_reward_and_an_entropy_bonus_go_with_every_algorithm() -> None:
    for name in ALGORITHMS:
        keep = {"zero_signal_groups": "keep"} if name == "dapo" else {}
        algorithm(name, entropy_coef=0.01, kl=KLConfig(place="reward", coef=0.1), **keep)


@pytest.mark.parametrize(
    ("settings", "term"),
    [
        ({"zero_signal_groups": "drop", "kl": KLConfig(place="reward")}, r"kl\.place=reward"),
        ({"zero_signal_groups": "refill", "kl": KLConfig(place="reward")}, r"kl\.place=reward"),
        ({"name": "dapo", "kl": KLConfig(place="reward")}, r"kl\.place=reward"),
        ({"zero_signal_groups": "drop", "kl": KLConfig(place="loss")}, r"kl\.place=loss"),
        ({"zero_signal_groups": "drop", "entropy_coef": 0.01}, r"entropy_coef=0\.01"),
        (
            {"zero_signal_groups": "drop", "overlong_penalty": 1.0, "overlong_buffer_tokens": 20},
            r"overlong_penalty=1\.0",
        ),
    ],
)
def test_groups_by_which_something_else_teaches_are_not_left_out(
    settings: dict[str, object], term: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{term} has something to teach by them. Set .*=keep"):
        algorithm(**settings)
    algorithm(**{**settings, "zero_signal_groups": "keep"})


@pytest.mark.parametrize("name", ["dapo", "dr_grpo"])
def test_what_depends_on_the_limit_has_to_know_it(name: str) -> None:
    with pytest.raises(ConfigError, match=r"needs to know how long a response may be"):
        resolve(AlgorithmConfig(name=name))


def test_only_estimators_that_compare_need_groups() -> None:
    for name in ("ppo", "remax", "reinforce_plus_plus"):
        check_group_size(algorithm(name), 1)
    check_group_size(algorithm("rloo"), 2)
    with pytest.raises(ConfigError, match=r"rollout\.group_size=1 with algorithm\.name='rloo'"):
        check_group_size(algorithm("rloo"), 1)


def test_names_are_checked_without_loading_anything_heavy() -> None:
    program = (
        "import sys; from policies.learning.algorithms import resolve\n"
        "from policies.learning.settings import AlgorithmConfig\n"
        "[resolve(AlgorithmConfig(name=name), 9) for name in ('ppo', 'gspo', 'dapo')]\n"
        "assert not {'torch', 'verl', 'numpy', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])


def test_an_estimator_of_ones_own_is_registered_by_its_module() -> None:
    own = algorithm(
        "custom",
        advantage="twice_the_reward",
        loss="unclipped",
        module="own_algorithm",
        gamma=0.5,
        correction=CorrectionConfig(mode="bypass"),
    )
    register_own(own)  # as every learner rank does
    completion = Completion(
        prompt_ids=(1,), completion_ids=(2, 3), logprobs=(-1.0, -1.0), text="", finish_reason="stop"
    )
    steps = [Step(completion=completion, reward=3.0)]
    group = TrajectoryGroup(
        group_id="g", task={}, trajectories=(Trajectory(rollout_id="g/0", steps=steps, reward=3.0),)
    )
    samples = {"g/0": training_samples(group.trajectories[0])}
    (credited,) = assign_credit([group], samples, own, 0.0)[0]["g/0"]
    np.testing.assert_allclose(credited.advantages, [3.0, 3.0])
