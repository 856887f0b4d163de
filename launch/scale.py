"""``python -m launch.scale --actors 64 --replicas 4``: change the size of a run while it goes on.

    python -m launch.scale                  the fleets and policy servers of this cluster
    python -m launch.scale --actors 64      have 64 rollout actors in the only fleet
    python -m launch.scale --replicas 4     have 4 replicas of the policy in the only server
    python -m launch.scale --actors 64 --fleet fleet-1a2b3c4d --address 10.0.0.1:6379

No rollout is lost. A surplus rollout actor finishes its rollout and then ends. A surplus replica ends after
two seconds: another replica samples for its rollouts again, and a client that has no answer by then gets an
error. A run whose fleet.num_actors and fleet.max_actors differ goes on to choose by itself, from the new
number. The replicas of a server with server.max_replicas are chosen by Serve alone. A replica keeps its share
of server.access.per_minute: with twice the replicas, a key may use twice as
much.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import ray
from ray.exceptions import RayError

from actors.ray_tools.calls import get_or_raise
from actors.ray_tools.connect import join
from actors.ray_tools.placement import NAMESPACE
from actors.rollouts.service import FLEET
from actors.serving.replicas import policy_servers, resize
from environments.command_name import command_parser, explained
from environments.errors import ConfigError


def fleets() -> dict[str, ray.actor.ActorHandle]:
    """The fleets of the cluster that this process is connected to, by name."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    return {name: ray.get_actor(name, NAMESPACE) for name in sorted(names) if name.startswith(FLEET)}


def chosen(option: str, present: Sequence[str], name: str | None) -> str:
    """The fleet or server that ``option`` means. Raises ``ConfigError`` if that is not clear."""
    if name is None and len(present) == 1:
        return present[0]
    if name is not None and name in present:
        return name
    if not present:
        raise ConfigError("No run is going on in this cluster, so there is nothing to change the size of.")
    raise ConfigError(f"{option} {name or ''}: choose one of those that are there ({', '.join(present)}).")


@explained(RayError)
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 done, 2 not done, for a reason that was printed."""
    parser = command_parser("scale", __doc__)
    parser.add_argument("--actors", type=int, metavar="N", help="rollout actors from now on")
    parser.add_argument("--fleet", help="its name, where there are several")
    parser.add_argument("--replicas", type=int, metavar="N", help="replicas of the policy from now on")
    parser.add_argument("--server", help="name of their policy server, where there are several")
    parser.add_argument("--address", help="HOST:PORT of the cluster, if this machine has none or several")
    options = parser.parse_args(arguments)
    for number, whole, name in (("actors", "fleet", options.fleet), ("replicas", "server", options.server)):
        wanted = vars(options)[number]
        if wanted is not None and wanted < 1:
            parser.error(f"--{number} {wanted}: a {whole} needs at least one")
        if name is not None and wanted is None:
            parser.error(f"--{whole} needs --{number}, the number that it is to have")
    try:
        join(options.address)
        present = fleets()
        if options.actors is not None:
            fleet = present[chosen("--fleet", list(present), options.fleet)]
            get_or_raise([fleet.resize.remote(options.actors)], "The fleet")
        if options.replicas is not None:
            resize(chosen("--server", list(policy_servers()), options.server), options.replicas)
        for name, fleet in present.items():
            (status,) = get_or_raise([fleet.status.remote()], "The fleet")
            sys.stdout.write(
                f"{name}: {status.num_actors} actors, {status.num_ready} of them up, {status.num_running} "
                f"playing; {status.num_waiting} requests wait\n"
            )
        servers = policy_servers()
        for name, states in servers.items():
            replicas = ", ".join(f"{number} {state.lower()}" for state, number in states.items())
            sys.stdout.write(f"{name}: replicas {replicas}\n")
        if not present and not servers:
            sys.stdout.write("No run is going on in this cluster.\n")
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
