"""torchtitan on CPU processes with gloo, where the machine has no accelerator."""

from __future__ import annotations

import functools
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


class CpuDevice:
    """The part of ``torch.cuda`` that torchtitan calls, for CPU. Memory is the resident set of the process."""

    @staticmethod
    def set_device(device: object) -> None:
        """CPU processes have one device."""

    @staticmethod
    def current_device() -> int:
        """Always 0."""
        return 0

    @staticmethod
    def device_count() -> int:
        """As many as torchtitan can have processes on this node."""
        return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    @staticmethod
    def get_device_name(device: object = None) -> str:
        """E.g. ``CPU (x86_64)``."""
        return f"CPU ({platform.machine()})"

    @staticmethod
    def get_device_properties(device: object = None) -> SimpleNamespace:
        """``total_memory`` in bytes, of the machine."""
        return SimpleNamespace(total_memory=total_memory_bytes())

    @staticmethod
    def memory_stats(device: object = None) -> dict[str, int]:
        """The keys torchtitan reads: peak resident set size in bytes since the process began."""
        peak = peak_rss_bytes()
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def mem_get_info(device: object = None) -> tuple[int, int]:
        """(total − peak resident set of this process, total), bytes."""
        total = total_memory_bytes()
        return total - peak_rss_bytes(), total

    @staticmethod
    def reset_peak_memory_stats(device: object = None) -> None:
        """The kernel's peak cannot be reset."""

    @staticmethod
    def empty_cache() -> None:
        """There is none."""

    @staticmethod
    def synchronize(device: object = None) -> None:
        """CPU kernels have finished when they return."""


def peak_rss_bytes() -> int:
    """Peak resident set size since exec (``ru_maxrss`` would count the parent's memory at fork)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM line")


def total_memory_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def has_accelerator() -> bool:
    """Whether torchtitan would find a device of its own."""
    from torch._utils import _get_available_device_type

    return _get_available_device_type() is not None


def use_cpu() -> None:
    """Replace device type and module in every torchtitan module that is loaded, and for those to come."""
    from torchtitan.tools import utils

    device = CpuDevice()
    utils.get_device_info = lambda: ("cpu", device)
    for name, module in list(sys.modules.items()):
        if name == "__main__" or name.startswith("torchtitan."):
            names = vars(module)
            names.update({n: v for n, v in (("device_type", "cpu"), ("device_module", device)) if n in names})


def summing_reductions(parallelize: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """``parallelize_fn`` whose FSDP modules reduce by SUM: gloo has no PREMUL_SUM."""

    @functools.wraps(parallelize)
    def wrapper(*args: Any, **kwargs: Any) -> torch.nn.Module:
        from torch.distributed.fsdp import FSDPModule

        model = parallelize(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return wrapper
