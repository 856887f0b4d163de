"""What the table of bad inputs names: workloads, models, runs and adapters, nearly all of them broken."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from launch.run_folder.checkpoint import LATEST, STATE, CheckpointFolder, Progress, StreamState

GOOD = """
from environments import BaseEnv, Dataset, Trajectory
from environments.types import Action, Step
from launch.workload import Workload
from policies.agents.base import BaseAgent


class Env(BaseEnv):
    def reset(self):
        return "1 + 1 = ?", {}

    def step(self, action):
        return "", 1.0, True, {}

    @staticmethod
    def from_dict(info):
        return Env()


class Agent(BaseAgent):
    chat_completions = property(lambda self: list(self.messages))

    def reset(self):
        self.messages, self._trajectory = [], Trajectory()

    def update_from_env(self, observation, reward, done, info, **kwargs):
        self.messages.append({"role": "user", "content": observation})

    def update_from_model(self, response, **kwargs):
        self.messages.append({"role": "assistant", "content": response})
        self.trajectory.steps.append(Step(chat_completions=list(self.messages)))
        return Action(action=response)


TALK = [{"role": "user", "content": "1 + 1 = ?"}, {"role": "assistant", "content": "2"}]


def make(**changes):
    tasks = Dataset([{"question": "1 + 1 = ?"}] * 8)
    parts = dict(agent_class=Agent, env_class=Env, train_dataset=tasks, val_dataset=tasks)
    return Workload(**(parts | {"demonstrations": [TALK]} | changes))


def workload(seed):
    return make()
"""

WORKLOADS: dict[str, str] = {
    "good": GOOD,
    "raises": "HALF = 1 / 0\n",
    "raises_when_called": "def workload(seed):\n    return [][seed]\n",
    "raises_in_a_library": "import json\n\ndef workload(seed):\n    return json.loads('{')\n",
    "lacks_its_dataset": """
from environments import DatasetRegistry
def workload(seed): return DatasetRegistry.load_dataset("no_such_data", "train")
""",
    "has_a_syntax_error": "def workload(seed)\n    return 1\n",
    "is_indented_wrongly": "def workload(seed):\nreturn 1\n",
    "imports_what_is_missing": "import a_package_that_nobody_has\n",
    "imports_a_name_that_is_missing": "from environments import Environment\n",
    "imports_a_broken_module": "import raises\n",
    "leaves_the_program": "import sys\n\nsys.exit(3)\n",
    "holds_nothing": "",
    "holds_a_number": "workload = 3\n",
    "returns_none": "def workload(seed):\n    pass\n",
    "takes_no_seed": "def workload():\n    pass\n",
    "gives_an_unfinished_agent": """
from good import *
class Unfinished(BaseAgent):
    def reset(self): ...
def workload(seed): return make(agent_class=Unfinished)
""",
    "gives_an_unfinished_environment": """
from good import *
class Unfinished(BaseEnv):
    def reset(self): return "", {}
def workload(seed): return make(env_class=Unfinished)
""",
    "rewards_nan": """
from good import *
class Strange(Env):
    def step(self, action): return "", float("nan"), True, {}
    @staticmethod
    def from_dict(info): return Strange()
def workload(seed): return make(env_class=Strange)
""",
    "steps_as_gymnasium_does": """
from good import *
class Strange(Env):
    def step(self, action): return "", 1.0, True, False, {}
    @staticmethod
    def from_dict(info): return Strange()
def workload(seed): return make(env_class=Strange)
""",
    "is_async": """
from good import *
class Strange(Env):
    async def step(self, action): return "", 1.0, True, {}
    @staticmethod
    def from_dict(info): return Strange()
def workload(seed): return make(env_class=Strange)
""",
    "makes_no_environment": """
from good import *
class Strange(Env):
    @staticmethod
    def from_dict(info): return None
def workload(seed): return make(env_class=Strange)
""",
    "acts_in_text": """
from good import *
class Strange(Agent):
    def update_from_model(self, response, **kwargs):
        super().update_from_model(response)
        return response
def workload(seed): return make(agent_class=Strange)
""",
    "forgets_its_steps": """
from good import *
class Strange(Agent):
    def update_from_model(self, response, **kwargs): return Action(action=response)
def workload(seed): return make(agent_class=Strange)
""",
}

CHANGES = {
    "gives_unknown_arguments": "enviroment=1",
    "gives_an_agent": "agent_class=Agent()",
    "gives_an_environment": "env_class=Env()",
    "gives_a_strange_agent": "agent_class=dict",
    "gives_a_strange_environment": "env_class=dict",
    "gives_unknown_agent_args": "agent_args={'x': 1}",
    "has_no_tasks": "train_dataset=Dataset([])",
    "has_a_list_of_tasks": "train_dataset=[{}]",
    "has_tasks_of_text": "train_dataset=Dataset(['a'])",
    "has_no_held_out_tasks": "val_dataset=None",
    "has_a_list_of_held_out_tasks": "val_dataset=[{}]",
    "has_no_demonstrations": "demonstrations=[]",
}
"""Arguments of ``make`` by the name of the workload that passes them."""

WORKLOADS |= {
    name: f"from good import *\n\ndef workload(seed):\n    return make({arguments})\n"
    for name, arguments in CHANGES.items()
}


def fill(folder: Path, model: Path) -> None:
    """Write them all into ``folder``; ``model`` is one that works."""
    for name, source in WORKLOADS.items():
        (folder / f"{name}.py").write_text(source)
    (folder / "is_binary.py").write_bytes(bytes(range(256)))
    (folder / "a_file").write_text("not a folder")
    (folder / "an_empty_folder").mkdir()
    make_models(folder, model)
    make_runs(folder, model)
    make_adapters(folder)


def make_models(folder: Path, model: Path) -> None:
    """Copies of ``model``, each with one file missing or damaged."""
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": 999999, "content": "<far>"})
    tokenizer["model"]["vocab"]["<far>"] = 999999
    damages: dict[str, tuple[str, bytes | None]] = {
        "model": ("unharmed", b""),
        "config_of_unknown_type": ("config.json", json.dumps({**config, "model_type": "qwen33"}).encode()),
        "config_of_other_weights": ("config.json", json.dumps({**config, "vocab_size": 7}).encode()),
        "quantized": ("config.json", json.dumps({**config, "quantization_config": {}}).encode()),
        "tokenizer_of_other_model": ("tokenizer.json", json.dumps(tokenizer).encode()),
        "config_missing": ("config.json", None),
        "config_empty": ("config.json", b""),
        "config_binary": ("config.json", bytes(range(256))),
        "config_of_no_model": ("config.json", b"[]"),
        "tokenizer_empty": ("tokenizer.json", b""),
        "tokenizer_binary": ("tokenizer.json", bytes(range(256))),
        "tokenizer_of_nothing": ("tokenizer.json", b"{}"),
        "tokenizer_config_binary": ("tokenizer_config.json", bytes(range(256))),
        "template_missing": ("chat_template.jinja", None),
        "template_wrong": ("chat_template.jinja", b"{% for message in messages %}"),
        "weights_missing": ("model.safetensors", None),
        "weights_empty": ("model.safetensors", b""),
        "weights_cut_off": ("model.safetensors", (model / "model.safetensors").read_bytes()[:5000]),
    }
    for name, (file, content) in damages.items():
        shutil.copytree(model, folder / name)
        if content is None:
            (folder / name / file).unlink()
        else:
            (folder / name / file).write_bytes(content)


def make_runs(folder: Path, model: Path) -> None:
    """Runs with a checkpoint, each with one file missing or damaged."""
    damages: dict[str, tuple[str, bytes | None]] = {
        "run": ("unharmed", b""),
        "run_binary_latest": (LATEST, bytes(range(128, 256))),
        "run_latest_nowhere": (LATEST, b"step_000099\n"),
        "run_without_state": (f"step_000030/{STATE}", None),
        "run_binary_state": (f"step_000030/{STATE}", bytes(range(128, 256))),
        "run_state_of_nothing": (f"step_000030/{STATE}", b"[]"),
        "run_damaged_weights": ("step_000030/huggingface/model.safetensors", b"?"),
        "run_binary_consumed": ("../consumed.jsonl", bytes(range(128, 256)) + b"\n{}\n"),
        "run_binary_metrics": ("../metrics.jsonl", bytes(range(128, 256)) + b"\n{}\n"),
    }
    for name, (file, content) in damages.items():
        run = folder / "trained" / name
        CheckpointFolder(run, kept=1).begin_save(
            Progress(step=30, version=30, stage_steps={"reinforce": 30}),
            StreamState(),
            lambda path: shutil.copytree(model, Path(path) / "huggingface") and None,
        )()
        path = run / "checkpoints" / file
        if content is None:
            path.unlink()
        else:
            path.unlink(missing_ok=True)
            path.write_bytes(content)
    (folder / "trained" / "run_without_checkpoint").mkdir()


def make_adapters(folder: Path) -> None:
    for name, text in {
        "adapter_broken": "{",
        "adapter_of_nothing": "[]",
        "adapter_ia3": '{"peft_type": "IA3"}',
    }.items():
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(text)
