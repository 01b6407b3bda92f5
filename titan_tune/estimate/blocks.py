"""The shapes of a transformer block by model family: attention and mixture of experts.

Widths are elements per token. Under tensor parallelism a ``split`` width is divided by its degree, a
``whole`` one is the same on every rank. Read off torchtitan 0.2.2's ``models/*/model/model.py``.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from titan_tune.domain.model import MlaSpec, ModelSpec, MoeSpec
from titan_tune.domain.settings import ParallelDims
from titan_tune.titan.experts import expert_shards_of, shards_dimension_0

GROUP_ALIGNMENT = 8
"""Tokens of each local expert are padded to a multiple (``TOKEN_GROUP_ALIGN_SIZE_M``)."""
ROUTED_INDEX_BYTES = 32
"""Kept for each routed token: int64 index of top-k, sort and division, fp32 score before and after."""

GPT_OSS = "gpt_oss"


class Width(NamedTuple):
    """Output of one matmul."""

    size: int
    is_split: bool


class Weight(NamedTuple):
    """One parameter of a block as ``fully_shard`` sees it: whole, before TP cuts it."""

    rows: int
    """Dimension 0, which it shards."""
    columns: int
    cut: str = ""
    """What TP divides: ``rows``, ``columns``, or neither."""


def linear(inputs: int, outputs: int, cut: str = "") -> Weight:
    """The weight of a linear layer."""
    return Weight(outputs, inputs, cut)


@lru_cache(maxsize=4096)
def padding_of(weights: tuple[Weight, ...], tp: int, shards: int) -> float:
    """Elements that ``fully_shard`` adds to these weights on one TP rank: it pads dimension 0 of each to a multiple
    of the shards (``FSDPParam._init_sharded_param``, torch 2.13)."""
    added = 0
    for weight in weights:
        rows = weight.rows // tp if weight.cut == "rows" else weight.rows
        columns = weight.columns // tp if weight.cut == "columns" else weight.columns
        added += -rows % shards * columns
    return float(added)


class Attention(NamedTuple):
    """One family's attention."""

    params_split: int
    params_whole: int
    """Norms of the block included."""
    weights: tuple[Weight, ...]
    """Those parameters one by one."""
    matmuls: tuple[Width, ...]
    """Outputs of the ``aten.mm`` calls in order; selective op AC saves every second one of a block."""
    output: int
    """Of the attention kernel: heads x value head size."""
    query_key: int
    kept_split: int
    """What autograd keeps besides the block's input and norm outputs: operands of the kernel, its output
    and the inputs of inner norms."""
    kept_whole: int
    norms_split: int
    """fp32 reciprocal deviations of the inner norms."""
    norms_whole: int
    latents: int
    """Width of compressed queries and keys, which have norms of their own."""
    sinks: int
    """gpt_oss's attention sinks, one a head: each keeps an fp32 and a cast value per token."""
    rope_cast: int
    """Elements per position of a RoPE table that ``fully_shard`` casts for each block; 0: complex, not cast."""
    rope_bytes: int
    """Bytes per position of the table itself."""


def attention_of(model: ModelSpec) -> Attention:
    """The attention of a model."""
    if model.mla is not None:
        return _latent(model.dim, model.n_heads, model.mla)
    return _grouped_query(
        model.name, model.dim, model.n_heads, model.n_kv_heads, model.head_dim, model.qk_norm
    )


@lru_cache(maxsize=256)
def _grouped_query(name: str, dim: int, heads: int, kv_heads: int, head: int, qk_norm: bool) -> Attention:
    q, kv = heads * head, kv_heads * head
    is_gpt_oss = name == GPT_OSS
    split = 2 * dim * (q + kv)
    whole = 2 * dim
    kept = 2 * (q + kv)
    norms = 0
    key = linear(dim, kv, "rows")
    weights = [linear(dim, q, "rows"), key, key, linear(q, dim, "columns"), Weight(dim, 1), Weight(dim, 1)]
    if qk_norm:  # their inputs are kept too
        whole += 2 * head
        weights += [Weight(head, 1)] * 2
        kept += q + kv
        norms = heads + kv_heads
    if is_gpt_oss:  # biases and sinks; the output before it is scaled
        split += q + 2 * kv + heads
        whole += dim
        weights += [Weight(rows, 1, "rows") for rows in (q, kv, kv, heads)] + [Weight(dim, 1)]
        kept += q
    real_rope = name == "qwen3" or is_gpt_oss
    return Attention(
        params_split=split,
        params_whole=whole,
        weights=tuple(weights),
        # linears with a bias are addmm, which the policy does not know
        matmuls=() if is_gpt_oss else (Width(q, True), Width(kv, True), Width(kv, True), Width(dim, False)),
        output=q,
        query_key=q + kv,
        kept_split=kept,
        kept_whole=0,
        norms_split=norms,
        norms_whole=0,
        latents=0,
        sinks=heads if is_gpt_oss else 0,
        rope_cast=2 * head if real_rope else 0,
        rope_bytes=(8 if real_rope else 4) * head,
    )


@lru_cache(maxsize=256)
def _latent(dim: int, heads: int, mla: MlaSpec) -> Attention:
    """deepseek_v3's: queries and keys are built by concatenation, so their parts are not kept."""
    rank = mla.kv_lora_rank
    head = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    q, output = heads * head, heads * mla.v_head_dim
    expanded = heads * mla.qk_nope_head_dim + output
    compressed = rank + mla.qk_rope_head_dim
    split = rank * expanded + output * dim
    whole = 2 * dim + dim * compressed + rank
    kept_whole = compressed + rank
    query: tuple[Width, ...]
    weights = [linear(dim, compressed), Weight(rank, 1), linear(rank, expanded, "rows")]
    weights += [linear(output, dim, "columns"), Weight(dim, 1), Weight(dim, 1)]
    if mla.q_lora_rank:
        split += mla.q_lora_rank * q
        whole += (dim + 1) * mla.q_lora_rank
        kept_whole += 2 * mla.q_lora_rank
        weights += [linear(dim, mla.q_lora_rank), Weight(mla.q_lora_rank, 1)]
        weights.append(linear(mla.q_lora_rank, q, "rows"))
        query = (Width(mla.q_lora_rank, False), Width(q, True))
    else:
        split += dim * q
        weights.append(linear(dim, q, "rows"))
        query = (Width(q, True),)
    return Attention(
        params_split=split,
        params_whole=whole,
        weights=tuple(weights),
        matmuls=(*query, Width(compressed, False), Width(expanded, True), Width(dim, False)),
        output=output,
        query_key=2 * q,
        kept_split=2 * q + expanded + output,
        kept_whole=kept_whole,
        norms_split=0,
        norms_whole=2 if mla.q_lora_rank else 1,
        latents=rank + mla.q_lora_rank,
        sinks=0,
        rope_cast=0,
        rope_bytes=4 * mla.qk_rope_head_dim,
    )


def feed_forward_weights(dim: int, hidden: int) -> tuple[Weight, ...]:
    """w1, w3 and w2; none without a width (experts that are not shared)."""
    wide = linear(dim, hidden, "rows")
    return (wide, wide, linear(hidden, dim, "columns")) if hidden else ()


def feed_forward_matmuls(dim: int, hidden: int) -> tuple[Width, ...]:
    """Outputs of w1, w3 and w2, in the order in which they run."""
    return (Width(hidden, True), Width(hidden, True), Width(dim, False))


class Moe(NamedTuple):
    """The mixture of experts of one rank, tokens routed evenly."""

    num_dense_layers: int
    layer_step: int
    experts: int
    top_k: int
    tokens: int
    """Whose experts this rank computes: the forward's, or a TP rank's part of them."""
    rows: int
    """Of the grouped matmuls, padding included."""
    hidden: float
    """Width of an expert on this rank."""
    shared_hidden: int
    """Width of the shared experts, all TP ranks."""
    expert_params: float
    """Of the routed experts on one rank when gathered."""
    padded_expert_params: float
    """The same with FSDP's padding of dimension 0."""
    expert_shards: int
    rest_split: int
    """Parameters of the shared experts."""
    rest_whole: int
    """Parameters of the router."""
    rest_weights: tuple[Weight, ...]
    """Those of both one by one."""
    own_group: bool
    """Expert parallelism: ``fully_shard`` treats the experts as a group of their own."""
    expert_parallel: int
    saves_all_to_all: bool
    """Whether selective op AC keeps what was sent to other ranks (all families but qwen3)."""
    is_gpt_oss: bool
    score_before_experts: bool

    def is_moe(self, layer: int) -> bool:
        """Whether that layer routes its tokens (dense otherwise)."""
        return layer >= self.num_dense_layers and (layer + 1) % self.layer_step == 0

    def num_moe_layers(self, first: int, end: int) -> int:
        """MoE layers among ``first`` ... ``end - 1``."""
        start = max(first, self.num_dense_layers)
        return max(0, end // self.layer_step - start // self.layer_step) if end > start else 0

    @property
    def expert_width(self) -> int:
        """Activations that a whole expert keeps per row, in units of its width (eager)."""
        return 7 if self.is_gpt_oss else 4

    @property
    def routed(self) -> int:
        """Routed tokens, no padding: tokens x experts per token."""
        return self.tokens * self.top_k


def expert_params_of(model: ModelSpec, moe: MoeSpec) -> int:
    """Parameters of the routed experts of one layer, whole."""
    hidden, dim = moe.expert_hidden_dim, model.dim
    biases = 2 * hidden + dim if model.name == GPT_OSS else 0
    return moe.num_experts * (3 * dim * hidden + biases)


def moe_of(model: ModelSpec, moe: MoeSpec, dims: ParallelDims, tokens: int) -> Moe:
    """The experts' shapes on one rank; ``tokens`` of one forward."""
    etp = dims.etp if dims.ep > 1 else dims.tp
    splits_tokens = dims.ep > 1 and dims.tp > 1 and dims.etp == 1
    local_tokens = tokens // dims.tp if splits_tokens else tokens
    local_experts = moe.num_experts / dims.ep
    rows = local_tokens * moe.top_k + math.ceil(local_experts) * GROUP_ALIGNMENT
    shards = expert_shards_of(dims)
    params = expert_params_of(model, moe) / (dims.ep * etp)
    padded = 1.0
    if shards_dimension_0(moe, dims):  # to a multiple of the shards
        padded = math.ceil(local_experts / shards) * shards / local_experts
    shared = moe.num_shared_experts * moe.expert_hidden_dim
    router = (linear(model.dim, moe.num_experts), *[Weight(moe.num_experts, 1)] * moe.gate_bias)
    return Moe(
        num_dense_layers=moe.num_dense_layers,
        layer_step=moe.layer_step,
        experts=moe.num_experts,
        top_k=moe.top_k,
        tokens=local_tokens,
        rows=-(-rows // GROUP_ALIGNMENT) * GROUP_ALIGNMENT,
        hidden=moe.expert_hidden_dim / etp,
        shared_hidden=shared,
        expert_params=params,
        padded_expert_params=params * padded,
        expert_shards=shards,
        rest_split=3 * model.dim * shared,
        rest_whole=(model.dim + moe.gate_bias) * moe.num_experts,
        rest_weights=(*feed_forward_weights(model.dim, shared), *router),
        own_group=dims.ep > 1,
        expert_parallel=dims.ep,
        saves_all_to_all=model.name != "qwen3",
        is_gpt_oss=model.name == GPT_OSS,
        score_before_experts=moe.score_before_experts,
    )
