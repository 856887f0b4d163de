"""A fleet on two nodes, each with a sampling actor, before one policy server with two replicas.

Run by test_several_nodes.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from tempfile import TemporaryDirectory

import ray
from machine import wait_until
from ray import serve
from ray.cluster_utils import Cluster
from several_nodes import WhereEnvironment

from actors.ray_tools.connect import RAYLET_ENVIRONMENT
from actors.rollouts.rollout import Pair, RolloutLimits, RolloutRequest
from actors.rollouts.service import RolloutService
from actors.sampling.serve_sampler import ServeSampler
from actors.serving.policy_app import PolicyApp
from actors.settings import FleetConfig, ServedModel, ServerConfig
from actors.weights.store import WeightStore
from environments.types import Trajectory
from policies import GameAgent
from policies.settings import EngineConfig
from policies.tiny import build_tokenizer

NUM_ACTORS = 4
SCRIPT = {"replies": ["Here."], "seconds_per_token": 0.2}


def main() -> None:
    os.environ.update(RAYLET_ENVIRONMENT)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False})
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    own, other = ray.get_runtime_context().get_node_id(), cluster.add_node(num_cpus=3).node_id
    with TemporaryDirectory() as folder:
        build_tokenizer([[{"role": "user", "content": "Hello."}]]).save_pretrained(folder)
        config = ServerConfig(
            num_replicas=2, engine=EngineConfig(name="scripted_engine:ScriptedEngine", options=SCRIPT)
        )
        service = RolloutService(
            Pair(agent_class=GameAgent, env_class=WhereEnvironment),
            partial(ServeSampler, "nodes", folder),
            RolloutLimits(),
            FleetConfig(num_actors=NUM_ACTORS),
            PolicyApp("nodes", ServedModel(path=folder), config, WeightStore.remote()),
        )
        service.start(NUM_ACTORS)
        fleet = service._playing
        wait_until(lambda: ray.get(fleet.status.remote()).num_ready == NUM_ACTORS, 120)
        samplers = ray.get(fleet.report.remote()).samplers
        assert list(samplers) == [own, other]

        played = list(order(service, "all", 2 * NUM_ACTORS))
        assert not any(each.failed for each in played), [each.error for each in played]
        by_node = Counter(each.steps[-1].info["node"] for each in played)
        each_status = {node: ray.get(sampler.status.remote()) for node, sampler in samplers.items()}
        answered = {
            node: sum(each.num_answered for each in status.replicas.values())
            for node, status in each_status.items()
        }
        assert answered == by_node and min(by_node.values()) >= NUM_ACTORS // 2, f"{answered}, {by_node}"
        _, status = service.status(service.request_status())
        shares = [each.num_answered for each in status.replicas.values()]
        assert len(shares) == 2 and sum(shares) == 2 * NUM_ACTORS and min(shares) >= NUM_ACTORS // 2, shares

        rest = order(service, "one is killed", 3 * NUM_ACTORS)
        played = [next(rest) for _ in range(NUM_ACTORS // 2)]
        wait_until(lambda: bool(ray.get(samplers[other].waiting.remote())))
        ray.kill(samplers[other], no_restart=False)
        played += rest
        assert not any(each.failed for each in played), [each.error for each in played]
        assert len({each.rollout_id for each in played}) == 3 * NUM_ACTORS
        assert service.stream.queue.empty(), "each once"

        order(service, "nobody waits", NUM_ACTORS)
        names = {f"nobody waits/{index}" for index in range(NUM_ACTORS)}
        seen: set[str] = set()

        def waiting() -> set[str]:
            here, there = ray.get([each.waiting.remote() for each in samplers.values()])
            seen.update(*([here, there] if here and there else []))
            return {*here, *there}

        wait_until(lambda: waiting() == names)
        assert seen, "on both nodes"
        ray.get([fleet.cancel.remote(name) for name in sorted(names)])
        assert not waiting() and service.stream.queue.empty()

        service.stop()
        serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def order(service: RolloutService, name: str, count: int) -> Iterator[Trajectory]:
    """Submit a group of rollouts; return their trajectories."""
    service.submit(
        [RolloutRequest(rollout_id=f"{name}/{index}", group_id=name, task={}) for index in range(count)]
    )
    return iter(service.stream.trajectories(count))


if __name__ == "__main__":
    sys.exit(main())
