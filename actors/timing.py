"""Time limits that depend on each other, in seconds: which has to be shorter than which, and why.

``tests/unit/actors/test_timing.py`` reads the lines with ``<`` and holds them against the values below.

Sampling. A replica polls its queue at least every sixth of a lease, and is taken for lost after a whole one.

    GATHER_REQUESTS < GATHER_ANSWERS < LEASE / 6      what gathers for a poll does not delay the next one
    QUEUE_RETRY < LEASE / 2                           a replica that reconnects still holds its requests
    FETCH_RETRY < MISSING_VERSION < REQUEST_WAIT      a replica without weights fails before its requests do
    SAMPLER_RETRY < SAMPLER_RESTART / 10              a sampling actor that is back is noticed soon
    PAIRING * 3 < REQUEST_WAIT                        a queue has other replicas before its requests fail

Nodes. A node that was cut off loses its work after five missed probes; Ray notices it after 62 s,
and then ends the node with all of its actors, also when it answers again.

    NODE_PROBE < NODE_SILENCE / 2                     one probe that is late is not a silent node
    NODE_SILENCE < SLOT_ANSWER < CALL_ANSWER          all actors of a node are moved at once, not one by one
    NODE_SILENCE < NODE_CUT < 60                      a storm's cut is noticed here, and not by Ray for good
    NODE_CUT < CUT_PAUSE                              the node reports to Ray again between two cuts

Rollouts. A limit interrupts the rollout itself; the fleet ends a process that nothing can interrupt.

    LIMIT_REPEAT < LIMIT_GRACE / 2                    the signal is repeated before the process is ended
    ENV_CLOSE + LIMIT_GRACE < CONVERSATIONS_END       every environment gets its whole time to close
    REPLICA_END < APPLICATION_END                     whoever waits for an address outlasts its last replica
    CONVERSATIONS_END + REPLICA_END < PROCESSES_END   a storm counts what is left when nothing may be left

Life of a run. Its driver reports every second to Ray's head process, which Ray gives up after 60 s.

    HEARTBEAT < DRIVER_SILENCE / 2                    one heartbeat that is late is not a stopped driver
    INSPECTION * 3 < HEAD_SILENCE < 60                the watchdog inspects in three rounds, before Ray ends
    NO_ACTOR < FLEET_START                            a fleet without actors is announced before others start

Size and loss. Serve averages the load that replicas report every ten seconds.

    SCALE_UP < LOAD_MEAN < SCALE_DOWN                 it grows at once, and shrinks on more than one mean
    10 < LOAD_MEAN                                    a mean holds at least one report
    PLACE_RETURN < STORM_CALM                         a run has its parts back before its next update is due
    SAMPLER_RESTART < STORM_CALM                      the same

A constant that depends on no other stands where it is used.
"""

from __future__ import annotations

GATHER_REQUESTS_SECONDS = 0.01
"""Seconds that a request waits for others that a replica can fetch with it, where all replicas are busy."""
GATHER_ANSWERS_SECONDS = 0.02
"""Seconds that a finished answer of a busy engine waits for others, to be delivered by the same poll."""
QUEUE_RETRY_SECONDS = 1.0
"""Seconds between two connections to a queue whose actor does not answer, or is started anew by Ray."""
LEASE_SECONDS = 3.0
"""Seconds without a poll after which a replica has stopped or died: its requests go to others."""
FETCH_RETRY_SECONDS = 1.0
"""Seconds between two attempts of a replica to fetch a version."""
MISSING_VERSION_SECONDS = 30.0
"""Seconds that the newest version may be missing: a shared disk may show a new file late."""
REQUEST_WAIT_SECONDS = 120.0
"""Seconds without a live replica after which a request fails. Serve replaces one in less, if it can."""
PAIRING_SECONDS = 3.0
"""Seconds between two reports of a replica to the directory. One that misses three has stopped or died."""
SAMPLER_RETRY_SECONDS = 0.5
"""Seconds between two calls of a sampling actor that does not answer."""
SAMPLER_RESTART_SECONDS = 60.0
"""Seconds for which a sampling actor that has died is waited for."""

NODE_PROBE_SECONDS = 1.0
"""Seconds between two probes of a node on which rollout actors live."""
NODE_SILENCE_SECONDS = 5
"""Seconds without an answer after which a node is silent: what its actors play is played elsewhere."""
SLOT_ANSWER_SECONDS = 30.0
"""Seconds without an answer after which an idle rollout actor is lost."""
CALL_ANSWER_SECONDS = 60.0
"""Seconds without an answer to a call without work after which an actor is treated as hung."""
NODE_CUT_SECONDS = 8.0
"""Seconds that a storm stops all processes of a node, as if its network were cut."""
CUT_PAUSE_SECONDS = 60.0
"""Seconds between two cuts of the same node: one that stays silent for long Ray takes for dead, for good."""

LIMIT_REPEAT_SECONDS = 1.0
"""Seconds between two signals that a time limit is reached, until one gets through."""
LIMIT_GRACE_SECONDS = 5.0
"""Seconds beyond its own limits after which the fleet ends an actor."""
ENV_CLOSE_SECONDS = 10.0
"""Seconds for an environment's ``close``, beyond the rollout's own limit."""
CONVERSATIONS_END_SECONDS = 20.0
"""Seconds for the environments of all conversations to close."""
REPLICA_END_SECONDS = 2.0
"""Seconds for a replica to end: all do at the end of a program, whose clients know."""
APPLICATION_END_SECONDS = 15.0
"""Seconds for the application of a program that was killed to end."""
PROCESSES_END_SECONDS = 30.0
"""Seconds for the processes of a run to be gone once its driver is."""

HEARTBEAT_SECONDS = 1.0
"""Seconds between two heartbeats of a driver."""
DRIVER_SILENCE_SECONDS = 5.0
"""Seconds without a heartbeat after which a driver is stopped, or cut off."""
INSPECTION_SECONDS = 2.0
"""Seconds for the parts of a run to report what they are doing."""
HEAD_SILENCE_SECONDS = 20.0
"""Seconds that Ray's head process (GCS) may be silent. After 60 Ray ends this process without a word."""
NO_ACTOR_SECONDS = 60.0
"""Seconds without any rollout actor after which the log says so."""
FLEET_START_SECONDS = 120.0
"""Seconds after which other programs of the cluster may start, though not all rollout actors are up."""

SCALE_UP_SECONDS = 5.0
"""Seconds that a replica has to be missing before Serve starts it."""
LOAD_MEAN_SECONDS = 11.0
"""Seconds over which tokens in flight are averaged: replicas report them every ten."""
SCALE_DOWN_SECONDS = 60.0
"""Seconds that a replica has to be too many before Serve ends it: starting one takes about as long."""
PLACE_RETURN_SECONDS = 60.0
"""Seconds for a place that was lost with its node to come back on another."""
STORM_CALM_SECONDS = 120.0
"""Seconds for a run's next update when a storm is over."""
