"""``python -m launch.train recipe=calculator``: train an agent."""

from __future__ import annotations

import sys

from launch.command import run_command
from launch.config import TrainConfig


def train(config: TrainConfig) -> None:
    """Train the agent of the workload that ``config`` names."""
    from launch.trainer import run_training
    from launch.workload import load_workload

    run_training(config, load_workload(config.workload, config.seed))


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    return run_command("launch.train", __doc__, arguments, train)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
