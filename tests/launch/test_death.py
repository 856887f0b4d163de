"""What a run says when Ray has lost one of its parts."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError

from launch.process import death


def died(text: str) -> RayActorError:
    return RayActorError(None, text)


def test_a_dead_actor_is_named_with_its_process_and_machine() -> None:
    error = died("The actor died.\n\tclass_name: RolloutFleet\n\tactor_id: 12ab\n\tpid: 77\n\tip: 10.0.0.3\n")
    assert death.death(error) == "RolloutFleet (process 77, on 10.0.0.3) has died."


@pytest.mark.parametrize("error", [ActorDiedError(), ActorUnavailableError("The node is silent.", b"1" * 16)])
def test_the_machine_is_named_where_ray_knows_nothing_of_the_actor(
    error: RayActorError, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"NodeManagerHostname": "left", "Alive": False}, {"NodeManagerHostname": "right", "Alive": True}]
    monkeypatch.setattr(death.ray, "nodes", lambda: nodes)
    said = death.death(error)
    assert str(error).splitlines()[0] in said
    assert "node on left (its raylet" in said and "right" not in said


def test_a_process_killed_for_memory_comes_with_the_amount_and_the_settings_to_lower() -> None:
    error = died(
        "The actor died.\n\tclass_name: LearnerWorker\n\tpid: 7\n"
        "Memory on the node (IP: 10.0.0.3, ID: ab) where the actor was running was 15.30GB / 16.00GB, "
        "which exceeds the memory usage threshold of 0.95. Ray killed this worker (ID: cd)."
    )
    said = death.death(error)
    assert "LearnerWorker (process 7) has died." in said
    assert "15.30GB / 16.00GB" in said and "learner.micro_batch_tokens" in said and "fleet.num_actors" in said
