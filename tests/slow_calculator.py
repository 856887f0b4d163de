"""The calculator, which takes its time: a run that leaves most of the machine to what goes on around it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from launch.recipes import calculator
from launch.workload import Workload

SECONDS = 0.25


class SlowEnvironment(calculator.CalculatorEnvironment):
    """Sleeps in every step."""

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        time.sleep(SECONDS)
        return super().step(action)


def workload(seed: int) -> Workload:
    return replace(calculator.workload(seed), env_class=SlowEnvironment)
