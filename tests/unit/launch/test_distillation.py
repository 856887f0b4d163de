"""A teacher is found and compared with the student before a run is started; one at an address scores."""

from __future__ import annotations

import asyncio
import json
import math
import shutil
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from learner_samples import ragged_samples
from scripted_judge import Script, serving
from trained_run import make_run

from environments.errors import ConfigError
from environments.types import Message
from launch.recipes import calculator
from launch.run_folder.checkpoint import CheckpointFolder
from launch.run_folder.model_paths import model_folder
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig, algorithm_of
from launch.training.stages.base import Stage
from launch.training.stages.chosen import chosen_stages
from launch.validation.memory_plan import Process, processes, shape_of
from launch.validation.workload import check_model
from launch.workload import Workload
from policies.chat import load_tokenizer
from policies.learning import served_teacher
from policies.learning.samples import TrainBatch
from policies.learning.served_teacher import ServedTeacher
from policies.model_files import num_rows

SETTINGS = ["workload=launch.recipes.calculator", "algorithm.name=distillation"]


def config(teacher: Path | str, *settings: str) -> TrainConfig:
    return compose([*SETTINGS, f"algorithm.options.teacher={teacher}", *settings])


def check(teacher: Path | str, student: Path) -> None:
    given = config(teacher, f"model.path={student}")
    check_model(given, calculator.workload(0))


@pytest.fixture
def other(tmp_path: Path, tiny_model: Path) -> Path:
    """A copy of the tiny model, for a test to change."""
    return Path(shutil.copytree(tiny_model, tmp_path / "other"))


def edit(path: Path, change: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | change), encoding="utf-8")


def test_teacher_of_another_shape_with_the_same_tokens_is_taken(tiny_model: Path, untied_model: Path) -> None:
    check(untied_model, tiny_model)


@pytest.mark.slow
@pytest.mark.parametrize("where", [["learner.device=cpu"], ["learner.device=cuda"]])
@pytest.mark.parametrize("more", [[], ["learner.num_workers=2"]])
def test_plan_has_the_teacher_where_the_ranks_are(
    tiny_model: Path, untied_model: Path, where: list[str], more: list[str]
) -> None:
    def rank(*settings: str) -> Process:
        given = compose([*settings, f"model.path={tiny_model}", *where, *more])
        return next(each for each in processes(given, shape_of(given)) if each.name == "learner rank")

    with_teacher = rank(*SETTINGS, f"algorithm.options.teacher={untied_model}")
    held = with_teacher.count * (with_teacher.weights - rank(*SETTINGS[:1]).weights)
    assert held == pytest.approx((untied_model / "model.safetensors").stat().st_size, rel=0.01)


def test_teacher_that_cannot_be_planned_is_named_by_its_setting(tiny_model: Path) -> None:
    given = config("nobody-here/no-model", f"model.path={tiny_model}")
    with pytest.raises(
        ConfigError, match=r"^algorithm\.options\.teacher='nobody-here/no-model' is no folder"
    ):
        processes(given, shape_of(given))


@pytest.mark.slow
def test_tiny_student_has_the_tokens_of_its_demonstrations(
    tiny_model: Path, demonstrations: list[list[Message]]
) -> None:
    def check_tiny(conversations: list[list[Message]]) -> None:
        given, workload = config(tiny_model), calculator.workload(0)
        check_model(given, Workload(**{**vars(workload), "demonstrations": conversations}))

    check_tiny(demonstrations)
    with pytest.raises(ConfigError, match=r"has token \d+ as '.*', and the student has it as"):
        check_tiny([[{"role": "user", "content": "quite other words, other words"}]])


def test_teacher_that_reads_a_token_otherwise_is_refused(tiny_model: Path, other: Path) -> None:
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = tokenizer["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    edit(other / "tokenizer.json", tokenizer)
    number = min(vocab["A"], vocab["B"])
    with pytest.raises(
        ConfigError, match=rf"other' has token {number} as 'B', and the student has it as 'A'"
    ):
        check(other, tiny_model)


def test_teacher_with_another_end_is_refused(tiny_model: Path, other: Path) -> None:
    edit(other / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    with pytest.raises(ConfigError, match=r"eos_token='<\|endoftext\|>', and the student has '<\|im_end\|>'"):
        check(other, tiny_model)


@pytest.mark.slow
def test_teacher_with_a_shorter_context_is_refused(tiny_model: Path, other: Path) -> None:
    edit(other / "config.json", {"max_position_embeddings": 16})
    with pytest.raises(ConfigError, match=r"max_position_embeddings=16, and cannot score a rollout of"):
        check(other, tiny_model)


def test_teacher_with_fewer_rows_than_student_is_refused(tiny_model: Path, other: Path) -> None:
    size = json.loads((tiny_model / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    edit(other / "config.json", {"vocab_size": size + 8})
    for path in other.glob("*.safetensors"):
        path.rename(path.with_suffix(".bin"))  # so that its rows are not compared with its configuration
    with pytest.raises(
        ConfigError, match=rf"vocab_size={size}, and the student can sample {size + 8} tokens"
    ):
        check(tiny_model, other)


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ("''", r"options\.teacher is not set, and algorithm\.name='distillation' learns from a teacher"),
        ("runs/no/teacher", r"options\.teacher='runs/no/teacher' does not exist"),
    ],
)
def test_teacher_that_is_missing_is_named(teacher: str, message: str, tiny_model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        check(teacher, tiny_model)


def test_best_checkpoint_of_a_run_can_be_the_teacher(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    best, newest = (make_run(run, tiny_model, step) for step in (20, 30))
    CheckpointFolder(run, kept=1).mark_best(20, "eval/reward_mean", 0.5)
    assert model_folder(str(run / "checkpoints" / "best")) == str(best / "huggingface")
    assert model_folder(str(run)) == str(newest / "huggingface")
    check(run / "checkpoints" / "best", tiny_model)
    monkeypatch.chdir(run / "checkpoints")
    assert model_folder("best") == str(best / "huggingface")


def test_stages_without_rollouts_have_no_use_for_a_teacher(tiny_model: Path) -> None:
    settings = ["stages=[warm_start]", "warm_start.num_steps=5", f"model.path={tiny_model}"]
    with pytest.raises(
        ConfigError, match=r"algorithm\.name=distillation starts a teacher, which has no effect"
    ):
        chosen_stages(config(tiny_model, *settings))


# -- at an address -------------------------------------------------------------------------------------


def scoring(student: Path, differs: Mapping[int, str] | None = None) -> Script:
    """A server that gives token ``number`` the log-probability ``-number / 8``."""
    tokenizer, others = load_tokenizer(str(student)), differs or {}

    def script(body: dict[str, Any], _: int) -> tuple[int, dict[str, Any]]:
        assert (body["echo"], body["logprobs"], body["max_tokens"]) == (True, 0, 0)
        texts = [others.get(number, tokenizer.decode([number])) for number in body["prompt"]]
        logprobs = [None, *(-number / 8 for number in body["prompt"][1:])]
        return 200, {"choices": [{"logprobs": {"tokens": texts, "token_logprobs": logprobs}}]}

    return script


def echoes_of(text: str | None, score: float) -> Script:
    """A server that has the same text and log-probability for each token."""

    def script(body: dict[str, Any], _: int) -> tuple[int, dict[str, Any]]:
        count = len(body["prompt"])
        logprobs = {"tokens": [text] * count, "token_logprobs": [None, *[score] * (count - 1)]}
        return 200, {"choices": [{"logprobs": logprobs}]}

    return script


def check_served(script: Script, student: Path, *settings: str) -> list[dict[str, Any]]:
    with serving(script) as server:
        named = ["algorithm.options.teacher_model=policy@best", f"model.path={student}", *settings]
        check_model(config(server.url, *named), calculator.workload(0))
        return server.bodies


def test_teacher_at_an_address_reads_all_tokens_of_the_student(tiny_model: Path) -> None:
    bodies = check_served(scoring(tiny_model), tiny_model, "rollout.max_response_tokens=100")
    longest = compose(["rollout.max_response_tokens=100", *SETTINGS]).rollout.longest
    assert {body["model"] for body in bodies} == {"policy@best"}
    assert {len(body["prompt"]) for body in bodies} == {2, longest}
    assert {number for body in bodies for number in body["prompt"]} == set(
        range(num_rows(str(tiny_model)) or 0)
    )


@pytest.mark.parametrize(
    ("script", "settings", "message"),
    [
        ({5: "other"}, [], r"teacher='http.*' has token 5 as 'other', and the student has it as"),
        ((200, {"choices": [{"logprobs": None}]}), [], r"cannot teach.* no log-probability of each of"),
        (echoes_of("a", math.nan), [], r"cannot teach.* no log-probability of each of"),
        (echoes_of(None, 0.0), [], r"has token \d+ as 'None', and the student has it as"),
        ((400, {"error": {"message": "no echo here"}}), [], r"cannot teach.*no echo here.*echo and logprobs"),
        (
            None,
            ["algorithm.options.teacher_model=''"],
            r"teacher_model is not set: name a model that GET http",
        ),
        (None, ["rollout.temperature=0.7"], r"at temperature 1, and rollouts have rollout\.temperature=0\.7"),
        (None, ["algorithm.options.teacher_key=sk-1"], r"key_variable is no name of an env(?!.*sk-1)"),
        (None, ["algorithm.options.teacher_key=NO_SUCH_KEY"], r"key_variable='NO_SUCH_KEY', .* is not set"),
    ],
)
def test_teacher_at_an_address_that_cannot_teach_is_refused(
    script: Any, settings: list[str], message: str, tiny_model: Path
) -> None:
    answers = (lambda *_: script) if isinstance(script, tuple) else scoring(tiny_model, script)
    with pytest.raises(ConfigError, match=message):
        check_served(script if callable(script) else answers, tiny_model, *settings)


def test_model_of_an_address_has_no_effect_on_a_folder(tiny_model: Path) -> None:
    given = config(tiny_model, "algorithm.options.teacher_model=large", f"model.path={tiny_model}")
    with pytest.raises(ConfigError, match=r"is no address, so that teacher_model and teacher_key have no ef"):
        check_model(given, calculator.workload(0))


def test_teacher_that_is_away_is_named_before_the_start(tiny_model: Path) -> None:
    named = ["algorithm.options.teacher_model=m", f"model.path={tiny_model}"]
    with pytest.raises(
        ConfigError, match=r"teacher='http://127\.0\.0\.1:9/v1' cannot teach.*does not answer"
    ):
        check_model(config("http://127.0.0.1:9/v1", *named), calculator.workload(0))


def test_silent_teacher_is_named_at_its_first_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def silent(*_: object) -> tuple[int, dict[str, Any]]:
        over.wait(10)
        return 503, {}

    over = threading.Event()
    monkeypatch.setattr(served_teacher, "FIRST_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"cannot teach.*timeout_seconds=0\.1, retries=0"):
        try:
            check_served(silent, tiny_model)
        finally:
            over.set()


def test_address_needs_no_memory_of_a_rank(tiny_model: Path) -> None:
    given = config("http://127.0.0.1:9/v1", "algorithm.options.teacher_model=m", f"model.path={tiny_model}")
    ranks = [
        next(each for each in processes(each, shape_of(given)) if each.name == "learner rank")
        for each in (given, compose([*SETTINGS[:1], f"model.path={tiny_model}"]))
    ]
    assert ranks[0] == ranks[1]


def test_served_teacher_scores_sampled_tokens_and_no_others(tiny_model: Path) -> None:
    given = config("http://host/v1", "algorithm.options.teacher_model=m")
    with serving(scoring(tiny_model)) as server:
        options = {**algorithm_of(given).options, "teacher": server.url}
        teacher = ServedTeacher.of(replace(algorithm_of(given), options=options))
        assert teacher is not None
        samples = ragged_samples(4)
        scored = teacher.scored([TrainBatch(samples=samples[:1]), TrainBatch(samples=samples[1:])])
    found = [sample for batch in scored for sample in batch.samples]
    for sample, before in zip(found, samples, strict=True):
        pairs = zip(before.response_ids, before.loss_mask, strict=True)
        assert list(sample.teacher_logprobs) == [-number / 8 * bit for number, bit in pairs]


# -- imitation -----------------------------------------------------------------------------------------


def imitation(address: str, *settings: str) -> Stage:
    named = ["stages=[imitation]", f"stage_settings.imitation.teacher={address}"]
    named += ["stage_settings.imitation.teacher_model=large", "stage_settings.imitation.num_steps=7"]
    (stage,) = chosen_stages(compose([SETTINGS[0], *named, *settings]))
    return stage


def test_teacher_to_imitate_is_sampled_before_the_start() -> None:
    with serving(lambda *_: "Hello.") as server:
        stage = imitation(server.url, "stage_settings.imitation.batch_size=5", "warm_start.num_epochs=3")
        stage.check_workload(calculator.workload(0))

        async def cell() -> None:  # of a notebook, which has an event loop of its own
            stage.check_workload(calculator.workload(0))

        asyncio.run(cell())
    assert [body["model"] for body in server.bodies] == ["large", "large"]
    assert (stage.num_steps, stage.config.warm_start.batch_size) == (7, 5)


@pytest.mark.parametrize(
    ("address", "settings", "message"),
    [
        ("http://127.0.0.1:9/v1", [], r"stage_settings\.imitation\.teacher: The server at http.* be reached"),
        ("localhost:8000", [], r"stage_settings\.imitation\.teacher: base_url is no web address"),
        (
            "http://h/v1",
            ["stage_settings.imitation.teacher_key=NO_KEY"],
            r"key_variable='NO_KEY', .* not set",
        ),
        ("http://h/v1", ["stage_settings.imitation.steps=7"], r"stage_settings\.imitation={.*steps"),
        ("http://h/v1", ["stage_settings.imitation.num_steps=-7"], r"num_steps=-7 has to be at least 0"),
        ("http://h/v1", ["stage_settings.imitation.num_tasks=-7"], r"num_tasks=-7 has to be at least 0"),
        ("http://h/v1", ["algorithm.name=ppo"], r"algorithm\.name=ppo starts a critic, which has no effect"),
    ],
)
@pytest.mark.slow
def test_imitation_that_cannot_work_is_refused(address: str, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        imitation(address, *settings).check_workload(calculator.workload(0))
