"""What a user gets wrong on the command line: a table of bad inputs, each answered at once by a sentence.

The rows call a command's ``main`` in this process, because a program of its own takes seconds to import what
it needs, and there are hundreds of rows. ``test_program_says_it_too`` starts real programs for a few of
them, to show that nothing between ``main`` and the shell adds a traceback or another exit status.
"""

from __future__ import annotations

import importlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from broken_inputs import WORKLOADS, fill

from launch import console

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
CPU_SECONDS = 40.0
"""Of this process and its children: other tests have the rest of the machine."""
SECONDS = 150.0
LINES = 8
"""Most lines of an answer: argparse shows the usage before its sentence."""

RECIPE = "recipe=calculator"
MINE = "workload=good"
RUN = "run.directory=new"
RESUME = "run.resume=true"

# What stands in a row: the command line, and words that its answer has to have.
SETTINGS = [
    ("train", "no workload"),
    ("train recipe=calculater", "no recipe 'calculater'.*'calculator'"),
    ("train recipe=../train", "recipe"),
    ("train recipe=", "recipe"),
    ("train recipe=null", "recipe=null"),
    (f"train {RECIPE} lr=1", r"no setting 'lr'.*learner\.optimizer\.lr"),
    (f"train {RECIPE} learner.optimizer.lrr=1", r"learner\.optimizer\.lr'"),
    (f"train {RECIPE} learner.optimizer.lr=-1", r"learner\.optimizer\.lr=-1"),
    (f"train {RECIPE} learner.optimizer.lr=nan", r"learner\.optimizer\.lr=nan"),
    (f"train {RECIPE} learner.optimizer.lr=1e400", r"learner\.optimizer\.lr=inf"),
    (f"train {RECIPE} run.num_steps=many", r"run\.num_steps.*many|many.*run\.num_steps"),
    (f"train {RECIPE} run.num_steps=3.5", r"3\.5"),
    (f"train {RECIPE} run.num_steps=", r"run\.num_steps"),
    (f"train {RECIPE} run.num_steps", r"run\.num_steps"),
    (f"train {RECIPE} --num-steps=3", "--num-steps"),
    (f"train {RECIPE} =3", "=3"),
    (f"train {RECIPE} rollout.group_size=[", r"rollout\.group_size=\["),
    (f"train {RECIPE} rollout=5", r"rollout is a section.*rollout\.group_size"),
    (f"train {RECIPE} seed=1,2", "seed=1,2"),
    (f"train {RECIPE} rollout={{group_sise:4}}", r"rollout\.group_size"),
    (f"train {RECIPE} ~rollout.group_size", r"rollout\.group_size"),
    (f"train {RECIPE} ++of.my.own=1", "of"),
    (f"train {RECIPE} hydra.run.dir=here", "hydra"),
    (f"train {RECIPE} seed=99999999999999999999", "seed=9"),
    (f"train {RECIPE} rollout.group_size=1000000000000", r"rollout\.group_size=1000000000000 .* at most"),
    (f"train {RECIPE} run.resume=true run.directory=trained", "holds something else than a run"),
    (f"train {RECIPE} run.resume=true run.directory=model", r"config\.json.*: name the folder of a run"),
    (f"train {RECIPE} rollout.max_prompt_tokens=9999", r"max_model_tokens"),
    (f"train {RECIPE} rollout.task_weights=weight", "task 0 has weight=None"),
    (f"train {RECIPE} selection.masked_reasons=[tired]", "tired"),
    (f"train {RECIPE} stages=[]", r"stages=\[\]"),
    (f"train {RECIPE} stages=[reinforcement]", "'reinforcement'.*'reinforce'"),
    (f"train {RECIPE} stages=[reinforce,reinforce]", "twice"),
    (f"train {RECIPE} stages=[nowhere:Stage]", "no module 'nowhere'"),
    (f"train {RECIPE} stages=[raises:Stage]", r"raises\.py, line 1.*HALF = 1 / 0.*ZeroDivisionError"),
    (f"train {RECIPE} stages=[good:Agent]", "Stage"),
    (f"train {RECIPE} stage_settings.polish.num_steps=3", "polish"),
    (f"train {RECIPE} algorithm.name=nonsense", r"algorithm\.name='nonsense'"),
    (f"train {RECIPE} algorithm.module=nowhere", r"algorithm\.module='nowhere'"),
    (f"train {RECIPE} algorithm.module=raises", r"raises\.py, line 1.*HALF = 1 / 0.*ZeroDivisionError"),
    (f"train {RECIPE} algorithm.options.zeal=1", "zeal"),
    (f"train {RECIPE} learner.device=cuda", r"learner\.device=cuda.*learner\.device=cpu"),
    (f"train {RECIPE} server.engine.num_gpus=1", r"server\.engine\.num_gpus=1"),
    (f"train {RECIPE} learner.verl.nonsense=1", "nonsense"),
    (f"train {RECIPE} server.engine.name=vlm", "'vlm'.*'vllm'"),
    (f"train {RECIPE} server.engine.name=good:Env", "Engine"),
    (
        f"train {RECIPE} server.engine.name=raises:Engine",
        r"raises\.py, line 1.*HALF = 1 / 0.*ZeroDivisionError",
    ),
    (f"train {RECIPE} server.weights.transport=pigeon", "'pigeon'"),
    (
        f"train {RECIPE} server.weights.transport=nccl evaluation.every=1 evaluation.num_replicas=1",
        r"Set evaluation\.num_replicas=0",
    ),
    (f"train {RECIPE} server.http_host=0.0.0.0", r"server\.http_port=8000"),
    (f"train {RECIPE} server.http_host=10.0.0.1 server.http_port=8000", "10.0.0.1 would.*TROUPE_API_KEYS"),
    (f"train {RECIPE} server.tool_parser=hermse", "'hermse'.*'hermes'"),
    (f"train {RECIPE} server.tool_parser=openai", "'openai' reads no text"),
    (f"train {RECIPE} server.reasoning_parser=granite", "'granite' names no parser.*vllm:granite, or leave"),
    (f"train {RECIPE} server.tool_parser=hermes", r"tool_parser=hermes .*server\.http_port=8000"),
    (
        f"train {RECIPE} expert_iteration.optimizer={{min_lr_ratio:1.5}}",
        r"expert_iteration\.optimizer\.min_lr_ratio=1\.5 has to be .*at most 1",
    ),
    (f"train {RECIPE} server.agents.keep_seconds=5", r"agents\.keep_seconds.*launch\.serve"),
    (f"evaluate {RECIPE} fleet.max_actors=3", r"fleet\.max_actors.*to its end"),
    (f"train {RECIPE} server.adapters.mine=a_file", r"server\.adapters.*launch\.serve"),
    (f"train {RECIPE} evaluation.rollouts_per_task=2", r"evaluation\.rollouts_per_task.*launch\.evaluate"),
    (f"train {RECIPE} run.best_metric=beauty", "'beauty'"),
    (f"train {RECIPE} model.chat_template_kwargs.loud=true", r"chat_template_kwargs"),
    ("serve algorithm.name=nonsense run.num_steps=-3", r"algorithm\.name.*(launch\.|troupe )train"),
    ("serve run.num_steps=-3", r"run\.num_steps.*(launch\.|troupe )train"),
    ("serve recipe=guess", "task_from_message"),
    ("train recipe=calculator fleet.nodes={a:0}", r"fleet\.nodes={a: 0} reserves nothing"),
    (
        "serve recipe=calculator fleet.num_actors=16 fleet.max_actors=8",
        r"fleet\.num_actors=16 .* fleet\.max_actors=8",
    ),
    ("serve server.weights.transport=files", r"server\.weights\.transport"),
    ("serve server.http_prt=1", r"server\.http_port"),
    ("serve server.http_port=70000", r"server\.http_port=70000"),
    ("serve server.http_port=PORT model.path=/nowhere", "Port.*server.http_port="),
    ("serve server.http_host=999.1.1.1 model.path=model", "999.1.1.1"),
    ("serve server.http_host=0.0.0.0 model.path=model", r"http_host=0\.0\.0\.0 .*TROUPE_API_KEYS"),
    ("serve server.access.keys_file=nowhere model.path=model", r"keys_file=nowhere"),
    (
        "serve server.access.per_minute={tokens:9} model.path=model",
        "'tokens': 9}.*TROUPE_API_KEYS",
    ),
    ("evaluate recipe=calculator", r"model\.path is not set"),
    ("evaluate model.path=model", "recipe=calculator"),
    ("evaluate recipe=calculator model.pth=model", r"model\.path"),
    (
        "evaluate recipe=calculator model.path=model algorithm.name=nonsense",
        r"algorithm\.name.*(launch\.|troupe )train",
    ),
    (
        "evaluate recipe=calculator model.path=model run.num_steps=3",
        r"run\.num_steps.*(launch\.|troupe )train",
    ),
    ("evaluate recipe=calculator model.path=model rollout.group_size=4", r"rollouts_per_task"),
    ("evaluate recipe=calculator model.path=model evaluation.num_tasks=0", r"evaluation\.num_tasks=0"),
    ("evaluate recipe=calculator model.path=model rollout.max_response_tokens=9999", r"max_model_tokens"),
]

OF_WORKLOADS = [
    ("workload=nowhere", "no module 'nowhere'"),
    ("workload=good.py", "not the name of a module"),
    ("workload=./good", "not the name of a module"),
    ("workload=.good", "not the name of a module"),
    ("workload=", "workload"),
    ("workload=os", "no workload"),
    ("workload=raises", r"raises\.py, line 1.*HALF = 1 / 0.*ZeroDivisionError: division by zero"),
    ("workload=raises_when_called", r"raises_when_called\.py, line 2.*return \[\]\[seed\].*IndexError"),
    ("workload=raises_in_a_library", r"raises_in_a_library\.py, line 4.*json\.loads.*JSONDecodeError"),
    ("workload=lacks_its_dataset", "no_such_data"),
    ("workload=has_a_syntax_error", r"has_a_syntax_error\.py, line 1.*def workload\(seed\).*SyntaxError"),
    ("workload=is_indented_wrongly", r"is_indented_wrongly\.py, line 2.*return 1.*IndentationError"),
    ("workload=imports_what_is_missing", r"imports_what_is_missing\.py, line 1.*a_package_that_nobody_has"),
    ("workload=imports_a_name_that_is_missing", r"imports_a_name_that_is_missing\.py, line 1.*Environment"),
    ("workload=imports_a_broken_module", r"raises\.py, line 1.*HALF = 1 / 0.*ZeroDivisionError"),
    ("workload=leaves_the_program", r"leaves_the_program\.py, line 3.*sys\.exit\(3\)"),
    ("workload=is_binary", r"is_binary"),
    ("workload=holds_nothing", r"no workload\(seed\)"),
    ("workload=holds_a_number", r"no workload\(seed\)"),
    ("workload=returns_none", "NoneType, not a Workload"),
    ("workload=takes_no_seed", r"takes_no_seed.*TypeError.*positional argument"),
    ("workload=gives_unknown_arguments", r"gives_unknown_arguments\.py|good\.py.*enviroment"),
    ("workload=gives_an_agent", r"agent_class.*instance.*agent_class=Agent"),
    ("workload=gives_an_environment", r"env_class.*instance.*env_class=Env"),
    ("workload=gives_a_strange_agent", r"agent_class=dict.*BaseAgent"),
    ("workload=gives_a_strange_environment", r"env_class=dict.*BaseEnv"),
    ("workload=gives_an_unfinished_agent", r"Unfinished.*update_from_model"),
    ("workload=gives_an_unfinished_environment", r"Unfinished.*from_dict.*step"),
    ("workload=gives_unknown_agent_args", r"Agent.*unexpected keyword|Agent\(\) takes no arguments"),
    ("workload=has_tasks_of_text", "dict"),
    ("workload=rewards_nan", r"step\(\) returned the reward nan"),
    ("workload=steps_as_gymnasium_does", r"5 values, as Gymnasium"),
    ("workload=is_async", r"step\(\) is async"),
    ("workload=makes_no_environment", "from_dict returned None"),
    ("workload=acts_in_text", "return Action"),
    ("workload=forgets_its_steps", "append exactly one Step"),
]

FOR_TRAINING = [
    ("workload=has_no_tasks", "training dataset is empty"),
    ("workload=has_a_list_of_tasks", "list.*Dataset"),
    ("workload=has_no_demonstrations", r"model\.path"),
    ("workload=has_no_demonstrations model.path=model warm_start.num_steps=3", "demonstrations"),
    (f"{MINE} model.path=quantized", r"model\.path='quantized' has quantized weights.*\(QLoRA\)"),
    (f"{MINE} model.path=model run.directory=a_file", r"run\.directory=.*a_file"),
    (f"{MINE} model.path=model run.directory=a_file/run", r"run\.directory=.*a_file/run"),
    (f"{MINE} model.path=model run.directory=/proc/run", r"run\.directory=/proc/run"),
    (f"{MINE} model.path=model run.directory={'x' * 300}", r"run\.directory=.*xxx"),
    (f"{MINE} model.path=model run.directory=", r"run\.directory"),
    (f"{MINE} model.path=model run.directory=trained/run", r"run\.resume=true"),
    (f"{MINE} model.path=model run.directory=trained/run_binary_latest {RESUME}", "latest"),
    (f"{MINE} model.path=model run.directory=trained/run_latest_nowhere {RESUME}", "step_000099"),
    (f"{MINE} model.path=model run.directory=trained/run_without_state {RESUME}", r"state\.json"),
    (f"{MINE} model.path=model run.directory=trained/run_binary_state {RESUME}", "step_000030"),
    (f"{MINE} model.path=model run.directory=trained/run_state_of_nothing {RESUME}", "step_000030"),
    (f"{MINE} model.path=model run.directory=trained/run_damaged_weights {RESUME}", r"model\.safetensors"),
    (f"{MINE} model.path=model run.directory=trained/run_binary_consumed {RESUME}", r"consumed\.jsonl"),
    (f"{MINE} model.path=model run.directory=trained/run_binary_metrics {RESUME}", r"metrics\.jsonl"),
]

FOR_EVALUATION = [
    (f"{MINE} model.path=model run.directory=a_file", r"run\.directory=.*a_file"),
    (f"{MINE} model.path=model run.directory=/proc/run", r"run\.directory=/proc/run"),
    ("model.path=model workload=has_no_held_out_tasks", "held-out"),
    ("model.path=model workload=has_a_list_of_held_out_tasks", "list.*Dataset"),
]

OF_MODELS = [
    ("model.path=config_of_unknown_type", r"model_type='qwen33'.*Did you mean 'qwen3'"),
    ("model.path=config_of_other_weights", r"vocab_size=7, and model\.embed_tokens\.weight .* rows"),
    ("model.path=tokenizer_of_other_model", "tokens up to number 999999"),
    ("model.path=/nowhere", "/nowhere"),
    ("model.path=./nowhere", "nowhere"),
    ("model.path=runs/nope", "runs/nope"),
    ("model.path=nobody/has-this-model", "nobody/has-this-model"),
    ("model.path=no-such-model", "no-such-model"),
    ("model.path='two words'", "two words"),
    ("model.path=a_file", "a_file"),
    ("model.path=an_empty_folder", "an_empty_folder"),
    ("model.path=config_missing", r"config\.json"),
    ("model.path=config_empty", r"config\.json"),
    ("model.path=config_binary", r"config\.json"),
    ("model.path=config_of_no_model", r"config\.json"),
    ("model.path=tokenizer_empty", "tokenizer"),
    ("model.path=tokenizer_binary", "tokenizer"),
    ("model.path=tokenizer_of_nothing", "tokenizer"),
    ("model.path=tokenizer_config_binary", "tokenizer"),
    ("model.path=template_missing", "chat template"),
    ("model.path=template_wrong", "chat template"),
    ("model.path=weights_missing", "safetensors"),
    ("model.path=weights_empty", r"model\.safetensors"),
    ("model.path=weights_cut_off", r"model\.safetensors"),
    ("model.path=trained/run_without_checkpoint", "run_without_checkpoint"),
    ("model.path=trained/run_binary_latest", "latest"),
    ("model.path=trained/run_latest_nowhere", "step_000099"),
    ("model.path=model model.chat_template_kwargs.loud=true", "'loud'"),
]

FOR_SERVING = [
    ("model.path=trained/run_binary_state", "step_000030"),
    ("server.adapters.mine=adapter_ia3", r"model\.path"),
    ("model.path=model server.adapters.policy=adapter_ia3", "'policy'.*choose another"),
    ("model.path=model server.adapters.mine=nowhere", "nowhere"),
    ("model.path=model server.adapters.mine=a_file", "a_file"),
    ("model.path=model server.adapters.mine=adapter_broken", "adapter_broken"),
    ("model.path=model server.adapters.mine=adapter_of_nothing", "adapter_of_nothing"),
    ("model.path=model server.adapters.mine=adapter_ia3", "LoRA"),
]

CHAOS = [
    ("chaos destroy", "destroy"),
    ("chaos kill", "--below"),
    ("chaos kill --below 1", "role"),
    ("chaos kill queen --below 1", "queen"),
    ("chaos kill learner", "--below"),
    ("chaos kill learner --below me", "me"),
    ("chaos kill learner --below SELF", "no learner"),
    ("chaos list --below 4194305", "4194305"),
    ("chaos list --below -1", "-1"),
    ("chaos list --below 99999999999999999999", "9999"),
    ("chaos list learner", "unrecognized arguments: learner"),
    ("chaos --speed=3", "--speed"),
    ("chaos list --seed x", "--seed"),
    ("nonsense", "no command 'nonsense'"),
]

TABLE = [
    *SETTINGS,
    *((f"train {arguments}", words) for arguments, words in [*OF_WORKLOADS, *FOR_TRAINING]),
    # Each command makes the same checks: a few of the rows show that it does.
    *((f"evaluate {arguments} model.path=model", words) for arguments, words in OF_WORKLOADS[::6]),
    *((f"evaluate {arguments}", words) for arguments, words in FOR_EVALUATION),
    *((f"train {MINE} {arguments}", words) for arguments, words in OF_MODELS),
    *((f"evaluate {MINE} {arguments}", words) for arguments, words in OF_MODELS[::5]),
    *((f"serve server.http_port=FREE {arguments}", words) for arguments, words in OF_MODELS[::5]),
    *((f"serve server.http_port=FREE {arguments}", words) for arguments, words in FOR_SERVING),
    *CHAOS,
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with workloads, models, runs and adapters, most of them broken."""
    folder = tmp_path_factory.mktemp("bad inputs")
    fill(folder, tiny_model)
    return folder


@pytest.fixture
def in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The working directory of a user, whose modules are forgotten afterwards. Nothing may start Ray."""

    def starts(*_: object, **__: object) -> None:
        pytest.fail("the command went on to start Ray")

    monkeypatch.chdir(place)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(ray, "init", starts)
    importlib.invalidate_caches()
    yield
    for name in (*WORKLOADS, "is_binary"):
        sys.modules.pop(name, None)


def words_of(line: str, taken: socket.socket) -> list[str]:
    """The arguments of a row's command line."""
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        free = other.getsockname()[1]
    values = {"PORT": str(taken.getsockname()[1]), "FREE": str(free), "SELF": str(os.getpid())}
    filled = re.sub("PORT|FREE|SELF", lambda found: values[found[0]], line.replace("http_port", "http\0port"))
    quoted = re.findall(r"(?:'[^']*'|\S)+", filled.replace("http\0port", "http_port"))
    return [word for word in quoted if word]


def check_answer(status: object, answer: str, words: str) -> None:
    """Exit status 2, and one paragraph with ``words``."""
    assert status == 2, answer
    assert "Traceback" not in answer, answer
    paragraph = answer.strip()
    assert paragraph and "\n\n" not in paragraph and len(paragraph.splitlines()) <= LINES, answer
    assert re.search(words, " ".join(paragraph.split()), re.IGNORECASE), answer


@contextmanager
def soon() -> Iterator[None]:
    """Fails if the block has computed or waited too long."""
    cpu, start = sum(os.times()[:4]), time.monotonic()
    yield
    assert sum(os.times()[:4]) - cpu < CPU_SECONDS
    assert time.monotonic() - start < SECONDS


def test_table_is_long_and_no_row_stands_in_it_twice() -> None:
    assert len(TABLE) >= 80
    assert len({line for line, _ in TABLE}) == len(TABLE)


@pytest.mark.parametrize(("line", "words"), TABLE, ids=[line[:80] for line, _ in TABLE])
def test_bad_input_is_answered_at_once_by_a_sentence(
    line: str, words: str, in_place: None, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        arguments = words_of(line, taken)
        with soon():
            try:
                status: object = console.main(arguments)
            except SystemExit as end:  # argparse's
                status = end.code
    check_answer(status, capfd.readouterr().err, words)


@pytest.mark.parametrize(
    "line",
    [
        f"train {RECIPE} learner.optimizer.lrr=1",
        "train workload=rewards_nan",
        "evaluate recipe=calculator model.path=runs/nope",
        "serve model.path=tokenizer_empty",
        "chaos kill learner",
    ],
)
def test_program_says_it_too(line: str, place: Path) -> None:
    words = dict(TABLE) | {"evaluate recipe=calculator model.path=runs/nope": "runs/nope"}
    command, *arguments = line.split()
    with soon():
        program = subprocess.run(
            [sys.executable, "-m", f"launch.{command}", *arguments],
            cwd=place,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=200,
        )
    check_answer(program.returncode, program.stderr, words.get(line, ""))
