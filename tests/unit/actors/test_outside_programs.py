"""Agents of other people as programs of rollout functions, unchanged: trained on their own tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from calculator_program import FUNCTIONS, Program, shell_conversation
from outside_packages import answering_program, environment_with, npm_environment
from test_rollout_function import play, processes_with

from actors.gateway.client import PolicyClient
from actors.gateway.harbor_program import HarborProgram
from actors.rollouts.rollout import Pair
from environments import ToolEnvironment
from environments.adapters.harbor import harbor_tasks
from environments.data.repairs import write_repairs_of
from environments.types import Completion, Message, Trajectory
from launch.recipes import calculator
from launch.recipes.demonstration import written_call
from policies import ToolAgent
from policies.chat import ChatRenderer, load_tokenizer
from policies.learning.samples import training_samples
from policies.sampler import Sampler, SampleRequest
from policies.tiny import CHAT_TEMPLATE

pytestmark = pytest.mark.outside

TESTS = Path(__file__).resolve().parents[2]
THOUGHT = "<think>\nTwo sums.\n</think>\n\n"
ANSWER = f"{THOUGHT}It is 46."


@pytest.fixture(scope="module")
def outside() -> Path:
    return environment_with(TESTS / "outside_programs.txt")


class TemplateSampler(Sampler):
    """A scripted model behind the chat template of Qwen3, which extends the tokens of the turn before."""

    template = (TESTS / "templates" / "qwen3.jinja").read_text()

    def __init__(self, folder: Path, replies: Callable[[list[Message]], str]) -> None:
        self._tokenizer, self._replies = load_tokenizer(folder), replies
        self._tokenizer.chat_template = self.template
        self._renderer = ChatRenderer(self._tokenizer)

    async def sample(self, request: SampleRequest) -> Completion:
        reply = self._replies(request.messages)
        ids = (*self._renderer.encode(reply), self._renderer.eos_token_id)
        return Completion(
            prompt_ids=self._renderer.request_ids(request),
            completion_ids=ids,
            logprobs=(0.0,) * len(ids),
            text=reply,
            finish_reason="stop",
        )


def call_of(name: str, **arguments: str) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def calculating(messages: list[Message]) -> str:
    """Hand over if that is the task, then call the tool twice at once, and answer."""
    if messages[0]["content"] == "Hand it over.":
        return THOUGHT + call_of("transfer_to_expert")
    if messages[-1]["content"] == "3":
        return ANSWER
    return f"{THOUGHT}{call_of('calculator', expression='12+34')}\n{call_of('calculator', expression='1+2')}"


def check_sequences(trajectory: Trajectory, num_turns: int) -> None:
    """Check that all turns are one sequence, in which nothing is trained but what was sampled."""
    (sample,) = training_samples(trajectory)
    assert len(trajectory.steps) == num_turns
    assert sample.num_sampled_tokens == trajectory.num_sampled_tokens
    counts = {name: count for name, count in trajectory.metrics.items() if name != "policy_calls"}
    assert trajectory.metrics["policy_calls"] == num_turns
    assert counts == {"branches": 0.0, "foreign_answers": 0.0, "unseen_answers": 0.0}


FRAMEWORKS = (
    *("agents", "agents_streamed", "langgraph", "langgraph_streamed", "langgraph_responses"),
    *("pydantic_ai", "pydantic_ai_responses", "pydantic_ai_messages", "litellm", "litellm_messages"),
)


def play_framework(name: str, outside: Path, folder: Path) -> Trajectory:
    keys: list[str] = []

    def solve(task: dict[str, Any], client: PolicyClient) -> float:
        keys.append(client.api_key)
        # The key stands in the command too, by which processes that are left behind would be found.
        command = [str(outside / "python"), str(TESTS / "outside_programs.py"), name, client.api_key]
        result = client.run(command, files={"task.txt": task["question"]}, collect=["answer.txt"])
        assert result.exit_code == 0, result.output
        return float(result.files["answer.txt"].decode() == "It is 46.")

    trajectory = play(solve, sampler=TemplateSampler(folder, calculating), max_steps=5)
    assert trajectory.reward == 1.0
    assert processes_with(keys[0]) == []
    return trajectory


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_framework_trains_on_one_sequence(name: str, outside: Path, tokenizer_folder: Path) -> None:
    check_sequences(play_framework(name, outside, tokenizer_folder), num_turns=2)


def test_agents_that_hand_over_are_two_sequences(outside: Path, tokenizer_folder: Path) -> None:
    trajectory = play_framework("agents_handoff", outside, tokenizer_folder)
    assert [step.info["follows"] for step in trajectory.steps] == [None, None, 1]
    assert trajectory.steps[1].info["branch"] == "another system prompt"
    samples = training_samples(trajectory)
    assert len(samples) == 2
    assert sum(sample.num_sampled_tokens for sample in samples) == trajectory.num_sampled_tokens
    # The second agent's history has the call of the first, which is trained in the first's sequence.
    assert trajectory.metrics["foreign_answers"] == 2


MINI = """
agent:
  system_template: You solve tasks in a shell.
  instance_template: "{{task}} Then submit: echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
  mode: yolo
  confirm_exit: false
  step_limit: 5
model:
  cost_tracking: ignore_errors
"""
QUIET = {"MSWEA_CONFIGURED": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Variables by which the program neither begins with questions nor fetches a list of prices."""
LEFT_BEHIND = "4646.5"
"""Seconds for which a process sleeps that the agent leaves behind."""
COMMANDS = (
    f"echo $((12+34)) > number.txt; sleep {LEFT_BEHIND} > /dev/null 2>&1 &",
    "cat number.txt",
    "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
)


def in_a_call(command: str) -> str:
    return f"{THOUGHT}I run it.\n{call_of('bash', command=command)}"


def in_a_block(command: str) -> str:
    return f"I run it.\n\n```mswea_bash_command\n{command}\n```"


@pytest.mark.parametrize(
    ("model", "model_class", "written"),
    [
        ("openai/policy", "litellm", in_a_call),
        ("anthropic/policy", "litellm", in_a_call),
        ("openai/policy", "litellm_textbased", in_a_block),
    ],
    ids=["chat", "messages", "blocks"],
)
def test_mini_swe_agent_trains_on_one_sequence(
    model: str, model_class: str, written: Callable[[str], str], outside: Path, tokenizer_folder: Path
) -> None:
    def solve(task: dict[str, Any], client: PolicyClient) -> float:
        command = [str(outside / "mini"), "-c", "mini.yaml", "-m", model, "--model-class", model_class]
        result = client.run(
            [*command, "-t", "Write the sum of 12 and 34 into number.txt.", "-o", "calls.json"],
            files={"mini.yaml": MINI},
            collect=["number.txt"],
            environment=QUIET,
        )
        assert result.exit_code == 0, result.output
        return float(result.files["number.txt"] == b"46\n")

    def shell(messages: list[Message]) -> str:
        return written(COMMANDS[sum(message["role"] == "assistant" for message in messages)])

    trajectory = play(solve, sampler=TemplateSampler(tokenizer_folder, shell), max_steps=5)
    assert trajectory.reward == 1.0
    check_sequences(trajectory, num_turns=3)
    assert processes_with(LEFT_BEHIND) == []


CLAUDE_CODE, CODEX = "@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.171.0"
CODEX_SETTINGS = """
model = "policy"
model_provider = "troupe"
web_search = "disabled"
features.multi_agent = false

[model_providers.troupe]
name = "troupe"
base_url = "BASE_URL"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""
ARGUMENTS = {
    "claude": ["--dangerously-skip-permissions", "--model", "policy", "-p"],
    "codex": ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
}


@pytest.mark.parametrize(
    ("package", "name", "tool", "argument"),
    [(CLAUDE_CODE, "claude", "Bash", "command"), (CODEX, "codex", "exec_command", "cmd")],
    ids=["claude_code", "codex"],
)
def test_coding_agent_trains_on_one_sequence(
    package: str, name: str, tool: str, argument: str, tokenizer_folder: Path
) -> None:
    """Claude Code by Anthropic's messages and Codex by Responses, streamed, with two commands at once."""
    folder = npm_environment(package) / "node_modules" / ".bin"

    def solve(task: dict[str, Any], client: PolicyClient) -> float:
        result = client.run(
            [str(folder / name), *ARGUMENTS[name], "Write the sum of 12 and 34 into number.txt."],
            files={".codex/config.toml": CODEX_SETTINGS.replace("BASE_URL", client.base_url)},
            collect=["number.txt"],
            # Nothing beyond this machine is called, and root may go on as in a container.
            environment={"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "IS_SANDBOX": "1"},
        )
        assert result.exit_code == 0, result.output
        return float(result.files["number.txt"] == b"46\n")

    def shell(messages: list[Message]) -> str:
        calls = [call_of(tool, **{argument: each}) for each in ("echo $((12+34)) > number.txt", "ls")]
        turns = ["\n".join(calls), f"I look.\n{call_of(tool, **{argument: 'cat number.txt'})}", "It is 46."]
        return THOUGHT + turns[sum(message["role"] == "assistant" for message in messages)]

    trajectory = play(solve, sampler=TemplateSampler(tokenizer_folder, shell), max_steps=5)
    assert trajectory.reward == 1.0
    check_sequences(trajectory, num_turns=3)


def test_mini_swe_agent_repairs_a_repository(outside: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    write_repairs_of("roman", tmp_path)
    row = next(iter(harbor_tasks(tmp_path)[0]))
    solution = (Path(row["folder"]) / "solution" / "solve.sh").read_text().replace("/app/", "")
    commands = ("python3 check.py", "ls /tests /solution; cat ../../tests/*", solution, COMMANDS[-1])
    command = [str(outside / "mini"), "-c", "../mini.yaml", "-m", "openai/policy", "-o", "../calls.json"]
    mini = HarborProgram(
        command=[*command, "-t", "{question}"],
        files={"mini.yaml": MINI},
        environment=QUIET,
        visible=[str(outside.parent)],
    )
    seen: list[str] = []

    def shell(messages: list[Message]) -> str:
        seen[:] = [str(message["content"]) for message in messages]
        return in_a_call(commands[sum(message["role"] == "assistant" for message in messages)])

    trajectory = play(mini, sampler=TemplateSampler(tokenizer_folder, shell), task=row, max_steps=5)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    check_sequences(trajectory, num_turns=4)
    assert any("calls failed" in each for each in seen)
    assert any(each.count("No such file") == 3 for each in seen), "neither tests nor solution"


TASK = {"question": "What is 12*34?", "ground_truth": "408"}


class TinySampler(TemplateSampler):
    template = CHAT_TEMPLATE.strip()


def in_turn(folder: Path, replies: Sequence[str]) -> TinySampler:
    """A model that gives the replies in their order."""
    return TinySampler(
        folder, lambda messages: replies[sum(message["role"] == "assistant" for message in messages)]
    )


@pytest.mark.parametrize("calculates", [True, False])
def test_demonstrations_of_mini_are_what_it_sends(
    calculates: bool, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """The conversations from which a model is warm-started have the tokens of the program's own calls."""
    *before, last = expected = shell_conversation(TASK, calculates, guess=-7)
    sampler = in_turn(tokenizer_folder, [each["content"] for each in expected if each["role"] == "assistant"])
    with answering_program("mini", tmp_path / "log") as socket:
        rollout = Program("mini", str(socket))
        trajectory = play(rollout, sampler=sampler, task=TASK, max_steps=3)
    assert trajectory.reward == float(calculates)
    tokenizer = sampler._tokenizer
    prompt = tokenizer.apply_chat_template(before, tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(trajectory.steps[-1].completion.prompt_ids) == prompt
    assert trajectory.steps[-1].model_response == last["content"]


RIGHT, ANOTHER = (written_call("calculator", expression=each) for each in ("12*34", "12+34"))
REPLIES = (
    [RIGHT, "\\boxed{408}"],
    ["\\boxed{7}"],
    [RIGHT + ANOTHER, "\\boxed{46}"],
    [f"I call {RIGHT}", ANOTHER, "It is \\boxed{408}."],
    [RIGHT, RIGHT, RIGHT],
)


@pytest.mark.parametrize("name", ["openai", "anthropic", "agents", "langgraph", "pydantic_ai"])
def test_tokens_of_programs_are_those_of_tool_agent(
    name: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A model that makes no faulty calls learns from both alike, number for number."""
    agent = Pair(
        agent_class=ToolAgent,
        env_class=ToolEnvironment,
        agent_args=calculator.AGENT_ARGS,
        env_args=calculator.ENV_ARGS,
    )
    with ExitStack() as stack:
        rollout = FUNCTIONS.get(name) or Program(
            name, str(stack.enter_context(answering_program(name, tmp_path / "log")))
        )
        for replies in REPLIES:
            expected, found = (
                play(each, sampler=in_turn(tokenizer_folder, replies), task=TASK, max_steps=3)
                for each in (agent, rollout)
            )
            assert [step.completion for step in found.steps] == [step.completion for step in expected.steps]
            assert (found.reward, found.termination_reason) == (expected.reward, expected.termination_reason)
