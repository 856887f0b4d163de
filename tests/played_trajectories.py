"""Trajectories with made-up tokens, and the bytes that each token takes: for tests and benchmarks."""

from __future__ import annotations

import json
import pickle
import random
import tracemalloc
from array import array
from dataclasses import dataclass, replace

from environments.columns import stored
from environments.data.trajectory_json import Json, trajectory_line
from environments.types import Completion, Step, TerminationReason, Trajectory
from policies.learning.division import OLD_LOGPROBS, POLICY_COLUMNS, Division
from policies.learning.samples import TrainBatch, training_samples

KINDS = ("append-only", "stripped thoughts")
VOCABULARY = 50_000
TASK_TOKENS = 100


@dataclass(frozen=True)
class Bytes:
    """Bytes for each token that differs."""

    in_memory: float
    """After a pickle."""
    pickled: float
    on_disk: float
    """In ``trajectories/``, and in ``ready.jsonl`` of a checkpoint."""
    to_ranks: float
    """To a rank, to score it and to learn from it."""


def play(kind: str, num_turns: int, answer_size: int = 100, observation_size: int = 100) -> Trajectory:
    """Make a trajectory whose texts have four characters a token."""
    draw = random.Random(f"{kind} {num_turns}")

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(VOCABULARY) for _ in range(count))

    def text(of: tuple[int, ...]) -> str:
        return "".join(f"{each % 1000:03d} " for each in of)

    thought_size = answer_size // 2 if kind == KINDS[1] else 0
    prompt = ids(TASK_TOKENS)
    messages = [{"role": "user", "content": text(prompt)}]
    steps = []
    for turn in range(num_turns):
        answer = ids(answer_size)
        completion = Completion(
            prompt_ids=prompt,
            completion_ids=answer,
            logprobs=tuple(array("f", (-draw.random() for _ in answer))),  # a model's are in float32
            text=text(answer),
            finish_reason="stop",
            policy_version=turn // 10,
            token_versions=(turn // 10,) * answer_size,
        )
        said = {"role": "assistant", "content": completion.text}
        observation = ids(observation_size)
        steps.append(
            Step(
                chat_completions=[*map(dict, messages), said],
                model_response=completion.text,
                action=completion.text,
                observation=messages[-1]["content"],
                completion=completion,
            )
        )
        shown = answer[thought_size:]
        messages += [
            {"role": "assistant", "content": text(shown)},
            {"role": "user", "content": text(observation)},
        ]
        prompt = (*prompt, *shown, *observation)
    return Trajectory(
        task={"question": messages[0]["content"]},
        steps=steps,
        rollout_id="00000000/0000",
        termination_reason=TerminationReason.ENV_DONE,
    )


def num_unique_tokens(trajectory: Trajectory) -> int:
    """Count the beginnings of all turns that differ."""
    count, before = 0, ()
    for each in trajectory.completions:
        whole = each.prompt_ids + each.completion_ids
        shared = next(
            (i for i, pair in enumerate(zip(before, whole, strict=False)) if pair[0] != pair[1]), None
        )
        count += len(whole) - (min(len(before), len(whole)) if shared is None else shared)
        before = whole
    return count


def _num_bytes_to_ranks(batch: TrainBatch) -> int:
    division = Division([batch], 1, 1 << 30, 1 << 30)
    credited = tuple(
        each.replaced(
            **{name: stored(each, "rollout_logprobs")[:] for name in ("old_logprobs", "advantages")}
        )
        for each in batch.samples
    )
    learned = division.shards([replace(batch, samples=credited)], [*POLICY_COLUMNS, *OLD_LOGPROBS])
    return sum(len(pickle.dumps(each)) for each in (division.ids(0), division.shards([batch], ()), learned))


def written(trajectory: Trajectory) -> Json:
    """The line of a trajectory, as it is read."""
    line: Json = json.loads(trajectory_line(trajectory, {}))
    return line


def measure(trajectory: Trajectory) -> Bytes:
    """Measure one trajectory as it reaches the driver: after a pickle."""
    num_tokens = num_unique_tokens(trajectory)
    pickled = pickle.dumps(trajectory)
    pickle.loads(pickled)  # what is only made once is not the trajectory's
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    arrived: Trajectory = pickle.loads(pickled)
    in_memory = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    batch = TrainBatch(samples=tuple(training_samples(arrived)))
    return Bytes(
        in_memory=in_memory / num_tokens,
        pickled=len(pickled) / num_tokens,
        on_disk=len(trajectory_line(arrived, {})) / num_tokens,
        to_ranks=_num_bytes_to_ranks(batch) / num_tokens,
    )
