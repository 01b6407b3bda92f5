"""What a transformer block keeps for its backward, and what its backward needs beyond that.

Derived from the torchtitan 0.2.2 source and fake-tensor traces of whole steps, then held against
H200 runs (torch 2.11). Sizes are bytes on one rank; T tokens, D dim, A heads x head_dim,
K KV heads x head_dim, F feed-forward width, H heads, t TP degree.
"""

from __future__ import annotations

from titan_tune.estimate.parameters import ParamPath, Recompute, Shapes


def saved_block_bytes(shapes: Shapes, mode: Recompute) -> float:
    """Saved by one block, without S x S attention scores."""
    if mode is Recompute.BUDGET:
        return _saved_under_budget(shapes)
    if shapes.path is ParamPath.AUTOCAST:
        return _saved_autocast(shapes, mode)
    return _saved_sharded(shapes, mode)


def _saved_autocast(s: Shapes, mode: Recompute) -> float:
    """Residual stream and norms in the parameters' dtype, linears cast to bf16."""
    tokens, dim = s.tokens, s.dim
    residual = s.residual_bytes * tokens * dim
    log_sum_exp = 4 * tokens * s.heads
    if mode is Recompute.FULL:
        return residual
    if mode is Recompute.OP:
        eager_w2_output = 0 if s.compile_block else 2 * tokens * dim
        return residual + 2 * tokens * (2 * s.attn_dim + s.kv_dim + s.ffn) + log_sum_exp + eager_w2_output
    rstd = 8 * tokens
    qkv_out = 2 * s.attn_dim + 2 * s.kv_dim
    weights = saved_weight_bytes(s, mode)
    if not s.compile_block:
        # each of the five linears that read a norm output casts its own copy of it
        norm_copies = (10 if s.residual_bytes == 4 else 4) * tokens * dim
        return 2 * residual + norm_copies + 2 * tokens * (qkv_out + 4 * s.ffn) + log_sum_exp + rstd + weights
    if s.float8:
        return residual + 2 * tokens * dim + 2 * tokens * (qkv_out + 2 * s.ffn) + log_sum_exp + rstd
    return residual + 6 * tokens * dim + 2 * tokens * (qkv_out + 3 * s.ffn) + log_sum_exp + rstd + weights


def saved_weight_bytes(shapes: Shapes, mode: Recompute) -> float:
    """bf16 weight copies that autocast's linears keep for their backward, part of the saved bytes."""
    float8_recomputes = shapes.float8 and shapes.compile_block
    if mode is not Recompute.NONE or shapes.path is not ParamPath.AUTOCAST or float8_recomputes:
        return 0.0
    return 2.0 * shapes.block_matmul if shapes.param_bytes == 4 else 0.0


def _saved_sharded(s: Shapes, mode: Recompute) -> float:
    """``fully_shard`` and plain paths: one dtype throughout, TP splits all but full-width inputs."""
    size, tokens, dim, tp = s.compute_bytes, s.tokens, s.dim, s.tp
    residual = size * tokens * dim / tp
    if mode is Recompute.FULL:
        return residual
    log_sum_exp = 0.0 if s.math_attention else 4 * tokens * s.heads / tp
    if mode is Recompute.OP:
        # MATH attention is no op of the save list: its output is recomputed
        outputs = (1 if s.math_attention else 2) * s.attn_dim + s.kv_dim + s.ffn
        saved = residual + size * tokens * outputs / tp + log_sum_exp
        saved += residual if tp > 1 else 0  # reduce-scatter output of wo
        if not s.compile_block:  # w2's output (full width: a partial sum under TP), saved and never used
            saved += size * tokens * dim + (residual if tp > 1 else 0)
        return saved + _ring_attention_bytes(s)
    rstd = 8 * tokens / tp
    qkv_out = 2 * s.attn_dim + 2 * s.kv_dim
    if s.float8 and s.compile_block:
        float8_weights = 3 * dim * s.ffn / tp if s.float8_all_gather else 0
        saved = 2 * residual + size * tokens * (qkv_out + 2 * s.ffn) / tp + float8_weights
    else:
        ffn_outputs = 3 if s.compile_block else 4
        saved = 2 * residual + 2 * size * tokens * dim + size * tokens * (qkv_out + ffn_outputs * s.ffn) / tp
    if s.math_attention:  # keys and values repeated to all heads
        saved += 2 * size * tokens * (s.attn_dim - s.kv_dim) / tp
    return saved + log_sum_exp + rstd + _ring_attention_bytes(s)


def _ring_attention_bytes(s: Shapes) -> float:
    """Keys and values gathered from all CP ranks and a contiguous local copy of the keys."""
    if s.cp == 1:
        return 0.0
    return (2 * s.compute_bytes * s.cp + s.compute_bytes) * s.tokens * s.kv_dim / s.tp


def _saved_under_budget(s: Shapes) -> float:
    """The min-cut partitioner's choice for ``memory_budget``.

    It fills ``budget`` x (saved without AC - inputs) with matmul outputs, all worth the same per
    byte, so what it saves is the largest subset sum below that (three traces agree exactly).
    fp32 weights count among the inputs, their bf16 copies among what is saved. Attention is
    recomputed unless everything that is not a matmul or attention output is enough.
    """
    if not s.compile_block:
        return saved_block_bytes(s, Recompute.NONE)
    none, floor = saved_block_bytes(s, Recompute.NONE), saved_block_bytes(s, Recompute.FULL)
    inputs = floor + (4 * s.block_matmul if saved_weight_bytes(s, Recompute.NONE) else 0)
    span = none - inputs
    if s.budget >= 1 or span <= 0:
        return none
    if s.budget <= 0:
        return floor
    unit = s.compute_bytes * s.tokens / s.tp
    outputs = (s.ffn, s.ffn, s.attn_dim, s.dim, s.kv_dim, s.kv_dim)
    compute_heavy = unit * (sum(outputs) + s.attn_dim) + 4 * s.tokens * s.heads / s.tp
    if compute_heavy < s.budget * span:
        return min(none, floor + compute_heavy)
    room = s.budget * span / unit
    sums = {0}
    for output in outputs:
        sums |= {total + output for total in sums if total + output <= room}
    return floor + unit * max(sums)


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


def saved_blocks(shapes: Shapes, num_layers: int, first: int = 0) -> tuple[float, float]:
    """``(activations, attention scores)`` of ``num_layers`` blocks from the rank's ``first``-th on."""
    if shapes.recompute is not Recompute.EVERY:
        mode = shapes.recompute
        return num_layers * saved_block_bytes(shapes, mode), num_layers * saved_scores_bytes(shapes, mode)
    full = (first + num_layers) // shapes.every - first // shapes.every
    none = num_layers - full
    saved_full = saved_block_bytes(shapes, Recompute.FULL)
    saved_none = saved_block_bytes(shapes, Recompute.NONE)
    return full * saved_full + none * saved_none, none * saved_scores_bytes(shapes, Recompute.NONE)


def saved_weights_of_blocks(shapes: Shapes) -> float:
    """bf16 weight copies inside :func:`saved_blocks` of the whole model (autocast, no AC)."""
    if shapes.recompute is Recompute.EVERY:
        none = shapes.layers - shapes.layers // shapes.every
        return none * saved_weight_bytes(shapes, Recompute.NONE)
    return shapes.layers * saved_weight_bytes(shapes, shapes.recompute)


def working_set(s: Shapes) -> tuple[float, float]:
    """``(bytes, attention score bytes)`` of one block's backward beyond what the block saved.

    Compiled, inductor's fused SwiGLU backward reads w1, w3 and d_product and writes product, d_w1
    and d_w3 at once: six F-wide buffers (five under op AC, which saved w1).
    """
    size, tokens, dim, tp = s.compute_bytes, s.tokens, s.dim, s.tp
    if s.math_attention:
        rest = 4 * (3 * dim * s.ffn + dim * s.attn_dim) / tp + 4 * tokens * (2 * dim + 5 * s.attn_dim / tp)
        return rest, 2 * s.score_bytes
    mode = s.recompute
    if not s.compile_block:
        return _eager_working_set(s), 0.0
    if mode is Recompute.OP:
        need = size * tokens * 5 * s.ffn / tp + 2 * size * tokens * dim
    elif mode is Recompute.NONE:
        need = size * tokens * 3 * s.ffn / tp + size * tokens * dim
    else:
        need = size * tokens * (6 * s.ffn + 2 * s.attn_dim + 2 * s.kv_dim) / tp + 3 * size * tokens * dim
        need += 4 * tokens * s.heads / tp
    if mode is not Recompute.OP and mode is not Recompute.NONE:
        need += _ring_attention_bytes(s)
    if s.path is ParamPath.AUTOCAST and s.param_bytes == 4 and mode is not Recompute.NONE:
        need += (1 if s.float8 else 2) * s.block_matmul  # recomputed low-precision weights
    if s.float8 and s.rowwise:  # feed-forward operands, row- and column-scaled
        need += (tokens * 5 * s.ffn + 3 * dim * s.ffn) / tp + 3 * tokens * dim
    return need, 0.0


def _eager_working_set(s: Shapes) -> float:
    """Everything the forward would have saved, and the gradients of the SwiGLU: two F-wide and two
    D-wide beyond the saved (three F-wide and one D-wide where nothing is recomputed)."""
    size, tokens = s.compute_bytes, s.tokens
    if s.recompute is Recompute.NONE:
        return size * tokens * (3 * s.ffn / s.tp + s.dim)
    mode = Recompute.FULL if s.recompute is Recompute.EVERY else s.recompute
    recomputed = saved_block_bytes(s, Recompute.NONE) - saved_block_bytes(s, mode)
    return max(0.0, recomputed) + size * tokens * (2 * s.ffn / s.tp + 2 * s.dim)
