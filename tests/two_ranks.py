"""Two ranks of a learner, in processes of their own and without Ray."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

NUM_RANKS = 2


def on_two_ranks(job: Callable[..., None], port: int, *args: Any) -> None:
    """Have ``job(*args)`` called by two processes that meet at ``port``; raise the error of one that fails.

    Args:
        job: a function at the top of a module. It may make ranks of ``policies.learning.verl``.
    """
    from torch.multiprocessing import spawn

    spawn(_be_a_rank, (port, job, args), nprocs=NUM_RANKS)


def _be_a_rank(rank: int, port: int, job: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ |= {
        "VERL_PLATFORM": "cpu",
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    warnings.simplefilter("ignore")
    import torch.distributed as dist

    dist.init_process_group("gloo")
    job(*args)
    dist.destroy_process_group()
