"""Where agents, environments and the policy run: every Ray actor of a run.

Who runs where, and what passes between them::

    driver                                                            learner's ranks
    training loop ─── requests ──▶ RolloutFleet ─▶ RolloutActor (N)   LearnerWorker (R)
        ▲   │                           │            │      ▲               │
        │   └── batches ────────────────┼────────────┼──────┼──────────────▶│ published
     groups                       trajectories    requests  completions     │ versions
        │                               │            ▼      │               ▼
    TrajectoryStream ◀─ queue ──────────┘         SamplerActor          WeightStore
                                                     ▲      │               │
                                              answers│      │requests       │ newest version
                                                     │      ▼               ▼
                                                  PolicyServer: replicas with an engine each

Each loop that runs beside others, with what it

================================  ====================  =======================  =====================
loop (file)                       consumes              waits for, unblocked by  produces
================================  ====================  =======================  =====================
training loop                     groups                the stream: the last     batches, versions,
(launch/training/loop.py)                               trajectory of a group    requests
RolloutFleet, one coroutine per   requests              room in the stream: the  one trajectory per
actor (rollouts/fleet.py)                               training loop takes      request
RolloutActor                      one request           the sampling actor's     one trajectory
(rollouts/rollout_actor.py)                             completion
RequestQueue's watch              time                  the next tick            requests of silent
(sampling/request_queue.py)                                                      replicas, free again
QueueWorker, one per sampling     requests              its poll: the queue has  an answer per request
actor and replica                                       some; the engine
(sampling/queue_worker.py)
replica follows its directory     sampling actors       the directory: one is    a QueueWorker for
(serving/policy_server.py)                              added                    each
replica follows its store         published versions    the store: a version     an engine with the
(weights/follower.py)                                   is published             newest weights
engine's thread                   requests, weights     its inbox: either comes  tokens
(policies/engines/vllm.py)
================================  ====================  =======================  =====================

A sampling request takes eight hops from the rollout actor to the engine: see sampling/README.md.

Importing this is light, because every rollout actor does so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.engine import AgentExecutionEngine

__all__ = ["AgentExecutionEngine"]


def __getattr__(name: str) -> Any:
    if name == "AgentExecutionEngine":
        from actors.engine import AgentExecutionEngine

        return AgentExecutionEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
