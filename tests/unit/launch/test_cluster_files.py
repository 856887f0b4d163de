"""The files of ``launch/cluster/``: each fits its schema, and says what our commands understand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from environments.errors import ConfigError
from launch import serve, train
from launch.cluster import session
from launch.cluster.application import Arguments, build
from launch.settings.tree import TrainConfig

FILES = Path(__file__).resolve().parents[3] / "launch" / "cluster"
SPEC_OF_CLUSTER = {
    "raycluster.yaml": ("spec",),
    "rayjob.yaml": ("spec", "rayClusterSpec"),
    "rayservice.yaml": ("spec", "rayClusterConfig"),
}
KEYS = "TROUPE_API_KEYS"


def fields(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """The JSON schema of an object that has these fields and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def each(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema}


# Of KubeRay's custom resources and of Kubernetes' pods, the fields that the manifests use, with the types
# that the schemas of KubeRay 1.7.0 give them. An unknown field would be dropped without an error there.
TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
PORT_NAME = {**NAME, "maxLength": 15}
QUANTITY = {"type": "string", "pattern": "^[0-9]+(m|Mi|Gi)?$"}
SECRET = fields(("key",), name=NAME, key=TEXT, optional=FLAG)
VARIABLE = fields(("name",), name=TEXT, value=TEXT, valueFrom=fields(secretKeyRef=SECRET))
CONTAINER = fields(
    ("name",),
    name=NAME,
    image=TEXT,
    env=each(VARIABLE),
    ports=each(fields(("containerPort",), name=PORT_NAME, containerPort={**COUNT, "maximum": 65535})),
    resources=fields(
        requests=fields(cpu=QUANTITY, memory=QUANTITY), limits=fields(cpu=QUANTITY, memory=QUANTITY)
    ),
    volumeMounts=each(fields(("name", "mountPath"), name=NAME, mountPath=TEXT)),
)
VOLUME = fields(("name",), name=NAME, persistentVolumeClaim=fields(("claimName",), claimName=NAME))
POD = fields(spec=fields(("containers",), containers=each(CONTAINER), volumes=each(VOLUME)))
WORKERS = fields(
    ("groupName", "template", "minReplicas", "maxReplicas"),
    groupName=NAME,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=POD,
)
CLUSTER = fields(
    ("headGroupSpec",),
    rayVersion=TEXT,
    authOptions=fields(mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=fields(version={"enum": ["v1", "v2"]}, idleTimeoutSeconds=COUNT),
    headGroupSpec=fields(("template",), rayStartParams=TEXTS, template=POD),
    workerGroupSpecs=each(WORKERS),
)
JOB = fields(
    entrypoint=TEXT,
    backoffLimit=COUNT,
    shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT,
    rayClusterSpec=CLUSTER,
)
SERVICE = fields(serveConfigV2=TEXT, rayClusterConfig=CLUSTER)


def manifest(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return fields(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata=fields(("name",), name=NAME),
        spec=spec,
    )


SCHEMAS = {
    "raycluster.yaml": manifest("RayCluster", CLUSTER),
    "rayjob.yaml": manifest("RayJob", JOB),
    "rayservice.yaml": manifest("RayService", SERVICE),
}


def content(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FILES / name).read_text(encoding="utf-8"))
    return loaded


def spec_of_cluster(name: str) -> dict[str, Any]:
    spec = content(name)
    for key in SPEC_OF_CLUSTER[name]:
        spec = spec[key]
    return spec


def settings_of_serve_yaml() -> list[str]:
    (application,) = content("serve.yaml")["applications"]
    return list(Arguments.model_validate(application["args"]).settings)


def config_of_the_job() -> TrainConfig:
    entrypoint = content("rayjob.yaml")["spec"]["entrypoint"].split()
    assert entrypoint[:3] == ["python", "-m", "launch.train"]
    return train.COMMAND.configuration(entrypoint[3:])


# -- schemas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SCHEMAS)
def test_manifest_has_the_fields_of_kuberay(name: str) -> None:
    jsonschema.validate(content(name), SCHEMAS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_unknown_field_of_a_manifest_is_found(name: str) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMAS[name])
    for path in places(content(name)):
        if path[-1:] != ["rayStartParams"]:  # any parameter of `ray start`
            with_unknown = content(name)
            reduce(getitem, path, with_unknown)["Replicas"] = 1
            (error,) = validator.iter_errors(with_unknown)
            assert "'Replicas' was unexpected" in error.message


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[list[Any]]:
    """The path of each mapping in ``value``."""
    if isinstance(value, dict):
        yield list(path)
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from places(inner, (*path, key))


def test_serve_config_file_fits_the_schema_of_serve() -> None:
    deployed = ServeDeploySchema.model_validate(content("serve.yaml"))
    assert [application.route_prefix for application in deployed.applications] == ["/"]


def test_file_of_ray_up_fits_schema_of_cluster_launcher() -> None:
    config = content("ray-up.yaml")
    validate_config(prepare_config(config))
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
    with pytest.raises(jsonschema.ValidationError, match="'provder'"):
        validate_config(prepare_config(config) | {"provder": {}})


# -- what the files say --------------------------------------------------------------------------------


def test_rayservice_serves_what_serve_yaml_says() -> None:
    embedded = content("rayservice.yaml")["spec"]["serveConfigV2"]
    shipped = (FILES / "serve.yaml").read_text(encoding="utf-8").partition("\n\n")[2]  # without its heading
    assert embedded == shipped
    assert yaml.safe_load(embedded) == content("serve.yaml")


def test_name_of_service_is_one_under_which_server_answers() -> None:
    service = f"{content('rayservice.yaml')['metadata']['name']}-serve-svc"  # so KubeRay calls it
    config = serve.COMMAND.configuration(settings_of_serve_yaml())
    assert config.server.access.hosts == [service]


@pytest.mark.parametrize("name", SPEC_OF_CLUSTER)
def test_manifests_describe_the_same_cluster(name: str) -> None:
    assert spec_of_cluster(name) == spec_of_cluster("raycluster.yaml")


def test_cluster_has_the_installed_ray_and_grows_by_itself() -> None:
    spec = spec_of_cluster("raycluster.yaml")
    assert spec["rayVersion"] == ray.__version__ and spec["enableInTreeAutoscaling"] is True
    (rollouts,) = spec["workerGroupSpecs"]
    assert rollouts["minReplicas"] < rollouts["maxReplicas"]
    for group in (spec["headGroupSpec"], rollouts):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"].endswith(f":{ray.__version__}")
        variables = {variable["name"]: variable for variable in container["env"]}
        assert KEYS in variables
        (cleanup,) = set(variables) & set(RAYLET_ENVIRONMENT)
        assert variables[cleanup]["value"] == RAYLET_ENVIRONMENT[cleanup]


def test_job_makes_the_autoscaler_add_nodes_and_fits_on_them(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, config = spec_of_cluster("rayjob.yaml"), config_of_the_job()
    (rollouts,) = spec["workerGroupSpecs"]
    on_head, on_node = (
        float(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        for group in (spec["headGroupSpec"], rollouts)
    )
    assert config.run.node_wait_seconds > 0
    monkeypatch.setattr(session.ray, "cluster_resources", lambda: {"CPU": on_head})
    with pytest.raises(ConfigError, match="add nodes"):
        session.check_resources(config)
    most = on_head + rollouts["maxReplicas"] * on_node
    monkeypatch.setattr(session.ray, "cluster_resources", lambda: {"CPU": most})
    session.check_resources(config)
    assert config.fleet.bounds[1] * config.fleet.nodes["CPU"] < most


# -- the application -----------------------------------------------------------------------------------


@pytest.fixture
def with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEYS, "me:0123456789abcdef")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["recipe=calculator", "model.path=gpt2"], r"workload=launch\.recipes\.calculator .*workload=null"),
        (["workload=my_workload", "model.path=gpt2"], r"workload=my_workload .*launch\.serve"),
        ([], r"model\.path is not set.*model\.path=/shared/runs/a"),
        (["model.path=gpt2", "server.http_host=127.0.0.1"], r"server\.http_host has no effect.*http_options"),
        (["model.path=gpt2", "server.http_port=80"], r"server\.http_port has no effect.*http_options"),
        (["model.path=gpt2", "learner.num_workers=2"], r"learner\.num_workers has no effect"),
        (["model.path=gpt2", "server.num_replica=2"], r"server\.num_replicas"),
        (["model.path=gpt2", "server.num_replicas=0"], r"server\.num_replicas=0"),
        (["model.path=/nowhere"], r"model\.path='/nowhere' does not exist"),
    ],
)
@pytest.mark.usefixtures("with_key")
def test_what_cannot_be_deployed_is_an_error_with_its_remedy(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build(Arguments(settings=settings))


def test_nothing_is_deployed_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEYS, raising=False)
    with pytest.raises(ConfigError, match=rf"no key.*{KEYS}=name:key"):
        build(Arguments(settings=["model.path=gpt2"]))


def test_unknown_argument_of_the_application_is_an_error() -> None:
    with pytest.raises(ValueError, match="model_path"):
        Arguments.model_validate({"settings": [], "model_path": "gpt2"})


@pytest.mark.slow
@pytest.mark.usefixtures("with_key")
def test_application_is_built_from_settings_of_shipped_file(tiny_model: Path) -> None:
    settings = [
        re.sub(r"^model\.path=.*", f"model.path={tiny_model}", each) for each in settings_of_serve_yaml()
    ]
    of_recipe = ["recipe=calculator", "workload=null"]
    application = build(Arguments(settings=[*settings, *of_recipe, "server.num_replicas=3"]))
    deployment = application._bound_deployment
    assert (deployment.name, deployment.num_replicas) == ("PolicyServer", 3)
    model, config, store, directory, *_ = deployment.init_args
    assert (model.path, store, directory) == (str(tiny_model), None, None)
    assert config.access.hosts == ["troupe-serve-svc"]
