"""The state of a run at one moment: its text, and a verdict on what holds it up. Used by ``launch.status``.

``inspection`` calls the actors and makes a ``RunReport``; here none is called.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from actors.rollouts.fleet_report import ActorFailure, FleetReport, RolloutInPlay
from actors.timing import DRIVER_SILENCE_SECONDS
from launch.health.heartbeat import START_PHRASES, RunHeartbeat
from policies.sampler import QueueStatus, ReplicaStatus

MAX_LISTED = 5
"""Rollouts in play that are listed, and failures of actors."""
DESCRIPTIONS = {
    "learner": "learner rank",
    "critic": "critic's rank",
    "replica": "replica of the policy server",
    "queue": "stream's queue",
    "actor": "rollout actor",
    "sampler": "sampling actor",
    "store": "weight store",
    "directory": "directory of sampling actors",
    "controller": "controller of Ray Serve",
    "proxy": "proxy of Ray Serve",
}
"""The roles of ``launch.chaos`` in words, where these differ."""


@dataclass(frozen=True, order=True)
class Process:
    """A process of a run: the node where it is, its role, its id there, and whether it was stopped."""

    host: str
    role: str
    pid: int
    stopped: bool = False

    @property
    def name(self) -> str:
        return f"the {DESCRIPTIONS.get(self.role, self.role)} (process {self.pid} on {self.host})"


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """A run at one moment.

    Args:
        heartbeat: the newest of its driver.
        silent_seconds: since then.
        processes: of its cluster's nodes.
        fleet: report of its fleet; ``None`` where there is none, or it does not answer.
        waiting: seconds for which rollouts have waited for a completion, by rollout id.
        sampling: requests and replicas of all its sampling actors, if these sample a policy server.
        stream: trajectories that lie in the stream, and how many it holds; ``None`` if it does not answer.
        free: resources of the cluster that nobody has taken.
        unanswered: parts that did not answer in time.
        errors: of parts that answered with an error.
        hosts: name of a node's machine, by Ray's id of the node.
    """

    heartbeat: RunHeartbeat
    silent_seconds: float = 0.0
    processes: Sequence[Process] = ()
    fleet: FleetReport | None = None
    waiting: Mapping[str, float] = field(default_factory=dict)
    sampling: QueueStatus | None = None
    stream: tuple[int, int] | None = None
    free: Mapping[str, float] = field(default_factory=dict)
    unanswered: Sequence[str] = ()
    errors: Sequence[str] = ()
    hosts: Mapping[str, str] = field(default_factory=dict)


# -- the verdict -------------------------------------------------------------------------------------


def verdict(state: RunReport) -> str:
    """The part that holds up the others, in a sentence or two."""
    heartbeat = state.heartbeat
    stopped = sorted(each for each in state.processes if each.stopped)
    if stopped:
        names = " and ".join(each.name for each in stopped)
        pids = " ".join(str(each.pid) for each in stopped)
        verb = "was" if len(stopped) == 1 else "were"
        return f"{_sentence(names)} {verb} stopped (SIGSTOP): `kill -CONT {pids}` there lets it go on."
    if state.silent_seconds > DRIVER_SILENCE_SECONDS:
        return (
            f"The driver (process {heartbeat.pid} on {heartbeat.host}) has reported nothing for "
            f"{state.silent_seconds:.0f} s: it is dead, hangs, or its node was cut off."
        )
    if state.errors:
        return f"{state.errors[0]}"
    if state.unanswered:
        return (
            f"{_sentence(' and '.join(state.unanswered))} did not answer: it hangs, or its node was cut off."
        )
    loop = f"The training loop {heartbeat.activity}, for {heartbeat.seconds:.0f} s now"
    if state.fleet is not None and heartbeat.activity in ("waits for rollouts", "waits for an evaluation"):
        return f"{loop}: {_rollouts(state, state.fleet)}"
    if heartbeat.activity in START_PHRASES.values():
        free = ", ".join(f"{state.free.get(name, 0):g} {name}s" for name in ("CPU", "GPU"))
        return f"{loop}. In the cluster {free} are free for it."
    if state.stream is not None and state.stream[0] >= state.stream[1]:
        return f"{loop}. The rollout actors wait for it: the stream is full."
    return f"{loop}."


def _rollouts(state: RunReport, fleet: FleetReport) -> str:
    """Cause for which the rollouts that the loop waits for do not come."""
    status = fleet.status
    if not status.num_ready:
        return _no_room(state, fleet)
    if not fleet.in_play:
        return (
            f"{status.num_waiting} requests wait for a rollout actor, and none plays."
            if status.num_waiting
            else "no rollout is requested, and none is in play."
        )
    sampling = [each for each in fleet.in_play if each.rollout_id in state.waiting]
    playing = [each for each in fleet.in_play if each.rollout_id not in state.waiting]
    longest_sampling = max((state.waiting[each.rollout_id] for each in sampling), default=-1.0)
    longest_playing = max((each.seconds_since_turn for each in playing), default=-1.0)
    if longest_playing >= longest_sampling:
        return (
            f"{len(playing)} of {status.num_ready} rollout actors are in {fleet.env_class} or its agent, the "
            f"longest for {longest_playing:.0f} s (rollout {playing[0].rollout_id})."
        )
    return (
        f"{len(sampling)} of {status.num_ready} rollout actors wait for completions, the longest for "
        f"{longest_sampling:.0f} s. {_server(state.sampling)}"
    )


def _no_room(state: RunReport, fleet: FleetReport) -> str:
    lacking = {name: most for name, most in fleet.needs.items() if most > state.free.get(name, 0)}
    if not lacking:
        return f"none of {fleet.status.num_actors} rollout actors is up yet; there is room for them."
    needs = ", ".join(f"{amount:g} {name}" for name, amount in lacking.items())
    free = ", ".join(f"{state.free.get(name, 0):g} {name}" for name in lacking)
    return (
        f"none of {fleet.status.num_actors} rollout actors is up. Each needs {needs}, and {free} is free in "
        "the cluster: add a node, or lower the CPU of fleet.nodes or what else runs there."
    )


def _server(sampling: QueueStatus | None) -> str:
    if sampling is None:
        return "An outside server answers them."
    if not sampling.replicas:
        return "No replica of the policy server has polled its queue yet."
    live = {name: each for name, each in sampling.replicas.items() if each.is_live}
    if not live:
        name, youngest = min(sampling.replicas.items(), key=lambda item: item[1].silent_seconds)
        silent = f"{name} last polled {youngest.silent_seconds:.0f} s ago"
        return f"No replica of the policy server is live: {silent}."
    if sampling.num_waiting and not any(each.num_running for each in live.values()):
        return f"{sampling.num_waiting} requests wait until a replica serves the version that they need."
    busy = ", ".join(f"{each.num_running} at {name}" for name, each in live.items())
    return f"The policy server has them: {busy}."


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


# -- the text ----------------------------------------------------------------------------------------


def report_text(state: RunReport) -> str:
    """The state in lines, and the verdict as the last one."""
    heartbeat = state.heartbeat
    lines = [
        f"{heartbeat.folder}: driver {heartbeat.pid} on {heartbeat.host}, {heartbeat.num_updates} updates",
        _line("loop", f"{heartbeat.activity}, for {heartbeat.seconds:.0f} s"),
        _line("progress", _progress(heartbeat)),
    ]
    if state.fleet is not None:
        lines += _fleet_lines(state, state.fleet)
    if state.sampling is not None:
        lines.append(_line("sampling", f"{state.sampling.num_waiting} requests wait for a replica"))
        lines += [_line("", _replica(name, each)) for name, each in state.sampling.replicas.items()]
    if state.stream is not None:
        there, capacity = state.stream
        lines.append(
            _line("stream", f"{there} of {capacity} trajectories wait there; the loop has the others")
        )
    for host in sorted({each.host for each in state.processes}):
        here = [each for each in state.processes if each.host == host]
        lines.append(_line("node", f"{host}: {_counted(here)}"))
    lines += [_line("no answer", each) for each in state.unanswered]
    return "\n".join([*lines, verdict(state)])


def as_data(state: RunReport) -> dict[str, Any]:
    """The state and the verdict for ``json.dumps``: for the page of ``launch.view``, and for scripts."""
    heartbeat, fleet, sampling = state.heartbeat, state.fleet, state.sampling
    replicas = sampling.replicas if sampling is not None else {}
    return {
        **{name: value for name, value in asdict(heartbeat).items() if name not in ("fleets", "sent_at")},
        "silent_seconds": state.silent_seconds,
        "verdict": verdict(state),
        "processes": [asdict(each) for each in state.processes],
        "fleet": None if fleet is None else asdict(fleet.status) | {"env_class": fleet.env_class},
        "failures": [
            asdict(each) | {"node": state.hosts.get(each.node, each.node)}
            for each in (fleet.failures if fleet is not None else ())
        ],
        "rollouts": [] if fleet is None else [_rollout_data(each, state) for each in fleet.in_play],
        "num_waiting_requests": sampling.num_waiting if sampling is not None else None,
        "replicas": {name: asdict(each) for name, each in replicas.items()},
        "stream": list(state.stream) if state.stream is not None else None,
        "free": dict(state.free),
        "unanswered": list(state.unanswered),
        "errors": list(state.errors),
    }


def _rollout_data(rollout: RolloutInPlay, state: RunReport) -> dict[str, Any]:
    waited = state.waiting.get(rollout.rollout_id)
    return {
        "id": rollout.rollout_id,
        "host": state.hosts.get(rollout.node, rollout.node),
        "seconds": rollout.seconds,
        "waits_for": "the environment or the agent" if waited is None else "a completion",
        "waiting_seconds": rollout.seconds_since_turn if waited is None else waited,
    }


def _progress(heartbeat: RunHeartbeat) -> str:
    """The last result of each stage, the youngest first."""
    results = sorted(heartbeat.progress.items(), key=lambda item: item[1])
    return ", ".join(f"{name} {seconds:.0f} s ago" for name, seconds in results) or "none yet"


def _line(title: str, text: str) -> str:
    return f"  {title:<10}{text}"


def _fleet_lines(state: RunReport, fleet: FleetReport) -> list[str]:
    status = fleet.status
    actors = f"{status.num_ready} of {status.num_actors} rollout actors up, {status.num_lost} lost so far"
    rollouts = f"{len(fleet.in_play)} rollouts of {fleet.env_class} in play, {status.num_waiting} wait"
    lines = [_line("fleet", f"{actors}; {rollouts}")]
    lines += [_line("", _played(each, state)) for each in fleet.in_play[:MAX_LISTED]]
    lines += [_line("failed", _failed(each, state)) for each in fleet.failures[:MAX_LISTED]]
    if len(fleet.failures) > MAX_LISTED:
        lines.append(_line("", f"and {len(fleet.failures) - MAX_LISTED} more rollout actors, longer ago"))
    return lines


def _replica(name: str, replica: ReplicaStatus) -> str:
    return (
        f"replica {name}: version {replica.version}, {replica.num_running} requests, "
        f"{replica.num_answered} answered, polled {replica.silent_seconds:.1f} s ago"
    )


def _played(rollout: RolloutInPlay, state: RunReport) -> str:
    waited = state.waiting.get(rollout.rollout_id)
    doing = (
        f"in {state.fleet.env_class} or its agent for {rollout.seconds_since_turn:.0f} s"
        if waited is None and state.fleet is not None
        else f"waits for a completion for {waited or 0:.0f} s"
    )
    return f"rollout {rollout.rollout_id}, {rollout.seconds:.0f} s old, {doing}"


def _failed(failure: ActorFailure, state: RunReport) -> str:
    return (
        f"rollout actor {failure.actor} on {state.hosts.get(failure.node, failure.node)}, "
        f"{failure.seconds:.0f} s ago, rollout {failure.rollout_id}: {_ends(failure.error)}"
    )


def _ends(text: str) -> str:
    """The first and the last line of an error."""
    first, *rest = text.strip().splitlines() or [""]
    return f"{first} ... {rest[-1].strip()}" if rest else first


def _counted(processes: Sequence[Process]) -> str:
    roles = {role: [each for each in processes if each.role == role] for role in {p.role for p in processes}}
    return ", ".join(
        f"{role} {' '.join(str(p.pid) + (' (stopped)' if p.stopped else '') for p in sorted(roles[role]))}"
        if len(roles[role]) <= 2 or any(p.stopped for p in roles[role])
        else f"{len(roles[role])} {role}s"
        for role in sorted(roles)
    )
