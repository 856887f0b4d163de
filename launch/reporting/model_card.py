"""The model card of a run's policy: how it was made, what was measured of it, and what was not."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from environments.bounds import leaves
from environments.errors import ConfigError
from launch.reporting.tracker import SETTINGS, read_metrics, read_settings
from launch.run_folder.checkpoint import CheckpointFolder
from launch.run_folder.jsonl_log import read_records
from launch.settings.compose import as_train_config
from launch.settings.tree import TrainConfig, algorithm_of

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SHOWN = (
    *("seed", "stages", "workload", "run.num_steps", "warm_start", "preferences", "expert_iteration"),
    *("algorithm", "rollout", "selection", "learner", "evaluation"),
)
"""Settings of the card: those of machines, addresses and folders are nobody's business."""
STAGE_FILES = ("warm_start.jsonl", "preferences.jsonl")
"""Files of a run with the losses of its stages without rollouts."""
Z = 1.96
"""Quantile of the normal distribution for an interval of 95 %."""


def model_card(run: Path, checkpoint: Path, name: str) -> str:
    """The card, in Markdown, of the policy in ``checkpoint``.

    Args:
        run: the folder of its run.
        name: ``OWNER/NAME`` of the model on the hub.

    Raises:
        ConfigError: the run's settings cannot be read.
    """
    _, settings = read_settings(run)
    try:
        config = as_train_config(settings)
    except ConfigError as error:
        raise ConfigError(f"{run / SETTINGS}: {error}") from error
    if config.workload is not None:  # behind openenv: is an address or a command, which may hold a key
        config = replace(config, workload=config.workload.partition(":")[0])
    progress = CheckpointFolder.progress(checkpoint)
    base = config.model.path
    places = (Path(), *run.resolve().parents)  # the run began in one of them, this command maybe in another
    is_public = base and HUB_NAME.fullmatch(base) and not any((each / base).exists() for each in places)
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags: [troupe]"]
    head += [f"base_model: {base}", "---"] if is_public else ["---"]
    if base is None:
        origin = "a tiny model with random weights, built for its workload"
    else:
        origin = base if is_public else f"the local model `{Path(base).name}`"
    stages = ", ".join(f"{stage} ({steps} steps)" for stage, steps in progress.stage_steps.items())
    algorithm = algorithm_of(config).name if progress.step else "none (nothing was learned from rollouts)"
    evaluations = [each for each in read_metrics(run) if "eval/reward_mean" in each]
    shown = [each for each in evaluations if each["step"] in (0, progress.step)]
    return "\n".join(
        [
            *head,
            f"# {name.partition('/')[2]}",
            "",
            f"- Base model: {origin}",
            f"- Training: {stages or 'none'}; {progress.step} policy updates from rollouts",
            f"- Algorithm: {algorithm}",
            *_data(config),
            f"- Made with Troupe {version('troupe')}; the checkpoint is `{checkpoint.name}`",
            "",
            "## Evaluation",
            "",
            *_evaluation_lines(shown),
            *_losses(run, progress.stage_steps),
            "",
            "## What was not measured",
            "",
            *_unmeasured(shown, progress.step),
            "",
            "## Settings that differ from the defaults",
            "",
            *_changed(config),
            "",
            "## Serve it",
            "",
            "```sh",
            f"python -m launch.serve model.path={name} server.http_port=8000",
            f"vllm serve {name}",
            "```",
            "",
        ]
    )


def _data(config: TrainConfig) -> Iterator[str]:
    """The names of files of tasks and conversations, without their folders."""
    for setting, path in (("dataset", config.dataset), ("demonstrations", config.demonstrations)):
        if path is not None:
            yield f"- Data ({setting}): `{Path(path).name}`"


def _evaluation_lines(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not records:
        yield "There was no evaluation on held-out tasks of this checkpoint."
        return
    yield "| after update | tasks | mean reward | lowest to highest | success, with its 95 % interval |"
    yield "|---|---|---|---|---|"
    for each in records:
        for prefix in ("eval/", *_sets(each)):
            label = prefix.removeprefix("eval/").rstrip("/")
            number = int(each[f"{prefix}num_tasks"])
            low, high = wilson_interval(each[f"{prefix}pass_at_1"], number)
            yield (
                f"| {each['step']}{f', {label}' if label else ''} | {number} | "
                f"{each[f'{prefix}reward_mean']:.3f} | {each[f'{prefix}reward_min']:.3f} to "
                f"{each[f'{prefix}reward_max']:.3f} | {each[f'{prefix}pass_at_1']:.3f} "
                f"({low:.3f} to {high:.3f}) |"
            )


def _sets(record: Mapping[str, Any]) -> list[str]:
    """The beginnings of the metrics of held-out tasks that have a name."""
    return [
        name.removesuffix("reward_mean") for name in record if re.fullmatch(r"eval/[^/]+/reward_mean", name)
    ]


def wilson_interval(share: float, number: int) -> tuple[float, float]:
    """The interval of 95 % of a share that was measured ``number`` times (Wilson 1927)."""
    if not number:
        return 0.0, 1.0
    middle = share + Z * Z / (2 * number)
    half = Z * math.sqrt(share * (1 - share) / number + Z * Z / (4 * number * number))
    return (middle - half) / (1 + Z * Z / number), (middle + half) / (1 + Z * Z / number)


def _losses(run: Path, stage_steps: Mapping[str, int]) -> Iterator[str]:
    """The losses of the stages up to the steps that the checkpoint has: the run may have gone on."""
    for file in STAGE_FILES:
        last_step = stage_steps.get(file.removesuffix(".jsonl"), 0)
        records = [each for each in read_records(run / file) if each["step"] <= last_step]
        held_out = [each for each in records if "held_out_loss" in each]
        if held_out:
            first, last = held_out[0], held_out[-1]
            yield ""
            yield (
                f"Loss on held-out data in {file.removesuffix('.jsonl')}, in nats per token: "
                f"{first['held_out_loss']:.3f} after step {first['step']}, {last['held_out_loss']:.3f} after "
                f"step {last['step']}."
            )


def _unmeasured(records: Sequence[Mapping[str, Any]], step: int) -> Iterator[str]:
    if not any(each["step"] == step for each in records):
        yield f"- Success on held-out tasks after the {step} updates of this checkpoint."
    else:
        yield "- The spread between seeds: this is one training, with one rollout of each held-out task."
    yield "- Tasks of any other kind than those of its training, and what the model has lost there."
    yield "- Safety, bias and factual accuracy."


def _changed(config: TrainConfig) -> Iterator[str]:
    usual = {leaf.name: leaf.value for leaf in leaves(as_train_config(None))}
    found = [
        f"- `{leaf.name}={json.dumps(leaf.value, default=str)}`"
        for leaf in leaves(config)
        if leaf.value != usual.get(leaf.name)
        and leaf.name != "learner.nodes"
        and any(f"{leaf.name}.".startswith(f"{each}.") for each in SHOWN)
    ]
    yield from found or ["None."]
