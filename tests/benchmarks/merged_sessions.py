"""Tokens and updates to train on 64 sessions: their calls merged into sequences, against one sample a call.

    python tests/benchmarks/merged_sessions.py [--frameworks] [--seconds 2]

Sessions of OpenAI's client over the gateway, as rollout actors play them, with a scripted policy behind the
chat template of Qwen3, which leaves thoughts out once a user has spoken again: tool loops, several questions
with thoughts that are dropped, a history that is compacted in the middle, and sub-agents with a system prompt
of their own. ``--frameworks`` plays a part of them by the Agents SDK, LangGraph, pydantic-ai and litellm,
unchanged, from an environment that pip makes. `a call each` are the tokens of all prompts and answers, `flat`
those of the merged sequences, and `trees` what the learner computes of these, in rows of 16,384 tokens. The
last table has the seconds of one update on a part of the sessions, with the tiny model, in turns.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import models
import repository
import torch.distributed as dist
from learner_speed import PlainLoop, Samples
from report import Report
from token_trees import MODELS, Learner, seconds

sys.path.insert(0, str(repository.ROOT / "tests"))  # for outside_packages

from actors.gateway.client import PolicyClient
from actors.gateway.function import pair_of
from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments.types import Completion, Message, Trajectory
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.rows import num_tokens, plan_rows
from policies.learning.samples import training_samples
from policies.learning.verl.token_trees import PAIRS_PER_WIDTH
from policies.sampler import SampleRequest

NUM_SESSIONS, NUM_CALLS = 64, 12
FRAMEWORK_CALLS = 9
"""Fewer than the most that the Agents SDK allows by default."""
MINI_BATCH, MICRO_BATCH_TOKENS = 64, 16384
WIDTH = 576
"""Width of SmolLM2-135M, by which the learner decides what rows share."""
WORDS = str(__doc__).split()
CALCULATOR = {"name": "calculator", "parameters": {"properties": {"expression": {"type": "string"}}}}
TOOLS: list[Any] = [{"type": "function", "function": CALCULATOR}]


def words(draw: random.Random, count: int) -> str:
    return " ".join(draw.choices(WORDS, k=count))


# -- programs ------------------------------------------------------------------------------------------


class Chat:
    """A conversation of a program with the policy, by OpenAI's client."""

    def __init__(self, client: PolicyClient, draw: random.Random) -> None:
        self._client, self._draw = client, draw
        self.messages: list[Any] = [{"role": "system", "content": words(draw, 150)}]

    def ask(self, num_calls: int) -> None:
        """Ask a question, and run tools for the policy until it has been called so often."""
        self.messages.append({"role": "user", "content": words(self._draw, 60)})
        for _ in range(num_calls):
            create = self._client.openai.chat.completions.create
            choices = create(model="m", messages=self.messages, tools=TOOLS).choices
            self.messages.append(choices[0].message)
            for call in choices[0].message.tool_calls or ():
                content = words(self._draw, 60)
                self.messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def tool_loop(client: PolicyClient, draw: random.Random) -> None:
    Chat(client, draw).ask(NUM_CALLS)


def dropped_thoughts(client: PolicyClient, draw: random.Random) -> None:
    chat = Chat(client, draw)
    for _ in range(4):
        chat.ask(NUM_CALLS // 4)


def compaction(client: PolicyClient, draw: random.Random) -> None:
    chat = Chat(client, draw)
    chat.ask(NUM_CALLS // 2)
    chat.messages[1:] = [{"role": "user", "content": words(draw, 100)}]
    chat.ask(NUM_CALLS // 2)


def sub_agents(client: PolicyClient, draw: random.Random) -> None:
    chat = Chat(client, draw)
    for _ in range(2):
        chat.ask(NUM_CALLS // 4)
        Chat(client, draw).ask(NUM_CALLS // 4)


PROGRAMS: dict[str, Callable[[PolicyClient, random.Random], None]] = {
    "tool loop": tool_loop,
    "dropped thoughts": dropped_thoughts,
    "compaction": compaction,
    "sub-agents": sub_agents,
}
FRAMEWORKS = ("agents", "agents_handoff", "langgraph", "pydantic_ai", "litellm_messages")


def framework(name: str, python: Path, client: PolicyClient, draw: random.Random) -> None:
    command = [str(python / "python"), str(repository.ROOT / "tests" / "outside_programs.py"), name]
    result = client.run(command, files={"task.txt": words(draw, 60)})
    assert result.exit_code == 0, result.output


# -- policy --------------------------------------------------------------------------------------------


class Policy:
    """A scripted model: it thinks and calls a tool, and answers a framework at last."""

    def __init__(self, folder: Path, draw: random.Random) -> None:
        tokenizer = load_tokenizer(models.tiny(folder))
        tokenizer.chat_template = (repository.ROOT / "tests" / "templates" / "qwen3.jinja").read_text()
        self._renderer, self._draw = ChatRenderer(tokenizer), draw

    def sample(self, request: SampleRequest) -> Completion:
        prompt_ids = self._renderer.request_ids(request)
        text = (
            f"<think>\n{words(self._draw, 60)}\n</think>\n\n{self._answer(request.messages, request.tools)}"
        )
        ids = (*self._renderer.encode(text), self._renderer.eos_token_id)
        return Completion(
            prompt_ids=prompt_ids,
            completion_ids=ids,
            logprobs=(-1.0,) * len(ids),
            text=self._renderer.completion_text(prompt_ids, ids),
            finish_reason="stop",
        )

    def _answer(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> str:
        num_answers = sum(message["role"] == "assistant" for message in messages)
        if not tools or (tools != TOOLS and num_answers == FRAMEWORK_CALLS - 1):
            return words(self._draw, 40)
        name = tools[0]["function"]["name"]
        arguments = {} if name.startswith("transfer") else {"expression": "12+34"}
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played(name: str, program: Callable[..., None], policy: Policy, number: int) -> Trajectory:
    """The trajectory of a session."""

    def solve(task: dict[str, Any], client: PolicyClient) -> float:
        program(client, random.Random(number))
        return 1.0

    pair = pair_of(None, None, solve, {}, {})
    request = RolloutRequest(rollout_id=f"{number:08d}/0000", group_id=f"{number:08d}", task={"kind": name})
    env = pair.make_env(request)
    limits = RolloutLimits(max_steps=2 * NUM_CALLS, max_response_tokens=10**6)
    try:
        trajectory = run_rollout(pair.make_agent(), env, policy.sample, request, limits, Journal())
    finally:
        env.close()
    assert trajectory.reward == 1.0, trajectory
    return trajectory


# -- what is counted -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Tokens and samples of sessions.

    Attributes:
        calls, sequences: samples with one a call, and where calls are merged.
        alone, flat, trees: tokens of the former, of the latter, and of these as the learner lays them out.
        sampled: tokens that are trained; the same in all.
    """

    sessions: int
    calls: int
    sequences: int
    alone: int
    flat: int
    trees: int
    sampled: int

    @classmethod
    def of(cls, sessions: Sequence[Trajectory]) -> Sizes:
        merged, alone = merged_samples(sessions), single_calls(sessions)
        sampled = [sum(sample.num_sampled_tokens for sample in each) for each in (merged, alone)]
        assert sampled[0] == sampled[1] == sum(each.num_sampled_tokens for each in sessions)
        ids = [sample.prompt_ids + sample.response_ids for sample in merged]
        rows = plan_rows(ids, MICRO_BATCH_TOKENS, PAIRS_PER_WIDTH * WIDTH)
        return cls(
            sessions=len(sessions),
            calls=len(alone),
            sequences=len(merged),
            alone=sum(map(len, alone)),
            flat=sum(map(len, merged)),
            trees=sum(map(num_tokens, rows)),
            sampled=sampled[0],
        )

    def cells(self) -> Iterator[str]:
        for count in (self.sessions, self.calls, self.sequences, self.sampled):
            yield str(count)
        yield from map(str, (self.alone, self.flat, self.trees))
        yield f"{self.alone / self.flat:.1f}"
        yield f"{self.alone / self.trees:.1f}"


def merged_samples(sessions: Sequence[Trajectory]) -> Samples:
    return tuple(sample for each in sessions for sample in training_samples(each))


def single_calls(sessions: Sequence[Trajectory]) -> Samples:
    """A sample for each call: its prompt and its answer."""
    return tuple(
        sample
        for each in sessions
        for number, step in enumerate(each.steps)
        for sample in training_samples(replace(each, rollout_id=f"{each.rollout_id}-{number}", steps=[step]))
    )


def credited(samples: Samples) -> Samples:
    """With the columns that an update needs."""
    return tuple(
        sample.replaced(advantages=sample.on_sampled_tokens([1.0] * sample.num_sampled_tokens))
        for sample in samples
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--frameworks", action="store_true", help="play 10 of the sessions by frameworks")
    parser.add_argument(
        "--seconds", type=int, default=2, help="sessions of the update that is measured; or 0"
    )
    arguments = parser.parse_args()
    programs, names = dict(PROGRAMS), list[str]()
    if arguments.frameworks:
        from outside_packages import environment_with

        python = environment_with(repository.ROOT / "tests" / "outside_programs.txt")
        programs |= {name: partial(framework, name, python) for name in FRAMEWORKS}
        names = [*FRAMEWORKS] * 2
    names += [*PROGRAMS] * (NUM_SESSIONS // len(PROGRAMS))
    sessions: defaultdict[str, list[Trajectory]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(Path(folder), random.Random(0))
        for number, name in enumerate(names[:NUM_SESSIONS]):
            sessions[name].append(played(name, programs[name], policy, number))
            print(".", end="", flush=True)
    every = [each for played in sessions.values() for each in played]
    print()
    columns = (
        "sessions",
        "calls",
        "sequences",
        "trained",
        "a call each",
        "flat",
        "trees",
        "/ flat",
        "/ trees",
    )
    report = Report(f"{NUM_SESSIONS} sessions: samples, and tokens to compute", ("", *columns))
    for name, each in {**sessions, "all": every}.items():
        report.add(name, *Sizes.of(each).cells())
    report.print()
    sizes = Sizes.of(every)
    updates = [math.ceil(count / MINI_BATCH) for count in (sizes.calls, sizes.sequences, sizes.sessions)]
    print(
        f"updates of {MINI_BATCH}: {updates[0]} where a call is a sample, {updates[1]} where a sequence is, "
        f"{updates[2]} where a session is, as the learner counts"
    )
    if arguments.seconds:
        compare_seconds(every[:: NUM_SESSIONS // arguments.seconds])


def compare_seconds(sessions: Sequence[Trajectory]) -> None:
    """Print the seconds of an update on ``sessions``: of the learner and of plain rows, merged and not."""
    model = MODELS["tiny"]
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        path = model.make(Path(folder))
        learner, plain = Learner(path, model), PlainLoop(path, model)
    merged, alone = credited(merged_samples(sessions)), credited(single_calls(sessions))
    for arm in (learner, plain):
        arm(merged[:1])  # the first update is slower
    took = seconds(
        {
            "trees": partial(learner, merged),
            "flat": partial(plain, merged),
            "a call each, trees": partial(learner, alone),
            "a call each": partial(plain, alone),
        },
        num_rounds=3,
    )
    dist.destroy_process_group()
    report = Report(
        f"seconds of an update, {len(sessions)} sessions, tiny model", ("", "seconds", "of trees")
    )
    for name, each in took.items():
        report.add(name, f"{each:.2f}", f"{each / took['trees']:.1f}")
    report.print()


if __name__ == "__main__":
    main()
