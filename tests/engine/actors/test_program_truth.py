"""What a program's calls teach is what was sampled, by the version that has sampled it: on a real engine.

The trees of conversations are drawn in ``tests/unit/actors/conversations.yaml``; here a program plays those
of its shapes that need no script, while its policy is published again and again.
"""

from __future__ import annotations

import asyncio
from itertools import count
from typing import TYPE_CHECKING, Any

import ray
import torch
from transformers_reference import load, perturbed, token_logprobs, weights_of

from actors.gateway.client import PolicyClient
from actors.gateway.function import pair_of
from actors.rollouts.journal import Journal
from actors.rollouts.rollout import RolloutLimits, RolloutRequest, run_rollout
from environments.types import Completion, Trajectory
from policies.learning.samples import training_samples
from policies.sampler import SampleRequest, SamplingParams

if TYPE_CHECKING:
    from served_policy import ServedPolicy

TOLERANCE = 1e-4
TEMPERATURE = 1.5
LIMITS = RolloutLimits(max_steps=20, max_turn_tokens=200, max_response_tokens=20_000)
"""A token in 300 ends an answer: most are under way when the next version comes."""
NUM_CHANGES = 3
"""Answers that were under way when a version was published."""


class Conversations:
    """A program of several conversations, during each of whose calls a version is published."""

    def __init__(self, policy: ServedPolicy) -> None:
        self._policy, self._original = policy, weights_of(policy.model_path)
        self._seeds = count()
        self.weights = {policy.publish(self._original): self._original}

    async def __call__(self, task: dict[str, Any], client: PolicyClient) -> float:
        lead, helper = (
            [{"role": "system", "content": f"You {verb}."}, {"role": "user", "content": "Go."}]
            for verb in ("lead", "help")
        )
        await self._say(client, lead, stream=True)
        await self._say(client, helper)
        lead.append({"role": "user", "content": "On."})
        await self._say(client, lead)
        helper.append({"role": "user", "content": "More."})
        await self._say(client, helper, stream=True)
        compacted = [*lead[:2], {"role": "user", "content": "So far: all well."}]
        await self._say(client, compacted)
        await self._say(client, [*lead[:3], {"role": "user", "content": "Or?"}], n=2)
        edited = [
            *lead[:2],
            {"role": "assistant", "content": "My own."},
            {"role": "user", "content": "Well?"},
        ]
        await self._say(client, edited)
        return 1.0

    async def _say(self, client: PolicyClient, messages: list[Any], **fields: Any) -> None:
        await asyncio.gather(self._call(client, messages, fields), asyncio.to_thread(self._publish))

    async def _call(self, client: PolicyClient, messages: list[Any], fields: dict[str, Any]) -> None:
        create = client.openai.chat.completions.create
        answer = await create(model=client.model, messages=messages, **fields)
        if "stream" in fields:
            text = "".join([part.choices[0].delta.content or "" async for part in answer])
        else:
            text = answer.choices[0].message.content
        messages.append({"role": "assistant", "content": text})

    def _publish(self) -> None:
        different = perturbed(self._original, next(self._seeds))
        self.weights[self._policy.publish(different)] = different

    def restore(self) -> None:
        """Publish what was served before."""
        self._policy.publish(self._original)


def num_changed(trajectory: Trajectory) -> int:
    return sum(len({*completion.token_versions}) > 1 for completion in trajectory.completions)


def played(program: Conversations, sampler: Any) -> Trajectory:
    def sample(request: SampleRequest) -> Completion:
        completion: Completion = ray.get(sampler.sample.remote(request))
        return completion

    params = SamplingParams(temperature=TEMPERATURE)
    request = RolloutRequest(rollout_id="a/0", group_id="a", task={}, params=params, seed=1)
    pair = pair_of(None, None, program, {}, {})
    env = pair.make_env(request)
    try:
        return run_rollout(pair.make_agent(), env, sample, request, LIMITS, Journal())
    finally:
        env.close()


@torch.no_grad()
def test_program_learns_each_token_as_its_version_sampled_it(policy_app: ServedPolicy, sampler: Any) -> None:
    for _ in range(3):  # where nothing else runs, answers may end before a version is published
        program = Conversations(policy_app)
        trajectory = played(program, sampler)
        program.restore()
        if num_changed(trajectory) >= NUM_CHANGES:
            break
    assert [step.info["follows"] for step in trajectory.steps] == [None, None, 0, 1, None, 0, 0, None]
    assert [step.info["branch"] for step in trajectory.steps] == [
        *("", "another system prompt", "", "", "history compacted"),
        *("history edited", "asked again", "answer edited"),
    ]
    samples = training_samples(trajectory)
    assert [list(dict.fromkeys(turn for turn in each.turns if turn >= 0)) for each in samples] == [
        *([0, 2], [1, 3], [4], [5], [6], [7]),
    ]
    models = {version: load(policy_app.model_path, each) for version, each in program.weights.items()}
    num_denied = 0
    for sample in samples:
        completions = {turn: trajectory.steps[turn].completion for turn in set(sample.turns) if turn >= 0}
        versions = [version for turn in sorted(completions) for version in completions[turn].token_versions]
        mask = torch.tensor(sample.loss_mask, dtype=torch.bool)
        found = torch.tensor(sample.rollout_logprobs)[mask]
        ids = sample.prompt_ids, sample.response_ids
        by_version = {
            version: token_logprobs(models[version], *ids, TEMPERATURE)[mask] for version in {*versions}
        }
        expected = torch.stack([by_version[version][index] for index, version in enumerate(versions)])
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
        assert sample.policy_version == versions[0] == min(versions)
        num_denied += bool((found - by_version[versions[0]]).abs().max() > 10 * TOLERANCE)
    assert num_changed(trajectory) >= NUM_CHANGES
    assert num_denied >= NUM_CHANGES - 1, "one version for all tokens of a sequence would be seen"
