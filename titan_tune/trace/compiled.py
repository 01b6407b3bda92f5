"""``torch.compile`` without a GPU: Inductor's own wrapper code runs, its kernels do nothing.

Everything up to code generation is Inductor's: decompositions, partitioner, fusion and memory planning,
with its Triton scheduler (the one for GPUs) on fake CPU tensors. The generated wrapper then allocates
and frees as it would on CUDA. Registered as the backend that the traced job's ``compile.backend`` names.
Runs in the child process only.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Final

import torch

from titan_tune.trace.jobconfig import COMPILE_BACKEND
from titan_tune.trace.kernels import InnerAllocations

_CONFIG: Final = {
    "cpu_backend": "triton",
    "force_disable_caches": True,
    "compile_threads": 1,
    # both would run operators on real tensors
    "joint_graph_constant_folding": False,
    "shape_padding": False,
    # what decides when a value becomes a buffer of its own; since torch 2.12 the CPU's are higher
    "realize_opcount_threshold": 30,
    "realize_acc_reads_threshold": 8,
}


class _Kernel:
    """A generated kernel: everything it writes was allocated before."""

    def run(self, *args: Any, **kwargs: Any) -> None:
        """Launch nothing."""


class KernelFactory:
    """Stands for Inductor's ``AsyncCompile``."""

    def triton(self, *args: Any, **kwargs: Any) -> _Kernel:
        """A kernel from Triton source."""
        return _Kernel()

    def wait(self, scope: dict[str, Any]) -> None:
        """Nothing compiles."""


class _ExternKernels:
    """``extern_kernels``: library calls into buffers that are already there."""

    def __init__(self, inner: InnerAllocations) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self._call, name)

    def _call(self, name: str, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if out is None:
            return getattr(torch, name)(*args, **kwargs)
        self._inner.matmul()
        return out


def install(inner: InnerAllocations) -> None:
    """Register the backend, and let Inductor end where it would load generated code."""
    import torch.utils._triton
    from torch._functorch import partitioners
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

    torch.utils._triton.triton_hash_with_backend = lambda: COMPILE_BACKEND
    # rng state of recomputed attention: some bytes, and a CUDA generator that is not there
    partitioners.functionalize_rng_ops = lambda joint, forward, backward, *rest: (forward, backward)
    # softmax in one pass, fusion and loop order as on a GPU
    post_grad.prepare_softmax_extra_check = lambda match: config.online_softmax
    BaseSchedulerNode.is_cpu = lambda node: False
    BaseSchedulerNode.is_gpu = lambda node: True
    # 0-dim tensors on CPU would be passed to kernels as Python numbers
    Scheduler.update_zero_dim_cpu_tensor = lambda scheduler: None
    GraphLowering.is_unspec_arg = lambda graph, name: False
    GraphLowering._compile_to_module_lines = lambda graph, code: _wrapper(code.value, inner)

    def backend(graph: Any, example_inputs: Any, **kwargs: Any) -> Any:
        return compile_fx(graph, example_inputs, config_patches=_CONFIG)

    torch._dynamo.register_backend(backend, name=COMPILE_BACKEND)


def _wrapper(source: str, inner: InnerAllocations) -> Any:
    """The generated module with allocation on fake tensors and without kernels."""
    source = source.replace(
        "from torch._inductor.async_compile import AsyncCompile",
        "from titan_tune.trace.compiled import KernelFactory as AsyncCompile",
    )
    scope: dict[str, Any] = {"__name__": "traced_graph", "__file__": "<traced graph>"}
    exec(compile(source, "<traced graph>", "exec"), scope)
    scope.update(
        empty_strided_cpu=_empty,
        reinterpret_tensor=_reinterpret,
        extern_kernels=_ExternKernels(inner),
        assert_size_stride=_nothing,
        assert_alignment=_nothing,
    )
    return SimpleNamespace(**scope)


def _empty(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _reinterpret(
    tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def _nothing(*args: Any) -> None:
    """Assertions about real tensors."""
