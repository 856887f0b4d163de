"""``python -m launch.play recipe=guess``: one episode in the terminal, with you as the model.

    python -m launch.play recipe=guess                                     you answer
    python -m launch.play workload=my_workload --task 3                    another task of the training set
    python -m launch.play recipe=guess --base-url http://localhost:8000/v1   a served model answers

Shows the messages that the model would get, and the reward of every turn: agent and environment are those of
training, in this process. An answer ends with an empty line.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from itertools import takewhile

from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments.bounds import check_bounds
from environments.command_name import command_parser
from environments.errors import ConfigError, SamplerError
from environments.types import Completion, Message, Trajectory
from launch.recipes.task_file import workload_of
from launch.reporting.conversation import conversation
from launch.settings.command import Command
from launch.settings.tree import TrainConfig
from launch.workload import Workload
from policies.openai_sampler import OpenAISampler
from policies.sampler import Sampler, SampleRequest, SamplingParams, ScriptedSampler

PLAY_SETTINGS = ("recipe", "workload", "dataset", "held_out", "agent", "reward", "seed", "rollout.max_steps")
NEEDS_A_MODEL = "A served model has it: add --base-url."
MODEL_SETTINGS = ("rollout.temperature", "model.chat_template_kwargs")


class Person:
    """The person at the keyboard, to whom each message is shown once."""

    def __init__(self) -> None:
        self._num_shown = 0

    def answer(self, messages: list[Message]) -> str:
        """The answer to ``messages``. Raises ``SamplerError`` when there is none left."""
        for message in messages[self._num_shown :]:
            sys.stdout.write(f"--- {message['role']}\n{message['content']}\n")
        self._num_shown = len(messages)
        sys.stdout.write("--- you, ended by an empty line\n")
        sys.stdout.flush()
        if lines := list(takewhile(str.strip, sys.stdin)):
            return "".join(lines).rstrip("\n")
        raise SamplerError("No answer was typed: the episode ends here.")


def play(workload: Workload, config: TrainConfig, number: int, sampler: Sampler) -> Trajectory:
    """Play one task of the training set to its end, or for ``rollout.max_steps``; tokens are not limited.

    Raises:
        ConfigError: there is no such task.
        TroupeError: agent, environment or sampler have failed.
    """
    tasks = workload.train_dataset
    if not 0 <= number < len(tasks):
        raise ConfigError(f"--task {number}: the training set has the tasks 0 to {len(tasks) - 1}.")
    params = SamplingParams(temperature=config.rollout.temperature)
    request = RolloutRequest(rollout_id="play/0", group_id="play", task=tasks[number], params=params)
    agent, env = workload.pair.make_agent(), workload.pair.make_env(request)
    limits = RolloutLimits(max_steps=config.rollout.max_steps)
    loop = asyncio.new_event_loop()

    def sample(turn: SampleRequest) -> Completion:
        return loop.run_until_complete(sampler.sample(turn))

    try:
        loop.run_until_complete(sampler.open())
        return run_rollout(agent, env, sample, request, limits, Journal())
    finally:
        loop.close()
        env.close()


def play_and_show(config: TrainConfig, task: int, base_url: str | None, model: str) -> None:
    """Play one task, by the person at the keyboard or by ``model`` at ``base_url``, and show the episode.

    Raises:
        TroupeError: as ``play``, or a setting is out of its bounds.
    """
    check_bounds(config)
    workload = workload_of(config)
    sampler: Sampler = (
        ScriptedSampler(Person().answer)
        if base_url is None
        else OpenAISampler(base_url, model, chat_template_kwargs=config.model.chat_template_kwargs)
    )
    trajectory = play(workload, config, task, sampler)
    sys.stdout.write(f"{conversation(trajectory)}\n")
    for turn, step in enumerate(trajectory.steps):
        sys.stdout.write(f"  turn {turn}: reward {step.reward:g}, info {step.info}\n")


def main(arguments: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = command_parser("play", __doc__)
    parser.add_argument(
        "overrides",
        nargs="*",
        help=f"settings: {', '.join(PLAY_SETTINGS)}; with --base-url {' and '.join(MODEL_SETTINGS)} too",
    )
    parser.add_argument("--task", type=int, default=0, metavar="N", help="the number of the task")
    parser.add_argument("--base-url", help="of an OpenAI server whose model answers")
    parser.add_argument("--model", default="policy", help="its name there")
    options = parser.parse_args(arguments)
    is_served = options.base_url is not None
    command = Command(
        name="play",
        summary=__doc__,
        work=partial(play_and_show, task=options.task, base_url=options.base_url, model=options.model),
        settings=PLAY_SETTINGS + MODEL_SETTINGS if is_served else PLAY_SETTINGS,
        left_out={} if is_served else dict.fromkeys(MODEL_SETTINGS, NEEDS_A_MODEL),
    )
    return command.run(options.overrides)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
