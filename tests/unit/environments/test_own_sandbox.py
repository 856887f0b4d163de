"""A sandbox from outside of the library, chosen for the python tool, for code rewards and CodeEnvironment."""

from __future__ import annotations

import functools
import json

import own_sandbox
import pytest
from own_sandbox import OwnSandbox

from environments import CodeEnvironment, SingleTurnEnvironment, ToolEnvironment, code_reward_fn
from environments.errors import ConfigError
from environments.sandbox.base import make_sandbox
from environments.sandbox.local import LocalSandbox
from environments.tools.python import PythonTool

PRINTS_A_SECRET = {"question": "Print.", "tests": [{"input": "", "output": "own\n"}]}
ANSWER = "```python\nprint('secret')\n```"
"""Right in ``OwnSandbox`` alone."""


@pytest.mark.parametrize(
    ("sandbox", "shown"),
    [(OwnSandbox("mine"), "mine"), ("own_sandbox:OwnSandbox", "own"), ("local", "secret")],
)
def test_python_tool_runs_code_in_sandbox_that_it_is_given(sandbox, shown):
    assert PythonTool(sandbox=sandbox)(code="print('secret')").to_string() == shown


def test_tool_environment_plays_with_it():
    env = ToolEnvironment(tools=[PythonTool(sandbox=OwnSandbox())], reward_fn=lambda task_info, action: 1.0)
    call = {"id": "1", "function": {"name": "python", "arguments": json.dumps({"code": "mark"})}}
    assert env.step([call])[0] == {"tool_outputs": {"1": "'own'"}}


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", [OwnSandbox(), "own_sandbox:OwnSandbox"])
def test_code_reward_is_judged_in_it(sandbox):
    task = {"tests": ["from solution import f\nassert f() == 1"]}
    right = "```python\ndef f():\n    return 1\n```"
    wrong = "```python\ndef f():\n    return 2\n```"
    reward_fn = functools.partial(code_reward_fn, sandbox=sandbox)
    env = SingleTurnEnvironment(task, reward_fn=reward_fn)
    assert [env.get_reward_and_next_obs(task, answer)[0] for answer in (right, wrong)] == [1.0, 0.0]


def test_sandbox_that_judges_is_the_one_that_was_given(monkeypatch):
    used = []
    monkeypatch.setattr(
        OwnSandbox, "run", lambda self, *given: used.append(self) or LocalSandbox().run(*given)
    )
    env = CodeEnvironment.from_dict({**PRINTS_A_SECRET, "sandbox": OwnSandbox("judge"), "max_turns": 1})
    env.reset()
    env.step(ANSWER)
    assert used == [OwnSandbox("judge")]
    assert "sandbox" not in env.task


def test_code_environment_takes_a_sandbox_or_a_reward_function():
    with pytest.raises(ConfigError, match="exclude each other"):
        CodeEnvironment(PRINTS_A_SECRET, reward_fn=code_reward_fn, sandbox="local")


@pytest.mark.parametrize(
    ("sandbox", "sentence"),
    [
        ("docker", "sandbox: there is no 'docker'. Known: best-effort, local."),
        ("no_such_module:Sandbox", "there is no module 'no_such_module'"),
        ("own_sandbox:Missing", "own_sandbox.Missing has to be a class"),
        ("own_sandbox:WithoutRun", "derived from environments.sandbox.base.Sandbox"),
        ("own_sandbox:WithArguments", "needs arguments .*image"),
        (own_sandbox.OwnSandbox, "is no sandbox"),
        (None, "is no sandbox"),
    ],
)
def test_what_is_no_sandbox_is_config_error_before_anything_runs(sandbox, sentence):
    with pytest.raises(ConfigError, match=sentence):
        PythonTool(sandbox=sandbox)


def test_name_gives_one_sandbox_per_process():
    assert make_sandbox("own_sandbox:OwnSandbox") is make_sandbox("own_sandbox:OwnSandbox")
