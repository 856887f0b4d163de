"""``python -m launch.verify runs/a``: check by a run's folder that the run has kept its promises.

    python -m launch.verify runs/a              a run that goes on, or has ended
    python -m launch.verify runs/a --ended      one that has ended by itself: all of its updates were made
    python -m launch.verify runs/a --score 0.8  the newest evaluation has at least this held-out reward

No rollout was used twice and none is missing, no token was older than rollout.max_staleness allows, versions
ascend in an episode, and the learner has found the log-probabilities of the engine again. Each check is a
line that begins with "sound" or "BROKEN". Nothing is written, and neither Ray nor a model is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from environments.command_name import command_parser, explained
from launch.reporting.audit import audit, read_run


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 sound, 1 broken, 2 not checked, for a printed reason."""
    parser = command_parser("verify", __doc__)
    parser.add_argument("run", type=Path, help="folder of a run, its run.directory")
    parser.add_argument("--ended", action="store_true", help="check too that all updates were made")
    parser.add_argument("--score", type=float, help="least held-out reward of the newest evaluation")
    options = parser.parse_args(arguments)
    findings = audit(read_run(options.run), options.ended, options.score)
    sys.stdout.writelines(f"{finding}\n" for finding in findings)
    return 0 if all(finding.is_sound for finding in findings) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
