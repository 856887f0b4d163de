"""verl's FSDP engines for policy and critic: a token that samples share is computed once, and logits are made
only for responses.

With a real vocabulary the logits are most of an update's memory, and prompts are most of its tokens:
log-probabilities of prompts are not needed. ``policies.learning.verl.config`` calls ``install``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import PreTrainedModel
from verl.utils import fsdp_utils
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import (
    FSDPEngine,
    FSDPEngineWithLMHead,
    FSDPEngineWithValueHead,
)

from environments.errors import LearnerError
from policies.learning.verl import sequence_parallel, token_trees
from policies.learning.verl.fields import QUANTIZATION
from policies.learning.verl.four_bits import put_in_four_bits
from policies.learning.verl.micro_batches import PACKED, prepare_micro_batches
from policies.learning.verl.sequence_parallel import of_all_ranks, own_part
from policies.learning.verl.token_trees import Layout
from policies.learning.verl.weights import freeze_routers, layers_beside_experts
from policies.pictures import BLANK, TOKEN_BIAS, PictureReader, picture_reader

Arguments = dict[str, Any]
ALL_LINEAR = "all-linear"
"""Name that peft has for all linear layers but the output."""
PICTURES = "pictures"
"""Column of a micro-batch [N], where any sample of its mini-batch has pictures on any rank: those of each."""


class UndividedEngine(FSDPEngine):
    """An engine that leaves a model as it is where there is nothing to divide and nothing to round: on one
    rank on a CPU in float32. FSDP copies each layer's weights for each pass there too, and what the pass
    keeps lies between the copies: their memory is not free again until it ends.
    """

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        precision = self.engine_config.mixed_precision or {}
        is_rounded = precision.get("param_dtype") != "fp32" or module.dtype != torch.float32
        if is_rounded or dist.get_world_size() > 1 or get_device_name() != "cpu":
            divided: torch.nn.Module = super()._build_fsdp_module(module)
            return divided
        for each in module.parameters():
            each.data = each.data.clone()  # until here it is a view of the model's file
        self._autocast_dtype, self.scaler = torch.float32, None
        return module


class _RowsEngine(UndividedEngine):
    """Engine of rows: of trees of samples, or of all samples one after the other."""

    @cached_property
    def _is_packed(self) -> bool:
        reads_text_only = picture_reader(self.model_config.local_path) is None
        return reads_text_only and token_trees.packs(self.module, self.model_config.hf_config)

    def forward_backward_batch(self, data: TensorDict, *args: Any, **kwargs: Any) -> Any:
        tu.assign_non_tensor(data, **{PACKED: self._is_packed})
        return super().forward_backward_batch(data, *args, **kwargs)

    def is_mp_src_rank_with_outputs(self) -> bool:
        return True  # of ranks that share their rows each has what all have


class PolicyEngine(_RowsEngine, FSDPEngineWithLMHead):
    """Log-probabilities, and entropies where they are asked for, of the response tokens of a micro-batch.

    In verl's columns, [P + R] for each sample: column i belongs to token i+1, and those of the prompt are 0.
    """

    def _build_module(self) -> torch.nn.Module:
        module: torch.nn.Module = super()._build_module()
        freeze_routers(module)
        return module

    def _build_lora_module(self, module: PreTrainedModel) -> torch.nn.Module:
        if self.model_config.target_modules == ALL_LINEAR and (layers := layers_beside_experts(module)):
            self.model_config.__dict__["target_modules"] = layers  # verl's class lets no field be set
        adapted: torch.nn.Module = super()._build_lora_module(module)
        if self.model_config.lora.get(QUANTIZATION):
            put_in_four_bits(adapted)
        return adapted

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[Arguments, Arguments]:
        pixels, beside = self._pixels(micro_batch)
        layout = Layout.of(micro_batch, beside, own_part())
        predicted = Predicted.of(layout, micro_batch)
        inputs = model_inputs(layout, self._is_packed) | pixels
        return inputs | {"logits_to_keep": predicted.columns}, {"predicted": predicted}

    @property
    def _pictures(self) -> PictureReader | None:
        return picture_reader(self.model_config.local_path)

    def _pixels(self, micro_batch: TensorDict) -> tuple[Arguments, list[torch.Tensor]]:
        """Arguments of the model for the pictures of a micro-batch, row by row, and rows beside its own.

        Ranks wait for each other in the model's part for pictures. So where others may have one and this has
        none, a row of a blank one is added, from which nothing is learned.
        """
        pictures = [*chain(*micro_batch.get(PICTURES).tolist())] if PICTURES in micro_batch else []
        if self._pictures is None:
            if pictures:
                raise LearnerError(f"{self.model_config.local_path} reads text only: a sample has pictures.")
            return {}, []
        ids, beside = micro_batch["input_ids"].values(), list[torch.Tensor]()
        num_tokens = sum(self._pictures.ids(each).count(self._pictures.token_id) for each in pictures)
        if (found := int((ids == self._pictures.token_id).sum())) != num_tokens:
            raise LearnerError(
                f"Samples have {found} tokens of pictures, and pictures of {num_tokens} tokens."
            )
        if PICTURES in micro_batch and not pictures and dist.get_world_size() > 1:
            pictures, beside = [BLANK], [ids.new_tensor(self._pictures.ids(BLANK).tolist())]
        if not pictures:
            return {}, []
        pixels = self._pictures.pixels(pictures)
        return {name: each.to(ids.device) for name, each in pixels.items()}, beside

    def prepare_model_outputs(
        self, output: Any, output_args: Arguments, micro_batch: TensorDict, logits_processor_func: object
    ) -> dict[str, torch.Tensor]:
        predicted = output_args["predicted"]
        if output.logits.shape[1] != len(predicted.columns):
            raise LearnerError(
                f"{type(self.module).__name__} has no argument logits_to_keep: it cannot be trained here."
            )
        logits = predicted.logits(output.logits)
        if self._pictures is not None:
            with torch.no_grad():  # in place, since they are most of an update's memory
                logits[:, self._pictures.token_id] += TOKEN_BIAS
        temperature = tu.get_non_tensor_data(data=micro_batch, key="temperature", default=1.0)
        if temperature != 1:
            logits = logits / temperature
        cross_entropy = torch.nn.functional.cross_entropy(logits, predicted.labels, reduction="none")
        values = {"log_probs": -cross_entropy}
        if tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False):
            values["entropy"] = entropy_from_logits(logits)
        offsets = micro_batch["input_ids"].offsets()
        return {
            name: torch.nested.nested_tensor_from_jagged(of_all_ranks(predicted.by_sample(value)), offsets)
            for name, value in values.items()
        }


class ValueEngine(_RowsEngine, FSDPEngineWithValueHead):
    """Values, [P + R] for each sample: column i belongs to what comes after token i."""

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[Arguments, Arguments]:
        if PICTURES in micro_batch:
            raise LearnerError("A critic reads text only, and a sample has pictures: use another estimator.")
        layout = Layout.of(micro_batch, part=own_part())
        return model_inputs(layout, self._is_packed), {"layout": layout}

    def prepare_model_outputs(
        self, output: Any, output_args: Arguments, micro_batch: TensorDict, logits_processor_func: object
    ) -> dict[str, torch.Tensor]:
        layout, offsets = output_args["layout"], micro_batch["input_ids"].offsets()
        of_others = (layout.own.start, layout.input_ids.shape[1] - layout.own.stop)
        values = torch.nn.functional.pad(output.logits.squeeze(-1), of_others).flatten()[layout.paths]
        return {"values": torch.nested.nested_tensor_from_jagged(of_all_ranks(values), offsets)}


def model_inputs(layout: Layout, is_packed: bool = False) -> Arguments:
    """Return what the model is called with. In a packed row transformers finds the samples by their
    positions, if there is no mask."""
    return {
        "input_ids": layout.input_ids[:, layout.own],
        "attention_mask": None if is_packed else layout.attention_mask(),
        "position_ids": layout.positions[:, layout.own],
    }


@dataclass(frozen=True)
class Predicted:
    """The tokens of a micro-batch whose log-probabilities are wanted of this rank, each once.

    Attributes:
        labels: [U] the tokens.
        columns: [C] columns of the rows, from this rank's first on, in which any is predicted.
        rows, places: [U] row of each, and index in ``columns`` of the one that predicts it.
        outputs: [N] where in verl's columns, all samples' one after the other, they are wanted.
        tokens: [N] index of the token that is wanted there.
        num_outputs: number of tokens of all samples.
    """

    labels: torch.Tensor
    columns: torch.Tensor
    rows: torch.Tensor
    places: torch.Tensor
    outputs: torch.Tensor
    tokens: torch.Tensor
    num_outputs: int

    @classmethod
    def of(cls, layout: Layout, micro_batch: TensorDict) -> Predicted:
        """The response tokens of flat rows, and of trees those that were sampled."""
        prompts = micro_batch["prompts"].offsets().diff()
        lengths = micro_batch["input_ids"].offsets().diff()
        wanted = layout.depths >= prompts.repeat_interleave(lengths)
        if layout.has_branches:
            wanted[wanted.clone()] = micro_batch["response_mask"].values().bool()
        width, parents = layout.input_ids.shape[1], layout.parents()
        of_parents = parents[layout.paths] % width
        wanted &= (layout.own.start <= of_parents) & (of_parents < layout.own.stop)
        places, tokens = layout.paths[wanted].unique(return_inverse=True)
        parents = parents[places]
        columns, place_of = (parents % width - layout.own.start).unique(return_inverse=True)
        return cls(
            labels=layout.input_ids.flatten()[places],
            columns=columns,
            rows=parents // width,
            places=place_of,
            outputs=wanted.nonzero().flatten() - 1,  # verl's column i belongs to token i+1
            tokens=tokens,
            num_outputs=len(wanted),
        )

    def logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Pick those that predict the tokens [U, V] from all that the model has made [rows, C, V]."""
        own = logits[self.rows, self.places]
        return own.to(torch.promote_types(own.dtype, torch.float32))

    def by_sample(self, values: torch.Tensor) -> torch.Tensor:
        """Values of the tokens [U] in the columns of all samples [T], and 0 in the others."""
        return values.new_zeros(self.num_outputs).index_put((self.outputs,), values[self.tokens])


def install() -> None:
    """Have verl's workers use these engines and our micro-batches, and the models' own forward passes.

    verl's are for packed rows and fused kernels, which it is not asked for, and for pictures: those of models
    that read pictures take positions of four kinds alone, and have no ``logits_to_keep``.
    """
    for device in ("cpu", "cuda"):  # verl's own way to register engines does not let one be replaced
        EngineRegistry._engines["language_model"]["fsdp2"][device] = PolicyEngine
        EngineRegistry._engines["value_model"]["fsdp2"][device] = ValueEngine
    transformer_impl.prepare_micro_batches = prepare_micro_batches
    transformer_impl.apply_monkey_patch = _no_patch
    # One of verl's transports of weights, none of which is used here: it imports vLLM. To verl it is missing.
    modules: dict[str, Any] = sys.modules
    modules.setdefault("verl.checkpoint_engine.hccl_checkpoint_engine", None)
    # verl has a patch for models whose first base is ABC, which makes FSDP2 refuse peft's layers.
    fsdp_utils.fully_shard_module = None
    sequence_parallel.install()


def _no_patch(model: PreTrainedModel, **options: object) -> None:
    """Called by verl in the place of its own ``apply_monkey_patch``."""
