from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from environments.errors import ConfigError
from policies.learning.algorithm import Algorithm
from policies.learning.algorithms import ALGORITHMS, check_group_size, resolve
from policies.learning.registry import LOSSES
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
    assert named.teacher == ("" if name == "distillation" else None)


def test_what_is_left_open_is_as_it_was_before_there_were_names() -> None:
    grpo = algorithm()
    assert (grpo.advantage, grpo.options) == ("grpo", {"normalize_by_std": True})
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
    assert (algorithm("ppo").gamma, algorithm("ppo").options) == (1.0, {"lam": 0.95})
    for name in ("rloo", "remax", "opo"):
        assert (algorithm(name).loss, algorithm(name).loss_aggregation) == ("reinforce", "seq-mean-token-sum")


def test_what_is_set_is_what_is_used() -> None:
    config = AlgorithmConfig(
        loss_aggregation="token-sum",
        options={"normalize_by_std": False},
        clip_low=0.1,
        clip_high=0.3,
        entropy_coef=0.01,
        credit="per_step",
        gamma=0.9,
        zero_signal_groups="keep",
        overlong={"penalty": 0.5, "buffer_tokens": 20},
        kl=KLConfig(place="reward", coef=0.1, estimator="k3", target=0.05),
        correction=CorrectionConfig(level="sequence", truncate_above=2.0, mask_outside=[0.1, 5.0]),
    )
    grpo = resolve(config, LIMIT)
    assert (grpo.loss_aggregation, grpo.options) == ("token-sum", {"normalize_by_std": False})
    assert (grpo.clip_low, grpo.clip_high, grpo.entropy_coef) == (0.1, 0.3, 0.01)
    assert (grpo.credit, grpo.gamma, grpo.zero_signal_groups) == ("per_step", 0.9, "keep")
    assert (grpo.overlong_penalty, grpo.overlong_buffer_tokens) == (0.5, 20)
    assert (grpo.kl_place, grpo.kl_coef, grpo.kl_estimator) == ("reward", 0.1, "k3")
    assert (grpo.kl_target, grpo.uses_reference) == (0.05, True)
    assert (grpo.correction_level, grpo.truncate_above) == ("sequence", 2.0)
    assert (grpo.mask_below, grpo.mask_above) == (0.1, 5.0)
    assert algorithm("ppo", options={"lam": 0.9}, gamma=0.99).options == {"lam": 0.9}
    assert algorithm("ppo", options={"lam": 1}).options == {"lam": 1}, "an integer is a number"


@pytest.mark.parametrize(
    ("name", "setting", "value", "why"),
    [
        ("grpo", "advantage", "rloo", r"'grpo': that is part of .* Or set algorithm\.name=rloo"),
        ("grpo", "loss", "gspo", r"algorithm\.name=custom lets you choose"),
        ("grpo", "module", "json", "estimator 'grpo' and loss 'vanilla' come with verl"),
        ("distillation", "module", "json", "estimator 'reverse_kl' and loss 'vanilla' come with verl"),
        ("grpo", "gamma", 0.9, r"nothing is discounted unless algorithm\.credit=per_step"),
        ("rloo", "clip_high", 0.2, "its loss reinforce does not clip"),
        ("gpg", "clip_low", 0.1, "its loss gpg does not clip"),
        ("gpg", "clip_high", 0.1, "its loss gpg does not clip"),
        ("ppo", "zero_signal_groups", "refill", "its estimator gae learns from groups"),
        ("ppo", "credit", "per_step", "gae does not compare.*takes rewards at the turn that earned them"),
        ("reinforce_plus_plus", "credit", "broadcast", "does not compare a turn"),
        ("remax", "credit", "per_step", "remax does not compare a turn"),
        ("remax", "gamma", 0.5, "nothing is discounted"),
    ],
)
def test_setting_without_effect_is_refused(name: str, setting: str, value: object, why: str) -> None:
    with pytest.raises(ConfigError, match=rf"algorithm\.{setting}={value!r} has no effect in .*{why}"):
        algorithm(name, **{setting: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"advantage": "grpo", "credit": "per_step"}, r"algorithm\.credit=per_step .*credit=broadcast"),
        ({"advantage": "gae"}, r"algorithm\.advantage=gae .*Set algorithm\.advantage=grpo"),
        (
            {"advantage": "reinforce_plus_plus"},
            r"advantage=reinforce_plus_plus with algorithm\.loss=geo_mean",
        ),
        ({"advantage": "reverse_kl"}, r"advantage=reverse_kl with algorithm\.loss=geo_mean"),
    ],
)
def test_loss_of_one_advantage_takes_none_by_turn_or_token(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm("custom", loss="geo_mean", **settings)
    if settings["advantage"] == "grpo":
        assert algorithm("custom", loss="gspo", **settings).credit == "per_step"


def test_gmpo_clips_wider_and_takes_means_over_sequences() -> None:
    """Zhao et al. 2025 (GMPO): from e^-0.4 to e^0.4."""
    gmpo = algorithm("custom", advantage="grpo", loss="geo_mean")
    assert (gmpo.clip_low, gmpo.clip_high, gmpo.loss_aggregation) == (0.4, 0.4, "seq-mean-token-mean")


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_rollouts_are_taken_again_only_by_a_loss_with_a_ratio(name: str) -> None:
    assert algorithm(name).needs_all_scores == (name == "distillation")
    if name in ("rloo", "remax", "opo", "gpg"):
        with pytest.raises(ConfigError, match=rf"learner.num_epochs=2 .*'{name}'.* Set learner.num_epochs=1"):
            resolve(AlgorithmConfig(name=name), LIMIT, num_epochs=2)
    else:
        again = resolve(AlgorithmConfig(name=name), LIMIT, num_epochs=2)
        assert again.needs_all_scores, "the first mini-batch's second step is not its own"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "grpo",
            {"lam": 0.9},
            r"options='lam' is not one of normalize_by_std\..* options of grpo",
        ),
        ("grpo", {"normalise_by_std": False}, r"Did you mean 'normalize_by_std'\?"),
        ("rloo", {"normalize_by_std": False}, r"options\.normalize_by_std=False: .*'rloo' has no options"),
        ("dr_grpo", {"normalize_by_std": True}, r"has no effect in .*'dr_grpo': it is False by definition"),
        ("grpo", {"normalize_by_std": 0}, r"options\.normalize_by_std=0 has to be of type bool"),
        ("ppo", {"lam": "high"}, r"options\.lam='high' has to be of type float; its default is 0\.95"),
        ("ppo", {"lam": True}, r"options\.lam=True has to be of type float"),
        ("ppo", {"lam": -1.0}, r"options\.lam=-1\.0 has to be at least 0"),
    ],
)
def test_option_has_to_be_one_of_its_estimator_or_loss(
    name: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(name, options=options)


def test_loss_with_its_own_aggregation_takes_no_other() -> None:
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
        ({"overlong": {"penalty": 1.0}}, r"overlong\.penalty=1\.0 without .*overlong\.buffer_tokens"),
        (
            {"overlong": {"penalty": 1.0, "buffer_tokens": 101}},
            r"overlong\.buffer_tokens=101 has to be from 1 to rollout\.max_response_tokens=100",
        ),
        ({"overlong": {"buffer_tokens": 5}}, r"buffer_tokens=5 has no effect in .*Set that too, or leave"),
        ({"name": "dapo", "overlong": {"penalty": 0.0, "buffer_tokens": 5}}, "has no effect in"),
        ({"overlong": {"penality": 1.0}}, r"overlong='penality' is not one of .*Did you mean 'penalty'"),
        ({"overlong": {"penalty": -1.0}}, r"overlong\.penalty=-1\.0 has to be at least 0"),
        (
            {"name": "distillation", "kl": KLConfig(place="reward")},
            r"kl\.place=reward has no effect in .*'distillation' with algorithm\.options\.reward_coef=0",
        ),
        (
            {"name": "distillation", "overlong": {"penalty": 1.0, "buffer_tokens": 20}},
            r"overlong\.penalty=1\.0 has no effect in .*reward_coef=0",
        ),
        ({"name": "distillation", "zero_signal_groups": "drop"}, r"reverse_kl learns from groups .* alike"),
        ({"name": "distillation", "options": {"teecher": "a"}}, r"Did you mean 'teacher'\?"),
        ({"name": "custom", "advantage": "grpo"}, r"algorithm\.loss=None: it needs both"),
        ({"name": "custom", "loss": "gpg"}, r"algorithm\.advantage=None.*it needs both"),
        (
            {"name": "custom", "advantage": "rlo", "loss": "vanilla"},
            r"advantage='rlo' is not one of .*Did you mean 'rloo'\? For one of your own, name its module",
        ),
        ({"name": "custom", "advantage": "grpo", "loss": "vanila"}, "Did you mean 'vanilla'"),
        ({"name": "custom", "advantage": "gdpo", "loss": "vanilla"}, "gdpo' cannot be used"),
        ({"name": "custom", "advantage": "grpo", "loss": "kl_cov"}, r"learner\.micro_batch_tokens"),
        ({"name": "custom", "advantage": "grpo", "loss": "bypass_mode"}, r"correction\.level=bypass"),
        ({"name": "custom", "advantage": "grpo", "loss": "dppo_kl"}, "no usual value. Set both"),
        (
            {"name": "custom", "advantage": "grpo", "loss": "vanilla", "module": "json"},
            "module='json' has no effect",
        ),
        ({"name": "mine"}, r"name='mine' is not one of grpo.* For one of your own, name its module"),
        (
            {"name": "custom", "advantage": "mine", "loss": "vanilla", "module": "no_such_module"},
            "module='no_such_module': there is no module 'no_such_module'",
        ),
        (
            {"name": "custom", "advantage": "mine", "loss": "vanilla", "module": "json"},
            "advantage='mine' is not one of .*module='json' has to register it with register_estimator of "
            "policies.learning.registry",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm(**settings)


def test_kl_in_reward_and_entropy_bonus_go_with_every_algorithm() -> None:
    needed = {"dapo": {"zero_signal_groups": "keep"}, "distillation": {"options": {"reward_coef": 1.0}}}
    for name in ALGORITHMS:
        kl = KLConfig(place="reward", coef=0.1)
        algorithm(name, entropy_coef=0.01, kl=kl, **needed.get(name, {}))


@pytest.mark.parametrize(
    ("settings", "term"),
    [
        ({"zero_signal_groups": "drop", "kl": KLConfig(place="reward")}, r"kl\.place=reward"),
        ({"zero_signal_groups": "refill", "kl": KLConfig(place="reward")}, r"kl\.place=reward"),
        ({"name": "dapo", "kl": KLConfig(place="reward")}, r"kl\.place=reward"),
        ({"zero_signal_groups": "drop", "kl": KLConfig(place="loss")}, r"kl\.place=loss"),
        ({"zero_signal_groups": "drop", "entropy_coef": 0.01}, r"entropy_coef=0\.01"),
        (
            {"zero_signal_groups": "drop", "overlong": {"penalty": 1.0, "buffer_tokens": 20}},
            r"overlong\.penalty=1\.0",
        ),
    ],
)
def test_groups_by_which_something_else_teaches_are_not_left_out(
    settings: dict[str, object], term: str
) -> None:
    with pytest.raises(ConfigError, match=rf"{term} has something to teach by them. Set .*=keep"):
        algorithm(**settings)
    algorithm(**{**settings, "zero_signal_groups": "keep"})


def test_only_estimators_that_compare_need_groups() -> None:
    for name in ("ppo", "remax", "reinforce_plus_plus", "distillation"):
        check_group_size(algorithm(name), 1)
    check_group_size(algorithm("rloo"), 2)
    with pytest.raises(ConfigError, match=r"rollout\.group_size=1 with algorithm\.name='rloo'"):
        check_group_size(algorithm("rloo"), 1)
    with pytest.raises(ConfigError, match=r"reward_coef=0\.5 has no effect with rollout\.group_size=1"):
        check_group_size(algorithm("distillation", options={"reward_coef": 0.5}), 1)


def test_names_are_checked_without_loading_anything_heavy() -> None:
    program = (
        "import sys; from policies.learning.algorithms import resolve\n"
        "from policies.learning.settings import AlgorithmConfig\n"
        "[resolve(AlgorithmConfig(name=name), 9) for name in ('ppo', 'gspo', 'dapo')]\n"
        "assert not {'torch', 'verl', 'numpy', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])
