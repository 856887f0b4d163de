"""Tasks of NeMo-Gym (https://github.com/NVIDIA-NeMo/Gym, 0.4), by the HTTP of their resource server.

An episode is that of NeMo-Gym's own simple agent: ``/seed_session``, then a POST to the name of each tool
that the policy calls, and ``/verify``, which gives the reward. Its package is not used: it needs an older
mcp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from environments.errors import EnvironmentFailure
from environments.rewards.base import RewardOutput

PARAMS = "responses_create_params"
"""Field of a task: the ``input`` and ``tools`` of a request to the Responses API."""
TIMEOUT_SECONDS = 300.0
"""Time limit of one answer of the server, whose judge may be a model."""


@dataclass(frozen=True)
class NemoGymRollout:
    """A rollout function that plays the tasks of the resource server at the address ``server``.

    A tool's error is its answer, as in NeMo-Gym. A server that is gone, or that cannot begin or judge an
    episode, is an ``EnvironmentFailure``: the task is played again.
    """

    server: str

    def __call__(self, task: dict[str, Any], client: Any) -> RewardOutput:
        import httpx

        with httpx.Client(base_url=self.server, timeout=TIMEOUT_SECONDS) as server:  # keeps the cookies
            _json(server, "/seed_session", task)
            response = self._play(server, task[PARAMS], client.openai)
            verdict = _json(server, "/verify", {**task, "response": response})
        reward = verdict.get("reward") if isinstance(verdict, dict) else None
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise EnvironmentFailure(f"NeMo-Gym's server {self.server} answers /verify by {verdict!s:.500}.")
        details = {name: each for name, each in verdict.items() if name not in {*task, "response", "reward"}}
        return RewardOutput(float(reward), metadata=details)

    def _play(self, server: Any, params: dict[str, Any], policy: Any) -> dict[str, Any]:
        """The policy's last response, with the output of all turns."""
        from openai import APIStatusError

        given, outputs, response = params["input"], list[dict[str, Any]](), None
        items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        while response is None or response["output"][-1]["type"] == "function_call_output":
            try:
                created = policy.responses.create(**{**params, "model": "policy", "input": items + outputs})
            except APIStatusError as error:
                if response is None or error.code != "rollout_ended":
                    raise
                break  # a limit of the rollout has ended it: what was done so far is judged
            response = created.model_dump(mode="json", exclude_none=True)
            outputs += response["output"]
            for call in [each for each in response["output"] if each["type"] == "function_call"]:
                output = _tool_output(server, call, params.get("tools") or ())
                ids = {"type": "function_call_output", "call_id": call["call_id"]}
                outputs.append({**ids, "output": output})
            response["output"] = list(outputs)
        return response


def _tool_output(server: Any, call: dict[str, Any], tools: Iterable[dict[str, Any]]) -> str:
    name = call["name"]
    if name not in {each.get("name") for each in tools}:  # such as seed_session, by which it could begin anew
        return json.dumps({"error": f"There is no tool {name!r}."})
    try:
        arguments = json.loads(call["arguments"])
    except (ValueError, RecursionError) as error:
        return json.dumps({"error": f"Invalid tool call arguments: {error}"})
    return str(_post(server, f"/{name}", arguments).text)


def _json(server: Any, path: str, body: dict[str, Any]) -> Any:
    answer = _post(server, path, body)
    with suppress(ValueError):
        if answer.status_code == 200:
            return answer.json()
    raise EnvironmentFailure(
        f"The NeMo-Gym server {server.base_url} answers {path} by status {answer.status_code}: "
        f"{answer.text[:500]}"
    )


def _post(server: Any, path: str, body: Any) -> Any:
    import httpx

    try:  # not by httpx's json, which refuses half a surrogate pair, as a model may write
        return server.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    except httpx.TransportError as error:
        raise EnvironmentFailure(
            f"The NeMo-Gym server {server.base_url} gives no answer to {path}: {error!r}. Start it, or "
            "correct its address."
        ) from error
