"""How a program joins Ray: what its actors get from it. No Ray is started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ray._private.runtime_env import constants

from actors.ray_tools import connect
from actors.ray_tools.job import JOB
from actors.serving import policy_app
from actors.settings import ServedModel, ServerConfig
from environments.errors import ConfigError


def told_path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders that ``connect`` has actors import from."""
    told: list[list[str]] = []
    monkeypatch.setattr(connect, "check_answers", lambda: None)
    monkeypatch.setattr(connect.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(
        connect.ray, "init", lambda **options: told.append(options["job_config"]._py_driver_sys_path)
    )
    connect.connect(num_cpus=1)
    return told[0]


def test_actors_import_library_from_where_program_has_found_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert told_path(monkeypatch) == [str(connect.LIBRARY)]
    monkeypatch.setenv(JOB, "{}")
    assert told_path(monkeypatch) == [str(connect.LIBRARY)], "it is installed, and not in the job's folder"


def test_library_in_jobs_working_directory_is_that_of_each_job(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Replicas belong to the job that has started Serve: its folder would hide that of the next job."""
    monkeypatch.setattr(connect, "LIBRARY", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(JOB, "{}")
    assert told_path(monkeypatch) == []


@pytest.mark.slow
def test_replicas_get_the_variables_of_the_job_that_they_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve gives them those of the job that has started it."""
    monkeypatch.setattr(policy_app, "job_environment", lambda: {"HF_HOME": "/shared/hf", "LOUD": "1"})
    app = policy_app.policy_application(ServedModel(path="a-model"), ServerConfig())
    given = app._bound_deployment.ray_actor_options["runtime_env"]["env_vars"]
    assert given["HF_HOME"] == "/shared/hf"
    assert given.items() >= policy_app.REPLICA_ENVIRONMENT.items()


def test_ray_still_marks_a_job_by_the_variable_that_we_look_for() -> None:
    assert JOB == constants.RAY_JOB_CONFIG_JSON_ENV_VAR


@pytest.mark.parametrize("address", ["nope", "a:b", "127.0.0.1:70000"])
@pytest.mark.parametrize("use", [connect.join, lambda address: connect.connect(num_cpus=1)])
def test_address_of_no_cluster_is_named(
    monkeypatch: pytest.MonkeyPatch, address: str, use: Callable[[str], object]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError, match=rf"does not answer \(.*{address}.*correct the address"):
        use(address)
