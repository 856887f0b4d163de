"""The critic on one rank: a value for every token, and the clipped value loss (PPO)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForTokenClassification

from policies.learning.division import VALUE_COLUMNS, Columns, RankShard
from policies.learning.settings import LearnerConfig, critic_optimizer
from policies.learning.verl.config import critic_config, worker_config
from policies.learning.verl.data import scored
from policies.learning.verl.losses import share_of_mean
from policies.learning.verl.worker import VerlWorker, mean_metrics, on_all_ranks

# isort: split
import verl.utils.model
from tensordict import TensorDict
from verl.workers.config import CriticConfig
from verl.workers.utils.losses import value_loss

METRIC_NAMES = {
    "loss": "learn/value_loss",
    "grad_norm": "learn/value_grad_norm",
    "lr": "learn/value_lr",
    "clip_fraction": "learn/value_clip_fraction",
}


class VerlCritic(VerlWorker):
    """A rank of the value model: the language model's body with a scalar in the place of its last layer.

    Args:
        model_path: folder in Hugging Face format of the policy that it starts from.
        num_schedule_steps: calls of ``update`` over which a cosine schedule runs.
    """

    def __init__(self, model_path: str, learner: LearnerConfig, num_schedule_steps: int, seed: int) -> None:
        verl.utils.model.load_valuehead_model = _load_value_model
        optimizer = critic_optimizer(learner)
        config = worker_config("value_model", model_path, learner, optimizer, num_schedule_steps)
        # verl sets the rate to the text "0", which configs that have one (StableLM's) do not take.
        vars(type(config.model_config.hf_config)).get("__validators__", {}).pop("hidden_dropout", None)
        super().__init__(config, learner, seed)
        self.loss_fn = partial(clipped_value_loss, critic_config(learner))

    def values(self, shards: Sequence[RankShard]) -> list[Columns]:
        """The column ``values`` of every sample: what the state before each sampled token is worth."""
        return [self.column(shard, "values", "values") for shard in shards]

    @on_all_ranks
    def update(self, shards: Sequence[RankShard]) -> dict[str, float]:
        """Take one optimizer step per mini-batch towards ``returns``, then one step of the schedule.

        A mini-batch without a sampled token takes no step.
        """
        shards = [shard for shard in shards if shard.num_trajectories]
        steps = [
            self._step(scored(shard, VALUE_COLUMNS), advance_schedule=number == len(shards))
            for number, shard in enumerate(shards, start=1)
        ]
        return mean_metrics(steps, METRIC_NAMES)


def clipped_value_loss(
    config: CriticConfig, model_output: dict[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Any]]:
    """verl's ``value_loss`` of one micro-batch, with the clipped share of the whole batch's tokens.

    verl reports the share of the micro-batch's, whose mean over micro-batches and ranks of unlike lengths
    would depend on how the batch is cut.
    """
    loss, metrics = value_loss(config, model_output, data, dp_group)
    mask = data.select("response_mask").to_padded_tensor()["response_mask"].bool()
    fraction = torch.tensor(metrics["critic/vf_clipfrac"])
    return loss, metrics | {"clip_fraction": share_of_mean(fraction, mask, data)}


def _load_value_model(
    local_path: str, torch_dtype: torch.dtype, model_config: Any, trust_remote_code: bool
) -> torch.nn.Module:
    """Replace verl's function of this name, which insists on flash attention.

    What the policy does not have begins at zero: the first values are 0, and not noise.
    """
    model_config.hidden_dropout = 0.0  # a number again: see ``VerlCritic``
    model, report = AutoModelForTokenClassification.from_pretrained(
        local_path,
        dtype=torch_dtype,
        config=model_config,
        attn_implementation="sdpa",
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
    )
    for name in report["missing_keys"]:
        torch.nn.init.zeros_(model.get_parameter(name))
    return model
