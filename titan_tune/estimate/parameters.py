"""The numbers that the closed forms read: model shapes, degrees and byte sizes of one rank."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from titan_tune.domain.settings import AcMode, Settings
from titan_tune.errors import InputError
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
    """Parameters of a block's seven linears, whole (not sharded)."""
    block_norm: int
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
    float8_all_gather: bool
    math_attention: bool
    accumulates: bool
    """Gradients of an earlier microbatch are there during this one's forward and backward."""
    loss_parallel: bool
    keep_gathered: bool
    reshard_output: bool
    offload: bool
    framework_bytes: float

    @property
    def block_shard_params(self) -> float:
        """Parameters of one block on one TP rank (norms are not TP-sharded)."""
        return self.block_matmul / self.tp + self.block_norm

    @property
    def embedding_shard_params(self) -> float:
        """Token embedding (or output weight) on one TP rank."""
        return self.vocab * self.dim / self.tp

    @property
    def local_params(self) -> float:
        """Parameters that this rank stores, all layers (no pipeline split)."""
        per_tp_rank = self.layers * self.block_shard_params + 2 * self.embedding_shard_params + self.dim
        return per_tp_rank / self.shards

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
    model = settings.model
    if not model.is_dense_llama:
        raise NotCoveredError(
            f"model {model.name}/{model.flavor}: the formula covers dense llama3 models only, not "
            f"{_uncovered_part(settings)}; measure it with a probe"
        )
    dims = settings.dims
    if dims.dp_replicate > 1 and dims.fsdp_degree == 1 and (dims.tp > 1 or dims.pp > 1):
        raise NotCoveredError(
            f"data_parallel_replicate_degree = {dims.dp_replicate} with tensor or pipeline parallelism and no "
            "sharding: torchtitan refuses DDP beyond one dimension; use data_parallel_shard_degree"
        )


def _uncovered_part(settings: Settings) -> str:
    model = settings.model
    if model.moe is not None:
        return "mixture of experts"
    if model.mla is not None:
        return "multi-head latent attention"
    if model.qk_norm:
        return "query/key norms"
    if model.tied_embeddings:
        return "tied embeddings"
    return f"the {model.name} family"


def param_path(settings: Settings) -> ParamPath:
    """The path of torchtitan 0.2.2's ``maybe_enable_amp`` and ``parallelize_llama``."""
    dims = settings.dims
    if dims.fsdp_degree > 1:
        return ParamPath.FSDP
    # torch.autocast knows no float32 and disables itself, which leaves plain training.dtype
    if dims.tp > 1 or dims.pp > 1 or settings.mixed_precision_param == "float32":
        return ParamPath.PLAIN
    return ParamPath.AUTOCAST


def _recompute(settings: Settings) -> Recompute:
    ac = settings.ac
    if ac.mode is AcMode.SELECTIVE:
        return Recompute.EVERY if ac.every else Recompute.OP
    return {
        AcMode.NONE: Recompute.NONE,
        AcMode.FULL: Recompute.FULL,
        AcMode.MEMORY_BUDGET: Recompute.BUDGET,
    }[ac.mode]


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
    attn_dim, kv_dim, ffn = heads * head_dim, model.n_kv_heads * head_dim, model.ffn_hidden_dim
    is_fsdp = path is ParamPath.FSDP
    reshard = settings.reshard_after_forward
    # inputs, labels and RoPE table; the whole sequence even under context parallelism
    inputs = 16.0 * settings.local_batch_size * seq_local + 4.0 * settings.seq_len * head_dim
    return Shapes(
        path=path,
        dim=dim,
        heads=heads,
        head_dim=head_dim,
        attn_dim=attn_dim,
        kv_dim=kv_dim,
        ffn=ffn,
        vocab=model.vocab_size,
        layers=model.n_layers,
        block_matmul=2 * dim * attn_dim + 2 * dim * kv_dim + 3 * dim * ffn,
        block_norm=2 * dim,
        tp=dims.tp,
        cp=dims.cp,
        pp=dims.pp,
        replicate=dims.dp_replicate,
        shards=dims.fsdp_degree,
        tokens=batch * seq_local,
        seq_full=settings.seq_len,
        seq_local=seq_local,
        batch=batch,
        param_bytes=param_bytes,
        compute_bytes=compute_bytes,
        residual_bytes=residual_bytes,
        recompute=_recompute(settings),
        every=settings.ac.every,
        budget=settings.ac.memory_budget,
        compile_block=settings.compile.model,
        compile_loss=settings.compile.loss,
        float8=float8 is not None or settings.mxfp8,
        rowwise=settings.mxfp8 or (float8 is not None and float8.recipe != "tensorwise"),
        float8_all_gather=is_fsdp and float8 is not None and float8.fsdp_all_gather,
        math_attention=_needs_math_attention(settings, compute_bytes),
        accumulates=settings.gradient_accumulation_steps > 1,
        loss_parallel=dims.tp > 1 and settings.loss_parallel,
        keep_gathered=is_fsdp and (reshard == "never" or (dims.pp > 1 and reshard == "default")),
        reshard_output=reshard == "always",
        offload=is_fsdp and settings.cpu_offload,
        framework_bytes=inputs + (0 if settings.cluster.gpu.is_cpu else CUBLAS_WORKSPACE_BYTES),
    )
