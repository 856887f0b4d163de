from __future__ import annotations

import json
import random
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec

import pytest

from environments.adapters import textarena as textarena_adapter
from environments.adapters.textarena import PolicyOpponent, TextArenaEnvironment, TextArenaSelfPlay
from environments.errors import ConfigError, EnvironmentFailure

pytestmark = pytest.mark.skipif(find_spec("textarena") is None, reason="textarena is an extra: worlds")

MOVES = ["A C", "A B", "C B", "A C", "B A", "B C", "A C"]


@pytest.fixture(autouse=True)
def same_generator_as_before():
    state = random.getstate()
    yield
    random.setstate(state)


def begun(**arguments):
    env = TextArenaEnvironment.from_dict({"seed": 1, "rest": 1, **arguments})
    return env, env.reset()[0]["question"]


def first_free(seen):
    """Takes the first free square of tic-tac-toe."""
    return re.findall(r"'(\[\d\])'", seen.rpartition("Available Moves")[2])[0]


@pytest.mark.slow
def test_game_for_one_is_won():
    env, question = begun(env_id="TowerOfHanoi-v0")
    assert "move the disks from tower A to tower C" in question
    results = [env.step(f"I move [{move}]") for move in MOVES]
    assert [(reward, done) for _, reward, done, _ in results[:-1]] == [(0.0, False)] * 6
    observation, reward, done, info = results[-1]
    assert observation.startswith("Congratulations")
    assert (reward, done, info["rewards"]) == (1.0, True, {"0": 1.0})
    assert json.loads(json.dumps(info)) == info
    with pytest.raises(EnvironmentFailure, match="reset"):
        env.step("[A C]")
    assert env.reset()[0]["question"] == question


def test_only_what_is_new_is_shown():
    env, _ = begun(env_id="TowerOfHanoi-v0")
    observation = env.step("[A C]")[0]
    assert "A: [3, 2]" in observation
    assert "move the disks from tower A to tower C" not in observation


def test_second_invalid_move_loses():
    env, _ = begun(env_id="TowerOfHanoi-v0")
    observation, _, done, _ = env.step("[C A]")
    assert "invalid move" in observation and not done
    assert env.step("[C A]")[2] is True


def test_seed_decides_on_the_secret():
    def secret(seed):
        env, _ = begun(env_id="GuessTheNumber-v0", seed=seed)
        low, high = 1, 20
        while True:
            guess = (low + high) // 2
            observation, reward, done, _ = env.step(f"[{guess}]")
            if done:
                assert reward == 1.0
                return guess
            low, high = (guess + 1, high) if "higher" in observation else (low, guess - 1)

    secrets = [secret(seed) for seed in range(6)]
    assert secrets == [secret(seed) for seed in range(6)]
    assert len(set(secrets)) > 1


def test_against_an_opponent_as_the_first_player():
    env, question = begun(env_id="TicTacToe-v0", opponent=first_free)
    assert "You are Player 0" in question
    observation, reward, done, _ = env.step("[4]")
    assert "[Player 1] [0]" in observation and (reward, done) == (0.0, False)
    env.step("[2]")  # the opponent takes 1
    observation, reward, done, info = env.step("[6]")
    assert (reward, done) == (1.0, True)
    assert info["rewards"] == {"0": 1.0, "1": -1.0}


def test_against_an_opponent_as_the_second_player():
    seen = []

    def opponent(observation):
        seen.append(observation)
        return first_free(observation)

    env, question = begun(env_id="TicTacToe-v0", opponent=opponent, player=1)
    assert "You are Player 1" in question and "[Player 0] [0]" in question
    env.step("[4]")  # the opponent takes 1
    _, reward, done, _ = env.step("[8]")  # the opponent takes 2 and has won
    assert (reward, done) == (-1.0, True)
    assert all("You are Player 0" in observation for observation in seen)
    assert "[Player 1] [8]" in seen[-1] and "[Player 1] [4]" in seen[-1]  # all of the game, every time


@pytest.mark.parametrize("env_id", ["KuhnPoker-v0", "IndianPoker-v0", "GameOfPureStrategy-v0"])
def test_opponent_that_loses_first_leaves_the_agent_the_reward(env_id):
    env, question = begun(env_id=env_id, opponent=lambda seen: "hm")
    assert question.startswith(f"{env_id} ended before your first turn: ")
    _, reward, done, info = env.step("[check]")
    assert (reward, done, info["rewards"]) == (1.0, True, {"0": 1.0, "1": -1.0})
    with pytest.raises(EnvironmentFailure, match="reset"):
        env.step("[check]")
    assert env.reset()[0]["question"] == question


def test_self_play_gives_each_player_what_is_new_to_it():
    env = TextArenaSelfPlay.from_dict({"env_id": "TicTacToe-v0", "seed": 1, "rest": 1})
    observation, _ = env.reset()
    assert observation["seat"] == "0" and "You are Player 0" in observation["question"]
    seats = []
    for move in ("[4]", "[0]", "[2]", "[1]"):
        observation, reward, done, _ = env.step(move)
        seats.append(observation["seat"])
        assert (reward, done) == (0.0, False)
    assert seats == ["1", "0", "1", "0"]
    assert "You are Player 0" not in observation["question"] and "[Player 1] [1]" in observation["question"]
    reason, reward, done, info = env.step("[6]")
    assert (reward, done) == (1.0, True) and "Player 0" in reason
    assert info["seat_rewards"] == {"0": 1.0, "1": -1.0}
    assert env.is_correct() is None
    assert env.compute_metrics() == {"player_0_reward": 1.0, "player_1_reward": -1.0}
    with pytest.raises(EnvironmentFailure, match="reset"):
        env.step("[8]")


def test_self_play_with_a_wrong_number_of_players_is_refused():
    with pytest.raises(ConfigError, match="TicTacToe-v0 is no game for 3"):
        TextArenaSelfPlay("TicTacToe-v0", num_players=3).reset()


def test_opponent_can_be_the_policy_of_a_server():
    bodies = []

    class Server(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            bodies.append(body)
            move = first_free(body["messages"][0]["content"])
            message = {"role": "assistant", "content": f"<think>[7]</think>{move}"}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "policy"}
            data = json.dumps({**reply, "choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        opponent = PolicyOpponent(f"http://127.0.0.1:{server.server_port}/v1", temperature=0.5)
        env, _ = begun(env_id="TicTacToe-v0", opponent=opponent)
        assert "[Player 1] [0]" in env.step("[4]")[0]
        assert (bodies[0]["model"], bodies[0]["temperature"]) == ("policy", 0.5)
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
def test_policy_that_does_not_answer_is_named():
    opponent = PolicyOpponent("http://127.0.0.1:9/v1", timeout_seconds=1)
    env, _ = begun(env_id="TicTacToe-v0", opponent=opponent)
    with pytest.raises(EnvironmentFailure, match=r"127\.0\.0\.1:9"):
        env.step("[4]")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "TicTacTo-v0"}, "Did you mean 'TicTacToe-v0'"),
        ({"env_id": "TicTacToe-v0", "player": 1}, "player=1"),
        ({"env_id": "TowerOfHanoi-v0", "game_args": {"disks": 2}}, "disks"),
        ({"env_id": "Debate-v0"}, "OPENROUTER_API_KEY"),
        ({}, "env_id"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        TextArenaEnvironment.from_dict(arguments)


@pytest.mark.parametrize(
    ("env_id", "opponent"),
    [
        *(("TicTacToe-v0", None), ("TowerOfHanoi-v0", str), ("Golf-v0", None)),
        *(("SecretMafia-v0", str), ("PublicGoodsGame-v0", None)),
    ],
)
def test_wrong_number_of_players_is_refused(env_id, opponent):
    with pytest.raises(ConfigError, match=r"is no game for \d: .*[Pp]layer"):
        TextArenaEnvironment(env_id, opponent=opponent).reset()


def test_game_without_wrapper_is_told_in_words():
    _, question = begun(env_id="TowerOfHanoi-v0-raw")
    assert question.startswith("[GAME] You are playing Tower of Hanoi with 3 disks.")


def test_wrapper_that_game_does_not_fit_is_refused():
    with pytest.raises(ConfigError, match=r"LightsOut-v0-train: .*Missing required observation types"):
        begun(env_id="LightsOut-v0-train")


def test_reward_and_reason_that_game_exchanges_are_told_apart():
    env, _ = begun(env_id="Cryptarithm-v0")
    env.step("[S 9]")
    env.step("what?")
    reason, reward, done, info = env.step("what?")
    assert reason.startswith("Bad action format")
    assert (reward, done, info["rewards"]) == (1 / 8, True, {"0": 1 / 8})


def test_failure_of_game_is_no_lack_of_words(monkeypatch):
    monkeypatch.setitem(textarena_adapter._WORD_LISTS, "Wordle-v0", {"words"})
    cannot = pytest.raises(ConfigError, match="cannot make Wordle-v0: IndexError")
    with cannot, textarena_adapter._playable_here("Wordle-v0"):
        raise IndexError


def test_missing_word_lists_are_named_and_not_downloaded(monkeypatch):
    import nltk

    def download(*args, **kwargs):
        raise AssertionError("something was downloaded")

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", download)
    for _ in range(2):  # a game asks for them when its module is imported, which happens once
        with pytest.raises(ConfigError, match=r"nltk\.downloader averaged_perceptron_tagger_eng words where"):
            TextArenaEnvironment("Wordle-v0")
    with pytest.raises(ConfigError, match=r"Wordle-v0-long needs.* words of NLTK.*downloader .*words where"):
        TextArenaEnvironment("Wordle-v0-long")
    assert nltk.download is download


def test_game_for_one_is_a_success_with_its_full_reward():
    env, _ = begun(env_id="TowerOfHanoi-v0")
    for move in MOVES:
        assert env.is_correct() is False
        env.step(f"[{move}]")
    assert env.is_correct() is True
    env.reset()
    assert env.is_correct() is False


@pytest.mark.parametrize(
    ("rewards", "is_won"),
    [
        ({0: 1, 1: -1}, True),
        ({0: -1, 1: 1}, False),
        ({0: 0, 1: 0}, False),
        ({0: 0.99}, False),
        ({0: 1}, True),
        ({0: 7}, None),
    ],
)
def test_game_is_won_against_others_or_with_full_reward(rewards, is_won):
    assert textarena_adapter._is_won(rewards, player=0) is is_won
