"""Mark of a program that ``ray job submit`` has started. Importable without Ray."""

from __future__ import annotations

import os

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""The variable that Ray sets in the program of a submitted job, and in no other."""


def in_job() -> bool:
    """True if this program is a submitted job."""
    return JOB in os.environ
