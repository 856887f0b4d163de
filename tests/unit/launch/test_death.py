"""One sentence for a process that died. The texts are Ray 2.56's, as it has written them."""

from __future__ import annotations

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

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
