"""A run's metrics in the tracker of others, and read back by its own library, in an environment of its own.

    python outside_trackers.py record TRACKER FOLDER
    python outside_trackers.py read TRACKER FOLDER

``record`` ends after step 4, goes on from step 2, and has an evaluation that comes late. Both write
``result.json``: ``record`` the addresses beyond this machine that Python has connected to, ``read`` the
values of two metrics.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.reporting.trackers.chosen import Trackers, chosen_trackers

SETTINGS = {"seed": 7, "run": {"num_steps": 6}, "stages": ["reinforce"], "model": {"path": None}}
METRIC, EVALUATED = "rollout/reward_mean", "eval/reward_mean"


def record(name: str, folder: Path) -> list[str]:
    """Record six steps in two lives of a run; return where Python has connected to."""
    connected: list[str] = []

    def notice(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo"):
            address = arguments[1] if event == "socket.connect" else arguments[0]
            host = address[0] if isinstance(address, tuple) else address
            if is_beyond(host):
                connected.append(str(address))

    sys.addaudithook(notice)
    life(name, folder, 0, range(1, 5))
    life(name, folder, 2, range(3, 7))
    return connected


def is_beyond(host: object) -> bool:
    return (
        isinstance(host, str) and host not in ("127.0.0.1", "::1", "localhost") and not host.startswith("/")
    )


def life(name: str, folder: Path, last_step: int, steps: range) -> None:
    printed: list[str] = []
    trackers = Trackers(chosen_trackers([name]), folder, last_step, printed.append)
    trackers.open(SETTINGS)
    for step in steps:
        trackers.log("rollout", step, {METRIC: step / 8}, {"rollout/reward": [0.0, 1.0]})
    trackers.log("eval", 1, {EVALUATED: 0.25}, {})  # late, and in both lives
    trackers.close()
    assert not printed, printed


def read(name: str, folder: Path) -> dict[str, Any]:
    """Values by metric as pairs of step and value, the number of runs, and the setting ``seed``."""
    return {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}[name](folder)


def read_mlflow(folder: Path) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("troupe")
    assert experiment is not None
    runs = list(client.search_runs([experiment.experiment_id]))
    run = runs[0]
    assert run.info.status == "FINISHED" and run.info.run_name == folder.name
    values = {
        metric: [[each.step, each.value] for each in client.get_metric_history(run.info.run_id, metric)]
        for metric in (METRIC, EVALUATED)
    }
    return {"runs": len(runs), "seed": int(run.data.params["seed"]), **values}


def read_trackio(folder: Path) -> dict[str, Any]:
    os.environ["TRACKIO_DIR"] = str(folder / "trackio")
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    runs = list(trackio.Api().runs("troupe"))
    logs = SQLiteStorage.get_logs("troupe", runs[0].name)
    values = {
        metric: [[each["step"], each[metric]] for each in logs if metric in each]
        for metric in (METRIC, EVALUATED)
    }
    return {"runs": len(runs), "seed": (runs[0].config or {})["seed"], **values}


def read_wandb(folder: Path) -> dict[str, Any]:
    """The records of the offline files, which ``wandb sync`` would send, in order."""
    ids, seed = set[str](), None
    values: dict[str, list[list[float]]] = {METRIC: [], EVALUATED: []}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda each: each.stat().st_mtime_ns):
        for kept in wandb_records(file.read_bytes()):
            if kept.WhichOneof("record_type") == "run":
                ids.add(kept.run.run_id)
                config = {each.key: json.loads(each.value_json) for each in kept.run.config.update}
                seed = config.get("seed", seed)
            row = {
                (each.key or each.nested_key[0]): json.loads(each.value_json) for each in kept.history.item
            }
            for metric in values.keys() & row.keys():
                values[metric].append([row["step"], row[metric]])
    return {"runs": len(ids), "seed": seed, **values}


def wandb_records(data: bytes) -> Iterator[Any]:
    """The records in wandb's file: a head of 7 bytes, then LevelDB's log of blocks of 32 KiB."""
    from wandb.proto.wandb_internal_pb2 import Record

    place, parts = 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            found = Record()
            found.ParseFromString(parts)
            parts = b""
            yield found


if __name__ == "__main__":
    work, tracker = {"record": record, "read": read}[sys.argv[1]], sys.argv[2]
    result = work(tracker, Path(sys.argv[3]))
    Path("result.json").write_text(json.dumps(result))
