"""What the probe hands to the learner was sampled by the version that the learner has, and by no other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import ray
from ray.exceptions import RayError

from environments.errors import SamplerError
from environments.types import Completion, Step, Trajectory, TrajectoryGroup
from launch.training.engine_comparison import LogprobProbe
from policies.sampler import TokenOutput, TokenRequest


def group(*prompts: tuple[int, ...]) -> TrajectoryGroup:
    steps = [Step(completion=Completion(prompt_ids=each, text="", finish_reason="stop")) for each in prompts]
    trajectory = Trajectory(steps=[Step(), *steps])
    return TrajectoryGroup(group_id="0", task={}, trajectories=(trajectory,))


def answering(*versions: int) -> Callable[[TokenRequest], ray.ObjectRef]:
    """An engine that samples a token by each of ``versions``."""

    def sample(request: TokenRequest) -> ray.ObjectRef:
        assert request.prompt_ids == (7, 8) and request.min_version == 3
        count = len(versions)
        return ray.put(
            TokenOutput(
                token_ids=(1,) * count,
                logprobs=(-0.5,) * count,
                finish_reason="length",
                policy_version=min(versions, default=3),
                token_versions=versions,
            )
        )

    return sample


def test_what_the_newest_version_has_sampled_is_handed_out_once(ray_cluster: None) -> None:
    probe = LogprobProbe(answering(3, 3), temperature=1.0)
    assert probe.take(3) == []
    probe.begin([group((), (7, 8), (9,))], version=3)
    (sample,) = probe.take(3)
    assert (sample.prompt_ids, sample.response_ids, sample.policy_version) == ((7, 8), (1, 1), 3)
    assert (sample.loss_mask, sample.rollout_logprobs) == ((1, 1), (-0.5, -0.5))
    assert probe.take(3) == []


@pytest.mark.parametrize("versions", [(), (3, 4), (4, 4)])
def test_what_others_have_sampled_is_left_out(ray_cluster: None, versions: tuple[int, ...]) -> None:
    probe = LogprobProbe(answering(*versions), temperature=1.0)
    probe.begin([group((7, 8))], version=3)
    assert probe.take(3) == []


def test_without_a_prompt_nothing_is_asked() -> None:
    def sample(request: TokenRequest) -> ray.ObjectRef:
        raise AssertionError(request)

    probe = LogprobProbe(sample, temperature=1.0)
    probe.begin([], version=3)
    probe.begin([group()], version=3)
    assert probe.take(3) == []


def test_engine_that_cannot_answer_is_an_error_once(
    ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.training.engine_comparison.MAX_MISSED", 0)  # wait for the answer

    @ray.remote(num_cpus=0)
    def fail() -> TokenOutput:
        raise SamplerError("No replica is left.")

    probe = LogprobProbe(lambda request: fail.remote(), temperature=1.0)
    probe.begin([group((7, 8))], version=3)
    with pytest.raises(RayError, match="No replica is left"):
        probe.take(3)
    assert probe.take(3) == []
