"""``python -m launch.train recipe=calculator``: train an agent."""

from __future__ import annotations

import sys
from dataclasses import fields

from launch.settings.command import Command
from launch.settings.tree import TrainConfig


def train(config: TrainConfig) -> None:
    """Train the agent of the workload that ``config`` names."""
    from launch.recipes.task_file import workload_of
    from launch.training.trainer import run_training

    run_training(config, workload_of(config))


COMMAND = Command(
    name="train",
    summary=__doc__,
    work=train,
    settings=("recipe", *(section.name for section in fields(TrainConfig))),
    left_out={
        "server.versions": "launch.serve serves older versions.",
        "server.adapters": "launch.serve serves adapters; a run with adapters is trained on by model.path.",
        "server.agents": "launch.serve serves agents; clients of a training ask its policy.",
        "evaluation.rollouts_per_task": "launch.evaluate repeats tasks; a training plays each of them once.",
    },
)


main = COMMAND.run
"""Function that runs the command with its arguments, and returns its exit status."""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
