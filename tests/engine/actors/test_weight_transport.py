"""Weights reach the engines by whichever transport the settings name, and are the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from machine import wait_until
from own_transport import InlineTransport
from scripted_engine import ScriptedEngine
from served_policy import publish, serve_policy

from actors.settings import ServerConfig
from actors.weights.transport import WeightTransport, WeightTransportError, make_transport
from environments.errors import ConfigError
from policies.engines.weights import WeightBucket, pack
from policies.sampler import SampleRequest
from policies.settings import EngineConfig

MESSAGES = [{"role": "user", "content": "Hello"}]
INLINE = {"transport": "own_transport:InlineTransport", "max_num_bytes": 1 << 25}


class WeightsAsReply(ScriptedEngine):
    """Replies with its weights: they are token ids."""

    async def load_weights(self, version: int, buckets: Sequence[WeightBucket]) -> None:
        self.replies = [tuple(ids.tolist()) for bucket in buckets for _, ids in bucket.shards()]
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


def test_transport_from_outside_brings_weights_to_an_engine(
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


def test_late_replica_reads_the_newest_undamaged_files(
    ray_cluster: None, tiny_model: Path, tmp_path: Path
) -> None:
    import ray

    transport = make_transport({"transport": "files"}, str(tmp_path), "training")
    store = store_of(transport)
    for version in (1, 2):
        assert publish(store, reply_of(version)) == version
    with serve_policy("files", tiny_model, store, SERVER) as policy:
        assert ray.get(policy.sampler().sample.remote(SampleRequest(messages=MESSAGES))).completion_ids == (
            2,
        )
        policy.app.check_replicas()
        (location,) = transport.publish(3, pack(reply_of(3).items()), rank=0)
        (shard,) = Path(location).glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-1])
        ray.get(store.publish.remote(3, [ray.put(location)]))
        with pytest.raises(WeightTransportError, match=r"version-000003-00000 are damaged.*SHA-256"):
            wait_until(lambda: policy.app.check_replicas() is not None)


def test_transport_from_outside_names_the_option_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"own_transport:InlineTransport does not take .*'max_bytes'"):
        make_transport(
            {"transport": "own_transport:InlineTransport", "max_bytes": 1}, str(tmp_path), "training"
        )
