"""Trajectories as logs of Inspect (inspect_ai): ``.eval`` files, which ``inspect view`` shows.

A log is a zip of JSON files: ``header.json``, ``summaries.json`` with a row for each sample, and a file for
each sample. They are written without inspect_ai, which cannot be installed beside our pins.

A group's task is a sample, and its members are the epochs of that sample. A turn is a "model" event with the
log-probabilities of its tokens, followed by a "score" event with its reward; what a tool answered is a "tool"
event. ``tests/unit/launch/test_inspect_log.py`` has inspect_ai read it all back.
"""

from __future__ import annotations

import json
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

from environments.data.trajectory_json import Json, plain_json
from environments.disk import replaced
from environments.types import Completion, Step, TerminationReason, Trajectory
from launch.reporting.inspect_messages import MessagePool, output_message
from launch.run_folder.lock import writing_to
from launch.run_folder.trajectory_log import BASELINE, KeptTrajectory, trajectory_path

FORMAT_VERSION = 2
"""``LOG_SCHEMA_VERSION`` of inspect_ai."""
AGENT = "agent"
"""Stands for the model in turns that the agent's own code decided."""
SHORT = 1000
"""Characters of a text in a summary, at most; inspect_ai shortens them so, too."""
SUMMARISED = ("id", "epoch", "target", "scores", "model_usage", "total_time", "turn_count")
"""Parts of a sample that its summary repeats."""
STOP_REASONS = {"stop": "stop", "length": "max_tokens", "tool_calls": "tool_calls"}


@dataclass(frozen=True, kw_only=True)
class InspectLog:
    """Log of one update or evaluation of a run.

    Args:
        run: the run's folder.
        kind: "step" for an update, "eval" for an evaluation.
        step: after how many updates.
        token_text: the text of a token by its id.
    """

    run: Path
    kind: str
    step: int
    token_text: Callable[[int], str]

    @property
    def name(self) -> str:
        return f"{self.kind}_{self.step:06d}"

    @cached_property
    def created(self) -> str:
        """Time at which the trajectories were written."""
        seconds = int(trajectory_path(self.run, self.kind, self.step).stat().st_mtime)
        return datetime.fromtimestamp(seconds, UTC).isoformat()

    def write(self, folder: Path, kept: Sequence[KeptTrajectory]) -> Path:
        """Write ``kept`` into ``folder``, as a file that appears when it is whole; return its path.

        Raises:
            ConfigError: it cannot be written.
        """
        target = folder / f"{self.name}.eval"
        summaries, epochs = [], Counter[str]()
        with (
            writing_to(folder),
            replaced(target) as unfinished,
            zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        ):
            for each in kept:
                epochs[_sample_id(each)] += 1
                sample = self._sample(each, epochs[_sample_id(each)])
                summaries.append(_summary(sample))
                archive.writestr(f"samples/{sample['id']}_epoch_{sample['epoch']}.json", json.dumps(sample))
            archive.writestr("summaries.json", json.dumps(summaries))
            archive.writestr("header.json", json.dumps(self._header(kept, epochs)))
        return target

    def _header(self, kept: Sequence[KeptTrajectory], epochs: Counter[str]) -> Json:
        created = self.created
        log_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{self.run.resolve()}/{self.name}/{created}").hex
        played = [each.trajectory for each in kept if each.outcome != BASELINE]
        usage = _usage([completion for each in kept for completion in each.trajectory.own_completions])
        return {
            "version": FORMAT_VERSION,
            "status": "success",
            "eval": {
                "eval_id": log_id,
                "run_id": uuid.uuid5(uuid.NAMESPACE_URL, str(self.run.resolve())).hex,
                "task_id": log_id,
                "created": created,
                "task": self.name,
                "dataset": {"name": self.run.name, "samples": len(epochs), "sample_ids": list(epochs)},
                "model": self.run.name,
                "config": {"epochs": max(epochs.values(), default=1)},
                "scorers": [{"name": "reward"}, {"name": "success"}],
                "metadata": {"run": str(self.run), "kind": self.kind, "update": self.step},
            },
            "results": {
                "total_samples": len(kept),
                "completed_samples": sum(not each.trajectory.failed for each in kept),
                "scores": [
                    _mean_score("reward", [each.reward for each in played]),
                    _mean_score("success", [float(each.succeeded) for each in played]),
                ],
            },
            "stats": {"started_at": created, "completed_at": created, "model_usage": {self.run.name: usage}},
        }

    def _sample(self, kept: KeptTrajectory, epoch: int) -> Json:
        trajectory = kept.trajectory
        pool = MessagePool()
        turns = [self._turn(pool, step, turn, kept) for turn, step in enumerate(trajectory.steps)]
        task = plain_json(trajectory.task)
        outputs = [event["output"] for events in turns for event in events if event["event"] == "model"]
        sample = {
            "id": _sample_id(kept),
            "epoch": epoch,
            "input": pool.first or json.dumps(task),
            "target": "",
            "messages": pool.now,
            "output": outputs[-1] if outputs else {"model": AGENT, "choices": []},
            "scores": {
                "reward": {"value": trajectory.reward, "explanation": str(trajectory.termination_reason)},
                "success": {
                    "value": trajectory.succeeded,
                    "explanation": f"judged by {trajectory.judged_by}",
                },
            },
            "metadata": _metadata(kept, task),
            "events": [event for events in turns for event in events],
            "events_data": {"messages": pool.messages, "calls": []},
            "model_usage": {self.run.name: _usage(trajectory.own_completions)},
            "total_time": trajectory.seconds,
            "turn_count": len(trajectory.steps),
        }
        if trajectory.error is not None:
            sample["error"] = _error(trajectory.error)
        if trajectory.termination_reason is not None and trajectory.termination_reason.is_overlong:
            sample["limit"] = _limit(trajectory, trajectory.termination_reason)
        return sample

    def _turn(self, pool: MessagePool, step: Step, turn: int, kept: KeptTrajectory) -> list[Json]:
        """The events of one turn: results of tools, the model's response, and the reward."""
        turn_input = pool.add_turn(step)
        tools = [
            self._event("tool", f"{turn}-tool-{number}", call)
            for number, call in enumerate(turn_input.answers)
        ]
        model = self.run.name if step.completion is not None else AGENT
        response = {
            "model": model,
            "input": [],
            "input_refs": turn_input.places,
            "tools": [],
            "tool_choice": "auto",
            "config": {},
            "output": self._output(step, model, output_message(pool, step, turn)),
            "metadata": {"turn": turn, "info": plain_json(step.info)},
        }
        advantage = kept.advantages[turn] if turn < len(kept.advantages) else None
        judged = {
            "score": {
                "value": step.reward,
                "explanation": None if advantage is None else f"advantage {advantage:g}",
                "metadata": {"advantage": advantage},
            },
            "scorer": "reward of the turn",
            "intermediate": True,
        }
        return [
            *tools,
            self._event("model", f"{turn}-model", response),
            self._event("score", f"{turn}-score", judged),
        ]

    def _event(self, kind: str, name: str, values: Json) -> Json:
        return {"event": kind, "uuid": name, "timestamp": self.created, "working_start": 0.0, **values}

    def _output(self, step: Step, model: str, message: Json) -> Json:
        completion = step.completion
        choice: Json = {"message": message}
        output: Json = {"model": model, "choices": [choice], "completion": message["content"]}
        if completion is None:
            return output
        choice["stop_reason"] = STOP_REASONS.get(completion.finish_reason, "unknown")
        choice["logprobs"] = {
            "content": [
                {"token": self.token_text(token_id), "logprob": logprob}
                for token_id, logprob in zip(completion.completion_ids, completion.logprobs, strict=False)
            ]
        }
        return output | {
            "usage": _usage([completion]),
            "metadata": {
                "finish_reason": completion.finish_reason,
                "policy_version": completion.policy_version,
                "token_versions": completion.token_versions,
                "token_ids": completion.completion_ids,
                "retokenized": completion.retokenized,
            },
        }


def _sample_id(kept: KeptTrajectory) -> str:
    return kept.group_id or kept.trajectory.rollout_id


def _metadata(kept: KeptTrajectory, task: Any) -> Json:
    trajectory = kept.trajectory
    versions = {
        version for each in trajectory.completions for version in each.token_versions or [each.policy_version]
    }
    return {
        "task": task,
        "group_id": kept.group_id,
        "rollout_id": trajectory.rollout_id,
        "fate": kept.outcome,
        "ended_by": str(trajectory.termination_reason),
        "judged_by": trajectory.judged_by,
        "policy_versions": sorted(versions),
        "advantages": kept.advantages,
        "metrics": trajectory.metrics,
        "masked": trajectory.masked,
        "forked_from": trajectory.forked_from,
        "num_shared_turns": trajectory.num_shared_turns,
    }


def _usage(completions: Sequence[Completion]) -> Json:
    prompt = sum(each.num_prompt_tokens for each in completions)
    sampled = sum(each.num_completion_tokens for each in completions)
    return {"input_tokens": prompt, "output_tokens": sampled, "total_tokens": prompt + sampled}


def _error(text: str) -> Json:
    return {"message": text.split("\n")[0], "traceback": text, "traceback_ansi": text}


def _limit(trajectory: Trajectory, reason: TerminationReason) -> Json:
    """The limit that ended it. Its value is not in the log of a run: what had been used up stands there."""
    kind, used = {
        TerminationReason.TIMEOUT: ("time", trajectory.seconds),
        TerminationReason.RESPONSE_BUDGET_SPENT: ("token", float(trajectory.num_response_tokens)),
    }.get(reason, ("custom", float(len(trajectory.steps))))
    return {"type": kind, "limit": used, "reason": str(reason)}


def _mean_score(name: str, values: Sequence[float]) -> Json:
    metrics = {"mean": {"name": "mean", "value": fmean(values)}} if values else {}
    return {"name": name, "scorer": name, "scored_samples": len(values), "metrics": metrics}


def _summary(sample: Json) -> Json:
    """The row of a sample in the list of all."""
    error, limit = sample.get("error"), sample.get("limit")
    return {
        **{name: sample[name] for name in SUMMARISED},
        "input": _shown(sample["input"])[:SHORT],
        "metadata": {
            key: value for key, value in sample["metadata"].items() if len(json.dumps(value)) < SHORT
        },
        "error": error and error["message"][:SHORT],
        "limit": limit and limit["type"],
        "limit_reason": limit and limit["reason"],
        "completed": True,
        "message_count": len(sample["messages"]),
    }


def _shown(messages: str | Sequence[Json]) -> str:
    """The last text of a user in ``messages``."""
    if isinstance(messages, str):
        return messages
    contents = [each["content"] for each in messages if each["role"] == "user"] or [messages[-1]["content"]]
    return contents[-1] if isinstance(contents[-1], str) else json.dumps(contents[-1])
