"""``python -m launch.train recipe=calculator``: train an agent. With ``--plan`` it starts nothing, and prints
the memory that each process will need, what fits into this machine, or into other devices (``--plan 8x80``: 8
GPUs of 80 GB; ``--plan 4x8x80``: 4 nodes with as many), and the settings to change.
"""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from functools import partial

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


PLAN = "--plan"


def main(arguments: list[str]) -> int:
    """Run the command with its arguments, and return its exit status."""
    arguments = [part for each in arguments for part in _divided(each)]
    if PLAN not in arguments:
        return COMMAND.run(arguments)
    place = arguments.index(PLAN)
    devices = [each for each in arguments[place + 1 : place + 2] if "=" not in each and each[:1] != "-"]
    rest = arguments[:place] + arguments[place + 1 + len(devices) :]
    return replace(COMMAND, work=partial(plan, "".join(devices))).run(rest)


def _divided(argument: str) -> list[str]:
    """``--plan=8x80`` as two arguments; another one as it is."""
    return argument.split("=", 1) if argument.startswith(f"{PLAN}=") else [argument]


def plan(devices: str, config: TrainConfig) -> None:
    """Print the memory that a run will need. ``devices`` are GPUs such as "8x80"; "" are those here."""
    from launch.recipes.task_file import workload_of
    from launch.training.stages.base import parts_needed
    from launch.training.stages.chosen import chosen_stages
    from launch.training.stages.warm_start import with_epochs
    from launch.validation.memory_plan import Devices, plan_text, shape_of
    from launch.validation.serving import check_colocation
    from launch.validation.settings import check_training_settings
    from launch.validation.workload import check_model_is_named

    check_training_settings(config)
    check_colocation(config)
    workload = workload_of(config)
    check_model_is_named(config, workload)
    config = with_epochs(config, workload)
    config = parts_needed(config, chosen_stages(config), workload)
    sys.stdout.write(plan_text(config, shape_of(config), Devices.of(devices) if devices else None) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
