"""The folder of recordings: what a kill leaves, who writes at the same time, and what is learned from it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kept_recordings import kept_recordings

from environments.data import recordings as recordings_module
from environments.data.conversation_file import is_imitated
from environments.data.feedback import judged_groups, liked_conversations, preferred_answers
from environments.data.recordings import (
    DAY_SECONDS,
    SWEEP_SECONDS,
    Deletion,
    Feedback,
    RecordedAnswer,
    Recording,
    Recordings,
    read_recordings,
)
from environments.disk import replaced
from environments.errors import ConfigError, DatasetError
from environments.types import Completion, Message, Step, TerminationReason, Trajectory

WRITER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from environments.data.recordings import Feedback, Recordings
from test_recordings import add_answer

recordings = Recordings(Path(sys.argv[1]), 30, ["training"])
while True:
    answer_id = add_answer(recordings, ["What is 1+1?", "2"])
    print(answer_id, "answer", flush=True)
    recordings.add_feedback("alice", answer_id, Feedback(score=1.0))
    print(answer_id, "feedback", flush=True)
"""


@pytest.fixture
def recordings(tmp_path: Path) -> Recordings:
    opened = Recordings(tmp_path / "recordings", keep_days=30, readers=["training"])
    opened.open()
    return opened


def conversation(*texts: str) -> list[Message]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]


def add_answer(
    recordings: Recordings,
    texts: list[str],
    score: float | None = None,
    after: str | None = None,
    prompt_ids: tuple[int, ...] = (1, 2),
    completion_ids: tuple[int, ...] = (3, 4),
    pictures: tuple[str, ...] = (),
    finish_reason: str = "stop",
) -> str:
    """Record the last of ``texts`` as an answer to those before it, with feedback if there is a score."""
    answer_id = f"resp_{uuid.uuid4().hex}"
    completion = Completion(
        text=texts[-1],
        prompt_ids=prompt_ids,
        completion_ids=completion_ids,
        logprobs=(-0.1, -1 / 3),
        finish_reason=finish_reason,
        policy_version=5,
        token_versions=(5, 6),
        pictures=pictures,
    )
    step = Step(chat_completions=conversation(*texts), model_response=texts[-1], completion=completion)
    trajectory = Trajectory(
        task={"question": texts[0]}, steps=[step], termination_reason=TerminationReason.ENV_DONE
    )
    answer = RecordedAnswer(
        answer_id=answer_id, owner="alice", model="agent/a", created=len(texts), after=after
    )
    assert recordings.write(answer, trajectory)
    if score is not None:
        recordings.add_feedback("alice", answer_id, Feedback(score=score))
    return answer_id


def test_nothing_that_was_acknowledged_is_lost_by_a_kill(recordings: Recordings) -> None:
    command = [sys.executable, "-c", WRITER, str(recordings.folder), *sys.path]
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    lines = [writer.stdout.readline() for _ in range(41)]
    writer.kill()
    lines += writer.stdout.read().splitlines()
    writer.wait(60)
    found = {each.answer.answer_id: each.feedback for each in kept_recordings(recordings.folder)}
    for answer_id, kind in map(str.split, lines):
        assert answer_id in found and (kind == "answer" or found[answer_id] is not None)
    assert len(found) >= 21


def test_one_of_many_at_once_gives_the_feedback(recordings: Recordings) -> None:
    answer_id = add_answer(recordings, ["Hi", "Ho"])

    def give(number: int) -> bool:
        try:
            recordings.add_feedback("alice", answer_id, Feedback(score=number / 16))
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        given = list(pool.map(give, range(16)))
    assert sum(given) == 1
    assert recordings.feedback("alice", answer_id) == Feedback(score=given.index(True) / 16)


def test_answer_after_a_deleted_one_is_not_written(recordings: Recordings) -> None:
    first = add_answer(recordings, ["Hi", "Ho"])
    recordings.delete("alice", first)
    with pytest.raises(AssertionError):
        add_answer(recordings, ["Hi", "Ho", "And?", "So"], after=first)
    assert not list((recordings.folder / "answers").iterdir())


@pytest.mark.parametrize("num_done", range(8))
def test_killed_deletion_can_be_repeated(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch, num_done: int
) -> None:
    unlink, ids, done = Path.unlink, list[str](), list[Path]()
    for _ in range(3):
        ids.append(add_answer(recordings, ["Hi", "Ho"], 1.0, after=ids[-1] if ids else None))

    def dying(path: Path, missing_ok: bool = False) -> None:
        if len(done) == num_done:
            raise KeyboardInterrupt
        done.append(path)
        unlink(path, missing_ok)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "unlink", dying)
        recordings.delete("alice", ids[0])
    assert recordings.delete("alice", ids[0]).answers[0] == ids[0]
    assert not list((recordings.folder / "answers").iterdir())


def test_deletion_names_the_reader_or_nothing_is_read(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deletion of an answer that a training has read and not yet noted."""
    answer_id = add_answer(recordings, ["Hi", "Ho"], 1.0)
    create, deletions = recordings_module._create, list[Deletion]()

    def slow_create(path: Path, *given: Any, **options: Any) -> None:
        if path.parent.name == "readings":
            deletions.append(recordings.delete("alice", answer_id))
        create(path, *given, **options)

    monkeypatch.setattr(recordings_module, "_create", slow_create)
    used = read_recordings(recordings.folder)
    assert deletions == [Deletion(answers=[answer_id], readings=[])] and used == []


def test_feedback_during_a_deletion_is_deleted(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_id = add_answer(recordings, ["Hi", "Ho"])
    unlink, late = Path.unlink, [Feedback(score=1.0, comment="Private.")]

    def unlink_and_judge(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        if late and path.name.startswith(answer_id):
            with suppress(FileNotFoundError):
                recordings.add_feedback("alice", answer_id, late.pop())

    monkeypatch.setattr(Path, "unlink", unlink_and_judge)
    recordings.delete("alice", answer_id)
    assert not list((recordings.folder / "answers").iterdir())


def test_long_conversation_is_read_once(recordings: Recordings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Feedback on each answer: a file is opened for its place and for its content, not for those after it."""
    ids, opened, open_file = list[str](), Counter[str](), Path.open
    for _ in range(9):
        ids.append(add_answer(recordings, ["Hi", "Ho"], 1.0, after=ids[-1] if ids else None))

    def counted(path: Path, *given: Any, **options: Any) -> Any:
        opened[path.name] += 1
        return open_file(path, *given, **options)

    monkeypatch.setattr(Path, "open", counted)
    assert len(read_recordings(recordings.folder)) == 9
    assert {each: opened[f"{each}.json"] for each in ids} == dict.fromkeys(ids, 2)
    monkeypatch.undo()
    recordings.folder.joinpath("answers", f"{ids[4]}.json").unlink()
    assert {each.answer.answer_id for each in read_recordings(recordings.folder)} == {*ids[:4]}


def test_deletion_reaches_what_a_kill_has_left_of_a_file(
    recordings: Recordings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole text beside the file, where its writer is killed before the first of two names goes."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda path, missing_ok: None)
        answer_id = add_answer(recordings, ["Hi", "Ho"], 1.0)
    other = add_answer(recordings, ["Hi", "Ho"])
    assert len(list((recordings.folder / "answers").iterdir())) == 5
    recordings.delete("alice", answer_id)
    assert [path.name for path in (recordings.folder / "answers").iterdir()] == [f"{other}.json"]


def test_only_named_readers_read(recordings: Recordings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'spy' may not read .* for training: server.recording.readers"):
        read_recordings(recordings.folder, "spy")
    with pytest.raises(ConfigError, match="is no folder of recordings"):
        read_recordings(tmp_path)


def test_use_that_cannot_be_noted_is_an_error(recordings: Recordings) -> None:
    add_answer(recordings, ["Hi", "Ho"], 1.0)
    (recordings.folder / "readings").rename(recordings.folder / "gone")
    with pytest.raises(ConfigError, match=r"cannot be noted .* let 'training' write into"):
        read_recordings(recordings.folder)


def test_damaged_file_is_an_error_with_its_name(recordings: Recordings) -> None:
    answer_id, other = (add_answer(recordings, ["Hi", "Ho"], 1.0) for _ in range(2))
    path = recordings.folder / "answers" / f"{answer_id}.json"
    whole = path.read_text()
    path.write_text(whole[:-20])
    with pytest.raises(DatasetError, match=answer_id):
        read_recordings(recordings.folder)
    path.write_text(whole[:20])
    with pytest.raises(DatasetError, match=answer_id):
        recordings.delete("alice", other)
    assert recordings.has(other), "nothing is deleted by half"


def test_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"server.recording.folder=.* cannot be written to"):
        Recordings(tmp_path / "file" / "recordings", 30).open()


def test_groups_have_scores_as_rewards_and_exact_tokens(recordings: Recordings) -> None:
    for score in (1.0, -0.5, None):
        add_answer(recordings, ["Hi", "Ho"], score)
    add_answer(recordings, ["Hi", "Ho", "And?", "So"], 0.25, prompt_ids=(1, 2, 3, 4, 5))
    two, one = judged_groups(read_recordings(recordings.folder))
    assert sorted(each.reward for each in two.trajectories) == [-0.5, 1.0]
    assert [each.rollout_id for each in two.trajectories] == ["00000000/0000", "00000000/0001"]
    assert two.task == {"question": "Hi"} and one.group_id == "00000001"
    (trajectory,) = one.trajectories
    assert trajectory.steps[-1].reward == trajectory.reward == 0.25 and trajectory.succeeded
    (completion,) = trajectory.completions
    assert completion.completion_ids == (3, 4) and completion.logprobs == (-0.1, -1 / 3)
    assert completion.token_versions == (5, 6)


def test_demonstrations_imitate_liked_answers_alone(recordings: Recordings) -> None:
    whole = ["A", "a", "B", "b", "C", "c"]
    after = None
    for number, score in enumerate((-1.0, 0.5, None), 1):
        after = add_answer(recordings, whole[: 2 * number], score, after)
    add_answer(recordings, ["D", "d", "E", "e"], 1.0)  # a chat, whose client has sent d
    add_answer(recordings, ["F", "f"], 0.0)
    add_answer(recordings, ["G", "g"], 1.0, pictures=("a cat",))
    add_answer(recordings, ["H", "h"], 1.0, finish_reason="length")
    found = liked_conversations(read_recordings(recordings.folder))
    texts = sorted("".join(each["content"] for each in messages) for messages in found)
    imitated = sorted(each["content"] for messages in found for each in messages if is_imitated(each))
    assert texts == ["AaBb", "DdEe"] and imitated == ["b", "e"]


def test_demonstration_imitates_all_texts_of_its_answer(recordings: Recordings) -> None:
    """An agent's answer of two steps, of which the second has a history that was rewritten before it."""

    def shown(answer: Recording, *conversations: list[Message]) -> list[list[str]]:
        (step,) = answer.trajectory.steps
        steps = [replace(step, chat_completions=each) for each in conversations]
        (found,) = liked_conversations([replace(answer, trajectory=Trajectory(steps=steps))])
        return [[each["content"] for each in found if is_imitated(each) is own] for own in (False, True)]

    add_answer(recordings, ["A", "a"], 1.0)
    (answer,) = read_recordings(recordings.folder)
    whole = ["A", "a", "B", "b", "C", "c"]
    steps = [conversation(*whole[:4]), conversation(*whole)]
    assert shown(answer, *steps) == [["A", "a", "B", "C"], ["b", "c"]]
    assert shown(answer, *steps, conversation("Z", "z")) == [["Z"], ["z"]]


def test_answers_to_other_pictures_are_not_compared(recordings: Recordings) -> None:
    for score, picture, answer in ((1.0, "a cat", 4), (-1.0, "a dog", 5), (-1.0, "a cat", 5)):
        ids = (3, answer)
        add_answer(recordings, ["Hi", "Ho"], score, completion_ids=ids, pictures=(picture,))
    judged = read_recordings(recordings.folder)
    assert sorted(len(each.trajectories) for each in judged_groups(judged)) == [1, 2]
    (pair,) = preferred_answers(judged)
    assert [each.completions[0].pictures for each in pair] == [("a cat",)] * 2


def test_preferences_pair_each_answer_once(recordings: Recordings) -> None:
    for score in (0.5, 1.0, -1.0, 0.5, None):
        ids = (3, round(4 + 2 * (score or 0)))
        add_answer(recordings, ["Hi", f"Answer {score}"], score, completion_ids=ids)
    add_answer(recordings, ["Other", "answer"], 1.0, prompt_ids=(7,))
    for score in (1.0, -1.0):  # the same tokens: nothing to prefer
        add_answer(recordings, ["Again", "same"], score, prompt_ids=(8,), completion_ids=(9, 9))
    (pair,) = preferred_answers(read_recordings(recordings.folder))
    assert [each.steps[0].model_response for each in pair] == ["Answer 1.0", "Answer -1.0"]


def test_clock_that_was_set_back_stops_no_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=lambda: time.time() + 365 * DAY_SECONDS, monotonic=lambda: 100.0)
    monkeypatch.setattr(recordings_module, "time", clock)
    recordings = Recordings(tmp_path, keep_days=30)
    recordings.open()
    clock.time = time.time
    old = add_answer(recordings, ["Hi", "Ho"])
    before = time.time() - 31 * DAY_SECONDS
    os.utime(tmp_path / "answers" / f"{old}.json", (before, before))
    clock.monotonic = lambda: 101.0 + SWEEP_SECONDS
    new = add_answer(recordings, ["Hi", "Ho"])
    assert [each.name for each in (tmp_path / "answers").iterdir()] == [f"{new}.json"]


def test_feedback_being_written_outlasts_a_sweep(recordings: Recordings) -> None:
    answer_id = add_answer(recordings, ["Hi", "Ho"])
    with replaced(recordings.folder / "answers" / f"{answer_id}.feedback.json") as unfinished:
        unfinished.touch()
        recordings.sweep()
        assert unfinished.exists()
