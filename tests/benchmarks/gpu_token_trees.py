"""The learner's token trees on a GPU, against flat rows: gradients, seconds and memory.

    python tests/benchmarks/gpu_token_trees.py [cuda]

Needs torch alone: the layout of the rows and their attention are Troupe's, the model around them is a Llama
of this file, in the shape of SmolLM2-135M with random weights. So it shows what an accelerator makes of the
trees, and of an update in bfloat16 over weights in float32; nothing of verl or of a training.
"""

from __future__ import annotations

import importlib.util
import random
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

LEARNING = Path(__file__).resolve().parents[2] / "policies" / "learning"
VOCABULARY = 49152
ROW_TOKENS = 16384
ROUNDS = 4


def attend_flat(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
    """Transformers' function of this name, without its package."""
    key, value = (each.repeat_interleave(module.groups, 1) for each in (key, value))
    causal = mask is None
    output = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)
    return output.transpose(1, 2).contiguous(), None


def token_trees() -> tuple[Any, Any]:
    """The modules of rows and of trees, with stand-ins for the packages that this machine may lack."""
    names = {
        "tensordict": {"TensorDict": dict},
        "transformers": {"PreTrainedConfig": object, "PreTrainedModel": nn.Module},
        "transformers.integrations": {},
        "transformers.integrations.sdpa_attention": {"sdpa_attention_forward": attend_flat},
        "transformers.modeling_utils": {"ALL_ATTENTION_FUNCTIONS": {}},
        "policies": {},
        "policies.learning": {},
    }
    for name, values in names.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(values)
    rows = loaded("policies.learning.rows", LEARNING / "rows.py")
    return rows, loaded("token_trees", LEARNING / "verl" / "token_trees.py")


def loaded(name: str, path: Path) -> Any:
    """The module of a file, under this name."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plans, trees = token_trees()


class Layer(nn.Module):
    """A layer of Llama."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int) -> None:
        super().__init__()
        self.size, self.groups = width // heads, heads // key_heads
        outs = (heads * self.size, key_heads * self.size, key_heads * self.size)
        self.query, self.key, self.value = (nn.Linear(width, out, bias=False) for out in outs)
        self.output = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, states: torch.Tensor, angles: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        normed = self.before(states)
        query, key, value = (
            part(normed).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        cosine, sine = angles.cos().to(query.dtype), angles.sin().to(query.dtype)

        def turned(heads: torch.Tensor) -> torch.Tensor:
            first, second = heads.chunk(2, -1)
            return heads * cosine + torch.cat((-second, first), -1) * sine

        attended, _ = trees.attend_along_paths(self, turned(query), turned(key), value, mask)
        states = states + self.output(attended.flatten(2))
        normed = self.between(states)
        return states + self.down(functional.silu(self.gate(normed)) * self.up(normed))


class Model(nn.Module):
    """A Llama whose output layer is its embedding."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.layers = nn.ModuleList(Layer(width, heads, key_heads, inner) for _ in range(layers))
        self.norm, self.size = nn.RMSNorm(width), width // heads

    def forward(self, ids: torch.Tensor, depths: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        steps = torch.arange(0, self.size, 2, device=ids.device, dtype=torch.float64) / self.size
        angles = depths[:, None, :, None] / 10000**steps
        states = self.embedding(ids)
        for layer in self.layers:
            states = layer(states, torch.cat((angles, angles), -1), mask)
        normed: torch.Tensor = self.norm(states)
        return normed

    def losses(self, states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = states @ self.embedding.weight.T
        exact = logits if logits.dtype == torch.float64 else logits.float()
        return functional.cross_entropy(exact, targets, reduction="none")


class Sample(NamedTuple):
    """Ids, the number of them that are prompt, and an advantage."""

    ids: list[int]
    prompt: int
    advantage: float


def by_trees(model: Model, samples: Sequence[Sample], most: int) -> float:
    """Add the gradient, computed on trees, and return the loss."""
    device, total = model.embedding.weight.device, 0.0
    for row in plans.plan_rows([each.ids for each in samples], most, 3 * model.embedding.embedding_dim):
        ordered = [samples[branch.sample] for branch in row]
        ids = [torch.tensor(each.ids, device=device) for each in ordered]
        columns = {
            "row": torch.zeros(len(row), dtype=torch.long),
            "shared": torch.tensor([branch.shared for branch in row]),
            "input_ids": torch.nested.as_nested_tensor(ids, layout=torch.jagged),
        }
        layout = trees.Layout.of(columns)
        mask = layout.attention_mask() if layout.has_branches else None
        states = model(layout.input_ids, layout.positions, mask).flatten(0, 1)
        paths = layout.paths.split([len(each.ids) for each in ordered])
        places = torch.cat([path[each.prompt :] for path, each in zip(paths, ordered, strict=True)])
        weights = torch.cat([torch.full((len(each.ids) - each.prompt,), each.advantage) for each in ordered])
        learned, where = places.unique(return_inverse=True)
        losses = model.losses(states[layout.parents()[learned]], layout.input_ids.flatten()[learned])
        loss = (losses[where] * weights.to(losses)).sum()
        loss.backward()
        total += float(loss.detach())
    return total


def by_rows(model: Model, samples: Sequence[Sample], most: int) -> None:
    """Add the gradient, computed on flat rows of about equal lengths."""
    device = model.embedding.weight.device
    left = sorted(samples, key=lambda each: len(each.ids))
    while left:
        count = 1
        while count < len(left) and (count + 1) * len(left[count].ids) <= most:
            count += 1
        batch, left = left[:count], left[count:]
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(each.ids) for each in batch], True).to(device)
        states = model(ids, torch.arange(ids.shape[1], device=device).expand_as(ids), None)
        total = torch.zeros((), device=device, dtype=states.dtype)
        for row, (own, prompt, advantage) in enumerate(batch):
            losses = model.losses(states[row, prompt - 1 : len(own) - 1], ids[row, prompt : len(own)])
            total = total + advantage * losses.sum()
        total.backward()


class Loads:
    """Samples of random ids, in segments of ``size``."""

    def __init__(self, size: int) -> None:
        self._size, self._rng = size, random.Random(0)

    def _new(self, count: int) -> list[int]:
        return [self._rng.randrange(1, VOCABULARY) for _ in range(count)]

    def _sample(self, prompt: list[int], answer: list[int]) -> Sample:
        return Sample(prompt + answer, len(prompt), self._rng.choice([-1.0, 1.0]))

    def groups(self) -> list[Sample]:
        prompts = [self._new(10 * self._size) for _ in range(2)]
        return [self._sample(prompt, self._new(self._size)) for prompt in prompts for _ in range(8)]

    def stripped(self) -> list[Sample]:
        samples, history = [], self._new(self._size)
        for _ in range(20):
            thought, answer = self._new(self._size), self._new(self._size // 4)
            samples.append(self._sample(history, thought + answer))
            history = history + answer + self._new(self._size // 4)
        return samples

    def forks(self, depth: int = 4) -> list[Sample]:
        prompt = self._new(self._size)
        paths: list[list[int]] = [[]]
        for _ in range(depth + 1):
            grown = [path + self._new(self._size) for path in paths]
            paths = [path for path in grown for _ in range(2)]
        return [self._sample(prompt, path) for path in paths[::2]]


def gradient(model: Model, add: Callable[..., None], samples: Sequence[Sample], most: int) -> list[Any]:
    model.zero_grad()
    add(model, samples, most)
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def distance(one: list[Any], other: list[Any]) -> float:
    pairs = zip(one, other, strict=True)
    return max(float((left - right).abs().max() / right.abs().max()) for left, right in pairs)


def update(device: str) -> tuple[float, float]:
    """The loss before and after a step of AdamW in bfloat16, whose weights and moments are in float32."""
    torch.manual_seed(0)
    model, samples = Model(128, 4, 2, 256, 3).to(device), Loads(12).groups()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            losses.append(by_trees(model, samples, 4096))
        optimizer.step()
    assert all(each.dtype == torch.float32 for each in model.parameters())
    assert losses[1] < losses[0], losses
    return losses[0], losses[1]


def cost(model: Model, add: Callable[..., None], samples: Sequence[Sample]) -> tuple[float, int]:
    """Median seconds, and the most memory in MiB."""
    took = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(ROUNDS):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        start = time.perf_counter()
        add(model, samples, ROW_TOKENS)
        torch.cuda.synchronize()
        took.append(time.perf_counter() - start)
    return sorted(took[1:])[1], torch.cuda.max_memory_allocated() >> 20


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cuda"
    print(torch.__version__, torch.cuda.get_device_name(0) if device == "cuda" else device)
    for load in ("groups", "stripped", "forks"):
        samples = getattr(Loads(12), load)()
        for dtype in (torch.float64, torch.float32):
            torch.manual_seed(0)
            model = Model(128, 4, 2, 256, 3).to(device, dtype)
            tree, flat, other = (
                gradient(model, add, samples, most)
                for add, most in ((by_trees, 4096), (by_rows, 4096), (by_rows, 2048))
            )
            print(
                load, dtype, "trees:", distance(tree, flat), "other rows:", distance(other, flat), flush=True
            )
    before, after = update(device)
    print(f"an update in bfloat16: the loss went from {before:.2f} to {after:.2f}", flush=True)
    if device != "cuda":
        return
    for size in (64, 256):
        for dtype in (torch.bfloat16, torch.float32):
            torch.manual_seed(0)
            model = Model(576, 9, 3, 1536, 30).to(device, dtype)
            for load in ("groups", "stripped", "forks"):
                samples = getattr(Loads(size), load)()
                tokens = sum(len(each.ids) for each in samples)
                tree, flat = (cost(model, add, samples) for add in (by_trees, by_rows))
                print(
                    f"{load}, segments of {size}, {dtype}, {tokens} flat tokens: trees {tree[0]:.3f} s and "
                    f"{tree[1]} MiB, rows {flat[0]:.3f} s and {flat[1]} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
