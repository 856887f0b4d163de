"""Trajectories store once what their turns repeat, and read as if each turn held all of it."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, make_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_trajectories import KINDS, measure, num_unique_tokens, play, written

from environments.columns import floats, packed, unpacked
from environments.data.trajectory_json import plain_json, trajectory_from_json
from environments.steps import share
from environments.turns import Turns
from environments.types import Completion, Step, TerminationReason, Trajectory
from policies.learning.samples import training_samples

VALUES: dict[str, Any] = {
    "prompt_ids": (1, 2, 3),
    "completion_ids": (70_000, 5),
    "logprobs": (-0.1, -1 / 3),
    "text": "x",
    "finish_reason": "stop",
    "token_versions": (3, 4),
}


def hop(trajectory: Trajectory) -> Trajectory:
    arrived: Trajectory = pickle.loads(pickle.dumps(trajectory))
    return arrived


def test_completion_reads_as_it_was_made() -> None:
    completion = Completion(**VALUES)
    assert {name: getattr(completion, name) for name in VALUES} == VALUES
    assert completion == replace(completion) == pickle.loads(pickle.dumps(completion))
    assert asdict(completion) | VALUES == asdict(completion)
    assert (completion.num_prompt_tokens, completion.num_completion_tokens, completion.num_tokens) == (
        3,
        2,
        5,
    )
    assert Completion(text="", finish_reason="stop").prompt_ids == ()
    with pytest.raises(FrozenInstanceError):
        completion.prompt_ids = (1,)  # type: ignore[misc]


@given(st.lists(st.floats(allow_nan=False) | st.floats(width=32, allow_nan=False)))
def test_numbers_come_back_to_the_last_bit(numbers: list[float]) -> None:
    read = Completion(text="", finish_reason="stop", logprobs=tuple(numbers)).logprobs
    assert [*map(repr, read)] == [*map(repr, numbers)]
    assert unpacked(packed(floats(numbers)).decode()) == floats(numbers)


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_token_do_not_grow_with_the_turns(kind: str) -> None:
    short, long, longer = (measure(play(kind, turns)) for turns in (1, 10, 60))
    for name, most in {"in_memory": 93, "pickled": 17, "on_disk": 26, "to_ranks": 20}.items():
        assert vars(longer)[name] < 1.2 * vars(long)[name]
        assert max(vars(each)[name] for each in (short, long, longer)) < most, name


@pytest.mark.parametrize("kind", KINDS)
def test_trajectory_is_equal_after_hops_and_files(kind: str) -> None:
    trajectory = play(kind, 12)
    whole = asdict(trajectory)
    arrived = hop(hop(trajectory))
    assert arrived == trajectory and asdict(hop(trajectory)) == whole
    assert trajectory_from_json(json.loads(json.dumps(written(arrived)))) == trajectory
    assert written(arrived) == written(trajectory)
    assert copy.deepcopy(arrived) == trajectory
    assert asdict(trajectory) == whole, "nothing of it has changed"


def test_tokens_that_turns_repeat_are_stored_once() -> None:
    trajectory = play(KINDS[1], 12)
    for arrived in (hop(trajectory), trajectory_from_json(written(trajectory))):
        trees = {id(each.tokens.tree): each.tokens.tree for each in arrived.completions}
        (tree,) = trees.values()
        assert sum(map(len, tree.__getstate__()[2])) == num_unique_tokens(trajectory)


def test_conversations_of_two_agents_are_stored_once_each() -> None:
    steps = []
    histories: list[list[dict[str, Any]]] = [[{"role": "user", "content": f"agent {n} "}] for n in (0, 1)]
    for turn in range(8):
        history = histories[turn % 2]
        history.append({"role": "assistant", "content": f"answer {turn}"})
        completion = Completion(
            **VALUES | {"prompt_ids": (turn % 2, *range(10 * len(history))), "completion_ids": (turn,)}
        )
        steps.append(Step(chat_completions=[*history], completion=completion))
    line = written(Trajectory(steps=steps))
    assert len(line["steps"]["messages"]) == 10
    assert line["steps"]["conversations"]["parents"] == [-1, -1]
    assert sum(line["steps"]["completion"]["tokens"]["sizes"]) == 2 * 50 + 2 + 8
    assert trajectory_from_json(json.loads(json.dumps(line))) == Trajectory(steps=steps)
    alone = written(Trajectory(steps=share(steps)[::2]))["steps"]
    assert [each["content"] for each in alone["messages"]][:2] == ["agent 0 ", "answer 0"]
    assert len(alone["messages"]) == 5 and alone["completion"]["tokens"]["parents"] == [-1, 0, 1, 2]


PARTS = st.text(st.characters()) | st.sampled_from(["a", "b"])
VALUE = st.none() | st.booleans() | st.integers() | st.floats() | PARTS | st.lists(PARTS, max_size=2)
LOGPROBS = st.lists(st.floats(max_value=0) | st.floats(width=32, max_value=0), max_size=3).map(tuple)
COMPLETIONS = st.builds(
    Completion,
    prompt_ids=st.lists(st.integers(0, 2), max_size=4).map(tuple),
    completion_ids=st.lists(st.integers(0, 2), max_size=3).map(tuple),
    logprobs=LOGPROBS,
    text=PARTS,
    finish_reason=st.just("stop"),
    token_versions=st.lists(st.integers(0, 2), max_size=3).map(tuple),
    tool_calls=st.sampled_from([(), ({"name": "f"},)]),
    usage=st.sampled_from([None, (1, 2)]),
)
MESSAGES = st.fixed_dictionaries({"role": st.just("user")}, optional={"content": VALUE})
STEPS = st.builds(
    Step,
    chat_completions=st.lists(MESSAGES, max_size=4),
    thought=PARTS,
    action=VALUE,
    observation=VALUE,
    model_response=PARTS,
    info=st.dictionaries(PARTS, VALUE, max_size=2),
    reward=st.floats(),
    completion=st.none() | COMPLETIONS,
)


@pytest.mark.slow
@given(st.lists(STEPS, max_size=6))
def test_any_turns_come_back_as_they_were(steps: list[Step]) -> None:
    line = json.dumps(written(Trajectory(steps=steps)))
    read = trajectory_from_json(json.loads(line))
    assert repr(asdict(read)) == repr(asdict(Trajectory(steps=steps)))
    assert repr(asdict(hop(hop(Trajectory(steps=steps))))) == repr(asdict(read))
    assert json.dumps(written(hop(read))) == line


@pytest.mark.parametrize(
    "value", [[{"": ()}], [{"a": (1, (2,))}, {}], [{1: "a"}], [(1,), (2,)], [(), ((),)], [{"a": 1}, ()], []]
)
def test_plain_value_is_what_json_reads_again(value: Any) -> None:
    assert plain_json(value) == json.loads(json.dumps(value))


def test_numbers_of_numpy_are_numbers_when_they_are_read_again() -> None:
    task = {"seed": np.int64(3), "share": np.float32(0.5), "done": np.True_, "list": [np.int32(1)]}
    info = {"turn": np.int64(2), "grid": np.zeros((1, 2))}
    line = json.dumps(written(Trajectory(task=task, reward=np.float32(1.0), steps=[Step(info=info)])))
    read = trajectory_from_json(json.loads(line))
    assert repr(read.task) == "{'seed': 3, 'share': 0.5, 'done': True, 'list': [1]}"
    assert repr(read.reward) == "1.0"
    assert repr(read.steps[0].info) == "{'turn': 2, 'grid': '[[0. 0.]]'}"


def test_field_of_a_subclass_named_as_a_column_spoils_nothing() -> None:
    kind = make_dataclass("Chat", [("messages", Any, None), ("conversations", Any, None)], bases=(Step,))
    line = written(Trajectory(steps=[kind([{"role": "user", "content": "ask"}], messages=["own"])]))
    assert trajectory_from_json(line).steps == [Step([{"role": "user", "content": "ask"}])]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("parents", [0]), ("parents", [-2]), ("starts", [1]), ("nodes", [1]), ("stops", [9])],
        *[("sizes", [99]), ("sizes", [-5]), ("sizes", [10**11]), ("sizes", [10**30])],
    ],
)
def test_tree_that_is_none_is_refused(name: str, value: list[int]) -> None:
    line = written(Trajectory(steps=[Step(completion=Completion(**VALUES))]))
    line["steps"]["completion"]["tokens"][name] = value
    with pytest.raises((LookupError, ValueError)):
        trajectory_from_json(line)


@pytest.mark.parametrize("number", [-1, 1, 10**30])
def test_number_of_no_message_is_refused(number: int) -> None:
    line = written(Trajectory(steps=[Step([{"role": "user", "content": "ask"}])]))
    line["steps"]["conversations"]["numbers"] = [number]
    with pytest.raises(IndexError, match="1 messages"):
        trajectory_from_json(line)


@pytest.mark.parametrize(("name", "value"), [("prompt_sizes", [9]), ("prompt_sizes", ["2"]), ("arrays", 3)])
def test_line_that_was_damaged_is_refused(name: str, value: Any) -> None:
    line = written(Trajectory(steps=[Step(completion=Completion(**VALUES))]))
    own = line["steps"]["completion"] if name in line["steps"]["completion"] else line["steps"]
    own[name] = value if name != "arrays" else dict.fromkeys(own[name], value)
    with pytest.raises((TypeError, ValueError)):
        trajectory_from_json(line)


@pytest.mark.slow
def test_two_thousand_turns_hop_without_recursion() -> None:
    steps, prompt = [], (0,)
    for turn in range(2_000):
        completion = Completion(**VALUES | {"prompt_ids": prompt, "completion_ids": (7, turn)})
        steps.append(Step(chat_completions=[{"role": "user", "content": "a"}], completion=completion))
        prompt = (*prompt, turn)  # the answer without its thought
    arrived = hop(hop(Trajectory(steps=steps)))
    assert arrived.completions[1_000:1_010] == [each.completion for each in steps[1_000:1_010]]
    assert pickle.loads(pickle.dumps(arrived.completions[-1])) == steps[-1].completion
    assert written(arrived)["steps"]["completion"]["tokens"]["sizes"][-1] == 3


def test_list_of_messages_is_the_agents_own_until_a_hop() -> None:
    history = [{"role": "user", "content": "a"}]
    step = Step(chat_completions=history)
    trajectory = Trajectory(steps=[step, Step(chat_completions=[*history, {"role": "user", "content": "b"}])])
    first = hop(trajectory)
    history.append({"role": "assistant", "content": "later"})
    assert step.chat_completions is history and len(hop(trajectory).steps[0].chat_completions) == 2
    assert [each["content"] for each in first.steps[1].chat_completions] == ["a", "b"]
    first.steps[0].chat_completions.append({"role": "user", "content": "c"})
    assert [each["content"] for each in hop(first).steps[0].chat_completions] == ["a", "c"]
    with pytest.raises(AttributeError, match="'Step' object has no attribute 'other'"):
        _ = step.other  # type: ignore[attr-defined]


def test_steps_are_made_when_they_are_read() -> None:
    trajectory = play(KINDS[0], 3)
    trajectory.steps[1].info["unseen"] = True
    arrived = hop(hop(trajectory))
    assert (arrived.num_sampled_tokens, arrived.seat_rewards) == (300, {"": 0.0})
    assert training_samples(arrived) == training_samples(trajectory)
    assert written(arrived) == written(trajectory) and "steps" not in vars(arrived)
    assert arrived.turns[2].completion is arrived.steps[2].completion and arrived.turns is arrived.steps


def test_change_of_a_step_is_in_all_that_follows() -> None:
    arrived = hop(play(KINDS[0], 3))
    turns, step = arrived.turns, arrived.steps[1]
    step.reward, step.observation, step.info["mark"] = 2.0, "other", [1]
    step.chat_completions.append({"role": "user", "content": "more"})
    arrived.steps.append(Step(reward=0.5))
    assert turns[1].reward == 0.0 and [turn.reward for turn in arrived.turns] == [0.0, 2.0, 0.0, 0.5]
    assert sum(training_samples(arrived)[0].rewards) == 2.5
    for later in (hop(arrived), hop(hop(arrived)), trajectory_from_json(written(arrived))):
        assert later == arrived and later.steps[1].info == {"mark": [1]}
    assert written(hop(arrived)) == written(arrived)
    assert written(hop(arrived))["steps"]["reward"] == [0.0, 2.0, 0.0, 0.5]


def test_steps_set_in_place_of_those_that_arrived_stay() -> None:
    arrived = hop(play(KINDS[0], 3))
    arrived.steps = [Step(reward=5.0)]
    assert [turn.reward for turn in arrived.turns] == [5.0]
    assert written(arrived)["steps"]["reward"] == [5.0] and hop(arrived) == arrived


def test_steps_made_by_two_threads_at_once_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, make, of_other = hop(play(KINDS[0], 3)), Turns.steps, list[Any]()

    def made_beside(turns: Turns) -> list[Step]:
        if not of_other:  # here the other thread takes its turn
            of_other.append(None)
            of_other[0] = arrived.steps
        return make(turns)

    monkeypatch.setattr(Turns, "steps", made_beside)
    assert arrived.steps is of_other[0] is arrived.steps


def test_line_makes_no_list_of_messages_in_another_threads_step() -> None:
    arrived = hop(play(KINDS[0], 3))
    assert arrived.steps[0].chat_completions  # the others' messages are stored with it no more
    assert written(arrived) == written(play(KINDS[0], 3))
    assert [step.conversation is None for step in arrived.steps] == [True, False, False]


@dataclass(frozen=True, kw_only=True)
class OwnCompletion(Completion):
    """A completion of a user's sampler."""

    own: int = 0


@dataclass
class OwnStep(Step):
    """A step of a user's agent."""

    own: Any = None


def _marked(step: Step) -> Step:
    step.mark = 1  # type: ignore[attr-defined]
    return step


@pytest.mark.parametrize(
    "step",
    [
        Step(action=(1, 2)),
        Step(info={1: "a"}),
        Step(reward=np.float32(0.5)),  # type: ignore[arg-type]
        Step(observation={"deep": [TerminationReason.ENV_DONE]}),
        Step([{"role": "user", "content": ({"type": "text"},)}]),
        Step([{"role": "user", "content": 0.0}, {"role": "user", "content": -0.0}]),
        Step(completion=Completion(**VALUES, tool_calls=({"arguments": (1,)},))),
        Step(observation="\ud83d\ude00"),
        Step(completion=OwnCompletion(**VALUES, own=1)),
        OwnStep(own={1}),
        _marked(Step()),
    ],
)
def test_what_json_would_change_travels_as_it_is(step: Step) -> None:
    trajectory = Trajectory(steps=[Step(action="plain"), step])
    arrived = hop(hop(trajectory))
    assert repr(arrived) == repr(trajectory) and type(arrived.steps[1]) is type(step)
    assert vars(arrived.steps[1]).get("mark") == vars(step).get("mark")
    assert repr(arrived.steps[1].chat_completions) == repr(step.chat_completions)
    assert written(arrived) == written(trajectory)


class WithoutText:
    """A value of a user's environment, whose text takes long or cannot be made."""

    def __str__(self) -> str:
        raise AssertionError("nobody reads it")


def test_value_that_travels_as_it_is_is_made_no_text() -> None:
    arrived = hop(hop(Trajectory(steps=[Step(info={"own": WithoutText()}, reward=1.0)])))
    assert type(arrived.steps[0].info["own"]) is WithoutText
