"""The sampling actor that a rollout actor uses, and what stands in for one that has ended for good."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from actors.rollouts import rollout_actor
from actors.rollouts.rollout_actor import RayLink
from environments.errors import SamplerError

REQUEST: Any = "a request"


def sampling_actor(answer: Callable[[], str]) -> Any:
    return SimpleNamespace(sample=SimpleNamespace(remote=lambda request: answer))


def dead() -> str:
    raise RayActorError(error_msg="Its constructor has failed.")


@pytest.fixture(autouse=True)
def called_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_actor.ray, "get", lambda answer, timeout: answer())


def test_first_serves_a_node_whose_sampler_has_ended() -> None:
    first = sampling_actor(lambda: "by the first")
    link = RayLink(first, None, None)
    link.sampler = sampling_actor(dead)
    assert link.sample(REQUEST, deadline=0.0) == "by the first"
    assert link.sampler is first


def test_end_of_the_first_sampler_is_an_error() -> None:
    link = RayLink(sampling_actor(dead), None, None)
    with pytest.raises(SamplerError, match="has ended"):
        link.sample(REQUEST, deadline=0.0)
