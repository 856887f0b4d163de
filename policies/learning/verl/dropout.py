"""Switches off what makes a model's answer random while it is trained: dropout, layerdrop, routers' jitter.

``score`` computes the old log-probabilities without it, and ``update`` the new ones: with dropout in only
one of them the ratio is not 1 before anything is learned (measured: up to 22 at p = 0.5).
"""

from __future__ import annotations

import logging
import re

import torch
from torch.nn.modules.dropout import _DropoutNd
from transformers import PretrainedConfig

logger = logging.getLogger(__name__)

RATES = re.compile("drop|jitter")
"""Pattern of the names of such settings: attention_dropout, resid_pdrop, router_jitter_noise."""


def switch_off_in_config(config: PretrainedConfig) -> None:
    """Set all such rates in the config of a model, and of its parts, to 0, before the model is built."""
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
