from __future__ import annotations

import json
import string
import sys
from collections import deque

import pytest

from environments.adapters.gymnasium import FrozenLakeEnvironment, GymnasiumEnvironment, named_choice
from environments.adapters.gymnasium_text import in_words, picture_in_words
from environments.errors import ConfigError, EnvironmentFailure
from launch.recipes import frozen_lake
from policies import GameAgent

gymnasium = pytest.importorskip("gymnasium")
numpy = pytest.importorskip("numpy")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

MOVES = ("Left", "Down", "Right", "Up")


def way_by_reading(grid):
    """The shortest way through a grid as the model sees it, found without looking at the map."""
    cells = [line.split() for line in grid.splitlines()]
    steps = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
    start = next((r, c) for r, line in enumerate(cells) for c, cell in enumerate(line) if cell == "P")
    waiting, seen = deque([(start, ())]), {start}
    while waiting:
        (r, c), moves = waiting.popleft()
        if cells[r][c] == "G":
            return moves
        for name, (dr, dc) in steps.items():
            there = r + dr, c + dc
            inside = all(0 <= x < len(cells) for x in there)
            if inside and there not in seen and cells[there[0]][there[1]] != "O":
                seen.add(there)
                waiting.append((there, (*moves, name)))
    raise AssertionError(f"no way in {grid}")


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_frozen_lake_can_be_solved_from_what_is_shown(size):
    for seed in range(5):
        env = FrozenLakeEnvironment.from_dict({"size": size, "seed": seed, "max_steps": 64, "rest": 1})
        question = env.reset()[0]["question"]
        way = way_by_reading(question.split("\n\n")[1])
        results = [env.step(f"I go {move.lower()}.") for move in way]
        assert [(reward, done) for _, reward, done, _ in results[:-1]] == [(0.0, False)] * (len(way) - 1)
        assert results[-1][0].endswith("You reached the goal.")
        assert results[-1][1:3] == (1.0, True)
        env.close()


def test_recipe_finds_the_same_way_and_shows_it(monkeypatch):
    monkeypatch.setattr(frozen_lake, "NUM_DEMONSTRATIONS", 20)
    tasks = frozen_lake.workload(0).train_dataset[:20]
    for task in tasks:
        env = FrozenLakeEnvironment.from_dict({**task, **frozen_lake.ENV_ARGS})
        env.reset()
        rewards = [env.step(move)[1] for move in frozen_lake.shortest_way(env.map)]
        assert rewards[-1] == 1.0
    workload = frozen_lake.workload(0)
    assert workload.agent_class is GameAgent
    assert {message["role"] for message in workload.demonstrations[0]} == {"user", "assistant"}
    assert workload.demonstrations == frozen_lake.workload(0).demonstrations


@pytest.mark.slow
def test_map_of_evaluation_occurs_in_no_training(monkeypatch):
    monkeypatch.setattr(frozen_lake, "NUM_DEMONSTRATIONS", 300)
    workload = frozen_lake.workload(0)
    held_out, seen = (
        {FrozenLakeEnvironment.from_dict(task).reset()[0]["question"] for task in tasks}
        for tasks in (workload.val_dataset, workload.train_dataset)
    )
    assert (len(held_out), len(seen)) == (len(workload.val_dataset), len(workload.train_dataset))
    assert not held_out & (seen | {messages[0]["content"] for messages in workload.demonstrations})
    assert list(workload.val_dataset) == list(frozen_lake.workload(1).val_dataset)


def test_recipe_says_where_there_is_no_way():
    with pytest.raises(ValueError, match="no way"):
        frozen_lake.shortest_way(["SH", "HG"])


def test_frozen_lake_explains_itself():
    question = FrozenLakeEnvironment(size=4, seed=3).reset()[0]["question"]
    rules, grid, choices = question.split("\n\n")
    assert rules.startswith("You walk on a frozen lake") and "slippery" not in rules
    assert grid == "P _ _ _\n_ _ _ O\n_ _ O _\nO _ _ G"
    assert choices == "Answer with one of: Left, Down, Right, Up."
    assert "slippery" in FrozenLakeEnvironment(is_slippery=True).reset()[0]["question"]


def test_hole_ends_the_walk():
    env = FrozenLakeEnvironment(size=4, seed=3)
    env.reset()
    for move in ("Right", "Right", "Right"):
        env.step(move)
    observation, reward, done, info = env.step("Down")
    assert observation.endswith("You fell into a hole.")
    assert (reward, done, info["action"]) == (0.0, True, 1)
    with pytest.raises(EnvironmentFailure, match="reset"):
        env.step("Down")


def test_what_is_not_understood_moves_nothing_but_uses_a_step():
    env = FrozenLakeEnvironment(size=4, seed=3, max_steps=2)
    env.reset()
    answer = "I found no valid action in that. Answer with one of: Left, Down, Right, Up."
    assert env.step("North!") == (answer, 0.0, False, {"action": None})
    observation, _, done, _ = env.step("Right")
    assert observation.startswith("_ P _ _") and done
    env.reset()
    assert [env.step("?")[2] for _ in range(2)] == [False, True]


def test_slippery_walk_is_the_same_for_the_same_seed():
    def walk(seed):
        env = FrozenLakeEnvironment(size=8, p=1.0, seed=seed, is_slippery=True, max_steps=20)
        env.reset()
        return [env.step("Right")[0] for _ in range(20)]

    assert walk(1) == walk(1) != walk(2)


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("left", "Left"),
        ("**Down**", "Down"),
        ("Not left. Right!", "Right"),
        (r"Right? No: \boxed{Up}, not left", "Up"),
        (r"\boxed{3}", "Up"),
        ("First ```Left```, then ```down\n```", "Down"),
        (r"Left \boxed{sideways}", None),
        (r"\boxed{\text{Left}}", "Left"),
        (r"\boxed{\mathbf{\text{Up}}.}", "Up"),
        (r"\boxed{Left.}", "Left"),
        (r"\boxed{'Right'}", "Right"),
        ("```text\nUp\n```", "Up"),
        ("I go.\n```python\nDown.\n```", "Down"),
        ("```Left\nUp\n```", "Up"),
        ("``````", None),
        ("I see 3 holes and 1 upright bear", None),
        ("", None),
    ],
)
def test_how_a_move_is_read(text, move):
    position = named_choice(text, MOVES)
    assert (None if position is None else MOVES[position]) == move


def test_longer_name_is_not_taken_for_the_shorter_one_in_it():
    assert named_choice("turn left", ["left", "turn left"]) == 1


def test_letter_that_resembles_an_upper_case_name_is_no_failure():
    assert named_choice("\N{LATIN SMALL LETTER LONG S}tay", ["stay", "go"]) is None


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (r"\boxed{0}", None),
        (r"\boxed{2}", "2"),
        ("I push it 2.5 times", None),
        ("half of it, 1/2", None),
        ("at 1:30, with 2,000 others", None),
        ("I take 2.", "2"),
        ("No 1, but 3, for 2.5 reasons", "3"),
    ],
)
def test_names_that_are_numbers_match_no_position(text, name):
    names = ["1", "2", "3"]
    position = named_choice(text, names)
    assert (None if position is None else names[position]) == name


def test_any_environment_with_discrete_actions():
    env = GymnasiumEnvironment.from_dict(
        {"env_id": "Blackjack-v1", "seed": 1, "action_names": ["stick", "hit"], "rest": 1}
    )
    assert env.reset()[0]["question"] == "(20, 7, 0)\n\nAnswer with one of: stick, hit."
    observation, reward, done, info = env.step("hit")
    assert (observation, reward, done) == ("(22, 7, 0)", -1.0, True)
    assert json.loads(json.dumps(info)) == info


def test_actions_without_names_are_numbers():
    env = GymnasiumEnvironment("CartPole-v1", seed=0)
    assert env.reset()[0]["question"].endswith("Answer with one of: 0, 1.")
    assert env.step("Push it 1 time")[3]["action"] == 1
    assert env.step("-1")[3]["action"] is None


def test_environment_that_draws_in_text_is_seen_as_it_draws():
    env = GymnasiumEnvironment("FrozenLake-v1", make_args={"is_slippery": False})
    assert env.reset()[0]["question"].splitlines()[:2] == ["[red S]FFF", "FHFH"]


def test_picture_names_its_colours():
    question = GymnasiumEnvironment("Taxi-v4", seed=1).reset()[0]["question"]
    assert question.splitlines()[1:4] == ["|[magenta R]: | : :G|", "| : | : : |", "| : :[yellow]: : |"]
    assert "|Y| : |[blue B]: |" in question


@pytest.mark.parametrize(
    ("picture", "words"),
    [
        ("plain", "plain"),
        ("\x1b[34;1mY\x1b[0m|\x1b[35mG\x1b[0m", "[blue Y]|[magenta G]"),
        ("\x1b[34;1m\x1b[43mR\x1b[0m\x1b[0m:", "[blue yellow R]:"),
        ("\x1b[42m \x1b[m.", "[green]."),
        ("\x1b[1mS\x1b[0mF", "[S]F"),
        ("\x1b[92mP", "[green P]"),
    ],
)
def test_colours_of_a_picture_become_words(picture, words):
    assert picture_in_words(picture) == words


class Mission(gymnasium.Env):
    """Observes what MiniGrid's environments do: a picture in numbers, a direction and a text."""

    observation_space = gymnasium.spaces.Dict(
        {
            "image": gymnasium.spaces.Box(0, 255, (2, 2, 3), numpy.uint8),
            "direction": gymnasium.spaces.Discrete(4),
            "mission": gymnasium.spaces.Text(100, charset=string.ascii_lowercase + " "),
        }
    )
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        image = numpy.arange(12, dtype=numpy.uint8).reshape(2, 2, 3)
        return {"image": image, "direction": numpy.int64(3), "mission": "go to the grey box"}, {}


def test_observation_of_several_parts_is_told_part_by_part(monkeypatch):
    monkeypatch.setitem(
        gymnasium.registry,
        "Mission-v0",
        gymnasium.envs.registration.EnvSpec("Mission-v0", entry_point=Mission),
    )
    question = GymnasiumEnvironment("Mission-v0").reset()[0]["question"]
    parts = question.partition("\n\n")[0]
    assert parts == "image:\n0,1,2 3,4,5\n6,7,8 9,10,11\ndirection: 3\nmission: go to the grey box"


def test_whole_list_of_numbers_is_told():
    assert in_words(numpy.array([0.123456, 2.0])) == "[0.1235, 2]"
    assert in_words((numpy.arange(2000), 7)).count(",") == 2000  # numpy itself leaves out the middle


def test_environment_of_another_package_names_its_module():
    with pytest.raises(ConfigError, match="minigrid:MiniGrid-Empty-5x5-v0"):
        GymnasiumEnvironment("MiniGrid-Empty-5x5-v0")


class Filmed(Mission):
    """Shows a picture among other things, and needs a package that is not there once it begins."""

    observation_space = gymnasium.spaces.Tuple(
        [gymnasium.spaces.Dict({"image": gymnasium.spaces.Box(0, 255, (96, 96), numpy.uint8)})]
    )

    def reset(self, *, seed=None, options=None):
        raise gymnasium.error.DependencyNotInstalled("imageio is missing")


def test_pictures_and_missing_packages_are_refused(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("Filmed-v0", entry_point=Filmed, disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, "Filmed-v0", spec)
    with pytest.raises(ConfigError, match=r"Filmed-v0 shows pictures.*describe="):
        GymnasiumEnvironment("Filmed-v0")
    with pytest.raises(ConfigError, match="'Filmed-v0': imageio is missing"):
        GymnasiumEnvironment("Filmed-v0", describe=lambda observation, env: "a film").reset()


def test_own_description_and_parser():
    env = GymnasiumEnvironment(
        "Pendulum-v1",
        seed=0,
        describe=lambda observation, env: f"x={observation[0]:.1f} dt={env.unwrapped.dt}",
        parse=lambda text: [float(text)] if text.lstrip("-").isdigit() else None,
        instructions="Swing it up.",
        max_steps=3,
    )
    assert env.reset()[0]["question"] == "Swing it up.\n\nx=0.7 dt=0.05"
    assert env.step("2")[3]["action"] == [2.0]
    assert env.step("up")[0] == "I found no valid action in that."
    assert env.step("1")[2] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"env_id": "FrozenLak-v1"}, "Did you mean 'FrozenLake-v1'"),
        ({"env_id": "Pendulum-v1"}, "parse="),
        ({"env_id": "Ant-v5"}, "MuJoCo"),
        ({"env_id": "Blackjack-v1", "action_names": ["hit"]}, "has 2 actions"),
        ({"env_id": "Blackjack-v1", "max_steps": 0}, "max_steps=0"),
        ({"env_id": "Blackjack-v1", "make_args": {"sped": 1}}, "sped"),
        ({}, "env_id"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        GymnasiumEnvironment.from_dict(arguments)


@pytest.mark.parametrize("arguments", [{"size": 1}, {"p": 2}, {"p": 0.0}, {"max_steps": 0}])
def test_lake_without_a_way_is_refused(arguments):
    with pytest.raises(ConfigError):
        FrozenLakeEnvironment(**arguments)


def test_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match="pip install gymnasium"):
        GymnasiumEnvironment("Blackjack-v1")


def test_lake_is_a_success_at_its_goal_alone():
    env = FrozenLakeEnvironment(size=4, seed=0, max_steps=64)
    way = way_by_reading(env.reset()[0]["question"].split("\n\n")[1])
    for move in way[:-1]:
        env.step(move)
    assert env.is_correct() is False
    env.step(way[-1])
    assert env.is_correct() is True
    env.reset()
    assert env.is_correct() is False


class Reaching(gymnasium.Env):
    """Pays for every step, and says itself whether the goal was reached, as Gymnasium-Robotics does."""

    action_space = gymnasium.spaces.Discrete(2)
    observation_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return action, 0.5, bool(action), False, {"is_success": numpy.float32(action)} if action < 2 else {}


def test_success_is_what_environment_calls_so_and_not_reward():
    gymnasium.register("Reaching-v0", Reaching)
    env = GymnasiumEnvironment("Reaching-v0")
    env.reset()
    assert env.is_correct() is None
    for move, is_success in (("0", False), ("1", True)):
        assert (env.step(move)[1], env.is_correct()) == (0.5, is_success)
    cart = GymnasiumEnvironment("CartPole-v1")
    cart.reset()
    cart.step("0")
    assert cart.is_correct() is None, "it balances, and never wins"


class Spaceless(Reaching):
    observation_space = None


def test_environment_may_have_no_space_of_observations():
    gymnasium.register("Spaceless-v0", Spaceless, disable_env_checker=True)
    assert GymnasiumEnvironment("Spaceless-v0").reset()[0]["question"].startswith("0")
