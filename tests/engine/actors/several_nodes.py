"""What lives on several nodes of one cluster: two checks, one after the other.

Run by test_several_nodes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
import ray
from httpx import AsyncClient
from machine import wait_until
from openai import AsyncOpenAI
from ray import serve
from ray._private import state
from ray._raylet import GcsClient
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group_table

from actors.gateway.client import PolicyClient
from actors.gateway.function import pair_of
from actors.learning.ranks import create_placement_group
from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.ray_tools.placement import beside_driver
from actors.rollouts.actor_factory import actor_options, check_room
from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.service import RolloutService
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.policy_app import PolicyApp
from actors.settings import FleetConfig, ServedModel, ServerConfig
from actors.weights.store import WeightStore
from environments import BaseEnv
from environments.errors import ConfigError
from environments.types import Trajectory
from launch.cluster.session import check_resources
from launch.settings.compose import compose
from policies import GameAgent
from policies.learning.settings import LearnerConfig
from policies.sampler import ScriptedSampler
from policies.settings import EngineConfig
from policies.tiny import build_tokenizer

PREEMPTION = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")


class WhereEnvironment(BaseEnv):
    """One short step, whose info says on which node it was played."""

    def reset(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"question": "Where are we?"}, {}

    def step(self, action: Any) -> tuple[str, float, bool, dict[str, Any]]:
        time.sleep(0.5)
        return "", 1.0, True, {"node": ray.get_runtime_context().get_node_id()}

    @staticmethod
    def from_dict(info: dict[str, Any]) -> WhereEnvironment:
        return WhereEnvironment()


PAIR = Pair(agent_class=GameAgent, env_class=WhereEnvironment)


def main() -> None:
    os.environ.update(RAYLET_ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    with TemporaryDirectory() as folder:
        build_tokenizer([[{"role": "user", "content": "Hello."}]]).save_pretrained(folder)
        parts_live_where_their_settings_say(cluster, folder)
        programs_reach_the_policy_at_their_node(cluster)
        nodes_sample_for_themselves(cluster, folder)
        serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def started_fleet(config: FleetConfig, pair: Pair = PAIR) -> tuple[Any, TrajectoryStream]:
    """A fleet of its full size that samples a script, and the stream that it fills."""
    stream = TrajectoryStream(capacity=64)
    sampler = SamplerActor.options(**beside_driver()).remote(partial(ScriptedSampler, ["Here."]))
    fleet = RolloutFleet.options(**beside_driver()).remote(
        pair, sampler, stream.queue, RolloutLimits(), config
    )
    stream.connect(fleet)
    ray.get(fleet.resize.remote(config.num_actors))
    return fleet, stream


def scripted_server(options: dict[str, Any], **settings: Any) -> ServerConfig:
    return ServerConfig(
        engine=EngineConfig(name="scripted_engine:ScriptedEngine", options=options), **settings
    )


def group_of(name: str, count: int) -> list[RolloutRequest]:
    return [RolloutRequest(rollout_id=f"{name}/{index}", group_id=name, task={}) for index in range(count)]


def assert_played(trajectories: list[Trajectory], name: str, count: int) -> None:
    """Each of a group was delivered once, and none has failed."""
    assert not any(each.failed for each in trajectories), [each.error for each in trajectories]
    names = sorted(each.rollout_id for each in trajectories)
    assert names == sorted(f"{name}/{index}" for index in range(count)), "each once"


def parts_live_where_their_settings_say(cluster: Cluster, folder: str) -> None:
    """Rollout actors, a replica and the place of a rank, for which one of two nodes has what they need."""
    node = cluster.add_node(num_cpus=2, labels={"market": "spot"}, resources={"big": 2})
    spot, big = {"CPU": 0.01, "market": "in(spot,none)"}, {"big": 1}
    config = FleetConfig(num_actors=2, nodes=spot)
    check_room(actor_options(PAIR, config))
    fleet, stream = started_fleet(config)
    ray.get(fleet.submit.remote(group_of("spot", 4)))
    assert nodes(list(stream.trajectories(4))) == {node.node_id}
    ray.kill(fleet)

    places = create_placement_group(LearnerConfig(nodes=big))
    assert set(placement_group_table(places)["bundles_to_node_id"].values()) == {node.node_id}
    ray.util.remove_placement_group(places)

    server = scripted_server({"replies": ["Here."]}, nodes=spot)
    app = PolicyApp("placed", ServedModel(path=folder), server, WeightStore.remote())
    app.start()
    (replica,) = [
        actor for actor in state.actors().values() if actor["Name"].startswith("SERVE_REPLICA::placed")
    ]
    assert replica["Address"]["NodeID"] == node.node_id
    app.stop()

    with pytest.raises(ConfigError, match=r"node with the labels \{'market': '!in\(spot\)'.*fleet\.nodes"):
        check_resources(compose(["recipe=calculator", "fleet.nodes={market: '!in(spot)', big: small}"]))
    with pytest.raises(ConfigError, match=r"needs 3 of the resource 'big' and .* has 2.*learner\.nodes"):
        check_resources(compose(["recipe=calculator", "learner.nodes={big: 3}"]))
    with pytest.raises(ConfigError, match=r"with the labels \{'market': 'none'\}"):
        check_room(actor_options(PAIR, FleetConfig(nodes={"market": "none"})))
    cluster.remove_node(node)


async def call_from_another_machine(task: dict[str, Any], client: PolicyClient) -> float:
    """Call the policy as a program of another machine does, and name the node in the message."""
    variables = client.remote_environment
    address, own = urlsplit(variables["OPENAI_BASE_URL"]).hostname, get_node_ip_address()
    async with AsyncOpenAI(
        base_url=variables["OPENAI_BASE_URL"],
        api_key=client.api_key,
        http_client=AsyncClient(trust_env=False),
    ) as policy:
        await policy.chat.completions.create(model="m", messages=[{"role": "user", "content": own}])
    await asyncio.sleep(0.5)  # so that all actors play
    return float(address == own)


def programs_reach_the_policy_at_their_node(cluster: Cluster) -> None:
    """The address that a program gets is that of the node which plays its rollout."""
    node = cluster.add_node(num_cpus=3, node_ip_address="127.0.0.2")
    config = FleetConfig(num_actors=4)
    fleet, stream = started_fleet(config, pair_of(None, None, call_from_another_machine, {}, {}))
    wait_until(lambda: ray.get(fleet.status.remote()).num_ready == 4, 120)
    ray.get(fleet.submit.remote(group_of("program", 8)))
    played = list(stream.trajectories(8))
    assert_played(played, "program", 8)
    assert [each.reward for each in played] == [1.0] * 8
    addresses = {each.steps[0].observation[0]["content"] for each in played}
    assert addresses == {get_node_ip_address(), "127.0.0.2"}
    ray.kill(fleet)
    cluster.remove_node(node)


def nodes_sample_for_themselves(cluster: Cluster, folder: str) -> None:
    """A fleet on two nodes, each with a sampling actor, before one policy server with two replicas."""
    num_actors = 4
    node = cluster.add_node(num_cpus=3)
    own, other = ray.get_runtime_context().get_node_id(), node.node_id
    server = scripted_server({"replies": ["Here."], "seconds_per_token": 0.2}, num_replicas=2)
    service = RolloutService(
        PAIR,
        partial(ServeSampler, "nodes", folder),
        RolloutLimits(),
        FleetConfig(num_actors=num_actors),
        [PolicyApp("nodes", ServedModel(path=folder), server, WeightStore.remote())],
    )
    service.start(num_actors)
    fleet = service._fleet
    wait_until(lambda: ray.get(fleet.status.remote()).num_ready == num_actors, 120)
    samplers = {node: sampler for (node, _), sampler in ray.get(fleet.report.remote()).samplers.items()}
    assert list(samplers) == [own, other]

    def order(name: str, count: int) -> Iterator[Trajectory]:
        service.submit(group_of(name, count))
        return iter(service.stream.trajectories(count))

    played = list(order("all", 2 * num_actors))
    assert_played(played, "all", 2 * num_actors)
    by_node = Counter(each.steps[-1].info["node"] for each in played)
    each_status = {node: ray.get(sampler.status.remote()) for node, sampler in samplers.items()}
    answered = {
        node: sum(each.num_answered for each in status.replicas.values())
        for node, status in each_status.items()
    }
    assert answered == by_node and min(by_node.values()) >= num_actors // 2, f"{answered}, {by_node}"
    _, status = service.status(service.request_status())
    shares = [each.num_answered for each in status.replicas.values()]
    assert len(shares) == 2 and sum(shares) == 2 * num_actors and min(shares) >= num_actors // 2, shares

    rest = order("one is killed", 3 * num_actors)
    played = [next(rest) for _ in range(num_actors // 2)]
    wait_until(lambda: bool(ray.get(samplers[other].waiting.remote())))
    ray.kill(samplers[other], no_restart=False)
    assert_played([*played, *rest], "one is killed", 3 * num_actors)
    assert not ray.get(service.stream.queue.qsize.remote())

    order("nobody waits", num_actors)
    names = {f"nobody waits/{index}" for index in range(num_actors)}
    seen: set[str] = set()

    def waiting() -> set[str]:
        here, there = ray.get([each.waiting.remote() for each in samplers.values()])
        seen.update(*([here, there] if here and there else []))
        return {*here, *there}

    wait_until(lambda: waiting() == names)
    assert seen, "on both nodes"
    ray.get([fleet.cancel.remote(name) for name in sorted(names)])
    assert not waiting() and not ray.get(service.stream.queue.qsize.remote())
    service.stop()
    cluster.remove_node(node)


@contextmanager
def stopped(node: Any) -> Iterator[None]:
    """All processes of a node stand still, as if its network were cut."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    processes = [raylet, *raylet.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # it was lost meanwhile
                process.resume()


def drain(cluster: Cluster, node_id: str) -> None:
    """Tell Ray that a node leaves in ten minutes."""
    deadline = int((time.time() + 600) * 1000)
    accepted, why_not = GcsClient(address=cluster.address).drain_node(
        node_id, PREEMPTION, "The machine is wanted back.", deadline
    )
    assert accepted, why_not


def nodes(trajectories: list[Trajectory]) -> set[str]:
    return {each.steps[-1].info["node"] for each in trajectories}


if __name__ == "__main__":
    main()
