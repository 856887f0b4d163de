"""One sentence for a process that died. The texts are Ray 2.56's, as it has written them."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError, RayError

from environments.errors import LearnerLostError
from launch.health.death import describe_death

NODE_DIED = """\
The actor died unexpectedly before finishing this task.
\tclass_name: LearnerWorker
\tactor_id: 4b66e4612bc4b5f411b595a301000000
\tpid: 21080
\tnamespace: 0dc79baa-bac1-435c-9d13-bc9d1db95b4e
\tip: 192.0.2.2
The actor is dead because its owner has died. Owner Id: 01000000ffff Owner Ip address: 192.0.2.2 \
Owner worker exit type: SYSTEM_ERROR Worker exit detail: Owner's node has crashed."""
LOST_NODE = """\
The actor died unexpectedly before finishing this task.
\tclass_name: LearnerWorker
\tpid: 956
\tip: 192.0.2.7
The actor died because its node has died. Node Id: 15a3a371466926a91b55b16888edf0d87034d652c2d2bb12e904b7b7
\tthe actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats"""
MEMORY_FULL = """\
1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, \
ID: a3009f42) was 22.41GB used / 23.54GB limit (0.952)
OOM kill reason: Memory usage 24000000000B exceeded threshold of 23900000000B (95.0% of 25276502016B limit)
Ray killed 1 worker(s) based on the killing policy
Considered workers: [
Selected to kill: (Actor(3e32086fd5da44e6): job ID=01000000, lease ID=000000004ea3, \
task name=LearnerWorker.update, required resources={}, pid=23350, actual memory used=17.90GB)
]"""


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (
            RayActorError(error_msg=NODE_DIED),
            "LearnerWorker (process 21080 on node 192.0.2.2) has died: its owner has died "
            "(Owner's node has crashed).",
        ),
        (RayActorError(error_msg="The actor died."), "A Ray actor has died: The actor died."),
        (
            OutOfMemoryError(MEMORY_FULL),
            "The memory of node 192.0.2.2 was full (22.41GB of 23.54GB), and Ray has killed a process there: "
            "LearnerWorker (process 23350, 17.90 GB). Lower learner.micro_batch_tokens, fleet.num_actors or "
            "server.num_replicas, or let the run have a larger machine.",
        ),
    ],
)
def test_death_is_one_sentence_with_name_place_and_reason(error: RayError, sentence: str) -> None:
    assert describe_death(error) == sentence


def test_lost_rank_is_named_with_its_node_where_ray_knows() -> None:
    error = LearnerLostError("A learner rank has died, or Ray cannot reach it.")
    error.__cause__ = ActorUnavailableError("It is away.", None)
    assert describe_death(error) == "A learner rank has died, or Ray cannot reach it."
    error.__cause__ = RayActorError(error_msg=LOST_NODE)
    assert (
        describe_death(error) == "LearnerWorker (process 956 on node 192.0.2.7) has died: its node has died."
    )
