"""``Recovery``: the name of ``RunState`` in stages that were written before 0.1.0."""

from launch.training.run_state import RunState as Recovery

__all__ = ["Recovery"]
