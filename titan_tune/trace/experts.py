"""Experts and masked attention without data: tokens are spread evenly, masks keep everything.

Replaces what would read values (how many tokens go to which rank) and kernels that only a GPU has.
Runs in the child process only.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

import torch

from titan_tune.trace.kernels import attention

aten = torch.ops.aten


def install() -> None:
    """Patch torchtitan's MoE and its flex and varlen attention."""
    _fake_histogram()
    _even_splits()
    kernels: Any = importlib.import_module("torchtitan.models.moe.kernels")
    kernels.fill_indices_wrapper = _permutation
    _expert_biases()
    _unmasked_attention()
    _gathers_in_recomputation()


def _gathers_in_recomputation() -> None:
    """Let FSDP gather the last block's experts while selective checkpointing recomputes it.

    torchtitan prefetches the experts of every block but that one, so their gather is not part of the forward
    that was recorded. torch 2.11 runs what it did not record; torch 2.13 counts calls and refuses, in a trace as on
    a GPU. What selective checkpointing keeps is counted as strictly as ever.
    """
    from torch.utils import checkpoint

    recompute = getattr(checkpoint, "_RECOMPUTE", None)
    if recompute is None:
        return
    original = checkpoint._CachedTorchDispatchMode.__torch_dispatch__

    @functools.wraps(original)
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorded = self.storage.get(func)
        if func not in checkpoint.SAC_IGNORED_OPS and all(
            entry is recompute for entry in (recorded or {}).values()
        ):
            return func(*args, **(kwargs or {}))
        return original(self, func, types, args, kwargs)

    checkpoint._CachedTorchDispatchMode.__torch_dispatch__ = dispatch


def _fake_histogram() -> None:
    from torch._subclasses.fake_impls import op_implementations_dict

    def histogram(fake_mode: Any, func: Any, tensor: torch.Tensor, bins: int = 100, *args: Any) -> Any:
        with fake_mode:
            return tensor.new_empty(bins)

    op_implementations_dict[aten.histc.default] = histogram


def _permutation(
    tokens_per_expert: torch.Tensor,
    start_index_values: torch.Tensor,
    write_offsets: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    **kwargs: Any,
) -> torch.Tensor:
    """As the Triton kernel's wrapper: (max_len,) int32, -1 where there is only padding."""
    return torch.full((max_len,), -1, dtype=torch.int32, device=tokens_per_expert.device)


_splits: list[list[int]] = []
"""Splits of the all-to-all that is being prepared, innermost last."""


def _even_splits() -> None:
    from torch._subclasses.fake_tensor import FakeTensor
    from torchtitan.distributed.expert_parallel import ExpertParallel

    original = ExpertParallel._token_dispatch

    @functools.wraps(original)
    def dispatch(self: Any, module: Any, inputs: tuple[torch.Tensor, ...], mesh: Any) -> Any:
        ranks = mesh.shape[0]
        _splits.append([inputs[0].shape[0] // ranks] * ranks)
        try:
            return original(self, module, inputs, mesh)
        finally:
            _splits.pop()

    ExpertParallel._token_dispatch = dispatch
    to_list = FakeTensor.tolist
    FakeTensor.tolist = lambda tensor: list(_splits[-1]) if _splits else to_list(tensor)


_rows: list[int] = []
"""Rows that experts compute, padding left out, of the grouped GEMM that is running; innermost last."""


def _expert_biases() -> None:
    """gpt_oss repeats each expert's bias for its tokens: as many rows as there are tokens."""
    from torch._subclasses.fake_impls import op_implementations_dict
    from torch._subclasses.fake_tensor import FakeTensor
    from torchtitan.models.moe import utils

    module: Any = importlib.import_module("torchtitan.models.gpt_oss.model.moe")
    original = module._run_experts_grouped_mm

    @functools.wraps(original)
    def run_experts(weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = args[4].shape[0]  # x
        _rows.append(rows - weight.shape[0] * utils.TOKEN_GROUP_ALIGN_SIZE_M)
        try:
            return original(weight, *args, **kwargs)
        finally:
            _rows.pop()

    def indices(fake_mode: Any, func: Any, repeats: torch.Tensor, output_size: int | None = None) -> Any:
        with fake_mode:
            return repeats.new_empty(_rows[-1] if output_size is None else output_size, dtype=torch.int64)

    module._run_experts_grouped_mm = run_experts
    op_implementations_dict[aten.repeat_interleave.Tensor] = indices
    to_int = FakeTensor.__int__
    FakeTensor.__int__ = lambda tensor: _rows[-1] if _rows else to_int(tensor)


def _unmasked_attention() -> None:
    """Flex and varlen kernels save q, k, v, the output and its log-sum-exp, as the fused kernel does."""
    from torchtitan.models import attention as titan_attention

    def flex(
        self: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        return_lse: bool = False,
        **kwargs: Any,
    ) -> Any:
        if not torch.compiler.is_compiling():
            # the compiled kernel of an eager block returns what it saves, its inputs among it, and selective
            # checkpointing keeps what that region returned; v is part of a matmul that is kept anyway
            q, k = aten.alias(q), aten.alias(k)
        out, lse = attention(q, k, v, scale=kwargs.get("scale"), is_causal=False)
        return (out, lse.squeeze(-1)) if return_lse else out

    titan_attention.FlexAttentionWrapper.forward = flex
    _save_aliases()
    titan_attention.VarlenAttentionWrapper.forward = _varlen
    titan_attention._compiled_create_block_mask = _block_mask
    for name, module in dict[str, Any](sys.modules).items():
        if name.startswith("torchtitan.") and hasattr(module, "create_varlen_metadata_for_document"):
            module.create_varlen_metadata_for_document = _one_document


def _save_aliases() -> None:
    """Let selective op checkpointing keep what :func:`_unmasked_attention` marks by an alias."""
    from torchtitan.distributed import activation_checkpoint

    original = activation_checkpoint._apply_op_sac

    @functools.wraps(original)
    def apply(*args: Any, op_sac_save_list: set[Any], **kwargs: Any) -> Any:
        return original(*args, op_sac_save_list={*op_sac_save_list, aten.alias.default}, **kwargs)

    activation_checkpoint._apply_op_sac = apply


def _block_mask(*args: Any, **kwargs: Any) -> Any:
    """A mask of one block: its tables are thousandths of what attention saves."""
    from torch.nn.attention.flex_attention import BlockMask

    count = torch.zeros(1, 1, 1, dtype=torch.int32)
    return BlockMask.from_kv_blocks(count, count.unsqueeze(-1))


def _one_document(input_batch: torch.Tensor, eos_id: int) -> Any:
    """Metadata of a batch without document ends."""
    from torchtitan.models.attention import VarlenMetadata

    batch, sequence = input_batch.shape
    ends = torch.zeros(batch + 1, dtype=torch.int32)
    return VarlenMetadata(ends, ends, sequence, sequence)


def _varlen(
    self: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any, scale: float | None = None
) -> torch.Tensor:
    """Packs (batch, heads, sequence, head dim) to (tokens, heads, head dim) as torchtitan does."""
    packed = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    out, _ = attention(*packed, scale=scale)
    return out.squeeze(0).transpose(0, 1)
