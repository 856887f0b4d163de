"""Every world of a registry, played through our adapter, in an environment of its own.

    python outside_worlds.py REGISTRY FILE

Each world is played in a process of its own that ends at a time limit, and is then a line of JSON in
``FILE``; those that are there already are not played again. ``outcome`` is ``played`` (an episode to its
end, or many legal steps of it), ``rejected`` (by an error of ours that says why), or ``failed``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import multiprocessing
import os
import random
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from environments.base import BaseEnv
from environments.errors import ConfigError, TroupeError

SECONDS = 120.0
"""Time limit of a world."""
STEPS = 200
"""Of an episode, after which it counts as played."""
SEED = 1
MORE_PACKAGES = ("minigrid", "ale_py")
"""Packages whose worlds Gymnasium lists once they are imported."""
MOST_PLAYERS = 15
BASIC, SHORT = 400, 5
"""Basic words are one of so many, and all of so few letters: WordLadder searches for ways among them."""

Row = dict[str, Any]
Mover = Callable[[str], Any]
"""An action for all that a player has seen."""


def played(env: BaseEnv, moves: Callable[[str], Mover], steps: int = STEPS) -> Row:
    """Play an episode, each seat by a player of its own."""
    observation, _ = env.reset()
    seen: dict[str, str] = {}
    movers: dict[str, Mover] = {}
    rewards, done = [], False
    while not done and len(rewards) < steps:
        seat, text = "", observation
        if isinstance(observation, dict):
            seat, text = observation.get("seat", ""), observation["question"]
        if not seen.get(seat, "") and not str(text).strip():
            raise AssertionError("the first observation is empty")
        seen[seat] = f"{seen.get(seat, '')}\n{text}"
        movers.setdefault(seat, moves(seat))
        observation, reward, done, _ = env.step(movers[seat](seen[seat]))
        rewards.append(reward)
    env.close()
    return {"outcome": "played", "steps": len(rewards), "ended": done, "reward": sum(rewards)}


# -- reasoning-gym: its own answer, and one that is wrong ---------------------------------------------------


def reasoning_gym_names() -> list[str]:
    return sorted(importlib.import_module("reasoning_gym.factory").DATASETS)


EXAMPLES: dict[str, Callable[[Row], str]] = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}
"""Right answers of datasets where many are, in the metadata of an entry."""


def play_reasoning_gym(name: str) -> Row:
    from environments.adapters.reasoning_gym import ReasoningGymEnvironment, reasoning_gym_tasks

    right, wrong = [], []
    for task in reasoning_gym_tasks(name, 3, seed=SEED):
        env = ReasoningGymEnvironment.from_dict(task)
        env.reset()
        wrong.append(env.step("no idea")[1])
        entry = env._entry
        answer = EXAMPLES[name](entry["metadata"]) if name in EXAMPLES else entry["answer"]
        env.reset()
        right += [] if answer is None else [env.step(f"<answer>{answer}</answer>")[1]]
    row = {"outcome": "played", "steps": 1, "ended": True, "reward": max(wrong)}
    return {**row, "right": min(right)} if right else {**row, "reason": "gives no right answer"}


# -- Gymnasium: random actions, and those of BabyAI's own bot -----------------------------------------------


def gymnasium_names() -> list[str]:
    gymnasium = importlib.import_module("gymnasium")
    for package in MORE_PACKAGES:
        gymnasium.register_envs(importlib.import_module(package))
    return sorted(gymnasium.registry)


def play_gymnasium(name: str) -> Row:
    from environments.adapters.gymnasium import GymnasiumEnvironment

    rng = random.Random(SEED)

    def choice(seen: str) -> str:
        choices = re.findall(r"Answer with one of: (.*)\.$", seen, re.MULTILINE)[-1]
        return rng.choice(choices.split(", "))

    row = played(GymnasiumEnvironment(name, seed=SEED), lambda seat: choice)
    if name.startswith("BabyAI-"):
        env = GymnasiumEnvironment(name, seed=SEED)
        try:
            row["right"] = played(env, lambda seat: babyai_bot(env), 1000)["reward"]
        except AssertionError as error:
            row["reason"] = f"its own bot gives up: {error}"
    return row


def babyai_bot(env: Any) -> Mover:
    bot = importlib.import_module("minigrid.utils.baby_ai_bot").BabyAIBot(env._env.unwrapped)
    last: list[Any] = [None]

    def move(seen: str) -> str:
        last[0] = bot.replan(last[0])
        return str(int(last[0]))

    return move


# -- TextArena: what stands in brackets --------------------------------------------------------------------


def textarena_names() -> list[str]:
    return list(importlib.import_module("textarena.envs.registration").ENV_REGISTRY)


def play_textarena(name: str) -> Row:
    """Play it alone, against an opponent, and with a policy in all seats, whichever it is for."""
    try:
        return textarena_game(name)
    except ConfigError as error:
        if "NLTK" not in str(error):
            raise
        with stand_in_words():
            return {**textarena_game(name), "reason": "with word lists of ours in the place of NLTK's"}


def textarena_game(name: str) -> Row:
    from environments.adapters.textarena import TextArenaEnvironment, TextArenaSelfPlay

    for players in range(1, MOST_PLAYERS + 1):
        try:
            if players == 1:
                return {**played(TextArenaEnvironment(name, seed=SEED), bracketed), "players": 1}
            row = played(TextArenaSelfPlay(name, num_players=players, seed=SEED), bracketed)
        except TroupeError as error:
            if not re.search("is no game for|does not exist", str(error)):
                raise
            wrong = error
            continue
        if players == 2:
            played(TextArenaEnvironment(name, opponent=bracketed("1"), seed=SEED), bracketed)
        return {**row, "players": players}
    raise wrong


@contextmanager
def stand_in_words() -> Iterator[None]:
    """Word lists where NLTK looks for its own: those of the dictionary of TextArena, all of them nouns."""
    dictionary = resources.files("textarena.envs.utils") / "data" / "en_US.dic"
    words = sorted(set(re.findall(r"^[a-z]{3,12}\b", dictionary.read_text("utf-8"), re.MULTILINE)))
    basic = sorted({*words[::BASIC], *(word for word in words if len(word) <= SHORT)})
    tagger = {"weights": {}, "tagdict": {}, "classes": ["NN"]}
    nltk = importlib.import_module("nltk")
    with tempfile.TemporaryDirectory() as folder:
        lists = Path(folder, "corpora", "words")
        lists.mkdir(parents=True)
        for name, some in (("en", words), ("en-basic", basic)):
            (lists / name).write_text("\n".join(some))
        name = "averaged_perceptron_tagger_eng"
        home = Path(folder, "taggers", name)
        home.mkdir(parents=True)
        for part, value in tagger.items():
            (home / f"{name}.{part}.json").write_text(json.dumps(value))
        nltk.data.path.insert(0, folder)
        yield


def bracketed(seat: str) -> Mover:
    """Moves that stand in brackets in what was seen, mostly the last ones."""
    rng = random.Random(f"{SEED} {seat}")

    def move(seen: str) -> str:
        found = re.findall(r"\[[^\[\]\n]{1,40}\]", seen)
        moves = [each for each in found if not re.match(r"\[(GAME|Player|ADMIN)", each)] or ["[0]"]
        return rng.choice(moves[-12:])

    return move


# -- verifiers: its own tasksets, and packages for it -------------------------------------------------------

TASKSETS: dict[str, dict[str, Any]] = {
    "harbor": {},
    "nemo_gym": {},
    "openenv": {},
    **{f"textarena {game}": {"game": game} for game in ("Hangman-v0", "WordLadder-v0", "WordSearch-v0")},
    **{f"textarena {game}": {"game": game} for game in ("Wordle-v0", "Wordle-v0-long")},
    **{
        package: {}
        for package in ("carla_env", "mazebench", "sophistry_bench_sprint", "stardata", "tasksets")
    },
}


def verifiers_names() -> list[str]:
    """Their names; mazebench's lies in a folder of its package."""
    spec = importlib.util.find_spec("mazebench_cli")
    for home in spec.submodule_search_locations or () if spec else ():
        sys.path.append(f"{home}/_runtime/environments/mazebench")
    return sorted(TASKSETS)


def play_verifiers(name: str) -> Row:
    from environments.adapters.verifiers import VerifiersEnvironment, verifiers_tasks

    config = {"taskset": {"id": name.split()[0], **TASKSETS[name]}}
    with stand_in_words():
        task = verifiers_tasks(config, 1)[0]
        return played(VerifiersEnvironment.from_dict(task), bracketed)


# -- one after the other -----------------------------------------------------------------------------------

REGISTRIES: dict[str, tuple[Callable[[], list[str]], Callable[[str], Row]]] = {
    "reasoning-gym": (reasoning_gym_names, play_reasoning_gym),
    "gymnasium": (gymnasium_names, play_gymnasium),
    "textarena": (textarena_names, play_textarena),
    "verifiers": (verifiers_names, play_verifiers),
}


def main(registry: str, file: Path) -> None:
    """Play what ``file`` does not have yet."""
    names, play = REGISTRIES[registry]
    known = {json.loads(line)["world"] for line in file.read_text().splitlines()} if file.exists() else set()
    with file.open("a") as rows:
        for name in names():
            if name not in known:
                print(json.dumps({"world": name, **apart(play, name)}), file=rows, flush=True)


def apart(play: Callable[[str], Row], name: str) -> Row:
    """The row of a world, played in a process of its own."""
    fork = multiprocessing.get_context("fork")
    reading, writing = fork.Pipe(duplex=False)
    process = fork.Process(target=report, args=(play, name, writing))
    process.start()
    writing.close()
    try:
        if not reading.poll(SECONDS):
            return {"outcome": "failed", "reason": f"it was not over after {SECONDS:g} s"}
        return reading.recv()  # type: ignore[no-any-return]
    except EOFError:
        return {"outcome": "failed", "reason": "its process died"}
    finally:
        process.kill()
        process.join()


def report(play: Callable[[str], Row], name: str, writing: Connection) -> None:
    """Send the row of a world. The libraries write to the terminal."""
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    try:
        row = play(name)
    except ConfigError as error:
        row = {"outcome": "rejected", "reason": str(error)}
    except BaseException as error:  # noqa: BLE001  (one of the table's rows)
        row = {"outcome": "failed", "reason": f"{type(error).__name__}: {error}"}
    writing.send(row)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
