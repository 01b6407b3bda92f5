"""This machine: its GPUs (or processor) as a cluster, and its software as provenance.

Neither function imports torch, and neither fails: where the NVIDIA driver is absent or does not answer,
the machine counts as one without GPUs.
"""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from titan_tune.catalog.loader import gpu_names, gpu_spec
from titan_tune.domain.cluster import ClusterSpec, GpuSpec
from titan_tune.errors import InputError
from titan_tune.units import GIB

CPU_PROCESSES = 2
"""Ranks of a machine without GPUs: the fewest that have any parallelism to choose."""
PACKAGES = ("titan-tune", "torch", "torchao", "torchtitan", "triton", "optuna")

# Nominal rates of a processor core, so that step times have an order of magnitude: two 8-wide fp32 FMA
# units (AVX2), 2.5 GHz where the clock is unknown, and two DDR4-2666 channels for the machine.
CORE_FLOP_PER_CYCLE = 2 * 8 * 2
DEFAULT_CLOCK_GHZ = 2.5
CPU_MEMORY_GB_PER_S = 42.0


@dataclass(frozen=True, slots=True)
class NvidiaGpu:
    """What the driver says of one GPU."""

    name: str
    memory_bytes: int
    """Total as CUDA reports it: without what the driver keeps for itself."""
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class NvidiaMachine:
    """The NVIDIA GPUs that a process started here would see."""

    gpus: tuple[NvidiaGpu, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    """Newest CUDA version that the driver supports."""


def local_cluster() -> ClusterSpec:
    """One node: this machine's NVIDIA GPUs, else :data:`CPU_PROCESSES` processes on its processor.

    Rates are the catalogue's, memory is the driver's own figure. A card that the catalogue does not know
    takes the rates of the nearest compute capability, which ``source`` says. ``CUDA_VISIBLE_DEVICES``
    is respected. GPUs of different models count as the one with the least memory.
    """
    gpus = nvidia_machine().gpus
    if gpus:
        return ClusterSpec(
            gpu=gpu_from_driver(min(gpus, key=lambda g: g.memory_bytes)), gpus_per_node=len(gpus)
        )
    return ClusterSpec(gpu=cpu_spec(CPU_PROCESSES), gpus_per_node=CPU_PROCESSES)


def gpu_from_driver(gpu: NvidiaGpu) -> GpuSpec:
    """The catalogue's rates with the driver's memory and compute capability."""
    measured = {"memory_gib": gpu.memory_bytes / GIB, "compute_capability": gpu.compute_capability}
    try:
        known = gpu_spec(gpu.name)
    except InputError:
        known = _nearest(gpu)
        measured |= {
            "name": gpu.name,
            "source": f"{gpu.name} is not in the catalogue: rates of {known.name}; memory from the driver",
        }
    return known.model_copy(update=measured)


def _nearest(gpu: NvidiaGpu) -> GpuSpec:
    """The card of the nearest compute capability, then of the nearest memory size."""

    def distance(spec: GpuSpec) -> tuple[int, int, float]:
        major, minor = spec.compute_capability or (0, 0)
        own_major, own_minor = gpu.compute_capability
        memory = abs(spec.memory_gib - gpu.memory_bytes / GIB)
        return abs(major - own_major), abs(minor - own_minor), memory

    specs = [gpu_spec(name) for name in gpu_names()]
    return min((spec for spec in specs if spec.compute_capability is not None), key=distance)


def cpu_spec(processes: int) -> GpuSpec:
    """A processor as ``processes`` equal devices: available memory and nominal rates, divided."""
    import psutil

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    try:
        frequency = psutil.cpu_freq()
    except (OSError, NotImplementedError):
        frequency = None
    clock_ghz = (frequency.current / 1000 if frequency is not None else 0.0) or DEFAULT_CLOCK_GHZ
    tflops = cores * CORE_FLOP_PER_CYCLE * clock_ghz / 1000
    return GpuSpec(
        name="cpu",
        memory_gib=psutil.virtual_memory().available / GIB / processes,
        bf16_tflops=tflops / processes,
        memory_gb_per_s=CPU_MEMORY_GB_PER_S / processes,
        link_gb_per_s=CPU_MEMORY_GB_PER_S / processes,
        is_cpu=True,
        source=f"this machine's processor shared by {processes} processes; available memory; nominal rates",
    )


def nvidia_machine() -> NvidiaMachine:
    """The NVIDIA driver's view; empty where there is no driver or it does not answer."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        # whatever a missing, broken or mismatched driver raises, the machine has no usable GPU
        return NvidiaMachine()
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        visible = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return NvidiaMachine(
            gpus=tuple(_query(pynvml, handles[i]) for i in visible),
            driver=str(pynvml.nvmlSystemGetDriverVersion()),
            cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        )
    except Exception:
        return NvidiaMachine()
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def visible_devices(selection: str | None, uuids: Sequence[str]) -> list[int]:
    """Device indices that a ``CUDA_VISIBLE_DEVICES`` leaves, in its order, as CUDA reads it.

    Entries are indices or unique prefixes of a UUID. CUDA stops at the first entry that names no device,
    and shows no device at all when one is named twice (seen on H200, driver 580).
    """
    if selection is None:
        return list(range(len(uuids)))
    visible: list[int] = []
    for entry in (part.strip() for part in selection.split(",")):
        named = [i for i, uuid in enumerate(uuids) if entry == str(i) or (entry and uuid.startswith(entry))]
        if len(named) != 1:
            break
        visible += named
    return visible if len(set(visible)) == len(visible) else []


def _query(pynvml: Any, handle: Any) -> NvidiaGpu:
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        total = memory.total - memory.reserved
    except pynvml.NVMLError:
        # drivers before 510 know only the first version, which includes the reserved part
        total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return NvidiaGpu(str(pynvml.nvmlDeviceGetName(handle)), int(total), (int(major), int(minor)))


def environment() -> dict[str, Any]:
    """Provenance: versions, GPUs, driver, host. Packages that are not installed are ``None``."""
    machine = nvidia_machine()
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        "gpu": machine.gpus[0].name if machine.gpus else None,
        "num_gpus": len(machine.gpus),
        "driver": machine.driver,
        "cuda": machine.cuda,
        "hostname": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
