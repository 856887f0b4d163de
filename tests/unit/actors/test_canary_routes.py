"""A canary in front of a server: its share of chats and of an agent's messages, and their judgement."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from agent_server import AGENT, AgentServer, LocalActor, agent_server
from kept_recordings import kept_recordings
from ray import serve
from starlette.testclient import TestClient
from test_policy_http import PinnedReplica, scripted, serving

from actors.sampling.serve_sampler import ServeSampler
from actors.serving.pinned import PinnedPolicy
from actors.settings import RecordingConfig, ServedModel, ServerConfig
from environments.data.canary import PROMOTED, ROLLED_BACK, TRIAL, read_canary
from environments.data.recordings import Recording, Recordings, read_recordings
from environments.data.trajectory_file import TrajectoryFile
from environments.types import Completion, Step, TerminationReason, Trajectory
from launch.recipes import canary as canary_recipe
from launch.recipes.canary import main
from policies.sampler import SampleRequest, SamplingParams

SERVED, CANARY = "111", "222"
"""Answers of the two versions."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "recordings"


@pytest.fixture
def client(tokenizer_folder: Path, folder: Path) -> Iterator[TestClient]:
    recording = RecordingConfig(folder=str(folder))
    version = ServedModel(path=str(tokenizer_folder), name="tiny@2", version=2)
    pinned = {version.name: (version, PinnedReplica(tokenizer_folder, version, recording))}
    with serving(tokenizer_folder, version=1, pinned=pinned, recording=recording) as client:
        yield client


def chat(client: TestClient, question: str, liked: str | None = None, **fields: object) -> str:
    """The text of the answer to a question; with ``liked`` it gets feedback: 1 if it is that, else -1."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": question}], **fields}
    answer = client.post("/v1/chat/completions", json=body).json()
    text = str(answer["choices"][0]["message"]["content"])
    if liked is not None:
        score = 1.0 if text == liked else -1.0
        given = client.post(f"/v1/responses/{answer['id']}/feedback", json={"score": score})
        assert given.status_code == 200, given.text
    return text


def results(
    path: Path, successes: int, ending: TerminationReason = TerminationReason.ENV_DONE, version: int = 0
) -> str:
    """A file of ``launch.evaluate`` with that many successes at forty tasks; the others end by ``ending``."""
    tasks = [{"question": number} for number in range(40)]
    with TrajectoryFile(path, {}, tasks) as file:
        for number, task in enumerate(tasks):
            reward = float(number < successes)
            completion = Completion(text="", finish_reason="stop", policy_version=version)
            steps = [Step(chat_completions=[], reward=reward, done=True, completion=completion)]
            file.append(
                number,
                Trajectory(
                    task=task,
                    steps=steps,
                    reward=reward,
                    termination_reason=TerminationReason.ENV_DONE if reward else ending,
                ),
            )
    return str(path)


def play(client: TestClient, good: str) -> None:
    """Play 25 conversations with each version, of which the answer ``good`` is liked."""
    numbers = {SERVED: 0, CANARY: 0}
    for question in range(200):
        numbers[chat(client, f"Question {question}", liked=good)] += 1
        if min(numbers.values()) >= 25:
            return
    raise AssertionError(f"The share does not hold: {numbers}")


@pytest.mark.slow
def test_canary_answers_its_share_and_both_are_recorded(client: TestClient, folder: Path) -> None:
    assert {chat(client, f"Before {number}") for number in range(9)} == {SERVED}
    assert main(["start", str(folder), "tiny@2", "--share", "0.5"]) == 0
    texts = [chat(client, f"Question {number}", liked=CANARY) for number in range(40)]
    assert 8 <= texts.count(CANARY) <= 32
    assert texts == [chat(client, f"Question {number}") for number in range(40)]
    assert chat(client, "Question 0", policy_version=1) == SERVED, "as the client has asked"
    recorded = {each.answer.model: each.trajectory for each in read_recordings(folder)}
    assert {name: each.completions[0].policy_version for name, each in recorded.items()} == {
        "tiny": 1,
        "tiny@2": 2,
    }


@pytest.mark.slow
def test_better_canary_is_promoted(
    client: TestClient, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["start", str(folder), "tiny@2", "--share", "0.5"])
    assert main(["judge", str(folder)]) == 3 and "each needs 20" in capsys.readouterr().out
    play(client, good=CANARY)
    assert main(["judge", str(folder)]) == 3 and "--held-out" in capsys.readouterr().out
    files = results(tmp_path / "served.jsonl", 20), results(tmp_path / "canary.jsonl", 30)
    assert main(["judge", str(folder), "--held-out", *files]) == 0
    assert "tiny@2: promoted." in capsys.readouterr().out
    canary = read_canary(folder)
    assert canary is not None and canary.state == PROMOTED
    assert {chat(client, f"Later {number}") for number in range(20)} == {CANARY}


def test_clients_that_choose_their_version_do_not_count(
    client: TestClient, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["start", str(folder), "tiny@2", "--share", "1e-9"])
    for number in range(3):
        chat(client, f"Question {number}", liked=CANARY, model="tiny@2")
    main(["judge", str(folder)])
    assert "feedback on 0 of the canary's" in capsys.readouterr().out


@pytest.mark.slow
def test_canary_with_feedback_alone_raises_an_alarm(
    client: TestClient, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["start", str(folder), "tiny@2", "--share", "0.5"])
    play(client, good=CANARY)
    files = results(tmp_path / "served.jsonl", 30), results(tmp_path / "canary.jsonl", 10)
    assert main(["judge", str(folder), "--held-out", *files]) == 0
    assert "ALARM" in capsys.readouterr().out
    canary = read_canary(folder)
    assert canary is not None and canary.state == ROLLED_BACK
    assert {chat(client, f"Later {number}") for number in range(20)} == {SERVED}
    assert main(["judge", str(folder)]) == 2, "the trial is over"
    assert "was rolled back" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["start", "tiny@2", "--share", "1.5"], "--share=1.5"),
        (["start", "tiny"], "names no version"),
        (["judge"], "start one"),
        (["judge", "--margin", "nan"], "--margin=nan is no loss: choose one from 0"),
        (["judge", "--margin=-0.1"], "--margin=-0.1"),
        (["judge", "--margin", "inf"], "--margin=inf"),
        (["end", "promote"], "start one"),
    ],
)
def test_mistakes_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], word: str
) -> None:
    command, *others = arguments
    assert main([command, str(tmp_path), *others]) == 2
    assert word in capsys.readouterr().err


def test_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recordings(tmp_path, keep_days=1.0, readers=("training",)).open()
    main(["start", str(tmp_path), "tiny@2"])
    assert main(["judge", str(tmp_path), "--held-out", "absent.jsonl", "absent.jsonl"]) == 2
    assert "absent.jsonl" in capsys.readouterr().err


def test_spoilt_results_are_no_failures_of_the_canary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Recordings(tmp_path, keep_days=1.0, readers=("training",)).open()
    main(["start", str(tmp_path), "tiny@2"])
    files = (
        results(tmp_path / "served.jsonl", 40),
        results(tmp_path / "canary.jsonl", 10, TerminationReason.ENV_ERROR),
    )
    assert main(["judge", str(tmp_path), "--held-out", *files]) == 2
    assert "10 tasks in common, of 40 and 10" in capsys.readouterr().err


def test_folder_without_recordings_has_no_trial(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        assert main(["start", str(folder), "tiny@2"]) == 2
        assert "is no folder of recordings: name a server" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_results_in_the_other_order_decide_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Recordings(tmp_path, keep_days=1.0, readers=("training",)).open()
    main(["start", str(tmp_path), "tiny@2"])
    better, worse = (
        results(tmp_path / f"{version}.jsonl", successes, version=version)
        for version, successes in ((1, 40), (2, 10))
    )
    assert main(["judge", str(tmp_path), "--held-out", worse, better]) == 2
    assert "2.jsonl has the results of tiny@2" in capsys.readouterr().err
    assert main(["judge", str(tmp_path), "--held-out", better, worse]) == 0
    assert "Held-out success has fallen" in capsys.readouterr().out


@pytest.mark.parametrize("starts_another", [False, True])
def test_end_by_hand_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, starts_another: bool) -> None:
    Recordings(tmp_path, keep_days=1.0).open()
    main(["start", str(tmp_path), "tiny@2"])

    def read_while_it_ends(folder: Path, reader: str) -> list[Recording]:
        assert main(["end", str(folder), "roll-back"]) == 0
        if starts_another:
            assert main(["start", str(folder), "tiny@3"]) == 0
        return []

    monkeypatch.setattr(canary_recipe, "read_recordings", read_while_it_ends)
    files = (results(tmp_path / f"{name}.jsonl", number) for name, number in (("served", 40), ("canary", 0)))
    assert main(["judge", str(tmp_path), "--held-out", *files]) == 2
    found = read_canary(tmp_path)
    assert found is not None and (found.version, found.state, found.reason) == (
        ("tiny@3", TRIAL, "") if starts_another else ("tiny@2", ROLLED_BACK, "By hand.")
    )


def test_trial_does_not_end_a_promotion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Recordings(tmp_path, keep_days=1.0).open()
    assert main(["start", str(tmp_path), "tiny@2"]) == main(["end", str(tmp_path), "promote"]) == 0
    assert main(["start", str(tmp_path), "tiny@3"]) == 2
    assert "tiny@2 was promoted" in capsys.readouterr().err
    assert main(["end", str(tmp_path), "roll-back"]) == 2
    assert f"delete {tmp_path / 'canary.json'} to have the model answer again" in capsys.readouterr().err


def test_results_of_other_tasks_are_rejected(
    client: TestClient, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["start", str(folder), "tiny@2"])
    assert main(["start", str(folder), "tiny@2"]) == 2, "one at a time"
    served = results(tmp_path / "served.jsonl", 20)
    with TrajectoryFile(tmp_path / "canary.jsonl", {}, [{"question": 0}]) as file:
        step = Step(chat_completions=[], done=True)
        file.append(0, Trajectory(task={"question": 0}, steps=[step]))
    assert main(["judge", str(folder), "--held-out", served, str(tmp_path / "canary.jsonl")]) == 2
    assert "1 tasks in common" in capsys.readouterr().err
    canary = read_canary(folder)
    assert canary is not None and canary.state == TRIAL


@pytest.fixture
def served(tokenizer_folder: Path, folder: Path) -> Iterator[AgentServer]:
    """A server of an agent, whose policy is there as the versions 7 and 2."""
    recording = RecordingConfig(folder=str(folder))
    version = ServedModel(path=str(tokenizer_folder), name="tiny@2", version=2)
    pinned = {version.name: (version, PinnedReplica(tokenizer_folder, version, recording))}
    with agent_server(tokenizer_folder, pinned=pinned, recording=recording, version=7) as server:
        yield server


def post(server: AgentServer, path: str, session: str | None = None, **body: object) -> Any:
    """The answer of the agent, unless another model is named, to a request."""
    headers = {} if session is None else {"X-Session-Id": session}
    body = {"model": AGENT, **body}
    return (
        httpx.post(f"{server.url}/v1/{path}", json=body, headers=headers, timeout=60)
        .raise_for_status()
        .json()
    )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.mark.slow
def test_pinned_version_samples_by_its_own_queue(
    tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = ServedModel(path=str(tokenizer_folder), name="tiny@2", version=2)
    context = SimpleNamespace(app_name="app", replica_id=SimpleNamespace(unique_id="r"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)

    async def play() -> Completion:
        sampler = ServeSampler({"": "app", version.policy: f"app{version.policy}"}, str(tokenizer_folder))
        actor = LocalActor(sampler)

        async def samplers_of(replica: str, load: int, known: list[int]) -> dict[int, Any]:
            if known:
                await asyncio.Event().wait()
            return {1: actor}

        directory = SimpleNamespace(samplers_of=SimpleNamespace(remote=samplers_of))
        replica = PinnedPolicy.func_or_class.__new__(PinnedPolicy.func_or_class)
        config = ServerConfig(engine=scripted(replies=["222"]))
        await replica.__init__(version, config, SimpleNamespace(), directory)
        replica.check_health()
        params = SamplingParams(policy=version.policy)
        return await sampler.sample(SampleRequest(messages=[user("Hi")], params=params))

    completion = asyncio.run(asyncio.wait_for(play(), 30))
    assert (completion.text, completion.policy, completion.policy_version) == (CANARY, "", 2)


@pytest.mark.slow
def test_canary_samples_its_share_of_an_agents_conversations(served: AgentServer, folder: Path) -> None:
    main(["start", str(folder), "tiny@2", "--share", "0.5"])
    versions = []
    for question in (f"Question {number}" for number in range(14)):
        answer = post(served, "chat/completions", messages=[user(question)])
        of_policy = post(served, "chat/completions", model="tiny", messages=[user(question)])
        said = answer["choices"][0]["message"]
        history = post(served, "chat/completions", messages=[user(question), said, user("And?")])
        first = post(served, "responses", input=question)
        second = post(served, "responses", input="And?", previous_response_id=first["id"])
        fork = post(served, "responses", input="Or?", previous_response_id=first["id"])
        session = [post(served, "responses", question, input=each) for each in (question, "And?")]
        answers = (answer, of_policy, history, first, second, fork, *session)
        (version,) = {each["policy_version"] for each in answers}
        versions.append(version)
    assert set(versions) == {2, 7}
    recorded = kept_recordings(folder)
    assert len(recorded) == 112 and len({each.answer.conversation for each in recorded}) == 14
    assert {
        (each.answer.model, completion.policy_version, completion.policy)
        for each in recorded
        for completion in each.trajectory.completions
    } == {("tiny", 7, ""), ("tiny@2", 2, ""), (AGENT, 7, ""), (f"{AGENT}@2", 2, "")}


@pytest.mark.slow
def test_feedback_on_an_agents_answers_decides_the_trial(
    served: AgentServer, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["start", str(folder), "tiny@2", "--share", "0.5"])
    for number in range(70):
        answer = post(served, "responses", input=f"Question {number}")
        score = 1.0 if answer["policy_version"] == 2 else -1.0
        path = f"{served.url}/v1/responses/{answer['id']}/feedback"
        httpx.post(path, json={"score": score}, timeout=60).raise_for_status()
    files = results(tmp_path / "served.jsonl", 30), results(tmp_path / "canary.jsonl", 10)
    assert main(["judge", str(folder), "--held-out", *files]) == 0
    assert "ALARM" in capsys.readouterr().out
    versions = {post(served, "responses", input=f"Later {number}")["policy_version"] for number in range(9)}
    assert versions == {7}, "rolled back"
