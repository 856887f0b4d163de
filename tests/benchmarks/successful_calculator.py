"""The calculator recipe with its successful demonstrations alone, as a workload for ``learning_curves``."""

from __future__ import annotations

from dataclasses import replace

from launch.recipes import calculator
from launch.workload import Workload


def workload(seed: int) -> Workload:
    """The recipe's, without the demonstrations that earned nothing."""
    successful = [each.messages for each in calculator.demonstrations(seed).with_rewards() if each.reward > 0]
    return replace(calculator.workload(seed), demonstrations=successful)
