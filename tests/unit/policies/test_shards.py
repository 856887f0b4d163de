"""Shards of a model's state: what two ranks have written is read as the same model, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from machine import free_port
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from two_ranks import on_two_ranks

from environments.errors import ConfigError
from policies.learning.verl import shards, weights
from policies.learning.verl.shards import (
    MODEL,
    PLACES,
    ShardFiles,
    StateCopy,
    model_state,
    optimizer_state,
    restore_model,
    restore_optimizer,
    write_in_turn,
)


class Tied(nn.Module):
    """Two names of one parameter of a single row, of which the second rank has nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 1, bias=False), nn.Linear(4, 1, bias=False)
        self.head.weight = self.embed.weight


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1, bias=False)


class Empty(nn.Module):
    """A parameter without an element, as of a layer of no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.none = nn.Linear(3, 4), nn.Parameter(torch.zeros(0, 3))


class Views(nn.Module):
    """Two buffers that begin at the same place in memory, and are not the same."""

    def __init__(self) -> None:
        super().__init__()
        table = torch.arange(6.0)
        self.register_buffer("table", table)
        self.register_buffer("head", table[:2])


class Frozen(Untied):
    """A parameter that is not trained, of which there is no copy."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 6)
        self.embed.weight.requires_grad_(False)


MODULES = (Tied, Untied, Empty, Views, Frozen)


class OwnAdamW(torch.optim.AdamW):
    """Somebody's, which is given its moments in the tensors that it makes itself."""


def sharded(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def learned(module: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, foreach=False)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def save(module: nn.Module, folder: Path) -> None:
    """Write this rank's part of the module, and of an optimizer that has made a step."""
    copy = StateCopy()
    if list(module.parameters()):
        copy.add(optimizer_state(learned(module).state_dict()))
    copy.add(model_state(module))
    copy.write(str(folder))
    dist.barrier()


def restore(module: nn.Module, folder: Path) -> torch.optim.Optimizer | None:
    files = ShardFiles(str(folder))
    restore_model(module, files)
    if not list(module.parameters()):
        return None
    optimizer, own = (
        kind(module.parameters(), lr=0.1, foreach=False) for kind in (torch.optim.AdamW, OwnAdamW)
    )
    for each in (optimizer, own):
        restore_optimizer(each, files)
    ours, theirs = (optimizer_state(each.state_dict()) for each in (own, optimizer))
    assert ours.keys() == theirs.keys() and own.param_groups[0]["lr"] == 0.1
    assert all(torch.equal(weights.local(ours[name]), weights.local(each)) for name, each in theirs.items())
    return optimizer


def is_same(module: nn.Module, other: nn.Module) -> bool:
    ours, theirs = model_state(module), model_state(other)
    return ours.keys() == theirs.keys() and all(
        torch.equal(weights.local(tensor), weights.local(theirs[name])) for name, tensor in ours.items()
    )


def be_a_rank(folder: Path) -> None:
    """Save each module, load it into another one, and go on from it; write down what came of that."""
    outcomes = {}
    for make in MODULES:
        path = folder / make.__name__
        torch.manual_seed(7)
        module = sharded(make())
        save(module, path)
        torch.manual_seed(8)
        resumed = sharded(make())
        try:
            optimizer = restore(resumed, path)
            outcomes[make.__name__] = "same" if is_same(module, resumed) else "other numbers"
            if optimizer is not None:
                optimizer.step()
        except ConfigError as error:
            outcomes[make.__name__] = str(error)
        for other in set(MODULES) - {make}:
            try:
                restore(sharded(other()), path)
                outcomes[f"{make.__name__} as {other.__name__}"] = "loaded"
            except ConfigError:
                outcomes[f"{make.__name__} as {other.__name__}"] = "refused"
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(outcomes))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules that two ranks have saved, and what came of loading them."""
    folder = tmp_path_factory.mktemp("shards")
    on_two_ranks(be_a_rank, free_port(), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_state_is_restored_on_each_rank_and_as_nothing_else(folder: Path, rank: int) -> None:
    outcomes = json.loads((folder / f"{rank}.json").read_text())
    same, others = (
        {name: each for name, each in outcomes.items() if (" as " in name) is is_other}
        for is_other in (False, True)
    )
    assert same == dict.fromkeys(same, "same") and len(same) == len(MODULES)
    assert others == dict.fromkeys(others, "refused") and len(others) == 20


@pytest.mark.slow
def test_tensor_that_lacks_a_part_is_refused(folder: Path) -> None:
    """It would be read with what happened to be in memory there."""
    path = folder / "Empty" / "state_00001_of_00002.safetensors"
    with safe_open(path, "pt") as file:
        places = json.loads(file.metadata()[PLACES])
        tensors = {name: file.get_tensor(name) for name in places}
    name = f"{MODEL}dense.weight"
    del places[name], tensors[name]
    save_file(tensors, path, {PLACES: json.dumps(places)})
    with pytest.raises(ConfigError, match=rf"Empty .*has 6 of the 12 numbers of '{name}'"):
        ShardFiles(str(path.parent))


def test_tensors_written_in_turn_are_read_by_safetensors(tmp_path: Path) -> None:
    tensors = {
        "count": torch.tensor(3),
        "weight": torch.arange(6.0).view(2, 3).T,
        "none": torch.zeros(0, 3),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
    }
    path = str(tmp_path / "new" / "model.safetensors")
    layout = {name: tensor.to("meta") for name, tensor in tensors.items()}
    [(written, digest)] = write_in_turn(layout, iter(tensors.values()), path).items()
    assert (written, digest.num_bytes) == (path, Path(path).stat().st_size)
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(
        torch.equal(read[name], each) and read[name].dtype == each.dtype for name, each in tensors.items()
    )


class Momentum(torch.optim.Optimizer):
    """Somebody's, with a number of steps that is a plain one, and another for all parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps_of_all": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        [group] = self.param_groups
        group["steps_of_all"] += 1
        for parameter in group["params"]:
            state = self.state.setdefault(parameter, {"step": 0, "moment": torch.zeros_like(parameter)})
            state["step"] += 1
            state["moment"].lerp_(parameter.grad, 0.5)
            parameter.sub_(state["moment"], alpha=group["lr"])


def written(folder: Path, tensors: dict[str, torch.Tensor]) -> ShardFiles:
    """Files of one rank that has all."""
    places = {name: [list(each.shape), [0] * each.dim(), list(each.shape)] for name, each in tensors.items()}
    save_file(tensors, folder / "state_00000_of_00001.safetensors", {PLACES: json.dumps(places)})
    return ShardFiles(str(folder))


def test_optimizer_of_plain_numbers_goes_on(tmp_path: Path) -> None:
    parameter = nn.Parameter(torch.ones(3))
    before, after = Momentum([parameter]), Momentum([parameter])
    for _ in range(3):
        parameter.grad = torch.ones(3)
        before.step()
    learned = parameter.detach().clone()
    restore_optimizer(after, written(tmp_path, optimizer_state(before.state_dict())))
    assert torch.equal(parameter, learned) and after.param_groups[0]["steps_of_all"] == 0
    [state], [theirs] = after.state.values(), before.state.values()
    assert state["step"] == 3 and isinstance(state["step"], int)
    assert torch.equal(state["moment"], theirs["moment"])


def test_file_is_opened_seldom_and_not_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To open it takes as long as it has tensors, and what is read of an open one stays in memory."""
    tensors = {f"{number}": torch.full((64,), float(number)) for number in range(200)}
    files, opener = written(tmp_path, tensors), Mock(side_effect=safe_open)
    monkeypatch.setattr(shards, "safe_open", opener)
    monkeypatch.setattr(shards, "OPEN_BYTES", 100 * 64 * 4)
    assert all(torch.equal(files.whole(name), each) for name, each in tensors.items())
    assert opener.call_count == 2


def test_copy_stays_as_it_is_and_has_nothing_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    module, copy = Frozen(), StateCopy()
    before = {name: tensor.detach().clone() for name, tensor in model_state(module).items()}
    copy.add(model_state(module))
    assert copy._tensors[f"{MODEL}embed.weight"].data_ptr() == module.embed.weight.data_ptr()
    with torch.no_grad():
        module.head.weight.add_(1.0)
    copy.write(str(tmp_path))
    assert all(torch.equal(ShardFiles(str(tmp_path)).whole(name), each) for name, each in before.items())
