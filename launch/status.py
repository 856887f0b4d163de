"""``python -m launch.status``: what the parts of a run wait for, and which one holds up the others.

    python -m launch.status                            the trainings of this machine's cluster
    python -m launch.status --address 10.0.0.1:6379    those of another one
    python -m launch.status --every 5                  again every five seconds, until Ctrl-C
    python -m launch.status --json                     as data: a line for each look
    ray job submit -- python -m launch.status          the same from outside of a cluster

A part that does not answer within two seconds is named. The last line of each run is the verdict.
"""

from __future__ import annotations

import json
import sys
import time

import ray
from ray.exceptions import RayError

from actors.ray_tools.connect import join
from environments.command_name import command_parser, explained, positive
from launch.health.heartbeat import run_heartbeats
from launch.health.inspection import inspect
from launch.health.run_report import RunReport, as_data, report_text

NOTHING = "No training is going on in this cluster.\n"


def render(states: list[RunReport], is_json: bool) -> str:
    """Text or data of one reading, to print."""
    if is_json:
        return json.dumps({"runs": [as_data(state) for state in states]}) + "\n"
    return "".join(f"{report_text(state)}\n" for state in states) or NOTHING


@explained(RayError)
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 done, 2 not done, for a reason that was printed."""
    parser = command_parser("status", __doc__)
    parser.add_argument("--address", help="HOST:PORT of the cluster, if this machine has none or several")
    parser.add_argument("--every", type=positive, metavar="SECONDS", help="look again, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print data instead of text")
    options = parser.parse_args(arguments)
    try:
        join(options.address)
        while True:
            sys.stdout.write(render([inspect(heartbeat) for heartbeat in run_heartbeats()], options.json))
            sys.stdout.flush()
            if options.every is None:
                return 0
            time.sleep(options.every)
    except KeyboardInterrupt:
        return 0
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
