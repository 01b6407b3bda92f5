"""The kernels that CUDA would pick, for operators that choose by device; and what kernels allocate.

Runs in the child process only.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from titan_tune.trace.recorder import Recorder

aten = torch.ops.aten

CUBLAS_WORKSPACE_BYTES: Final = 32 << 20
"""Of each (thread's handle, stream) pair on compute capability 9 (at::cuda::getChosenWorkspaceSize)."""
EMBEDDING_SORT_MIN_TOKENS: Final = 3072
EMBEDDING_ROWS_PER_THREAD: Final = 10
"""``embedding_dense_backward`` sorts its indices and sums partial segments in fp32 from so many tokens on."""
FP32_BYTES: Final = 4
FUSED_HEAD_DIM: Final = 256
"""Largest head dimension of the fused attention kernels' backward."""

_MATMULS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")


def fused_attention(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether cuDNN or flash attention takes these inputs (head dim last)."""
    half = q.dtype in (torch.bfloat16, torch.float16) or bool(torch.is_autocast_enabled("cpu"))
    return half and q.shape[-1] <= FUSED_HEAD_DIM and q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None, is_causal: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fused attention: output (batch, heads, sequence, head dim) and log-sum-exp (…, 1) in fp32.

    The backward of causal attention has cuDNN's workspace; ``is_causal=False`` stands for kernels without one.
    """
    if torch.is_autocast_enabled("cpu"):
        dtype = torch.get_autocast_dtype("cpu")
        q, k, v = (t.to(dtype) if t.dtype == torch.float32 else t for t in (q, k, v))
    out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, is_causal, False, scale=scale
    )
    return out, lse


def _scaled_dot_product_attention(
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    is_causal: bool = True,
) -> torch.Tensor:
    if fused_attention(q, v):
        return attention(q, k, v, scale=scale)[0]
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, scale=scale, is_causal=is_causal, enable_gqa=enable_gqa
        )
        return out


def _not_executed(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("fake tensors never reach a kernel")


def install() -> None:
    """Replace torchtitan's attention call, and make RMSNorm save what its fused kernel saves."""
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    ScaledDotProductAttentionWrapper.forward = _scaled_dot_product_attention
    # with a kernel of its own on the device, autograd uses the operator's derivative (saves x, w, rstd)
    # instead of differentiating a decomposition
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", _not_executed, "CPU")
    library.impl("_fused_rms_norm_backward", _not_executed, "CPU")
    _libraries.append(library)


_libraries: list[Any] = []
"""Registrations live as long as their library object."""


class InnerAllocations:
    """Memory that kernels allocate themselves, unseen by dispatch: cuBLAS workspaces, sorting scratch,
    attention's and softmax's temporaries."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._with_workspace: set[int] = set()

    def reset(self) -> None:
        """Before another trace."""
        self._with_workspace.clear()

    def __call__(self, func: Any, args: tuple[Any, ...]) -> None:
        """After an operator ran."""
        name = func.name()
        if name.startswith(_MATMULS):
            self.matmul()
        elif name.startswith("aten::embedding_dense_backward"):
            self._embedding(args[0], args[1], args[2])
        elif name.startswith("aten::_scaled_dot_product_cudnn_attention_backward"):
            self._attention_backward(query=args[1], is_causal=args[14])
        elif name.startswith("aten::_softmax_backward_data"):
            self._transient(args[0].nbytes)  # the product of gradient and output (SoftMax.cu)
        elif name.startswith("aten::_safe_softmax"):
            # the plain softmax, and where its input is minus infinity
            self._transient(args[0].nbytes, args[0].numel())

    def matmul(self) -> None:
        """A cuBLAS call: the first of each thread makes its workspace."""
        # torchtitan's collectives and copies use other streams, its matmuls only the default one;
        # autograd runs a backward in a thread of its own on CUDA
        in_backward = int(torch._C._current_graph_task_id() != -1)
        if in_backward not in self._with_workspace:
            self._with_workspace.add(in_backward)
            self.recorder.block(CUBLAS_WORKSPACE_BYTES, "cublas_workspace")

    def _embedding(self, grad: torch.Tensor, indices: torch.Tensor, num_weights: int) -> None:
        tokens = indices.numel()
        if tokens <= EMBEDDING_SORT_MIN_TOKENS:
            return
        rows = tokens // EMBEDDING_ROWS_PER_THREAD + min(tokens, num_weights)
        self._transient(4 * grad.shape[-1] * rows, operator="embedding_scratch")

    def _attention_backward(self, query: torch.Tensor, is_causal: bool) -> None:
        """cuDNN's workspace: the query's gradient in fp32 and a sum of each row (H200: to 0.02 MiB)."""
        if is_causal:
            rows = query.numel() // query.shape[-1]
            self._transient(FP32_BYTES * (query.numel() + rows))

    def _transient(self, *sizes: int, operator: str = "kernel") -> None:
        """Blocks that are there together and gone when the kernel returns."""
        for block in [self.recorder.block(num_bytes, operator) for num_bytes in sizes]:
            self.recorder.release(block)
