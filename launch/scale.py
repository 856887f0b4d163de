"""``python -m launch.scale --actors 64``: change the number of rollout actors while a run goes on.

    python -m launch.scale                  the fleets of this cluster, and what they are doing
    python -m launch.scale --actors 64      have 64 rollout actors in the only fleet
    python -m launch.scale --actors 64 --fleet fleet-1a2b3c4d --address 10.0.0.1:6379

No rollout is lost: an actor too many ends with the rollout that it is playing. A run whose fleet.min_actors
and fleet.max_actors differ goes on to choose by itself, from the new number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import ray
from ray.exceptions import RayError

from actors.ray_tools.connect import join
from actors.ray_tools.get_soon import answers
from actors.rollouts.fleet_report import FleetStatus
from actors.rollouts.service import FLEET, NAMESPACE
from environments.errors import ConfigError, TroupeError


def fleets() -> dict[str, ray.actor.ActorHandle]:
    """The fleets of the cluster that this process is connected to, by name."""
    named = ray.util.list_named_actors(all_namespaces=True)
    names = [each["name"] for each in named if each["namespace"] == NAMESPACE]
    return {name: ray.get_actor(name, NAMESPACE) for name in sorted(names) if name.startswith(FLEET)}


def chosen(present: Sequence[str], name: str | None) -> str:
    """The fleet that is meant. Raises ``ConfigError`` if that is not clear."""
    if name is None and len(present) == 1:
        return present[0]
    if name is not None and name in present:
        return name
    there = ", ".join(present) or "none: no run is going on in this cluster"
    raise ConfigError(f"--fleet {name or ''}: choose one of the fleets that are there ({there}).")


def described(status: FleetStatus) -> str:
    """A fleet in a line."""
    return (
        f"{status.num_actors} actors, {status.num_ready} of them up, {status.num_running} playing; "
        f"{status.num_waiting} requests wait"
    )


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 done, 2 not done, for a reason that was printed."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.scale", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--actors", type=int, metavar="N", help="rollout actors from now on")
    parser.add_argument("--fleet", help="its name, where there are several")
    parser.add_argument("--address", help="HOST:PORT of the cluster, if this machine has none or several")
    options = parser.parse_args(arguments)
    if options.actors is not None and options.actors < 1:
        parser.error(f"--actors {options.actors}: a fleet needs at least one")
    if options.fleet is not None and options.actors is None:
        parser.error("--fleet needs --actors, the number that it is to have")
    try:
        join(options.address)
        present = fleets()
        if options.actors is not None:
            fleet = present[chosen(list(present), options.fleet)]
            answers([fleet.resize.remote(options.actors)], "The fleet")
        for name, fleet in present.items():
            (status,) = answers([fleet.status.remote()], "The fleet")
            sys.stdout.write(f"{name}: {described(status)}\n")
        if not present:
            sys.stdout.write("No run is going on in this cluster.\n")
    except (TroupeError, RayError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
