"""A rank of a worker group: verl's TrainingWorker with phases of training, shares of batches, checkpoints.

Every public method is called on all ranks at once with the same arguments, but for shards of mini-batches:
each rank gets its own, as ``division.py`` makes them.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig

from environments.disk import FileDigest
from environments.errors import ConfigError, LearnerError
from policies.learning.division import Columns, RankShard
from policies.learning.settings import LearnerConfig, OptimizerConfig
from policies.learning.verl import weights as verl_weights
from policies.learning.verl.config import optimizer_config
from policies.learning.verl.data import as_column, responses, unscored
from policies.learning.verl.four_bits import SCALES, numbers_in, unpacked
from policies.learning.verl.sequence_parallel import check_model
from policies.learning.verl.shards import (
    MODEL,
    ShardFiles,
    StateCopy,
    extra_state,
    flat_start,
    is_first_with,
    model_state,
    optimizer_state,
    restore_model,
    restore_optimizer,
    write_in_turn,
)
from policies.learning.verl.token_trees import pairs_per_token
from policies.model_files import HUGGINGFACE, weights_file
from policies.pictures import picture_reader

# isort: split
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.metric import Metric
from verl.utils.model import convert_weight_keys
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine.fsdp.utils import unfuse_moe_params
from verl.workers.engine_workers import TrainingWorker

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

RATES = re.compile("drop|jitter")
"""Pattern of the names of settings that make a model's answer random: attention_dropout, resid_pdrop,
router_jitter_noise.

``score`` computes the old log-probabilities without it, and ``update`` the new ones: with dropout in only
one of them the ratio is not 1 before anything is learned (measured: up to 22 at p = 0.5).
"""
PRIMITIVE_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables with the sizes of oneDNN's and torch's caches of matrix products, read at the first in bfloat16.

By default each holds 1,024, of every shape one: rows of ever new lengths fill them with hundreds of MB. A
micro-batch has some 20 shapes.
"""


def on_all_ranks(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """A method that all ranks have to call together. Rank 0 answers; the others would say the same again."""

    @functools.wraps(method)
    def call(self: VerlWorker, *args: P.args, **kwargs: P.kwargs) -> T:
        answer = method(self, *args, **kwargs)
        return answer if dist.get_rank() == 0 else cast(T, None)

    return call


class VerlWorker(TrainingWorker):
    """A rank of a model that is trained.

    Args:
        config: verl's, of the model.
        seed: of torch's generator on this rank.

    Raises:
        ConfigError: the rank is to be on a GPU, and torch finds none.
    """

    def __init__(self, config: TrainingWorkerConfig, learner: LearnerConfig, seed: int) -> None:
        self._learner = learner
        if learner.device == "cpu":
            for variable in PRIMITIVE_CACHES:
                os.environ.setdefault(variable, "64")
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # torchao's step was compiled in 174 s
            # The same number in a resumed run: it decides the order of sums, and so their last bits.
            torch.set_num_threads(learner.num_threads or 1)
            if not dist.is_initialized():  # verl's own backend string is one that torch rejects on a CPU
                dist.init_process_group(
                    "gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
                )
        elif not torch.cuda.is_available():
            raise ConfigError(
                f"learner.device={learner.device}, and torch {torch.__version__} finds no GPU on "
                f"{socket.gethostname()}: install the packages of launch/install/pins-cuda.txt there (make "
                "install DEVICE=cuda) and the GPU's driver, or set learner.device=cpu."
            )
        torch.manual_seed(seed)
        switch_off_in_config(config.model_config.hf_config)
        if (reader := picture_reader(config.model_config.local_path)) is not None:
            # A checkpoint has it too; verl itself loads Qwen's alone.
            config.model_config.processor = reader.processor
        super().__init__(config)
        self.reset()
        if learner.ranks_of_row > 1:
            model = config.model_config.hf_config
            check_model(self.engine.module, model, learner.ranks_of_row, reader is not None)
        switch_off_in_modules(self.engine.module)
        self.pairs_per_token = pairs_per_token(self.engine.module, config.model_config.hf_config)

    @on_all_ranks
    def begin_phase(self, optimizer: OptimizerConfig, num_schedule_steps: int) -> None:
        """Start a phase of training: a fresh optimizer and schedule on the present weights."""
        engine = self.engine
        engine.optimizer_config = optimizer_config(optimizer, self._learner, num_schedule_steps)
        engine.optimizer = engine._build_optimizer(engine.module)
        engine.lr_scheduler = engine._build_lr_scheduler(engine.optimizer)
        engine.checkpoint_manager.optimizer = engine.optimizer
        engine.checkpoint_manager.lr_scheduler = engine.lr_scheduler

    # -- one pass over a batch -----------------------------------------------------------------------

    def _step(self, data: TensorDict, advance_schedule: bool, entropy: bool = False) -> dict[str, float]:
        """Take one optimizer step under ``self.loss_fn``, and return verl's report of it."""
        tu.assign_non_tensor(data, update_lr_scheduler=advance_schedule, calculate_entropy=entropy)
        lr = float(self.engine.optimizer.param_groups[0]["lr"])  # verl reports the next step's
        reported = tu.get(self.train_batch(data), "metrics")
        metrics = {name: _number(value) for name, value in reported.items()} | {"lr": lr}
        if not torch.isfinite(torch.tensor(metrics["grad_norm"])):
            raise LearnerError(
                f"The gradient norm is {metrics['grad_norm']}: verl skipped the step. Lower the lr."
            )
        return metrics

    def column(self, shard: RankShard, name: str, output: str = "log_probs") -> Columns:
        """A column of this name: what the model puts out for each sampled token. Collective."""
        data = unscored(shard)
        tu.assign_non_tensor(data, compute_loss=False)
        rows = responses(shard, tu.get(self.infer_batch(data), output))
        return {name: as_column(shard, rows)}

    # -- weights and checkpoints ---------------------------------------------------------------------

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Shards of the weights on this rank, adapters merged, by names of ``shard_name``; the first rank has
        what several have alike. Collective: the call gathers adapters, and the iteration nothing.
        """
        state, device = self.engine.module.state_dict(), get_device_id()
        adapters = {
            name: verl_weights.full_tensor(tensor.to(device))
            for name, tensor in state.items()
            if verl_weights.is_adapters(name)
        }
        return self._shards(state, adapters)

    def _shards(
        self, state: Mapping[str, torch.Tensor], adapters: Mapping[str, torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shards in self._own_rows.items():
            own = unpacked(name, lambda each: verl_weights.local(state[each])).flatten()
            delta = verl_weights.delta(self.engine.module, name, adapters.__getitem__)
            if delta is not None:
                start = flat_start(state[name])
                own = own + delta.to(own.device).flatten()[start : start + len(own)]
            for each in shards:
                yield each.name, own[each.begin : each.end].view(each.shape)

    @functools.cached_property
    def _own_rows(self) -> dict[str, list[verl_weights.OwnRows]]:
        """The shards that this rank publishes, by the model's tensors. To find them takes as long as to copy
        them, and they stay; the memory of the tensors may move."""
        state = self.engine.module.state_dict()

        def without_memory(name: str) -> torch.Tensor:
            return torch.empty(state[name].shape, dtype=state[name].dtype, device="meta")

        return {
            name: [
                each
                for exported, whole in self._exported([name], without_memory)
                for each in verl_weights.own_rows(
                    exported,
                    whole,
                    flat_start(tensor),
                    verl_weights.local(tensor).numel() * numbers_in(tensor),
                )
            ]
            for name, tensor in state.items()
            if is_first_with(tensor)
        }

    def _exported(
        self, names: Iterable[str], whole_tensor: Callable[[str], torch.Tensor]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of these names of the module, by checkpoint name."""
        module, kind = self.engine.module, self.model_config.hf_config.model_type
        converted = (
            each
            for name in names
            if not verl_weights.is_adapters(name) and not name.endswith(SCALES)
            for each in convert_weight_keys(
                {verl_weights.base_name(name): self._merged(name, whole_tensor)}, module
            ).items()
        )
        return (each for each in unfuse_moe_params(converted, kind) if not self._is_tied(each[0]))

    def _merged(self, name: str, whole_tensor: Callable[[str], torch.Tensor]) -> torch.Tensor:
        weight = unpacked(name, whole_tensor)
        delta = verl_weights.delta(self.engine.module, name, whole_tensor)
        return weight if delta is None else weight + delta

    def _is_tied(self, name: str) -> bool:
        return name == "lm_head.weight" and bool(self.model_config.hf_config.tie_word_embeddings)

    def begin_save(self, folder: str) -> Callable[[], dict[str, FileDigest]]:
        """Copy this rank's state to host memory, and write what is small: config, tokenizer, schedule, random
        generators. Collective.

        Returns:
            A function that writes the copy and returns the digests of its files, by path. Not collective: the
            rank may learn meanwhile. Raises OSError for a file that cannot be written.
        """
        self.engine.checkpoint_manager.save_checkpoint(folder)
        copy = StateCopy()
        copy.add(model_state(self.engine.module))
        copy.add(optimizer_state(self.engine.optimizer.state_dict()))
        self._add_to(copy)
        return partial(copy.write, folder)

    def _add_to(self, copy: StateCopy) -> None:
        """Copy other parts of this rank's state."""

    def export(self, folder: str) -> dict[str, FileDigest]:
        """Write this rank's share of the weights in Hugging Face's form, from what all ranks have written to
        ``folder``; return the digest of the file. Not collective. Raises as the function of ``begin_save``.
        """
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        files = ShardFiles(folder)

        def without_memory(name: str) -> torch.Tensor:
            shape, dtype = files.shapes[MODEL + name], files.dtype(MODEL + name)
            return torch.empty(tuple(shape), dtype=dtype, device="meta")

        names = sorted(files.names_for(rank), key=lambda name: -unpacked(name, without_memory).itemsize)
        weights = self._exported(names, lambda name: files.whole(MODEL + name))
        layout = dict(self._exported(names, without_memory))
        path = os.path.join(folder, HUGGINGFACE, weights_file(rank, num_ranks))
        return write_in_turn(layout, (tensor for _, tensor in weights), path)

    @on_all_ranks
    def load(self, folder: str) -> str | None:
        """Restore what was saved; return a sentence on what could not be restored, if there is any.

        Weights, moments and the place in the schedule, however many ranks saved them; where they were as many
        as now, the random generators too, of which each rank has its own. Settings of the optimizer are this
        run's.

        Raises:
            ConfigError: the checkpoint is damaged, or of another model.
        """
        saved, present = ShardFiles(folder), dist.get_world_size()
        restore_model(self.engine.module, saved)
        restore_optimizer(self.engine.optimizer, saved)
        self._restore_from(saved, folder)
        if self.engine.is_optimizer_offload_enabled:
            self.engine.to("cpu", model=False, grad=False)
        is_same = saved.num_ranks == present
        extra = extra_state(folder, dist.get_rank() if is_same else 0, saved.num_ranks)
        self.set_schedule(extra["lr_scheduler"])
        if is_same:
            self.engine.checkpoint_manager.load_rng_state(extra["rng"])
            return None
        return (
            f"The checkpoint was written by {saved.num_ranks} learner rank(s) and is loaded by {present}: "
            "weights, optimizer and schedule are as they were; the random generators begin anew."
        )

    def _restore_from(self, saved: ShardFiles, folder: str) -> None:
        """Restore what ``_add_to`` has copied."""

    def schedule(self) -> dict[str, Any]:
        """The state of the learning rate's schedule, for ``set_schedule``."""
        state: dict[str, Any] = self.engine.lr_scheduler.state_dict()
        return state

    def _tensors(self) -> dict[str, torch.Tensor]:
        """All that has a place in ``weights``, as this rank has it, by checkpoint name."""
        module = self.engine.module
        tensors = convert_weight_keys(module.state_dict(), module)
        return {name: tensor for name, tensor in tensors.items() if not self._is_tied(name)}

    def set_schedule(self, state: dict[str, Any]) -> None:
        """Let the schedule go on from a state of ``schedule``, with this run's ``learner.optimizer.lr``."""
        schedule, groups = self.engine.lr_scheduler, self.engine.optimizer.param_groups
        schedule.load_state_dict({**state, "base_lrs": schedule.base_lrs})
        shares = [share_of(schedule.last_epoch) for share_of in schedule.lr_lambdas]
        schedule._last_lr = [lr * share for lr, share in zip(schedule.base_lrs, shares, strict=True)]
        for group, lr in zip(groups, schedule.get_last_lr(), strict=True):
            if isinstance(group["lr"], torch.Tensor):  # torchao's
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr


# -- metrics -------------------------------------------------------------------------------------------


def _number(value: Any) -> float:
    """A metric over micro-batches and ranks as one number."""
    if isinstance(value, list):
        if value and isinstance(value[0], Metric):
            return float(Metric.aggregate_dp(value))
        return sum(map(_number, value)) / max(1, len(value))
    if isinstance(value, Metric):
        return float(value.aggregate())
    return float(value)


def mean_metrics(steps: Sequence[Mapping[str, float]], names: Mapping[str, str]) -> dict[str, float]:
    """The metrics in ``names`` (verl's -> ours), as means over the steps that report them."""
    values = {ours: [step[theirs] for step in steps if theirs in step] for theirs, ours in names.items()}
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items() if numbers}


# -- dropout, layerdrop, jitter of routers ------------------------------------------------------------


def switch_off_in_config(config: PretrainedConfig) -> None:
    """Set all ``RATES`` in the config of a model, and of its parts, to 0, before the model is built."""
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            switch_off_in_config(value)
        elif RATES.search(name) and type(value) in (int, float) and value:
            logger.warning("The model's config has %s=%s: it is trained without, at 0.", name, value)
            setattr(config, name, type(value)(0))


def switch_off_in_modules(model: torch.nn.Module) -> None:
    """Set the rate of all dropout layers to 0, also of those that no config speaks of (adapters')."""
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd) and module.p:
            logger.warning("The model's layer %s has dropout %s: it is trained without.", name, module.p)
            module.p = 0.0
