"""TRL's GRPO as a peer of ``peers.py``, which runs this program in an environment that has ``PACKAGES``.

    python peer_trl.py JOB.json        writes the seconds of its steps into the file that the job names

Another trainer is plugged in by a file like this one: ``PACKAGES``, and a program that reads a job. That of
``evidence/same_as_trl.py`` has three keys more: the right ``answers``, messages that are ``shown`` before a
question, and ``settings`` of TRL's own.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

PACKAGES = ("trl==1.16.0",)
"""All else that it needs is borrowed from Troupe's environment: torch, transformers, accelerate, datasets."""


def rewards(completions: list[Any], answer: list[str | None], **_: Any) -> list[float]:
    """1 for the right answer, else 0; without one as ``peers.has_odd_length``."""
    texts = [messages[0]["content"] for messages in completions]
    return [
        float(len(text) % 2 if right is None else text.strip() == right)
        for text, right in zip(texts, answer, strict=True)
    ]


def main(job: dict[str, Any]) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    moments: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            moments.append(time.monotonic())

    settings: dict[str, Any] = {
        "output_dir": str(Path(job["seconds"]).parent / "trl"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": job["groups"] * job["group_size"],
        "gradient_accumulation_steps": 1,
        "num_generations": job["group_size"],
        "max_completion_length": job["max_tokens"],
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": job["lr"],
        "max_steps": job["steps"],
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    shown = job.get("shown", [])
    prompts = [[*shown, {"role": "user", "content": question}] for question in job["questions"]]
    answers = job.get("answers") or [None] * len(prompts)
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=rewards,
        args=GRPOConfig(**settings | job.get("settings", {})),
        train_dataset=Dataset.from_dict({"prompt": prompts, "answer": answers}),
        callbacks=[Clock()],
    )
    trainer.train()
    seconds = [after - before for before, after in itertools.pairwise(moments)]
    Path(job["seconds"]).write_text(json.dumps(seconds), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
