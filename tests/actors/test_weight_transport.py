"""Weights reach the engines by whichever transport the settings name, and are the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import publish, serve_policy, wait_until
from own_transport import InlineTransport
from scripted_engine import ScriptedEngine

from actors.settings import ServerConfig, WeightsConfig
from actors.weights.transport import WeightTransport, WeightTransportError, make_transport
from environments.errors import ConfigError
from policies.engines.weights import WeightBucket
from policies.sampler import SampleRequest
from policies.settings import EngineConfig

MESSAGES = [{"role": "user", "content": "Hello"}]
INLINE = WeightsConfig("own_transport:InlineTransport", {"max_num_bytes": 1 << 25})


class WeightsAsReply(ScriptedEngine):
    """Replies with its weights: they are token ids."""

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        self.replies = [tuple(ids.tolist()) for bucket in buckets for _, ids in bucket.tensors()]
        await super().load_weights(version, buckets)


SERVER = ServerConfig(
    engine=EngineConfig(name=f"{__name__}:WeightsAsReply", max_model_tokens=100, options={"replies": ["1"]})
)


def reply_of(*ids: int) -> dict[str, Any]:
    """The weights of an engine that replies with ``ids``."""
    import torch

    return {"ids": torch.tensor(ids)}


def store_of(transport: WeightTransport) -> Any:
    from actors.weights.store import WeightStore

    return WeightStore.remote(transport)


@pytest.mark.engine
def test_a_transport_from_outside_brings_weights_to_an_engine(
    ray_cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    import ray

    transport = make_transport(INLINE, str(tmp_path), "training")
    assert isinstance(transport, InlineTransport)
    with serve_policy("inline", tiny_model, store_of(transport), SERVER) as policy:
        sampler = policy.sampler()
        for ids in ((5, 6, 7), (8, 9)):
            version = policy.publish(reply_of(*ids))
            request = SampleRequest(messages=MESSAGES, min_version=version)
            answer = ray.get(sampler.sample.remote(request))
            assert (answer.policy_version, answer.completion_ids) == (version, ids)


@pytest.mark.engine
def test_a_late_replica_reads_the_newest_files_and_damaged_ones_reach_the_program_as_an_error(
    ray_cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    import ray

    transport = make_transport(WeightsConfig("files"), str(tmp_path), "training")
    store = store_of(transport)
    for version in (1, 2):
        assert publish(store, reply_of(version)) == version
    with serve_policy("files", tiny_model, store, SERVER) as policy:
        assert ray.get(policy.sampler().sample.remote(SampleRequest(messages=MESSAGES))).completion_ids == (
            2,
        )
        policy.app.check_replicas()
        location = transport.publish(3, reply_of(3).items(), rank=0)
        (shard,) = Path(location).glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-1])
        ray.get(store.publish.remote(3, location))
        with pytest.raises(WeightTransportError, match=r"version-000003 are damaged.*SHA-256"):
            wait_until(lambda: policy.app.check_replicas() is not None)


def checkpointed(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "checkpoints" / "step_000003" / "huggingface" / "model.safetensors")


@pytest.mark.engine
def test_a_training_with_files_ends_with_the_weights_of_one_with_the_object_store(
    ray_cluster: None, tmp_path: Path
) -> None:
    import torch

    from launch.config import compose
    from launch.trainer import run_training
    from launch.workload import load_workload

    def train(name: str, *overrides: str) -> dict[str, Any]:
        config = compose(
            [
                "recipe=calculator",
                f"run.directory={tmp_path / name}",
                "run.num_steps=3",
                "warm_start.num_steps=0",
                "evaluation.num_tasks=4",
                "rollout.groups_per_step=3",
                "rollout.group_size=4",
                "fleet.num_actors=4",
                "learner.mini_batch_size=6",
                "learner.optimizer.warmup_steps=0",
                "algorithm.entropy_coef=0.01",  # so that there is a gradient even where all rollouts fail
                *overrides,
            ]
        )
        run_training(config, load_workload(config.workload, config.seed))
        return checkpointed(tmp_path / name)

    expected = train("object_store")
    found = train(
        "files",
        "server.weights.transport=files",
        "server.weights.options={bucket_bytes: 100000}",
        "learner.num_workers=1",
        "evaluation.num_replicas=1",  # which reads the version that was pinned for it
        "evaluation.every=2",
    )
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert not list((tmp_path / "files").glob("weights_*")), "the run has ended: no replica needs them"


def test_a_transport_from_outside_is_told_which_option_it_does_not_take(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"own_transport:InlineTransport does not take .*'max_bytes'"):
        make_transport(
            WeightsConfig("own_transport:InlineTransport", {"max_bytes": 1}), str(tmp_path), "training"
        )
