"""verl's FSDP engine for the policy: shared prompts are computed once, and logits made only for responses.

With a real vocabulary the logits are most of an update's memory, and prompts are most of its tokens:
log-probabilities of prompts are not needed. ``policies.learning.verl.config`` calls ``install``.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict
from transformers import PreTrainedModel
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from environments.errors import LearnerError
from policies.learning.verl.micro_batches import prepare_micro_batches
from policies.learning.verl.shared_prompts import Layout
from policies.learning.verl.weights import layers_beside_experts

ALL_LINEAR = "all-linear"
"""Name that peft has for all linear layers but the output."""


class PolicyEngine(FSDPEngineWithLMHead):
    """Log-probabilities, and entropies where they are asked for, of the response tokens of a micro-batch.

    In verl's columns, [P + R] for each sample: column i belongs to token i+1, and those of the prompt are 0.
    """

    def _build_lora_module(self, module: PreTrainedModel) -> torch.nn.Module:
        if self.model_config.target_modules == ALL_LINEAR and (layers := layers_beside_experts(module)):
            self.model_config.__dict__["target_modules"] = layers  # verl's class lets no field be set
        adapted: torch.nn.Module = super()._build_lora_module(module)
        return adapted

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        layout = Layout.of(micro_batch)
        columns, places = layout.column_of.unique(return_inverse=True)
        inputs = {
            "input_ids": layout.input_ids,
            "attention_mask": layout.attention_mask(),
            "position_ids": layout.positions,
            "logits_to_keep": columns,
        }
        return inputs, {"layout": layout, "num_columns": len(columns), "places": places}

    def prepare_model_outputs(
        self,
        output: Any,
        output_args: dict[str, Any],
        micro_batch: TensorDict,
        logits_processor_func: Any,
    ) -> dict[str, torch.Tensor]:
        if output.logits.shape[1] != output_args["num_columns"]:
            raise LearnerError(
                f"{type(self.module).__name__} has no argument logits_to_keep: it cannot be trained here."
            )
        layout = output_args["layout"]
        logits = output.logits[layout.row_of, output_args["places"]].float()  # [N, V]
        temperature = tu.get_non_tensor_data(data=micro_batch, key="temperature", default=1.0)
        if temperature != 1:
            logits = logits / temperature
        labels = layout.labels
        values = {"log_probs": -torch.nn.functional.cross_entropy(logits, labels, reduction="none")}
        if tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False):
            values["entropy"] = entropy_from_logits(logits)
        predicts = predicting(micro_batch)
        offsets = micro_batch["input_ids"].offsets()
        is_real = torch.arange(predicts.shape[1], device=predicts.device) < offsets.diff().unsqueeze(-1)
        return {
            name: torch.nested.nested_tensor_from_jagged(
                torch.zeros(predicts.shape, device=value.device, dtype=value.dtype).masked_scatter(
                    predicts, value
                )[is_real],
                offsets,
            )
            for name, value in values.items()
        }


def predicting(micro_batch: TensorDict) -> torch.Tensor:
    """Return whether a column [B, longest row] predicts a token of its row's response."""
    prompts = micro_batch["prompts"].offsets().diff().unsqueeze(-1)
    lengths = micro_batch["input_ids"].offsets().diff().unsqueeze(-1)
    columns = torch.arange(int(lengths.max()), device=lengths.device)
    return (columns >= prompts - 1) & (columns < lengths - 1)


def install() -> None:
    """Have verl's workers use this engine for policies, and our micro-batches for policies and critics."""
    for device in ("cpu", "cuda"):  # verl's own way to register engines does not let one be replaced
        EngineRegistry._engines["language_model"]["fsdp2"][device] = PolicyEngine
    transformer_impl.prepare_micro_batches = prepare_micro_batches
