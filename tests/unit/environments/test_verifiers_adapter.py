"""Plays small verifiers environments, which are written to a folder of their own: verifiers finds them,
and starts their tool servers, by the name of a module."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import psutil
import pytest

from environments.adapters.verifiers import VerifiersEnvironment, verifiers_tasks
from environments.errors import AgentError, ConfigError, DatasetError, EnvironmentFailure
from policies import GameAgent
from policies.agents.messages import MessagesAgent

pytest.importorskip("verifiers")
pytestmark = pytest.mark.slow  # importing it takes seconds

SUMS = """
import itertools
import verifiers.v1 as vf

__all__ = ["Sums"]

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def correct(self, trace: vf.Trace) -> float:
        if trace.last_reply == "break":
            raise RuntimeError("the rubric breaks")
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for second in range(3):
            data = Data(prompt=f"1+{second}?", system_prompt="Add.", answer=str(1 + second))
            yield Sum(data, self.config.task)
"""

COUNTING = '''
import asyncio, itertools
import verifiers.v1 as vf

__all__ = ["Numbers", "Counting"]

class Number(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    pass

class Numbers(vf.Taskset[Number, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for number in itertools.count():
            yield Number(vf.TaskData(prompt=f"Count on from {number}."), self.config.task)

class CountingConfig(vf.EnvConfig):
    counter: vf.AgentConfig = vf.AgentConfig()

class Counting(vf.Env[CountingConfig]):
    """Answers each right number with "Go on.", three times."""

    async def run(self, task, agents):
        expected = task.data.idx
        async with agents.counter.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply == str(expected + 1):
                expected += 1
                if expected == task.data.idx + 3:
                    break
                segment = await interaction.turn("Go on.")
            if segment.last_reply == "hang":
                await asyncio.sleep(600)
        interaction.trace.record_reward("counted", (expected - task.data.idx) / 3)
'''

SHOP = '''
import verifiers.v1 as vf

__all__ = ["Shop"]

class Basket(vf.State):
    items: list[str] = []

class BasketTools(vf.Toolset[vf.ToolsetConfig, Basket]):
    TOOL_PREFIX = None

    @vf.tool
    async def buy(self, item: str) -> str:
        """Put an item into the basket."""
        self.state.items.append(item)
        return f"{len(self.state.items)} in the basket"

class Purchase(vf.Task[vf.TaskData, Basket, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [BasketTools(vf.ToolsetConfig())]

    @vf.reward
    async def bought(self, trace: vf.Trace) -> float:
        return float(trace.state.items == ["tea"])

class Shop(vf.Taskset[Purchase, vf.TasksetConfig]):
    def load(self):
        yield Purchase(vf.TaskData(prompt="Buy tea."), self.config.task)

if __name__ == "__main__":
    BasketTools.run()
'''

DUEL = """
import asyncio
import verifiers.v1 as vf

__all__ = ["Numbers", "Duel"]

class Numbers(vf.Taskset[vf.Task, vf.TasksetConfig]):
    def load(self):
        yield vf.Task(vf.TaskData(prompt="Name a number. The higher one wins 2."), self.config.task)

class DuelConfig(vf.EnvConfig):
    first: vf.AgentConfig = vf.AgentConfig()
    second: vf.AgentConfig = vf.AgentConfig()

class Duel(vf.Env[DuelConfig]):
    async def run(self, task, agents):
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(seat.run(task)) for seat in (agents.first, agents.second)]
        first, second = (run.result() for run in runs)
        won = 2.0 if int(first.last_reply) > int(second.last_reply) else -2.0
        first.record_reward("won", won)
        second.record_reward("won", -won)
"""

OF_THE_OLD_API = """
import verifiers as vf

async def turns(state: vf.State) -> float:
    return 0.0

def load_environment():
    return vf.SingleTurnEnv()
"""

OF_THE_OLD_API_TOO = """
def load_environment():
    import verifiers as vf
    return vf.SingleTurnEnv()
"""


WITHOUT_DATA = """
import verifiers.v1 as vf

__all__ = ["WithoutData"]

class WithoutData(vf.Taskset[vf.Task[vf.TaskData, vf.State, vf.TaskConfig], vf.TasksetConfig]):
    def load(self):
        raise RuntimeError("its program is missing")
"""

WORLDS = {
    "troupe_sums": SUMS,
    "troupe_counting": COUNTING,
    "troupe_shop": SHOP,
    "troupe_duel": DUEL,
    "troupe_without_data": WITHOUT_DATA,
    "troupe_old": OF_THE_OLD_API,
    "troupe_old_too": OF_THE_OLD_API_TOO,
}


@pytest.fixture(autouse=True, scope="module")
def worlds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("worlds")
    for name, source in WORLDS.items():
        (folder / f"{name}.py").write_text(source)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", str(folder))  # for the tool servers
        yield
    for name in WORLDS:
        sys.modules.pop(name, None)


@pytest.fixture
def begun():
    """Begin the task of that number and return its environment and agent; all are closed at the end."""
    envs = []

    def begin(config, index=0, **arguments):
        task = verifiers_tasks(config, index + 1)[index]
        env = VerifiersEnvironment.from_dict({**json.loads(json.dumps(task)), "rest": 1, **arguments})
        envs.append(env)
        agent = MessagesAgent()
        observation, info = env.reset()
        agent.update_from_env(observation, 0.0, False, info)
        return env, agent

    yield begin
    for env in envs:
        env.close()


def say(env, agent, response):
    observation, reward, done, info = env.step(agent.update_from_model(response).action)
    agent.update_from_env(observation, reward, done, info)
    return reward, done, info


def test_tasks_of_a_taskset():
    tasks = verifiers_tasks("troupe-sums")
    assert [task["question"] for task in tasks] == ["1+0?", "1+1?", "1+2?"]
    assert len(verifiers_tasks("troupe-counting", 5)) == 5


def test_tasks_that_cannot_be_loaded_are_refused():
    with pytest.raises(ConfigError, match="tasks of 'troupe-without-data': RuntimeError: its program"):
        verifiers_tasks("troupe-without-data")


def test_single_turn(begun):
    env, agent = begun("troupe-sums", 1)
    assert agent.chat_completions == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1?"},
    ]
    reward, done, info = say(env, agent, "<think>One and one</think>2")
    assert (reward, done) == (1.0, True)
    assert info == {
        "traces": [
            {
                "agent": "agent",
                "reward": 1.0,
                "rewards": {"correct": 1.0},
                "metrics": {"length": 1.0},
                "stop": "agent_completed",
            }
        ]
    }
    assert env.reset()[0]["question"] == "Add.\n\n1+1?"  # the same environment once more
    assert env.step("3")[1:3] == (0.0, True)


def test_many_turns(begun):
    env, agent = begun("troupe-counting", 4)
    assert say(env, agent, "5")[:2] == (0.0, False)
    assert agent.chat_completions[-2:] == [
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Go on."},
    ]
    assert say(env, agent, "<think>after 5</think>6")[:2] == (0.0, False)
    assert agent.chat_completions[-2]["content"] == "<think>after 5</think>6"
    assert say(env, agent, "7")[:2] == (1.0, True)


def test_configuration_limits_the_turns(begun):
    env, agent = begun({"taskset": {"id": "troupe-counting"}, "counter": {"max_turns": 1}})
    reward, done, info = say(env, agent, "1")
    assert (reward, done) == (pytest.approx(1 / 3), True)
    assert info["traces"][0]["stop"] == "max_turns"


@pytest.mark.parametrize("limit", ["max_input_tokens", "max_output_tokens", "max_total_tokens"])
def test_limit_on_tokens_that_would_do_nothing_is_an_error(limit):
    config = {"taskset": {"id": "troupe-duel"}, "second": {limit: 9}}
    with pytest.raises(ConfigError, match=rf"{limit}=9 of the seat 'second'.*rollout\.max_response_tokens"):
        verifiers_tasks(config)
    other = config["second"] | played_by("http://127.0.0.1:9/v1")
    assert len(verifiers_tasks(config | {"second": other})) == 1


def test_attempts_of_one_episode_are_played_one_by_one(begun):
    config = {"id": "best-of-n", "n": 2, "taskset": {"id": "troupe-sums"}}
    env, agent = begun(config)
    assert say(env, agent, "9")[:2] == (0.0, False)
    assert agent.chat_completions == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+0?"},
    ]
    reward, done, info = say(env, agent, "1")
    assert (reward, done) == (0.5, True)
    # In the order in which their library has scored them, which is not always that of playing.
    assert sorted((each["reward"], each["metrics"]["best"]) for each in info["traces"]) == [(0, 0), (1, 1)]


def test_modelled_user_is_played_too_but_not_rewarded(begun):
    env, agent = begun({"id": "user-sim", "taskset": {"id": "troupe-sums"}})
    assert "1+0?" in agent.chat_completions[0]["content"]  # the user's persona knows the task
    say(env, agent, "What is 1 and 0?")
    assert agent.chat_completions[-1]["content"] == "What is 1 and 0?"
    say(env, agent, "1")
    reward, done, info = say(env, agent, "###DONE###")
    assert (reward, done, [trace["agent"] for trace in info["traces"]]) == (1.0, True, ["assistant"])


class Says(BaseHTTPRequestHandler):
    """A model of an OpenAI-compatible server that always says 5."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "5"}, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


@pytest.fixture
def opponent():
    """The address of a server that plays a seat."""
    server = HTTPServer(("127.0.0.1", 0), Says)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def played_by(url):
    return {"client": {"type": "eval", "base_url": url}}


@pytest.mark.parametrize(
    ("ours", "other", "number", "reward"),
    [("first", "second", 7, 2.0), ("first", "second", 3, -2.0), ("second", "first", 7, 2.0)],
)
def test_in_a_game_for_two_the_reward_is_that_of_the_agents_seat(
    begun, opponent, ours, other, number, reward
):
    env, agent = begun({"taskset": {"id": "troupe-duel"}, other: played_by(opponent)})
    found, done, info = say(env, agent, str(number))
    assert (found, done, [trace["agent"] for trace in info["traces"]]) == (reward, True, [ours])


def test_game_against_itself_needs_a_client_for_the_other_seat():
    task = verifiers_tasks("troupe-duel")[0]
    env = VerifiersEnvironment.from_dict(task)
    try:
        with pytest.raises(ConfigError, match=r"first and second .* one seat alone.*\"second\": {\"client\""):
            env.reset()
    finally:
        env.close()


def test_answer_that_environment_cannot_use_is_its_failure(begun, opponent):
    env, agent = begun({"taskset": {"id": "troupe-duel"}, "second": played_by(opponent)})
    with pytest.raises(EnvironmentFailure, match=r"ValueError: invalid literal for int.*a high one"):
        say(env, agent, "a high one")


@pytest.mark.parametrize("name", ["troupe-old", "troupe-old-too"])
def test_package_for_the_old_api_is_named_as_one(name):
    with pytest.raises(ConfigError, match=r"before verifiers 0\.4"):
        verifiers_tasks(name)


def test_agent_that_knows_texts_only_can_play(begun):
    env, _ = begun("troupe-sums")
    agent = GameAgent()
    agent.update_from_env(env.reset()[0], 0.0, False, {})
    assert agent.chat_completions == [{"role": "user", "content": "Add.\n\n1+0?"}]
    assert env.step(agent.update_from_model("<think>.</think>1").action)[1:3] == (1.0, True)


def test_tools_share_their_state_with_the_rewards(begun):
    env, agent = begun("troupe-shop")
    assert "Put an item into the basket." in agent.chat_completions[0]["content"]
    say(env, agent, '<tool_call>{"name": "sell", "arguments": {}}</tool_call>')
    assert agent.chat_completions[-1]["content"] == "Error: unknown tool 'sell', known: buy."
    say(env, agent, "<tool_call>{</tool_call>")
    assert agent.chat_completions[-1]["content"].startswith("Error: The tool call is not valid JSON")
    say(env, agent, '<tool_call>{"name": "buy", "arguments": {"item": "tea"}}</tool_call>')
    assert agent.chat_completions[-1]["content"] == "1 in the basket"
    assert say(env, agent, "I bought tea.")[:2] == (1.0, True)


def test_close_in_the_middle_leaves_no_tool_server(begun):
    before = set(psutil.Process().children(recursive=True))
    env, _ = begun("troupe-shop")
    assert set(psutil.Process().children(recursive=True)) - before
    env.close()
    assert set(psutil.Process().children(recursive=True)) <= before


def test_rubric_that_breaks_is_the_environments_failure(begun):
    env, _ = begun("troupe-sums")
    with pytest.raises(EnvironmentFailure, match="the rubric breaks"):
        env.step("break")


def test_environment_that_hangs_ends_at_its_limit(begun):
    env, _ = begun("troupe-counting", timeout_seconds=6)
    with pytest.raises(EnvironmentFailure, match="neither ended nor called the model"):
        env.step("hang")


def test_misuse_is_refused(begun):
    env, _ = begun("troupe-sums")
    with pytest.raises(AgentError, match="neither a text nor an assistant message"):
        env.step(7)
    env.step("1")
    with pytest.raises(EnvironmentFailure, match="reset"):
        env.step("1")
    with pytest.raises(ConfigError, match="verifiers_tasks"):
        VerifiersEnvironment.from_dict({"config": "troupe-sums"})
    with pytest.raises(DatasetError, match="answer"):
        VerifiersEnvironment(config="troupe-sums", data={"prompt": "1+1?"})
    with pytest.raises(ConfigError, match="troupe-summs"):
        verifiers_tasks("troupe-summs")
    with pytest.raises(ConfigError, match="max_turn"):
        verifiers_tasks({"taskset": {"id": "troupe-sums"}, "agent": {"max_turn": 1}})
    with pytest.raises(ConfigError, match="num_tasks"):
        verifiers_tasks("troupe-counting")
