"""Served agents: trained agents that answer clients, one ``AgentPool`` for each, shared by all replicas.

A message on its way, and what keeps a part of it::

    replica of the policy server                     actor of the agent
    agent_routes ─▶ AgentFrontend,    ─▶ PoolClient ─▶ AgentPool.play
    a2a, mcp        ResponsesFrontend                   │ IdempotentAnswers   the whole answer, by its key
                                                        │ Conversations       where the message goes on
                                                        │ Messages            its events, until it has ended
                                                        ▼
                    steps, trajectory ◀──────── AsyncRolloutService ─▶ fleet, sampling actor

Errors are kinds of ``RequestError`` everywhere here: ``actors/serving/errors.py`` gives them an HTTP status.
"""
