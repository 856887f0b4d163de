from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from environments import BaseEnv, check_environment

README = Path(__file__).parents[3] / "environments" / "README.md"


@pytest.mark.slow
def test_environment_of_the_readme_has_no_fault(capsys):
    _, example, *_ = README.read_text(encoding="utf-8").split("```python\n")
    names: dict[str, Any] = {"BaseEnv": BaseEnv, "check_environment": check_environment}
    exec(example.partition("```")[0], names)
    assert capsys.readouterr().out == "Coin: all fine.\n"
    assert names["Coin"]("heads").step(" heads ")[1] == 1.0
