"""Says in a sentence which part of a run has died, from the error that Ray raises: the trainer prints it."""

from __future__ import annotations

import re

import ray
from ray.exceptions import RayActorError


def death(error: RayActorError) -> str:
    """A sentence that names the part, its process and its machine, as far as Ray knows them."""
    text = str(error)
    fields = dict(re.findall(r"\b(class_name|pid|ip): (\S+)", text))
    named = fields.get("class_name", "An actor")
    place = ", ".join(
        [f"process {fields['pid']}" if "pid" in fields else "its process is not known to Ray"]
        + ([f"on {fields['ip']}"] if "ip" in fields else [])
    )
    sentence = f"{named} ({place}) has died."
    if memory := re.search(r"^.*memory usage threshold[^.]*\.\d+", text, re.MULTILINE):
        return (
            f"{sentence} Ray has killed it because its machine was short of memory ({memory[0].strip()}): "
            "lower learner.micro_batch_tokens or fleet.num_actors."
        )
    if "class_name" not in fields:  # its raylet may have died with it, and then Ray knows nothing of it
        sentence += f" Ray says: {text.strip().splitlines()[0]}"
        if lost := _lost_nodes():
            sentence += f" Lost is the Ray node on {', '.join(lost)} (its raylet or the machine)."
    return sentence


def _lost_nodes() -> list[str]:
    return [f"{node['NodeManagerHostname']}" for node in ray.nodes() if not node["Alive"]]
