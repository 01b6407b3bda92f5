"""Makes torchtitan believe in a CUDA job while every tensor is a fake CPU tensor.

Runs in the child process only, before torchtitan is imported. Sizes and lifetimes do not depend on
the device, kernels do: those that CUDA would pick are put in by :mod:`titan_tune.trace.kernels`.
"""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from titan_tune.trace import replicated, streams
from titan_tune.trace.recorder import Recorder


def start(recorder: Recorder, *, world_size: int, rank: int) -> None:
    """Patch torch, then start a process group of ``world_size`` in which collectives do nothing."""
    replicated.install(recorder)
    _drop_profiler_labels()
    _use_cpu_as_device()
    _cast_in_float8_linears()
    _keep_meshes_real()
    _pause_in_sharding_propagation(recorder)
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE=str(world_size))
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def _use_cpu_as_device() -> None:
    import torch._utils

    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.Stream = streams.Stream
    torch.cpu.Event = streams.Event
    torch.cpu.current_stream = streams.current_stream
    torch.cpu.stream = streams.stream
    import torchtitan.components.quantization.float8
    import torchtitan.components.quantization.mx  # noqa: F401

    # float8, mxfp8 and grouped GEMMs ask before they convert; the job's GPU is not this machine's
    modules: dict[str, Any] = dict(sys.modules)
    for name, module in modules.items():
        if name.startswith("torchtitan.") and hasattr(module, "has_cuda_capability"):
            module.has_cuda_capability = lambda major, minor: True


def _cast_in_float8_linears() -> None:
    """They ask whether CUDA's autocast is on; here it is the processor's."""
    from torchao.float8.float8_linear import Float8Linear

    original = Float8Linear.forward

    @functools.wraps(original)
    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            input = input.to(torch.get_autocast_dtype("cpu"))
        return original(self, input)

    Float8Linear.forward = forward


def _drop_profiler_labels() -> None:
    """``record_function`` is an operator too: selective checkpointing of torch 2.13 counts FSDP's labels."""
    label = torch.autograd.profiler.record_function
    label.__enter__ = lambda self: self
    label.__exit__ = lambda self, *args: None


def _keep_meshes_real() -> None:
    """DeviceMesh computes with real tensors, some of them late: leave fake mode for it."""
    from torch.distributed._mesh_layout import _MeshLayout
    from torch.distributed.device_mesh import DeviceMesh

    for owner, name in ((DeviceMesh, "__init__"), (_MeshLayout, "remap_to_tensor")):
        setattr(owner, name, _outside_fake_mode(getattr(owner, name)))


def _outside_fake_mode(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return wrapper


def _pause_in_sharding_propagation(recorder: Recorder) -> None:
    """DTensor runs operators on fake tensors of the global shape to learn what they return."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    original = getattr(ShardingPropagator, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with recorder.paused():
            return original(*args, **kwargs)

    setattr(ShardingPropagator, name, wrapper)
