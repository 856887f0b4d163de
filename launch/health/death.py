"""Description of a process that has died, by Ray's error: its name, its place, and the cause."""

from __future__ import annotations

import re

from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from environments.errors import PartLostError

FULL = re.compile(r"Memory on the node \(IP: (\S+), .*?\) was (\S+) used / (\S+) limit")
KILLED = re.compile(r"Selected to kill: \(.*?task name=(\w+).*?pid=(\d+), actual memory used=([\d.]+)\s?GB")
FIELD = re.compile(r"^\s*(class_name|pid|ip): *(\S+)$", re.MULTILINE)
PLACE = (("pid", "process"), ("ip", "on node"))
DETAIL = re.compile(r"Worker exit detail: (.+?)\.?$", re.MULTILINE)
REASON = re.compile(
    r"^The actor (?:is dead|died) because (.+?)\.?(?: (?:Owner Id|Node Id|Worker exit type): .*)?$",
    re.MULTILINE,
)


def describe_death(error: RayError | PartLostError) -> str:
    """Sentence on the process whose death ``error`` reports, and for a full memory one on the remedy.

    A part that is lost and may live, or of which Ray does not know, keeps its own sentence.
    """
    cause = error.__cause__
    if isinstance(cause, RayActorError) and not isinstance(cause, ActorUnavailableError):
        error = cause
    text = str(error)
    if isinstance(error, PartLostError):
        return text
    if full := FULL.search(text):
        node, used, limit = full.groups()
        killed = "; ".join(f"{name} (process {pid}, {size} GB)" for name, pid, size in KILLED.findall(text))
        return (
            f"The memory of node {node} was full ({used} of {limit}), and Ray has killed a process there: "
            f"{killed or 'its name is in the logs of Ray'}. Lower learner.micro_batch_tokens, "
            "fleet.num_actors or server.num_replicas, or let the run have a larger machine."
        )
    fields = dict(FIELD.findall(text))
    who = fields.get("class_name", "A Ray actor")
    where = " ".join(f"{word} {fields[name]}" for name, word in PLACE if name in fields)
    reason = REASON.search(text)
    because = reason.group(1) if reason else text.splitlines()[0].strip(".")
    if detail := DETAIL.search(text):
        because += f" ({detail.group(1)})"
    return f"{who}{f' ({where})' if where else ''} has died: {because}."
