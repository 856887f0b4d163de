"""Rollout actors, a replica and the place of a learner's rank, for which one of two nodes has what they need.

Run by test_several_nodes.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from tempfile import TemporaryDirectory

import pytest
import ray
from ray import serve
from ray._private import state
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
from several_nodes import WhereEnvironment, nodes

from actors.learning.ranks import create_placement_group
from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.ray_tools.placement import beside_driver
from actors.rollouts.actor_factory import actor_options, check_room
from actors.rollouts.fleet import RolloutFleet
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.stream import TrajectoryStream
from actors.sampling.sampler_actor import SamplerActor
from actors.serving.policy_app import PolicyApp
from actors.settings import FleetConfig, ServedModel, ServerConfig
from actors.weights.store import WeightStore
from environments.errors import ConfigError
from launch.cluster.session import check_resources
from launch.settings.compose import compose
from policies import GameAgent
from policies.learning.settings import LearnerConfig
from policies.sampler import ScriptedSampler
from policies.settings import EngineConfig
from policies.tiny import build_tokenizer


def main() -> None:
    os.environ.update(RAYLET_ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    node = cluster.add_node(num_cpus=2, labels={"market": "spot"}, resources={"big": 2}).node_id
    spot, big = {"CPU": 0.01, "market": "in(spot,none)"}, {"big": 1}
    stream = TrajectoryStream(capacity=64)
    sampler = SamplerActor.options(**beside_driver()).remote(partial(ScriptedSampler, ["Here."]))
    config = FleetConfig(num_actors=2, nodes=spot)
    pair = Pair(agent_class=GameAgent, env_class=WhereEnvironment)
    check_room(actor_options(pair, config))
    fleet = RolloutFleet.remote(pair, sampler, stream.queue.actor, RolloutLimits(), config)
    stream.connect(fleet)
    ray.get(fleet.resize.remote(2))
    requests = [RolloutRequest(rollout_id=f"spot/{index}", group_id="spot", task={}) for index in range(4)]
    ray.get(fleet.submit.remote(requests))
    assert nodes(list(stream.trajectories(4))) == {node}
    ray.kill(fleet)

    places = create_placement_group(LearnerConfig(nodes=big))
    assert set(placement_group_table(places)["bundles_to_node_id"].values()) == {node}
    ray.util.remove_placement_group(places)

    with TemporaryDirectory() as folder:
        build_tokenizer([[{"role": "user", "content": "Hello."}]]).save_pretrained(folder)
        engine = EngineConfig(name="scripted_engine:ScriptedEngine", options={"replies": ["Here."]})
        app = PolicyApp(
            "placed", ServedModel(path=folder), ServerConfig(engine=engine, nodes=spot), WeightStore.remote()
        )
        app.start()
        (replica,) = [
            actor for actor in state.actors().values() if actor["Name"].startswith("SERVE_REPLICA::placed")
        ]
        assert replica["Address"]["NodeID"] == node
        app.stop()
        serve.shutdown()

    with pytest.raises(ConfigError, match=r"node with the labels \{'market': '!in\(spot\)'.*fleet\.nodes"):
        check_resources(compose(["recipe=calculator", "fleet.nodes={market: '!in(spot)', big: small}"]))
    with pytest.raises(ConfigError, match=r"needs 3 Ray bigs and the cluster has 2.*learner\.nodes"):
        check_resources(compose(["recipe=calculator", "learner.nodes={big: 3}"]))
    with pytest.raises(ConfigError, match=r"with the labels \{'market': 'none'\}"):
        check_room(actor_options(pair, FleetConfig(nodes={"market": "none"})))
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
