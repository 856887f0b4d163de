"""``python -m launch.train recipe=calculator``: train an agent."""

from __future__ import annotations

import sys

from environments.errors import TroupeError
from launch.config import compose, help_text


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status (0 done, 2 refused, 130 interrupted)."""
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(help_text("launch.train", __doc__ or ""))
        return 0
    try:
        config = compose(arguments)
        from launch.trainer import run_training
        from launch.workload import load_workload

        run_training(config, load_workload(config.workload, config.seed))
    except TroupeError as error:
        sys.stderr.write(f"\n{type(error).__name__}: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
