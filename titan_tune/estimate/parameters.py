"""The numbers that the closed forms read: model shapes, degrees and byte sizes of one rank."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from titan_tune.domain.settings import AcMode, Settings
from titan_tune.errors import InputError
from titan_tune.estimate.blocks import (
    GPT_OSS,
    Attention,
    Moe,
    Weight,
    attention_of,
    feed_forward_weights,
    moe_of,
    padding_of,
)
from titan_tune.titan.experts import expert_shards_of, uneven_experts
from titan_tune.units import MIB

CUBLAS_WORKSPACE_BYTES = 2 * 32 * MIB
"""One 32 MiB workspace a handle on sm90: the forward thread's and the autograd thread's
(H200, torch 2.11)."""
FP32_BYTES = 4
FUSED_ATTENTION_CAPABILITY = (8, 0)
"""Flash and cuDNN attention need it; torchtitan allows no other fused kernel."""


class NotCoveredError(InputError):
    """The closed forms do not cover this model or layout; the message says which part."""


class ParamPath(StrEnum):
    """Who owns mixed precision; decides every byte size (torchtitan 0.2.2)."""

    AUTOCAST = "autocast"
    """One GPU or DDP: fp32 parameters, ``torch.autocast`` around forward and loss."""
    FSDP = "fsdp"
    """``fully_shard``: sharded masters, gathered copies in ``mixed_precision_param``."""
    PLAIN = "plain"
    """TP or PP without FSDP: everything in ``training.dtype``."""


class Recompute(StrEnum):
    """What a block keeps for its backward."""

    NONE = "none"
    OP = "op"
    EVERY = "every"
    FULL = "full"
    BUDGET = "memory_budget"


class Shapes(NamedTuple):
    """One rank's view of a job. Sizes are elements unless the name says bytes.

    ``tokens`` is what one forward of one rank sees (local batch, or microbatch under PP, times
    sequence / cp).
    """

    path: ParamPath
    dim: int
    heads: int
    head_dim: int
    attn_dim: int
    kv_dim: int
    ffn: int
    vocab: int
    layers: int
    block_matmul: int
    """Parameters of a dense block's linears that TP splits, whole (not sharded)."""
    block_norm: int
    """Parameters of a block that every TP rank has."""
    attention: Attention
    moe: Moe | None
    block_padding: float
    """What FSDP adds to a dense block on one TP rank, gathered: it shards dimension 0 of each parameter evenly."""
    moe_padding: float
    """The same of a MoE block, routed experts left out (``moe`` has theirs)."""
    table_padding: float
    """The same of the token embedding, and of the output weight."""
    tables: int
    """Embedding and output weight: two, or one that both share."""
    tp: int
    cp: int
    pp: int
    replicate: int
    shards: int
    tokens: int
    seq_full: int
    seq_local: int
    batch: int
    param_bytes: int
    """Of a stored parameter, of its gradient and of each Adam moment."""
    block_param_bytes: int
    """The same for the blocks: gpt_oss builds them in bf16 whatever ``training.dtype`` is."""
    compute_bytes: int
    """Of matmul inputs and outputs."""
    residual_bytes: int
    recompute: Recompute
    every: int
    budget: float
    compile_block: bool
    compile_loss: bool
    float8: bool
    rowwise: bool
    bf16_weight_gradients: bool
    """``rowwise_with_gw_hp``: the weights' gradients are no float8 matmuls."""
    float8_all_gather: bool
    math_attention: bool
    flex_attention: bool
    accumulates: bool
    """Gradients of an earlier microbatch are there during this one's forward and backward."""
    loss_parallel: bool
    keep_gathered: bool
    reshard_output: bool
    offload: bool
    framework_bytes: float

    @property
    def recomputes_operands(self) -> bool:
        """Whether norm outputs and the SwiGLU's product are recomputed where they are cast to float8, not kept."""
        return self.float8 and self.compile_block and not self.bf16_weight_gradients

    @property
    def block_shard_params(self) -> float:
        """Parameters of one dense block on one TP rank (norms are not TP-sharded)."""
        return self.block_matmul / self.tp + self.block_norm

    @property
    def moe_rest_params(self) -> float:
        """Parameters of a MoE block on one TP rank, routed experts left out."""
        moe = self.moe
        assert moe is not None
        split = self.attention.params_split + moe.rest_split
        return split / self.tp + self.block_norm + moe.rest_whole

    @property
    def gathered_rest_params(self) -> float:
        """The same gathered, FSDP's padding included."""
        return self.moe_rest_params + self.moe_padding

    def gathered_params(self, is_moe: bool) -> float:
        """Parameters of one block on one TP rank when no rank has only a part, FSDP's padding included."""
        if not is_moe or self.moe is None:
            return self.block_matmul / self.tp + self.block_norm + self.block_padding
        return self.gathered_rest_params + self.moe.padded_expert_params

    def stored_params(self, is_moe: bool) -> float:
        """Parameters of one block that this rank stores, FSDP's padding included: rank 0 has a full part of each."""
        if not is_moe or self.moe is None:
            return self.gathered_params(False) / self.shards
        experts = self.moe.padded_expert_params / self.moe.expert_shards
        return self.gathered_rest_params / self.shards + experts

    def num_moe_layers(self, first: int, end: int) -> int:
        """MoE blocks among ``first`` ... ``end - 1``."""
        return 0 if self.moe is None else self.moe.num_moe_layers(first, end)

    def is_moe(self, layer: int) -> bool:
        """Whether that block routes its tokens."""
        return self.moe is not None and self.moe.is_moe(layer)

    def stored_blocks(self, first: int, end: int) -> float:
        """Parameters that this rank stores of blocks ``first`` ... ``end - 1``."""
        routed = self.num_moe_layers(first, end)
        dense = (end - first - routed) * self.gathered_params(False) / self.shards
        return dense + routed * self.stored_params(True) if routed else dense

    def gathered_blocks(self, first: int, end: int) -> float:
        """Parameters of those blocks on one TP rank, gathered, FSDP's padding included."""
        routed = self.num_moe_layers(first, end)
        dense = (end - first - routed) * self.gathered_params(False)
        return dense + routed * self.gathered_params(True) if routed else dense

    def whole_blocks(self, first: int, end: int) -> float:
        """Parameters of those blocks on one TP rank without any padding, as their unsharded gradients have."""
        routed = self.num_moe_layers(first, end)
        dense = (end - first - routed) * self.block_shard_params
        if not routed or self.moe is None:
            return dense
        return dense + routed * (self.moe_rest_params + self.moe.expert_params)

    @property
    def embedding_shard_params(self) -> float:
        """Token embedding (or output weight) on one TP rank."""
        return self.vocab * self.dim / self.tp

    @property
    def gathered_table_params(self) -> float:
        """The same gathered, FSDP's padding included."""
        return self.embedding_shard_params + self.table_padding

    @property
    def local_params(self) -> float:
        """Parameters that this rank stores, all layers (no pipeline split)."""
        tables = self.tables * self.gathered_table_params + self.dim
        return self.stored_blocks(0, self.layers) + tables / self.shards

    @property
    def local_param_bytes(self) -> float:
        """Those parameters in bytes; their gradients and each Adam moment take the same."""
        tables = (self.tables * self.gathered_table_params + self.dim) / self.shards
        return self.block_param_bytes * self.stored_blocks(0, self.layers) + self.param_bytes * tables

    @property
    def residual_stream_bytes(self) -> float:
        """One hidden state: tokens x dim (/ tp under sequence parallelism)."""
        return self.residual_bytes * self.tokens * self.dim / self.tp

    @property
    def score_bytes(self) -> float:
        """One fp32 S x S attention matrix over all local heads and sequences."""
        return FP32_BYTES * (self.tokens / self.seq_local) * (self.heads / self.tp) * self.seq_local**2


def check_covered(settings: Settings) -> None:
    """Raise :class:`NotCoveredError` for what the closed forms do not describe."""
    dims = settings.dims
    if dims.dp_replicate > 1 and dims.fsdp_degree == 1 and (dims.tp > 1 or dims.pp > 1):
        raise NotCoveredError(
            f"data_parallel_replicate_degree = {dims.dp_replicate} with tensor or pipeline parallelism and no "
            "sharding: torchtitan refuses DDP beyond one dimension; use data_parallel_shard_degree"
        )
    uneven = None if settings.model.moe is None else uneven_experts(settings.model, settings.model.moe, dims)
    if uneven is not None:
        raise NotCoveredError(
            f"parallelism.expert_parallel_degree = {dims.ep}: FSDP shards each rank's experts over "
            f"{expert_shards_of(dims)} ranks, more than it has experts, so torchtitan shards their dimension 1, and "
            f"FSDP refuses {uneven}, which that does not divide; use a larger expert_parallel_degree or "
            "data_parallel_replicate_degree"
        )


def param_path(settings: Settings) -> ParamPath:
    """The path of torchtitan 0.2.2's ``maybe_enable_amp`` and ``parallelize_llama``."""
    dims = settings.dims
    if dims.fsdp_degree > 1:
        return ParamPath.FSDP
    # torch.autocast knows no float32 and disables itself, which leaves plain training.dtype
    if dims.tp > 1 or dims.pp > 1 or settings.mixed_precision_param == "float32":
        return ParamPath.PLAIN
    return ParamPath.AUTOCAST


_RECOMPUTE = {
    AcMode.NONE: Recompute.NONE,
    AcMode.FULL: Recompute.FULL,
    AcMode.MEMORY_BUDGET: Recompute.BUDGET,
}


def _recompute(settings: Settings) -> Recompute:
    ac = settings.ac
    if ac.mode is AcMode.SELECTIVE:
        return Recompute.EVERY if ac.every else Recompute.OP
    return _RECOMPUTE[ac.mode]


def _needs_math_attention(settings: Settings, compute_bytes: int) -> bool:
    """Flash and cuDNN refuse fp32 and old GPUs, and torchtitan's list then falls to MATH."""
    gpu = settings.cluster.gpu
    if settings.model.attention != "sdpa" or gpu.is_cpu:
        return False
    too_old = gpu.compute_capability is not None and gpu.compute_capability < FUSED_ATTENTION_CAPABILITY
    return compute_bytes == FP32_BYTES or too_old


def shapes_of(settings: Settings) -> Shapes:
    """The :class:`Shapes` of a configuration.

    Raises:
        NotCoveredError: for models and layouts outside the closed forms.
    """
    check_covered(settings)
    model, dims, float8 = settings.model, settings.dims, settings.float8
    path = param_path(settings)
    param_bytes = 2 if settings.dtype == "bfloat16" else FP32_BYTES
    mixed_bytes = 2 if settings.mixed_precision_param == "bfloat16" else FP32_BYTES
    compute_bytes = param_bytes if path is ParamPath.PLAIN else mixed_bytes
    residual_bytes = param_bytes if path is ParamPath.AUTOCAST else compute_bytes
    batch = settings.pipeline.microbatch_size if dims.pp > 1 else settings.local_batch_size
    seq_local = settings.seq_len // dims.cp
    dim, heads, head_dim = model.dim, model.n_heads, model.head_dim
    kv_dim, ffn = model.n_kv_heads * head_dim, model.ffn_hidden_dim
    attention, tokens = attention_of(model), batch * seq_local
    is_fsdp = path is ParamPath.FSDP
    reshard = settings.reshard_after_forward
    # inputs, labels and RoPE table; the whole sequence even under context parallelism
    inputs = 16.0 * settings.local_batch_size * seq_local + attention.rope_bytes * settings.seq_len
    moe = None if model.moe is None else moe_of(model, model.moe, dims, tokens)
    shards = dims.fsdp_degree
    padded = (attention.weights + feed_forward_weights(dim, ffn), dims.tp, shards)
    compiles = settings.compile.model and model.name != GPT_OSS  # torchtitan compiles its loss only
    return Shapes(
        path=path,
        dim=dim,
        heads=heads,
        head_dim=head_dim,
        attn_dim=heads * head_dim,
        kv_dim=kv_dim,
        ffn=ffn,
        vocab=model.vocab_size,
        layers=model.n_layers,
        block_matmul=attention.params_split + 3 * dim * ffn,
        block_norm=attention.params_whole,
        attention=attention,
        moe=moe,
        block_padding=padding_of(*padded) if shards > 1 else 0.0,
        moe_padding=0.0 if moe is None else padding_of(attention.weights + moe.rest_weights, dims.tp, shards),
        table_padding=padding_of((Weight(model.vocab_size, dim, "rows"),), dims.tp, shards),
        tables=1 if model.tied_embeddings else 2,
        tp=dims.tp,
        cp=dims.cp,
        pp=dims.pp,
        replicate=dims.dp_replicate,
        shards=shards,
        tokens=tokens,
        seq_full=settings.seq_len,
        seq_local=seq_local,
        batch=batch,
        param_bytes=param_bytes,
        block_param_bytes=2 if model.name == GPT_OSS else param_bytes,
        compute_bytes=compute_bytes,
        residual_bytes=residual_bytes,
        recompute=_recompute(settings),
        every=settings.ac.every,
        budget=settings.ac.memory_budget,
        compile_block=compiles,
        compile_loss=settings.compile.loss,
        float8=float8 is not None or settings.mxfp8,
        rowwise=settings.mxfp8 or (float8 is not None and float8.recipe != "tensorwise"),
        bf16_weight_gradients=float8 is not None and float8.recipe == "rowwise_with_gw_hp",
        float8_all_gather=is_fsdp and float8 is not None and float8.fsdp_all_gather,
        math_attention=_needs_math_attention(settings, compute_bytes),
        flex_attention=model.attention == "flex",
        accumulates=settings.gradient_accumulation_steps > 1,
        loss_parallel=dims.tp > 1 and settings.loss_parallel,
        keep_gathered=is_fsdp and (reshard == "never" or (dims.pp > 1 and reshard == "default")),
        reshard_output=reshard == "always",
        offload=is_fsdp and settings.cpu_offload,
        framework_bytes=inputs + (0 if settings.cluster.gpu.is_cpu else CUBLAS_WORKSPACE_BYTES),
    )
