"""``python -m launch.export runs/a --parquet a.parquet --inspect``: a run's trajectories, for other programs.
``--model FOLDER`` copies its newest policy in Hugging Face's form, and --hub OWNER/NAME puts it on the hub.

A row of the parquet table is a turn: what was said, its reward and advantage, and its tokens with
log-probabilities and versions. Read it with pandas.read_parquet, datasets.Dataset.from_parquet, DuckDB or
Polars.

--inspect writes logs for Inspect, one for each update and each evaluation. inspect_ai needs other versions of
our libraries, so look at them from an environment of its own:

    python -m venv ~/inspect && ~/inspect/bin/pip install inspect_ai
    ~/inspect/bin/inspect view --log-dir runs/a/inspect

--model takes the address of run.checkpoints.to for the run, too, and checks each file by its digest. The
weights are in as many files as the learner had ranks.

--hub needs a token that may write, in HF_TOKEN or of `hf auth login`. The model is private unless --public is
set. The hub gets weights, tokenizer and a model card that is made from the run, and no trajectory.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from environments.command_name import command_parser, explained
from environments.data.trajectory_json import plain_json
from environments.disk import replaced
from environments.errors import ConfigError, TroupeError
from launch.reporting.inspect_log import InspectLog
from launch.reporting.model_card import HUB_NAME, model_card
from launch.run_folder.checkpoint import STATE, CheckpointFolder, Manifest, check_digests
from launch.run_folder.lock import writing_to
from launch.run_folder.model_paths import token_texts
from launch.run_folder.remote import RemoteCheckpoints
from launch.run_folder.trajectory_log import EVALUATION, TRAIN, KeptTrajectory, kept_steps, read_kept
from policies.model_files import HUGGINGFACE

if TYPE_CHECKING:
    from huggingface_hub import HfApi

SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("update", pa.int64()),
        ("fate", pa.string()),
        ("group_id", pa.string()),
        ("rollout_id", pa.string()),
        ("task", pa.string()),
        ("reward", pa.float64()),
        ("success", pa.bool_()),
        ("judged_by", pa.string()),
        ("ended_by", pa.string()),
        ("error", pa.string()),
        ("num_turns", pa.int64()),
        ("turn", pa.int64()),
        ("messages", pa.string()),
        ("response", pa.string()),
        ("turn_reward", pa.float64()),
        ("turn_advantage", pa.float64()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("completion_ids", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float64())),
        ("token_versions", pa.list_(pa.int64())),
    ]
)
"""The columns. ``kind`` is "step" or "eval"; ``task`` and ``messages`` are JSON, the messages those of the
whole conversation up to this turn; a trajectory without a turn has one row, whose ``turn`` is null."""


def export_parquet(run: Path, target: Path) -> int:
    """Write all trajectories that ``run`` has kept into the file ``target``; return the number of rows.

    The file appears when it is whole.

    Raises:
        ConfigError: the run has kept none, or the file cannot be written.
    """
    steps = _steps(run)
    num_rows = 0
    with (
        writing_to(target),
        replaced(target) as unfinished,
        pq.ParquetWriter(unfinished, SCHEMA, compression="zstd") as writer,
    ):
        for kind, step in steps:  # one at a time: a run may hold more than memory does
            table = pa.Table.from_pylist([*_rows(kind, step, read_kept(run, kind, step))], SCHEMA)
            writer.write_table(table)
            num_rows += len(table)
    return num_rows


def export_inspect(run: Path, folder: Path) -> tuple[int, int]:
    """Write all trajectories that ``run`` has kept into ``folder``, as ``.eval`` logs of inspect_ai.

    A log that is there already is replaced.

    Returns:
        The number of trajectories and of logs.

    Raises:
        ConfigError: the run has kept none, or the folder cannot be written to.
    """
    steps = _steps(run)
    with writing_to(folder):
        folder.mkdir(parents=True, exist_ok=True)
    num_trajectories = 0
    for kind, step in steps:
        kept = read_kept(run, kind, step)
        InspectLog(run=run, kind=kind, step=step, token_text=token_texts(run)).write(folder, kept)
        num_trajectories += len(kept)
    return num_trajectories, len(steps)


def export_model(run: str, target: Path) -> str:
    """Copy the newest policy of ``run``, a folder or an address, to the folder ``target``, which appears when
    it is whole. Any program that reads Hugging Face's form can load it.

    Returns:
        The name of the checkpoint.

    Raises:
        ConfigError: there is no checkpoint, or one of several policies, a file is damaged, or the folder
            cannot be written, or is there.
        TroupeError: the address cannot be read.
    """
    if target.exists():
        raise ConfigError(f"--model {target} is there already: name a new folder.")
    part, name = f"{HUGGINGFACE}/", None
    with writing_to(target), tempfile.TemporaryDirectory(dir=target.parent, prefix=".model") as temporary:
        folder = Path(temporary)
        if "://" in run:
            name = RemoteCheckpoints("RUN", run).fetch_part(part, folder)
        elif (checkpoint := CheckpointFolder(Path(run), kept=1).latest()) is not None:
            name = checkpoint.name
            shutil.copyfile(checkpoint / STATE, folder / STATE)
            if (checkpoint / part).is_dir():
                shutil.copytree(checkpoint / part, folder / part)
        if name is None:
            raise ConfigError(f"{run} has no whole checkpoint: name a run, or its run.checkpoints.to.")
        check_one_model(folder)
        files = Manifest.read(folder).files
        try:
            check_digests(folder, {file: files[file] for file in files if file.startswith(part)})
        except ValueError as error:
            raise ConfigError(f"The model of {name} in {run} is damaged: {error}.") from error
        (folder / part).rename(target)
    return name


def check_one_model(checkpoint: Path) -> None:
    """Raise ``ConfigError`` for a checkpoint of several policies, each of which has a folder of its name."""
    files = Manifest.read(checkpoint).files
    if policies := sorted({file.partition("/")[0] for file in files if f"/{HUGGINGFACE}/" in file}):
        raise ConfigError(
            f"The checkpoint holds the policies {', '.join(policies)}, and one model is exported: copy its "
            f"folder {policies[0]}/{HUGGINGFACE}, or that of another."
        )


def hub_of(name: str) -> HfApi:
    """The hub, to which ``name`` can be written.

    Raises:
        ConfigError: the name is none of a model's, or there is no token.
    """
    from huggingface_hub import HfApi, get_token

    if not HUB_NAME.fullmatch(name):
        raise ConfigError(f"--hub {name!r} is no name of a model on the hub: write OWNER/NAME.")
    if (token := get_token()) is None:
        raise ConfigError("--hub needs a token that may write: set HF_TOKEN, or run `hf auth login`.")
    return HfApi(token=token)


def export_hub(run: Path, name: str, public: bool, hub: HfApi) -> str:
    """Put the newest policy of ``run`` on the hub with its card; return its address.

    Raises:
        ConfigError: the run has no checkpoint, or one of several policies, or the hub has this model already,
            for all to see, and ``public`` was not set.
        TroupeError: the hub does not take it.
    """
    from httpx import HTTPError

    checkpoint = CheckpointFolder(run, kept=1).latest()
    if checkpoint is None:
        raise ConfigError(f"{run} has no checkpoint to put on the hub: name the folder of a run.")
    card = model_card(run, checkpoint, name)
    check_one_model(checkpoint)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for file in (checkpoint / HUGGINGFACE).iterdir():
            (folder / file.name).symlink_to(file.resolve())
        (folder / "README.md").unlink(missing_ok=True)
        (folder / "README.md").write_text(card, encoding="utf-8")
        try:
            address = hub.create_repo(name, private=not public, exist_ok=True)
            if not public and not hub.model_info(name).private:
                raise ConfigError(
                    f"--hub {name} is there, where all can see it: add --public, or choose another name."
                )
            hub.upload_folder(
                repo_id=name, folder_path=folder, commit_message=f"Add {checkpoint.name} of a Troupe run"
            )
        except (HTTPError, OSError) as error:  # HF_HUB_OFFLINE, too
            reason = " ".join(str(error).split())
            raise TroupeError(
                f"The hub has not taken {name} ({reason}): check that HF_TOKEN may write there."
            ) from error
    return str(address)


def _steps(run: Path) -> list[tuple[str, int]]:
    """The updates and the evaluations whose trajectories ``run`` has kept."""
    steps = [(kind, step) for kind in (TRAIN, EVALUATION) for step in kept_steps(run, kind)]
    if not steps:
        raise ConfigError(
            f"{run} has kept no trajectories: name a run's folder; run.trajectories_kept says how many of "
            "its updates keep theirs."
        )
    return steps


def _rows(kind: str, step: int, kept: list[KeptTrajectory]) -> Iterator[dict[str, Any]]:
    for each in kept:
        trajectory = each.trajectory
        whole = {
            "kind": kind,
            "update": step,
            **each.facts(),
            "task": json.dumps(plain_json(trajectory.task)),
            "num_turns": len(trajectory.steps),
        }
        if not trajectory.steps:
            yield whole
        for turn, played in enumerate(trajectory.steps):
            row = whole | {
                "turn": turn,
                "messages": json.dumps(plain_json(played.chat_completions)),
                "response": played.model_response,
                "turn_reward": played.reward,
                "turn_advantage": each.advantages[turn] if turn < len(each.advantages) else None,
            }
            if played.completion is not None:
                row |= {
                    "prompt_ids": played.completion.prompt_ids,
                    "completion_ids": played.completion.completion_ids,
                    "logprobs": played.completion.logprobs,
                    "token_versions": played.completion.token_versions,
                }
            yield row


@explained()
def main(arguments: list[str]) -> int:
    """Run the command; return its exit status: 0 done, 2 not done, for a reason that was printed."""
    parser = command_parser("export", __doc__)
    parser.add_argument("run", help="the run's folder; for --model an address, too")
    parser.add_argument("--parquet", type=Path, metavar="FILE", help="write a table, into this file")
    parser.add_argument("--inspect", action="store_true", help="write logs for Inspect")
    parser.add_argument("--inspect-folder", type=Path, metavar="FOLDER", help="default: inspect/ of the run")
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="copy the newest policy into a new folder"
    )
    parser.add_argument("--hub", metavar="OWNER/NAME", help="put the newest policy on the Hugging Face hub")
    parser.add_argument("--public", action="store_true", help="let all see it there")
    options = parser.parse_args(arguments)
    inspect = options.inspect or options.inspect_folder is not None
    others = options.parquet is not None or inspect or options.hub is not None
    if not others and options.model is None:
        parser.error("nothing to write: add --parquet FILE, --inspect, --model FOLDER or --hub OWNER/NAME")
    if others and "://" in options.run:
        parser.error("an address is for --model FOLDER alone: name the run's folder")
    if options.public and options.hub is None:
        parser.error("--public is for --hub OWNER/NAME: add that, or leave it out")
    hub = None if options.hub is None else hub_of(options.hub)
    run = Path(options.run)
    if options.model is not None:
        sys.stdout.write(f"The model of {export_model(options.run, options.model)}: {options.model}\n")
    if options.parquet is not None:
        num_rows = export_parquet(run, options.parquet)
        sys.stdout.write(f"{num_rows} turns: {options.parquet}\n")
    if inspect:
        folder = options.inspect_folder or run / "inspect"
        num_trajectories, num_logs = export_inspect(run, folder)
        sys.stdout.write(f"{num_trajectories} trajectories in {num_logs} logs: {folder}\n")
    if hub is not None:
        sys.stdout.write(f"{export_hub(run, options.hub, options.public, hub)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
