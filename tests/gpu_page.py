"""The rows of the page "On GPUs": devices, model, settings, and what it states of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / ".docs" / "pages" / "gpus.md"
ALWAYS = ("learner.device=cuda", "learner.dtype=bfloat16", "learner.micro_batch_tokens=8192")
ON_GPUS = (*ALWAYS, "server.engine.num_gpus=1", "server.engine.options.dtype=bfloat16")
"""What the page adds to every row."""
IN_FOUR_BITS = "learner.verl.model.override_config.quantization_config.load_in_4bit=true"
_ROW = re.compile(r"^\| (\d[\dx ]+) \| (\S+) \| (.+) \| (\d+) \| (\d+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Row:
    """A row. ``devices`` are as ``--plan`` takes them; GB are those of a rank's GPU, and of all hosts."""

    devices: str
    model: str
    settings: tuple[str, ...]
    rank_gb: float
    hosts_gb: float

    @property
    def nodes(self) -> list[int]:
        """GPUs of each node."""
        *nodes, count, _ = map(int, self.devices.split("x"))
        return [count] * (nodes[0] if nodes else 1)


def _settings(added: str) -> tuple[str, ...]:
    settings = re.findall(r"[^\s`]+=[^\s`]+", added)
    settings += ["learner.verl.engine.offload_policy=true"] if "offload" in added else []
    settings += [IN_FOUR_BITS] if "four bits" in added else []
    for spread in re.findall(r"tensor (\d)", added):
        settings += [
            f"server.engine.num_gpus={spread}",
            f"server.engine.options.tensor_parallel_size={spread}",
        ]
    return ("workload=my_workload", *ON_GPUS, *settings)


ROWS = [
    Row(devices.replace(" ", ""), model, _settings(added), float(rank_gb), float(hosts_gb))
    for devices, model, added, rank_gb, hosts_gb in _ROW.findall(PAGE.read_text(encoding="utf-8"))
]
