"""verl's platform plugin for machines without an accelerator.

verl 0.9.1 knows CUDA, ROCm and NPU. Importing this module teaches it ``cpu``: FSDP2 over gloo with plain
torch. It has to be imported, with ``VERL_PLATFORM=cpu`` in the environment, before anything from
``verl.workers.engine``, because verl fixes its device name when those modules load. We call ``install()``
ourselves rather than use verl's plugin entry point: verl swallows what a broken plugin raises.
"""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from verl.plugin.platform import get_platform
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

from environments.errors import ConfigError

DEVICE = torch.device("cpu")


def _device_module() -> types.ModuleType:
    """``torch.cpu`` with the memory calls that verl makes on every device; on a CPU they report nothing."""
    module = types.ModuleType(torch.cpu.__name__)
    sizes = ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved")
    actions = ("reset_peak_memory_stats", "empty_cache", "ipc_collect")
    vars(module).update(
        vars(torch.cpu),
        **dict.fromkeys(sizes, lambda *_args: 0),
        **dict.fromkeys(actions, lambda *_args: None),
        mem_get_info=lambda *_args: (0, 0),
        get_device_name=lambda *_args: "cpu",
        manual_seed=torch.manual_seed,
        # verl saves the generators of the host and of its device: here they are one and the same.
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
    )
    return module


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """The calls that verl makes of a device, answered for a plain CPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _device_module()

    def _do_nothing(self, *_: int | str | None) -> None:
        """Answer a call about what a CPU does not have."""

    set_device = synchronize = set_allocator_settings = empty_cache = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        # Never detected by itself: a GPU node must not fall back to its CPU unasked.
        return False

    def current_device(self) -> torch.device:  # verl calls `.to()` with it
        return DEVICE

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "TROUPE_VISIBLE_CPUS"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False


def install() -> None:
    """Make verl train on the CPU in this process.

    Raises:
        ConfigError: verl had already settled on another device.
    """
    if os.environ.get("VERL_PLATFORM") != "cpu" or get_platform().device_name != "cpu":
        raise ConfigError(
            f"verl runs on {get_platform().device_name!r} in this process, not on 'cpu': "
            "set VERL_PLATFORM=cpu in the worker's environment before verl is imported."
        )
