"""TensorBoard and other people's trackers. Each imports its package when it is opened, and not before.

Nothing leaves the machine unless a variable of the tracker's own names a key or a server: WANDB_API_KEY,
MLFLOW_TRACKING_URI, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL. Without one, all of it is in the run's folder.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from launch.reporting.trackers.base import BaseTracker, TrackedRun

PROJECT = "troupe"
"""Name of the project, or experiment, where no variable of the tracker's own names another."""
MLFLOW_PARAMETERS = 100
"""Most parameters that MLflow takes at once."""


class TensorBoard(BaseTracker):
    """Files for TensorBoard, in ``tensorboard/`` of the run's folder."""

    package = "tensorboard"
    forgets_later_steps = True

    def open(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.last_step + 1)

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        import numpy as np

        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        for name, values in histograms.items():
            self._writer.add_histogram(name, np.asarray(values), step)

    def close(self) -> None:
        self._writer.close()


class WandB(BaseTracker):
    """Weights & Biases: without a key an offline run in ``wandb/`` of the folder, for ``wandb sync``."""

    package = "wandb"

    def open(self, run: TrackedRun) -> None:
        has_key = bool(os.environ.get("WANDB_API_KEY"))
        if not has_key:
            os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would report errors offline too
        import wandb

        self._histogram = wandb.Histogram
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.folder.name,
            id=run.run_id,
            dir=str(run.folder),
            config=dict(run.settings),
            mode=None if has_key else "offline",
            resume="allow" if has_key else None,  # an offline run goes on by its id, when it is synced
            settings=wandb.Settings(console="off", silent=True),
        )
        # A step of its own: an evaluation may end after later updates, and wandb drops what goes back.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        drawn = {name: self._histogram(list(values)) for name, values in histograms.items()}
        self._run.log({"step": step, **metrics, **drawn})

    def close(self) -> None:
        self._run.finish()


class MLflow(BaseTracker):
    """MLflow: the server of ``MLFLOW_TRACKING_URI``, else ``mlflow.db`` in the run's folder."""

    package = "mlflow"

    def open(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        database = f"sqlite:///{run.folder.resolve() / 'mlflow.db'}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or database)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        # MLflow chooses the ids of runs itself: ours is a tag.
        found = self._client.search_runs([experiment_id], f"tags.troupe_run = '{run.run_id}'")
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {"troupe_run": run.run_id}
        self._run_id = self._client.create_run(experiment_id, tags=tags, run_name=run.folder.name).info.run_id
        self._log_parameters(run.settings)

    def _log_parameters(self, settings: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        parameters = [Param(name, str(value)) for name, value in _flat(settings)]
        for start in range(0, len(parameters), MLFLOW_PARAMETERS):
            self._client.log_batch(self._run_id, params=parameters[start : start + MLFLOW_PARAMETERS])

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        batch = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=batch)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class Trackio(BaseTracker):
    """Trackio: a database in ``trackio/`` of the run's folder, and a Space or a server if one is named."""

    package = "trackio"

    def open(self, run: TrackedRun) -> None:
        os.environ.setdefault("TRACKIO_DIR", str(run.folder.resolve() / "trackio"))  # read by the import
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.folder.name}-{run.run_id}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Sequence[float]]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their dotted names."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
