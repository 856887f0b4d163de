"""Every Ray actor of a run: agents and environments, engines, learner.

The head of ``launch/training/loop.py`` draws them, and what passes between them.

Each loop that runs beside others, what it consumes, what it waits for and what it produces:

==================================  =====================  =======================  =====================
loop (file)                         consumes               waits for, unblocked by  produces
==================================  =====================  =======================  =====================
training loop                       groups                 the stream: the last     batches, versions,
(launch/training/loop.py)                                  trajectory of a group    requests
Watchdog._watch                     time                   the next tick            a report of a stall,
(launch/health/watchdog.py)                                                         or the run's end
HeartbeatSender._beat               time                   Ray's head process       a heartbeat
(launch/health/heartbeat.py)
SlotLoop.run, once per slot         requests               room for finished        one trajectory per
(rollouts/slot_loop.py)                                    trajectories             request
RolloutFleet._deliver               finished trajectories  room in the stream: the  trajectories in the
(rollouts/fleet.py)                                        training loop takes      stream
PartCalls._send, once per part      attempts               the next ones            calls of a FleetPart
(rollouts/fleet_parts.py)
PartCalls._receive, once per part   turns, results         the part: either comes   turns in journals,
(rollouts/fleet_parts.py)                                                           ends of attempts
RolloutFleet._leave_draining_nodes  time                   Ray's list of draining   idle actors on other
(rollouts/fleet.py)                                        nodes                    nodes
NodeWatch._watch, once per node     time                   the node's answer        the node's silence
(ray_tools/node_watch.py)
RolloutActor                        one request            the sampling actor's     one trajectory
(rollouts/rollout_actor.py)                                completion
AgentPool._follow_fleet             the fleet's counts     the clock                another number of
(served_agents/pool.py)                                                             rollout actors
RequestQueue._watch_leases          time                   the next tick            requests of silent
(sampling/request_queue.py)                                                         replicas, free again
QueueWorker.run, once per replica   requests               its poll: the queue has  an answer per request
and sampling actor                                         some; the engine
(sampling/queue_worker.py)
ServedQueues.run, once per replica  sampling actors        the directory: other     a QueueWorker for
(sampling/served_queues.py)                                ones are its own         each of its own
WeightFollower.run                  published versions     the store: a version is  an engine with the
(weights/follower.py)                                      published                newest weights
follow_turns                        turns                  the store: the learner   an engine that sleeps
(weights/turns.py)                                         or the driver takes one  in those of the learner
VLLMEngine._run                     requests, weights      its inbox: either comes  tokens
(policies/engines/vllm.py)
==================================  =====================  =======================  =====================

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
