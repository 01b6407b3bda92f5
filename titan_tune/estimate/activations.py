"""What a transformer block keeps from its forward for its backward.

Derived from the torchtitan 0.2.2 source and fake-tensor traces of whole steps, then held against
H200 runs (torch 2.11). Sizes are bytes on one rank; T tokens, D dim, A heads x head_dim,
K KV heads x head_dim, F feed-forward width, H heads, t TP degree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from titan_tune.estimate.blocks import ROUTED_INDEX_BYTES, Width, feed_forward_matmuls
from titan_tune.estimate.parameters import FP32_BYTES, ParamPath, Recompute, Shapes


def saved_block_bytes(shapes: Shapes, mode: Recompute, is_moe: bool = False) -> float:
    """Saved by one block, without S x S attention scores."""
    if mode is Recompute.BUDGET:
        return _saved_under_budget(shapes, is_moe)
    if shapes.path is ParamPath.AUTOCAST:
        return _saved_autocast(shapes, mode, is_moe)
    return _saved_sharded(shapes, mode, is_moe)


def _saved_autocast(s: Shapes, mode: Recompute, is_moe: bool) -> float:
    """Residual stream and norms in the parameters' dtype, linears cast to bf16."""
    tokens, dim, attention = s.tokens, s.dim, s.attention
    residual = s.residual_bytes * tokens * dim
    if mode is Recompute.FULL:
        return residual
    log_sum_exp = 4 * tokens * s.heads
    if mode is Recompute.OP:
        return residual + _saved_by_policy(s, 2, log_sum_exp, is_moe)
    fp32 = s.residual_bytes == 4
    kept = 2 * attention.kept_split * tokens + log_sum_exp + _reciprocals(s) + _sink_bytes(s)
    kept += inner_norm_bytes(s) if fp32 and not s.compile_block else 2 * attention.kept_whole * tokens
    if fp32:
        kept += 2 * attention.rope_cast * s.seq_full
    weights = saved_weight_bytes(s, mode, is_moe)
    if s.compile_block:
        norms = 6 if not is_moe else 4  # the norm outputs, cast once, and wo's output in a dense block
        if s.float8 and not s.bf16_weight_gradients:
            norms = 2
        ffn = _kept_experts(s) if is_moe else 2 * tokens * (2 if s.recomputes_operands else 3) * s.ffn
        hidden = residual * (2 if is_moe else 1) + norms * tokens * dim
        return hidden + kept + ffn + weights
    # each linear that reads a norm output casts its own copy of it
    readers = (2 if attention.kept_whole else 3) + 2
    if is_moe and s.moe is not None:
        readers += 1 if s.moe.shared_hidden else -1  # the router; no dense w1 and w3
    norm_copies = (2 * readers if fp32 else 4) * tokens * dim
    ffn = _kept_experts(s) if is_moe else 2 * tokens * 4 * s.ffn
    return 2 * residual + norm_copies + kept + ffn + weights


def inner_norm_bytes(s: Shapes) -> float:
    """Norms of queries, keys and latents under autocast: input and normalised input in fp32."""
    attention, tokens = s.attention, s.tokens
    heads = 6.0 * attention.query_key if attention.norms_split else 0.0
    return (heads + 10.0 * attention.latents) * tokens  # of latents also the output, cast to bf16


def _sink_bytes(s: Shapes) -> float:
    """gpt_oss: the sinks' sigmoid in fp32 and in the compute dtype."""
    return s.tokens * s.attention.sinks * (4 + s.compute_bytes) / s.tp


def _reciprocals(s: Shapes) -> float:
    """fp32 reciprocal deviations of the block's norms."""
    attention = s.attention
    inner = attention.norms_split / s.tp + attention.norms_whole
    return 4 * s.tokens * (2 / s.tp + inner)


def saved_weight_bytes(shapes: Shapes, mode: Recompute, is_moe: bool = False) -> float:
    """bf16 weight copies that autocast's linears keep for their backward, part of the saved bytes."""
    float8_casts = shapes.float8 and (shapes.compile_block or not is_moe)
    if mode is not Recompute.NONE or shapes.path is not ParamPath.AUTOCAST or float8_casts:
        return 0.0
    if shapes.param_bytes != FP32_BYTES:
        return 0.0
    return 2.0 * (shapes.gathered_params(True) if is_moe else shapes.block_matmul)


def _saved_by_policy(s: Shapes, size: int, log_sum_exp: float, is_moe: bool) -> float:
    """What selective op AC saves beyond the block's input: attention, every second ``mm`` and what
    collectives received. The submodules of a compiled MoE block hide their matmuls from the policy."""
    attention, tokens, tp, moe = s.attention, s.tokens, s.tp, s.moe
    residual = size * tokens * s.dim / tp
    saved = residual if tp > 1 else 0.0  # reduce-scatter output of wo
    hidden_from_policy = is_moe and s.compile_block
    if not (hidden_from_policy and s.flex_attention):
        # MATH attention is no op of the save list: its output is recomputed
        saved += log_sum_exp + (0.0 if s.math_attention else size * tokens * attention.output / tp)
    if not hidden_from_policy:
        hidden = s.ffn if not is_moe or moe is None else moe.shared_hidden
        saved += size * tokens * policy_width(attention.matmuls, s.dim, hidden, tp, s.compile_block)
        if s.flex_attention and not s.compile_block:
            # the compiled kernel hands its inputs to the policy as outputs
            saved += size * tokens * attention.query_key / tp
    if tp > 1 and (is_moe or not s.compile_block):
        saved += residual  # reduce-scatter output of the feed-forward
    if is_moe and moe is not None and moe.saves_all_to_all and moe.own_group:
        saved += 2 * size * moe.routed * s.dim
    return saved


@lru_cache(maxsize=4096)
def policy_width(attention: tuple[Width, ...], dim: int, hidden: int, tp: int, compiled: bool) -> float:
    """Elements per token of every second matmul output of a block. Compiled, one that no backward
    reads is dropped: w2's, and under TP wo's (partial sums that were reduced)."""
    outputs = (*attention, *feed_forward_matmuls(dim, hidden)) if hidden else attention
    total = 0.0
    for index, output in enumerate(outputs):
        is_last = hidden > 0 and index == len(outputs) - 1
        if index % 2 or (compiled and (is_last or (tp > 1 and not output.is_split and output.size == dim))):
            continue
        total += output.size / tp if output.is_split else output.size
    return total


def _saved_sharded(s: Shapes, mode: Recompute, is_moe: bool) -> float:
    """``fully_shard`` and plain paths: one dtype throughout, TP splits all but full-width inputs."""
    size, tokens, dim, tp = s.compute_bytes, s.tokens, s.dim, s.tp
    residual = size * tokens * dim / tp
    saved = residual
    if s.attention.rope_cast and s.path is ParamPath.FSDP and size != FP32_BYTES:
        saved += size * s.attention.rope_cast * s.seq_full  # fully_shard casts floating inputs
    if mode is Recompute.FULL:
        return saved
    log_sum_exp = 0.0 if s.math_attention else 4 * tokens * s.heads / tp
    if mode is Recompute.OP:
        # eager, the policy sees the ring's kernel calls and saves nothing that was gathered
        gathered = ring_attention_bytes(s) if s.compile_block else 0.0
        return saved + _saved_by_policy(s, size, log_sum_exp, is_moe) + gathered
    saved += attention_kept_bytes(s) + residual + log_sum_exp
    casts = s.float8 and s.compile_block
    if not s.recomputes_operands:
        saved += 2 * size * tokens * dim  # norm outputs, recomputed where their casts fuse
    elif is_moe:  # compiled in parts: attention's input as it was cast, the router's and experts' as it is
        saved += (1 + size) * tokens * dim
    elif s.cp > 1:  # one of the hidden states is recomputed (traced)
        saved -= residual
    elif tp > 1:  # gathered as they were cast
        saved += 2 * tokens * dim
    if casts and tp > 1:  # weights' casts are kept too, by row not those of queries and keys
        of_weights = dim * s.attention.output if s.float8_all_gather else s.attention.params_split
        saved += (dim * (s.attention.output + s.kv_dim) if s.rowwise else of_weights) / tp
    if casts and not is_moe and (s.float8_all_gather or tp > 1):
        saved += 3 * dim * s.ffn / tp
    if is_moe:
        saved += _kept_experts(s)
    elif s.recomputes_operands:
        saved += 2 * size * tokens * s.ffn / tp
    else:
        saved += size * tokens * (3 if s.compile_block else 4) * s.ffn / tp
    return saved


def attention_kept_bytes(s: Shapes) -> float:
    """What attention keeps without AC, its input and the log-sum-exp left out; norms' deviations with it."""
    size, tokens, tp, attention = s.compute_bytes, s.tokens, s.tp, s.attention
    kept = size * tokens * (attention.kept_split / tp + attention.kept_whole)
    if s.math_attention:  # keys and values repeated to all heads
        kept += 2 * size * tokens * (s.attn_dim - s.kv_dim) / tp
    if s.compile_block and s.cp > 1:  # keys and values gathered, and as they were sent; RoPE rows by position
        key = attention.query_key - s.attn_dim
        value = attention.output if attention.kept_whole else key
        kept += size * (s.cp + 1) * (key + value) * tokens / tp + attention.rope_bytes * tokens
    elif s.cp > 1:  # the ring keeps its own copy of the output and nothing gathered; RoPE rows by position
        kept += size * tokens * attention.output / tp + attention.rope_bytes * tokens
    return kept + _reciprocals(s) + _sink_bytes(s)


def _kept_experts(s: Shapes) -> float:
    """Kept by the routed and shared experts without AC."""
    moe, size = s.moe, s.compute_bytes
    assert moe is not None
    fused = s.compile_block
    per_row = moe.hidden * (moe.expert_width - (1 if fused else 0))
    inputs = s.dim
    scored = FP32_BYTES * s.tokens * moe.top_k * s.dim  # scores multiply in fp32
    if s.path is ParamPath.AUTOCAST:
        inputs *= 1 if fused else 2  # cast for w1 and for w3
        scored = (FP32_BYTES if moe.score_before_experts else 2) * s.tokens * moe.top_k * s.dim
    experts = size * moe.rows * (per_row + inputs) + scored
    shared = size * s.tokens * (3 if fused else 4) * moe.shared_hidden / s.tp
    router = FP32_BYTES * (s.tokens * moe.experts + moe.rows) + ROUTED_INDEX_BYTES * moe.routed
    return experts + shared + router


def ring_attention_bytes(s: Shapes) -> float:
    """Keys and values gathered from all CP ranks and a contiguous local copy of the keys."""
    if s.cp == 1:
        return 0.0
    key = s.attention.query_key - s.attn_dim
    value = s.attention.output if s.attention.kept_whole else key
    return s.compute_bytes * (s.cp * (key + value) + key) * s.tokens / s.tp


def _saved_under_budget(s: Shapes, is_moe: bool) -> float:
    """The min-cut partitioner's choice for ``memory_budget``.

    It fills ``budget`` x (saved without AC - inputs) with matmul outputs, all worth the same per
    byte, so what it saves is the largest subset sum below that (three traces agree exactly).
    fp32 weights count among the inputs, their bf16 copies among what is saved. Attention is
    recomputed unless everything that is not a matmul or attention output is enough.
    """
    none, floor = (saved_block_bytes(s, mode, is_moe) for mode in (Recompute.NONE, Recompute.FULL))
    if not s.compile_block:
        return none
    if is_moe:  # the routed experts and the seams between the compiled parts keep all they would
        return none - (1 - max(0.0, min(1.0, s.budget))) * attention_kept_bytes(s)
    return _budget_choice(s, none, floor).num_bytes


def num_saved_products(s: Shapes) -> int:
    """How many of w1's and w3's outputs a dense block saves under a memory budget; none where the other one is made
    from attention that is recomputed first, all of it."""
    none, floor = (saved_block_bytes(s, mode) for mode in (Recompute.NONE, Recompute.FULL))
    choice = _budget_choice(s, none, floor)
    return 0 if choice.products == 1 and not choice.has_output else choice.products


class _Choice(NamedTuple):
    """What a dense block saves under its budget."""

    num_bytes: float
    products: int
    """Outputs of w1 and w3."""
    has_output: bool
    """That of wo."""


def _budget_choice(s: Shapes, none: float, floor: float) -> _Choice:
    inputs = floor + (4 * s.block_matmul if saved_weight_bytes(s, Recompute.NONE) else 0)
    span = none - inputs
    if s.budget >= 1 or span <= 0:
        return _Choice(none, 2, True)
    if s.budget <= 0:
        return _Choice(floor, 0, False)
    unit = s.compute_bytes * s.tokens / s.tp
    outputs = (s.attn_dim, s.dim, s.kv_dim, s.kv_dim)
    compute_heavy = unit * (2 * s.ffn + sum(outputs) + s.attn_dim) + 4 * s.tokens * s.heads / s.tp
    if compute_heavy < s.budget * span:
        return _Choice(min(none, floor + compute_heavy), 2, True)
    room = s.budget * span / unit
    # each sum that fits, and the first set of outputs that comes to it
    sums = {count * s.ffn: (count, False) for count in range(3) if count * s.ffn <= room}
    for number, output in enumerate(outputs):
        sums = {
            total + output: (count, has_output or number == 1)
            for total, (count, has_output) in sums.items()
            if total + output <= room
        } | sums
    most = max(sums)
    return _Choice(floor + unit * most, *sums[most])


def saved_scores_bytes(shapes: Shapes, mode: Recompute) -> float:
    """S x S matrices kept by one block: MATH attention without recomputation keeps the softmax result."""
    if not shapes.math_attention or mode in (Recompute.FULL, Recompute.OP, Recompute.BUDGET):
        return 0.0
    return shapes.score_bytes


def block_mode(shapes: Shapes, layer: int) -> Recompute:
    """The mode of block ``layer``; torchtitan counts the blocks a rank builds from 1."""
    if shapes.recompute is not Recompute.EVERY:
        return shapes.recompute
    return Recompute.FULL if (layer + 1) % shapes.every == 0 else Recompute.NONE


def saved_blocks(
    shapes: Shapes, num_layers: int, first: int = 0, counted: int | None = None
) -> tuple[float, float]:
    """``(activations, attention scores)`` of ``num_layers`` blocks from the model's ``first`` on, which
    is the rank's ``counted``-th (the same where there is no pipeline)."""
    if shapes.recompute is not Recompute.EVERY:
        mode = shapes.recompute
        scores = num_layers * saved_scores_bytes(shapes, mode)
        routed = shapes.num_moe_layers(first, first + num_layers) if shapes.moe is not None else 0
        saved = (num_layers - routed) * saved_block_bytes(shapes, mode) if routed < num_layers else 0.0
        return saved + (routed * saved_block_bytes(shapes, mode, True) if routed else 0.0), scores
    built = first if counted is None else counted
    if shapes.moe is None:
        full = (built + num_layers) // shapes.every - built // shapes.every
        kinds = {(Recompute.FULL, False): full, (Recompute.NONE, False): num_layers - full}
    else:
        kinds = Counter((block_mode(shapes, built + i), shapes.is_moe(first + i)) for i in range(num_layers))
    saved = scores = 0.0
    for (kind, is_moe), count in kinds.items():
        saved += count * saved_block_bytes(shapes, kind, is_moe)
        scores += count * saved_scores_bytes(shapes, kind)
    return saved, scores


Saved = Callable[[int], tuple[float, float]]
"""``(activations, attention scores)`` of so many leading blocks."""


def saved_by_depth(shapes: Shapes) -> Saved:
    """:func:`saved_blocks` of the model's first blocks, computed once where all are alike."""
    if shapes.moe is not None or shapes.recompute is Recompute.EVERY:
        return lambda num_layers: saved_blocks(shapes, num_layers)
    block, scores = saved_blocks(shapes, 1)
    return lambda num_layers: (num_layers * block, num_layers * scores)


def saved_weights_of_blocks(shapes: Shapes) -> float:
    """bf16 weight copies inside :func:`saved_blocks` of the whole model (autocast, no AC)."""
    routed = shapes.num_moe_layers(0, shapes.layers)
    kept = 1.0
    mode = shapes.recompute
    if mode is Recompute.EVERY:
        kept = 1 - shapes.layers // shapes.every / shapes.layers
        mode = Recompute.NONE
    dense = (shapes.layers - routed) * saved_weight_bytes(shapes, mode)
    return kept * (dense + (routed * saved_weight_bytes(shapes, mode, True) if routed else 0.0))
