"""``python -m launch.status``: what the parts of a run wait for, and which one holds up the others.

    python -m launch.status                            the trainings of this machine's cluster
    python -m launch.status --address 10.0.0.1:6379    those of another one
    ray job submit -- python -m launch.status          the same from outside of a cluster

A part that does not answer within two seconds is named. The last line of each run is the verdict.
"""

from __future__ import annotations

import argparse
import sys

import ray
from ray.exceptions import RayError

from actors.ray_tools.connect import join
from environments.errors import TroupeError
from launch.health.heartbeat import pulses
from launch.health.inspection import inspect
from launch.health.run_state import described


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 done, 2 not done, for a reason that was printed."""
    parser = argparse.ArgumentParser(
        prog="python -m launch.status", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--address", help="HOST:PORT of the cluster, if this machine has none or several")
    options = parser.parse_args(arguments)
    try:
        join(options.address)
        runs = pulses()
        for pulse in runs:
            sys.stdout.write(f"{described(inspect(pulse))}\n")
        if not runs:
            sys.stdout.write("No training is going on in this cluster.\n")
    except (TroupeError, RayError) as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 2
    finally:
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
