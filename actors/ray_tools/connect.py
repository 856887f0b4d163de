"""Joins this process to Ray, or starts a cluster for it: the one ``ray.init`` of the project."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.utils import read_ray_address
from ray._raylet import (  # type: ignore[attr-defined]  # of a compiled module
    AuthenticationTokenLoader,
    Config,
)
from ray.job_config import JobConfig

from actors.ray_tools.job import in_job
from environments.errors import ConfigError, TroupeError

LIBRARY = Path(__file__).resolve().parents[2]
"""The folder that holds the packages of this library."""
RAYLET_ENVIRONMENT = {
    "RAY_process_group_cleanup_enabled": "1",  # child processes of an actor that has died end with it
    # Data for the dashboard, which is not started: recording it took a fifth of the throughput.
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_metrics_collection": "0",
    # Statistics of Ray's event loops, for its log. An idle actor wakes up a hundred times a second to look
    # for signals, and the statistics are a sixth of its cost.
    "RAY_event_stats": "0",
    # With a first driver Ray starts as many workers as the cluster counts CPUs, far more than it has actors:
    # 17 idle processes cost 12 s of a start on two cores.
    "RAY_prestart_worker_first_driver": "0",
    # Above four times this number of processes Ray prints a warning into the program's output.
    "RAY_worker_maximum_startup_concurrency": str(max(16, os.cpu_count() or 1)),
}
"""Variables that have to be in the environment of a process before it starts Ray."""
START_ATTEMPTS = 2
"""Attempts to start a cluster: on a machine that is busy with other programs, the first may be too slow."""
WORKER_LOGS = "TROUPE_WORKER_LOGS"
"""Variable that is 1 where the program prints the logs of its actors."""


def connect(num_cpus: int, worker_environment: Mapping[str, str] | None = None) -> bool:
    """Connect this process to Ray and return whether a cluster was started here, and so may be stopped here.

    A cluster is found as Ray does it: by ``RAY_ADDRESS``, inside a job, or by ``ray start`` on this
    machine; one that another program started for itself is left alone. Does nothing in a process that is
    connected.

    Args:
        num_cpus: CPUs that a cluster counts if it is started here.
        worker_environment: variables for the actors' processes, unless this process has them already.

    Raises:
        ConfigError: the cluster does not answer.
        TroupeError: Ray did not start.
    """
    if ray.is_initialized():
        return False
    check_answers()
    os.environ.update(RAYLET_ENVIRONMENT)
    if not joins_cluster():
        _bring_a_token()
    options: dict[str, Any] = {
        "log_to_driver": os.environ.get(WORKER_LOGS, "0") not in ("", "0"),
        "logging_level": logging.ERROR,
        "job_config": JobConfig(_py_driver_sys_path=_library_path()),
    }
    # Ray accepts no variable that a job has set itself.
    missing = {name: value for name, value in (worker_environment or {}).items() if name not in os.environ}
    try:
        with _inherited(missing):
            _start(num_cpus, options)
        return True
    except ValueError:  # the CPUs of an existing cluster are not ours to set
        if not joins_cluster():
            raise
    try:
        ray.init(**options, runtime_env={"env_vars": missing} if missing else None)
        return False
    except (ConnectionError, ValueError) as error:  # the latter for an address that is none
        raise unreachable(error) from error


@contextmanager
def _inherited(variables: Mapping[str, str]) -> Iterator[None]:
    """Have these variables in the block, in which Ray starts: all its processes inherit them.

    Those of a job or an actor make Ray start each process twice, for 0.4 s of CPU time.
    """
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _start(num_cpus: int, options: Mapping[str, Any]) -> None:
    """Start a cluster, at the second attempt if a busy machine takes longer for it than Ray allows: 30 s."""
    program = psutil.Process()
    others = set(program.children())
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(num_cpus=num_cpus, include_dashboard=False, **options)
            return
        except ConnectionError as error:
            raise unreachable(error) from error
        except Exception as error:
            if type(error) is not Exception:  # Ray has no class of its own for a start that takes too long
                raise
            if attempt == START_ATTEMPTS:
                raise TroupeError(
                    f"Ray did not start on this machine: {str(error).splitlines()[0]} Mostly other programs "
                    "keep it busy: try again when they have ended."
                ) from error
            for process in set(program.children()) - others:  # what has started goes on otherwise
                for each in (*process.children(recursive=True), process):
                    with suppress(psutil.NoSuchProcess):
                        each.kill()


def _bring_a_token() -> None:
    """Give the cluster that starts here a token of its own, unless this user has one or wants none.

    Ray would make one in the home folder and leave it there: a cluster that ``ray start --head`` starts later
    would ask for it, and ``ray job submit`` would not send it.
    """
    tokens = AuthenticationTokenLoader.instance()
    if "RAY_AUTH_MODE" not in os.environ and not tokens.has_token(ignore_auth_mode=True):
        os.environ["RAY_AUTH_TOKEN"] = generate_new_authentication_token()
        tokens.reset_cache()


def _library_path() -> list[str]:
    """Folders from which actors import this library: where this program has found it, whatever its folder.

    A job's working directory reaches its actors without this. Replicas belong to the job that has started
    Serve: where that one's working directory is this library, a path to it would hide the library of the job
    that they serve.
    """
    if in_job() and Path.cwd() == LIBRARY:
        return []
    return [str(LIBRARY)]


def job_environment() -> dict[str, str]:
    """The variables that this program's actors get, by ``ray job submit`` or by ``connect``."""
    if not ray.is_initialized():
        return {}
    return dict(ray.get_runtime_context().runtime_env.get("env_vars") or {})


def join(address: str | None) -> None:
    """Connect this process to a cluster that is there, to look at what runs on it.

    Args:
        address: of the cluster; ``None`` finds it by ``RAY_ADDRESS``, or as the only one of this machine.

    Raises:
        ConfigError: it does not answer, or there are none or several.
    """
    clusters = _clusters_here()
    address = address or os.environ.get("RAY_ADDRESS") or _only(clusters)
    os.environ["RAY_ADDRESS"] = address
    os.environ.update(clusters.get(address, {}))
    Config.initialize("")  # Ray has read its variables when it was imported
    check_answers()
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise unreachable(error) from error


def _clusters_here() -> dict[str, dict[str, str]]:
    """The clusters that have a node on this machine: by address, the variables with which they are reached.

    A cluster that a program has started for itself asks for this user's token.
    """
    found = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended while we looked, or is somebody else's
            if process.name() == "raylet":
                addresses = [
                    word.partition("=")[2]
                    for word in process.cmdline()
                    if word.startswith(("--gcs-address=", "--gcs_address="))
                ]
                variables = {
                    name: value for name, value in process.environ().items() if name.startswith("RAY_AUTH_")
                }
                found.update(dict.fromkeys(addresses, variables))
    return found


def _only(clusters: Collection[str]) -> str:
    """The one address among ``clusters``. Raises ``ConfigError`` if there are none or several."""
    if len(clusters) != 1:
        there = f"clusters at {', '.join(sorted(clusters))}" if clusters else "no cluster"
        raise ConfigError(f"This machine has {there}: say which one is meant by --address HOST:PORT.")
    return next(iter(clusters))


# -- the address of a cluster -----------------------------------------------------------------------


def check_answers() -> None:
    """Find a cluster that is gone, as after a restart of the machine: Ray would try in silence for minutes.

    Raises:
        ConfigError: nothing answers where ``RAY_ADDRESS`` or the note of ``ray start`` points to.
    """
    address = _address()
    host, _, port = address.rpartition(":")
    if not port.isdigit() or "://" in host:  # none, or a form that only Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except OSError as error:
        raise unreachable(f"{address}: {error}") from error


def joins_cluster() -> bool:
    """True if this process is connected to a cluster, or would join one instead of starting its own."""
    return ray.is_initialized() or _address() not in ("", "local")  # which asks Ray for a new one


def _address() -> str:
    return os.environ.get("RAY_ADDRESS") or read_ray_address() or ""


def unreachable(reason: object) -> ConfigError:
    """The error for a cluster that does not answer."""
    return ConfigError(
        f"The Ray cluster that this process was pointed to does not answer ({reason}): start it with "
        "`ray start --head`, or correct the address (RAY_ADDRESS, --address). A run starts a Ray of its own "
        "where RAY_ADDRESS is unset and no `ray start` is left (`ray stop`)."
    )
