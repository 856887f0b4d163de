"""What the engine and the learner are compared with: plain transformers in float32, nothing cached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

torch.set_num_threads(1)  # the engines have the other cores


def load(path: Path, weights: dict[str, torch.Tensor] | None = None) -> Any:
    """The model of a folder, with other ``weights`` if there are any."""
    import transformers

    auto = getattr(transformers, transformers.AutoConfig.from_pretrained(path).architectures[0])
    model = auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    if weights is not None:
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert not unexpected
        assert set(missing) <= {"lm_head.weight"}  # the same tensor as the embedding, where it is tied
    return model.eval()


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder by their checkpoint names."""
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def perturbed(weights: dict[str, torch.Tensor], seed: int, scale: float = 0.05) -> dict[str, torch.Tensor]:
    """Other weights, far enough to speak differently."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + scale * torch.randn(tensor.shape, generator=generator)
        for name, tensor in weights.items()
    }


def greedy(model: Any, prompt_ids: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """The likeliest token, again and again, to the end of the message or ``max_tokens``."""
    ids = list(prompt_ids)
    with torch.no_grad():
        for _ in range(max_tokens):
            ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
            if ids[-1] == model.config.eos_token_id:
                break
    return tuple(ids[len(prompt_ids) :])


def token_logprobs(
    model: Any, prompt_ids: Sequence[int], response_ids: Sequence[int], temperature: float
) -> torch.Tensor:
    """log p of each response token [R], differentiable."""
    logits = model(torch.tensor([[*prompt_ids, *response_ids]]), use_cache=False).logits[0]
    logprobs = (logits[len(prompt_ids) - 1 : -1] / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(response_ids).unsqueeze(-1)).squeeze(-1)


def logprobs_of_pictures(model: Any, folder: Path, turn: Any) -> torch.Tensor:
    """log p of each token of an answer to a prompt with pictures, by the model and its own processor,
    differentiable. The token that stands for pictures is never sampled.
    """
    from transformers import Idefics3Processor

    from policies.pictures import open_picture

    processor = Idefics3Processor.from_pretrained(folder)
    images = [open_picture(each) for each in turn.pictures]
    pixels = processor.image_processor([images], return_tensors="pt")
    ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
    logits = model(input_ids=ids, **pixels, use_cache=False).logits[0, turn.prompt_size - 1 : -1]
    places = torch.tensor([processor.image_token_id])
    logprobs = logits.index_fill(-1, places, -torch.inf).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(turn.completion_ids)[:, None])[:, 0]
