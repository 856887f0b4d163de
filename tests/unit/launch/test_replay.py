"""``launch.replay`` on a run of three updates, with a learner of one weight in the place of a model."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from scripted_judge import judged, serving, verdict
from trained_run import save_whole

from environments.data.trajectory_json import plain_json
from environments.disk import FileDigest
from environments.errors import ConfigError, EnvironmentFailure, TroupeError
from environments.rewards.group_judge import GroupJudge
from environments.rewards.judge import Judge
from environments.types import Completion, Step, TerminationReason, Trajectory, TrajectoryGroup
from launch.console import main
from launch.health.interrupt import Interrupts
from launch.replay import Replay
from launch.reporting.model_card import model_card
from launch.run_folder.checkpoint import StreamState
from launch.settings.compose import compose
from launch.settings.tree import TrainConfig, algorithm_of
from launch.training.activity import Activity, Clock
from launch.training.engine_comparison import EngineComparison
from launch.training.past_run import PastRun
from launch.training.run_state import RunState
from launch.training.stages.reinforce import Reinforce
from launch.training.update_change import Change
from launch.training.update_report import UpdateReport
from policies.learning.kl import KLController
from policies.learning.samples import LearnerUpdate, TrainBatch

NUM_UPDATES = 3
REWARDS = {0: (1.0, 0.0), 1: (0.5, 0.25), 2: (0.0, 0.0), 3: (0.0, 2.0), 4: (1.0, 0.0), 5: (0.0, 3.0)}
"""Rewards of the two members of each group; an update takes two groups."""
SETTINGS = [
    "stages=[reinforce]",
    "algorithm.name=grpo",
    "algorithm.loss_aggregation=token-mean",
    "rollout.groups_per_step=2",
    "rollout.group_size=2",
    f"run.num_steps={NUM_UPDATES}",
    "learner.mini_batch_size=2",
]


class OneWeight:
    """A learner whose gradient is the mean advantage of its tokens, times one more than its weight."""

    def __init__(self) -> None:
        self.weight = 0.0

    def begin_phase(self, *of_phase: object) -> None: ...

    def score(self, batches: Sequence[TrainBatch]) -> list[TrainBatch]:
        return list(batches)

    def update(self, batches: Sequence[TrainBatch]) -> LearnerUpdate:
        gradient = 0.0
        for batch in batches:
            tokens = [(each, value) for each in batch.samples for value in each.advantages]
            # The last token of a rollout weighs twice, so that a group's gradient is not 0.
            gradient = sum(
                (1 + (each.rollout_id[-1] == "1")) * value * (1 + self.weight) for each, value in tokens
            ) / len(tokens)
            self.weight -= 0.1 * gradient
        metrics = {"learn/loss": gradient / 3, "learn/grad_norm": abs(gradient)}
        metrics |= dict.fromkeys(("learn/rollout_logprob_diff_mean", "learn/rollout_logprob_diff_max"), 0.0)
        return LearnerUpdate(metrics=metrics, num_optimizer_steps=len(batches))

    def publish(self, version: int) -> None: ...

    def begin_save(self, folder: str) -> Callable[[], dict[str, FileDigest]]:
        import torch
        from safetensors.torch import save_file

        Path(folder, "state").write_text(repr(self.weight))
        Path(folder, "huggingface").mkdir()
        tensors = {"weight": torch.tensor([self.weight], dtype=torch.float64)}
        save_file(tensors, Path(folder, "huggingface", "model.safetensors"))
        return dict

    def load(self, folder: str) -> None:
        self.weight = float(Path(folder, "state").read_text())


def played(group: int, member: int, reward: float) -> Trajectory:
    answer = Completion(
        prompt_ids=(1,),
        completion_ids=(2, 3),
        logprobs=(-1.0, -2.0),
        text="a",
        finish_reason="stop",
        policy_version=group // 2,
        token_versions=(group // 2,) * 2,
    )
    return Trajectory(
        task={"question": str(group)},
        rollout_id=f"{group:08d}/{member:04d}",
        steps=[Step(completion=answer, model_response="a" * group, action="b" * member, reward=reward)],
        reward=reward,
        termination_reason=TerminationReason.ENV_DONE,
    )


def group(number: int, rewards: Sequence[float]) -> TrajectoryGroup:
    members = tuple(played(number, member, reward) for member, reward in enumerate(rewards))
    return TrajectoryGroup(group_id=f"{number:08d}", task=members[0].task, trajectories=members)


def half_of_the_second(task_info: dict[str, Any], action: str) -> float:
    """The rewards of ``REWARDS``, but for the second member's, which is half of it."""
    return REWARDS[int(task_info["question"])][len(action)] / (1 + len(action))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a run that has made its updates, with checkpoints of the first and the last."""
    return trained(tmp_path / "run", REWARDS)


def trained(folder: Path, rewards: Mapping[int, Sequence[float]]) -> Path:
    """The folder of a run whose groups have these rewards."""
    folder.mkdir()
    config = compose([*SETTINGS, f"run.directory={folder}", "run.checkpoints.kept=9"])
    (folder / "settings.yaml").write_text(yaml.safe_dump(plain_json(config)), encoding="utf-8")
    state, learner, algorithm = RunState(config, folder), cast(Any, OneWeight()), algorithm_of(config)
    metrics = (folder / "metrics.jsonl").open("w", encoding="utf-8")
    tracker: Any = SimpleNamespace(
        announce=print,
        failures=lambda groups: None,
        step=lambda step, numbers, histograms, groups: metrics.write(
            json.dumps({"step": step, **numbers}) + "\n"
        ),
    )
    groups = (group(number, each) for number, each in rewards.items())
    run: Any = SimpleNamespace(
        algorithm=algorithm,
        learner=learner,
        kl=KLController(algorithm),
        interrupts=Interrupts(),
        rollouts=SimpleNamespace(take=lambda: next(groups), commit=dict),
        comparison=EngineComparison(config, algorithm, learner, None, print),
        report=UpdateReport(config, state, tracker, None),
        tracker=tracker,
    )
    for step in range(NUM_UPDATES):
        Reinforce(config).step(run, state, Clock(Activity()))
        if step != 1:
            save_whole(state, StreamState(), learner.begin_save)
    metrics.close()
    return folder


@contextmanager
def one_weight(run: PastRun, config: TrainConfig, stage: object) -> Iterator[Any]:
    yield OneWeight()


def replayed(folder: Path, update: int, **change: Any) -> tuple[bool, str]:
    """The result of the command, and all that it has printed."""
    lines: list[str] = []
    scratch = folder / ".replay"
    scratch.mkdir()
    replay = Replay(PastRun(folder), scratch, cast(Any, one_weight), lines.append)
    return replay.replay(update, Change(**change)).is_same, "\n".join(lines)


def test_updates_from_the_nearest_checkpoint_come_out_the_same(folder: Path) -> None:
    is_same, printed = replayed(folder, 3)
    assert is_same
    assert "2 updates from the checkpoint of step 1 on" in printed
    assert printed.count("same ") == 3 and "the weights of its checkpoint, to the last bit" in printed


def test_first_update_is_computed_from_the_first_model(folder: Path) -> None:
    is_same, printed = replayed(folder, 1)
    assert is_same and "1 update from the model that the run began with on" in printed


def test_number_and_weight_that_differ_are_named(folder: Path) -> None:
    metrics = folder / "metrics.jsonl"
    records = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()]
    records[2]["learn/loss"] += 1e-12
    metrics.write_text("".join(json.dumps(each) + "\n" for each in records), "utf-8")
    other = OneWeight()
    other.weight = 0.5
    checkpoint = folder / "checkpoints" / "step_000003"
    (checkpoint / "huggingface" / "model.safetensors").unlink()
    (checkpoint / "huggingface").rmdir()
    other.begin_save(str(checkpoint))
    is_same, printed = replayed(folder, 3)
    assert not is_same
    assert "DIFFERS  update 3" in printed and "learn/loss is " in printed and "recorded was" in printed
    assert "weight differs by" in printed and "learner.num_threads" in printed


def test_reward_without_effect_changes_nothing(folder: Path) -> None:
    _, printed = replayed(folder, 3, reward="test_replay:as_it_was")
    rows = [line.split() for line in printed.splitlines() if line.startswith(("loss", "norm of"))]
    assert len(rows) == 2 and all(row[-1] == row[-2] for row in rows)


def as_it_was(task_info: dict[str, Any], action: str) -> float:
    return REWARDS[int(task_info["question"])][len(action)]


@pytest.mark.slow
def test_changed_reward_does_what_a_run_with_it_does(folder: Path, tmp_path: Path) -> None:
    halved = {number: (first, second / 2) for number, (first, second) in REWARDS.items()}
    other = trained(tmp_path / "other", {**REWARDS, 2: halved[2], 3: halved[3]})
    is_same, printed = replayed(folder, 2, reward="test_replay:half_of_the_second")
    assert is_same, "the update as it was is compared, not the changed one"
    assert "reward 0.500, gradient" in printed
    for name, label in (("learn/loss", "loss"), ("learn/grad_norm", "norm of the gradient")):
        before, now = (f"{PastRun(each).metrics(2)[name]:.6g}" for each in (folder, other))
        (row,) = (line for line in printed.splitlines() if line.startswith(label))
        assert row.split()[-2:] == [before, now]


def test_share_of_a_group_is_that_of_its_tokens_gradient(folder: Path) -> None:
    _, printed = replayed(folder, 2, without=2)
    rows = {line.split()[1]: line for line in printed.splitlines() if line.startswith("group ")}
    assert rows["00000002"].endswith("not learned from")
    assert rows["00000002"].count("gradient 0 (0%)") == 1
    assert "(100%)" in rows["00000003"]


def test_group_that_the_update_lacks_is_an_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="the update has the groups 00000002, 00000003"):
        replayed(folder, 2, without=93)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("rollout.group_size=4", "has no effect on an update whose rollouts are there"),
        ("algorithm.name=ppo", r"needs a critic, and .* has none: .*run\.replay="),
        ("algorithm.name=remax", "needs greedy rollouts"),
        ("algorithm.kl.place=loss", "needs a reference policy"),
    ],
)
def test_change_that_cannot_be_made_is_an_error(folder: Path, setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        replayed(folder, 2, overrides=[setting])


def test_state_that_is_gone_names_its_setting(folder: Path) -> None:
    (folder / "trajectories" / "step_000002.jsonl").unlink()
    with pytest.raises(TroupeError, match=r"2 has lost its rollouts\. run\.trajectories_kept=200"):
        replayed(folder, 3)
    with pytest.raises(TroupeError, match="has made 3 updates: --update 4 is none of them"):
        PastRun(folder).beginning_before(4)
    settings = yaml.safe_load((folder / "settings.yaml").read_text("utf-8"))
    settings["stages"], settings["warm_start"]["num_steps"] = ["warm_start", "reinforce"], 5
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings), "utf-8")
    with pytest.raises(TroupeError, match=r"oldest one is of step 1\..*every=50.*kept=9"):
        PastRun(folder).beginning_before(1)


def test_setting_of_an_earlier_state_is_named_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("run: {checkpoint_every: 5}", encoding="utf-8")
    named = r"settings\.yaml: There is no setting 'run\.checkpoint_every'. Did you mean 'run\.checkpoints'"
    for read in (PastRun, lambda folder: model_card(folder, folder, "a/b")):
        with pytest.raises(ConfigError, match=named):
            read(tmp_path)


@pytest.mark.parametrize("name", ["math", "math:no_such_function", "math:pi"])
def test_reward_that_is_no_function_is_an_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--reward {name}.* no function"):
        Change(reward=name).groups([])


def test_replay_refuses_a_folder_without_a_run(tmp_path: Path, capsys: Any) -> None:
    assert main(["replay", str(tmp_path), "--update", "3", "algorithm.name=rloo"]) == 2
    assert "has no settings.yaml: name the folder of a run" in capsys.readouterr().err


@pytest.mark.slow
def test_help_loads_no_serve() -> None:
    program = (
        "import sys; from launch import replay\n"
        "try: replay.main(['--help'])\n"
        "finally: sys.exit('ray.serve' in sys.modules and 'Serve takes seconds')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[3])


def by_length(body: dict[str, Any], number: int) -> str:
    """Judge the second member of a group, whose answer is "b", to be good; the first one has no text."""
    return verdict("b" in judged(body)["answer"], False)


@pytest.mark.slow
def test_judge_grades_a_stored_run_anew(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graded = {**REWARDS, 2: (0.0, 0.75), 3: (0.0, 0.75)}
    other = trained(tmp_path / "other", graded)
    with serving(by_length) as server:
        judge = Judge(server.endpoint(), {"It is a b.": 3.0, "It is polite.": 1.0})
        monkeypatch.setitem(globals(), "judge", judge)
        is_same, printed = replayed(folder, 2, reward="test_replay:judge")
        assert is_same and len(server.bodies) == 2, "one call for each answer, none for those without text"
        assert printed.count("reward 0.375, gradient") == 2
        for name, label in (("learn/loss", "loss"), ("learn/grad_norm", "norm of the gradient")):
            before, now = (f"{PastRun(each).metrics(2)[name]:.6g}" for each in (folder, other))
            (row,) = (line for line in printed.splitlines() if line.startswith(label))
            assert row.split()[-2:] == [before, now]
        server.script = lambda body, number: (503, {"error": {"message": "out to lunch"}})
        with pytest.raises(EnvironmentFailure, match=f"{server.url} does not answer.*out to lunch"):
            Change(reward="test_replay:judge").groups(PastRun(folder).groups(3))


def test_group_judge_compares_the_groups_of_a_stored_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = PastRun(folder).groups(3)
    with serving(lambda body, number: pytest.fail("a member without text needs no comparison")) as server:
        judge = GroupJudge(Judge(server.endpoint(), {"It is a b.": 3.0}))
        monkeypatch.setitem(globals(), "judge", judge)
        changed = Change(reward="test_replay:judge").groups(groups)
    assert [[each.reward for each in group.trajectories] for group in changed] == [[0.0, 1.0]] * len(groups)
