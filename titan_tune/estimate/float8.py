"""The backward of a dense block whose linears are float8 (torchao), compiled or not.

From traces of whole steps with torch 2.13, but for one buffer that without TP torch 2.11 writes in bf16 and 2.13 in
fp32: the formula is for what was measured on H200s, which is torch 2.11. Ranks of two kinds have such a block as their
peak, with scales for whole tensors: 405B with TP 8 is within 0.1 %, 1B without TP 1 % below. Scales by row and by
column are 2.13's: small jobs traced with 2.11 peak 8 to 12 % higher. Sizes are bytes on one rank; a float8 element
has one.
"""

from __future__ import annotations

from titan_tune.estimate.activations import num_saved_products
from titan_tune.estimate.parameters import FP32_BYTES, ParamPath, Recompute, Shapes


def float8_feed_forward(s: Shapes, mode: Recompute, saved: float, attention: float) -> float:
    """A compiled block around the backward of its feed-forward, what it ``saved`` included; ``attention`` is what
    its attention keeps without AC, with the block's input.

    A scale needs the largest value before anything is cast, so the SwiGLU's backward writes what it will cast: two
    F-wide buffers in bf16, under TP one of them in fp32, for scales by row and by column one in bf16 and two in fp32.
    They are there while their float8 copies are made, with the product's gradient and the outputs of w1 and w3.
    Inductor takes the order of least memory that it finds, which decides what else is there: the least of two is that
    of a few and of many tokens.
    """
    size, tokens, tp = s.compute_bytes, s.tokens, s.tp
    copy, product, weight = tokens * s.dim, tokens * s.ffn / tp, s.dim * s.ffn / tp
    copies = 4 if not s.rowwise else 3 if tp == 1 else 2
    second = size if tp == 1 and not s.rowwise else FP32_BYTES
    swiglu = (2 * size + second + (FP32_BYTES if s.rowwise else 0) + copies) * product
    num_saved = {Recompute.NONE: 2, Recompute.OP: 1}.get(mode, 0)
    if mode is Recompute.BUDGET:
        num_saved = num_saved_products(s)
    if s.bf16_weight_gradients:
        return _with_bf16_gradients(s, num_saved, saved, attention)
    if num_saved == 2:
        return saved + _with_saved_products(s, swiglu, copy, product, weight)
    output = s.dim * s.attention.output / tp
    if num_saved == 1:  # the other is recomputed
        held = saved + swiglu + size * product + (0.0 if s.float8_all_gather and tp == 1 else weight)
        if mode is Recompute.BUDGET:
            return held
        # from the norm output's copy; the block's sum behind attention
        held += copy * (1 + size if tp == 1 else 3)
        if s.rowwise or tp > 1:
            return held
        return held + tokens * s.attention.output + (0.0 if s.float8_all_gather else output)
    held = attention + swiglu + size * 2 * product + 2 * weight + FP32_BYTES * tokens * s.heads / tp
    is_complex = not s.attention.rope_cast and not s.attention.latents
    in_fp32 = (FP32_BYTES - size) * tokens / tp if is_complex else 0.0
    if tp > 1:
        # queries and keys still in fp32; the block's gradient gathered, copies of it and of both norm outputs
        return held + in_fp32 * s.attention.query_key + size * (copy + copy / tp) + 3 * copy
    # the rotated queries still in fp32
    early = output + in_fp32 * s.attn_dim
    held += size * copy
    if s.float8_all_gather:  # one of w1 and w3 is cast, the others are gathered so
        return held + early + copy - output - weight
    if s.rowwise or (s.path is ParamPath.AUTOCAST and s.param_bytes == FP32_BYTES):
        return held + early
    # copies of both norm outputs, of the gradient and of all weights but w2
    late = 2 * copy + s.attention.params_split + s.attention.rope_bytes * s.seq_full
    return held + min(early + copy, late)


def _with_saved_products(s: Shapes, swiglu: float, copy: float, product: float, weight: float) -> float:
    """Beyond what a block saved that has the outputs of w1 and w3; under TP and with float8 all-gather it has float8
    copies of the weights, too, and w2's is gone."""
    if s.tp > 1:
        if s.rowwise:  # the fp32 buffers come one after the other, the first one's copies are there
            return swiglu - (FP32_BYTES - 1) * product + copy - weight
        # w2's gradient is made before; or the block's gradient is still there, gathered and cast
        return max(swiglu - product + s.compute_bytes * weight, swiglu - 3 * product + 3 * copy) - weight
    if s.rowwise:
        return swiglu + min(weight + s.dim * s.attention.output, copy)
    return swiglu - weight if s.float8_all_gather else swiglu + min(weight, copy)


def _with_bf16_gradients(s: Shapes, num_saved: int, saved: float, attention: float) -> float:
    """The same where the weights' gradients read bf16, which the SwiGLU's backward then writes beside two float8
    copies for the matmuls with w1 and w3: as much as :func:`float8_feed_forward` has with scales for whole tensors."""
    size, copy = s.compute_bytes, s.tokens * s.dim
    product, weight = s.tokens * s.ffn / s.tp, s.dim * s.ffn / s.tp
    casts = s.path is ParamPath.AUTOCAST and s.param_bytes == FP32_BYTES
    if num_saved == 2:  # w2's gradient, also cast; the product is among what was saved, and gone
        entered = (size + 2) * product + size * weight * (2 if casts else 1)
        if s.tp > 1:  # the product's gradient; the block's whole and as it is cast
            entered = size * (product + copy) + copy
        return saved + entered
    late = 2 * weight + s.attention.params_split / s.tp + s.attention.rope_bytes * s.seq_full
    late += FP32_BYTES * s.tokens * s.heads / s.tp
    if s.tp > 1:  # w2's gradient first, with the block's gradient gathered and its norm's output whole
        if num_saved == 1:
            return saved + size * (4 * product + 2 * copy + weight) + weight
        return attention + size * (5 * product + 3 * copy + copy / s.tp + weight) + late
    swiglu = (6 * size + 2) * product
    if num_saved == 1:
        copies = 3 if casts else 2  # the norm's output, cast
        return saved + swiglu + copies * size * copy + weight + s.dim * s.attention.output
    return attention + swiglu + size * (product + copy) + late


def eager_float8_feed_forward(s: Shapes, everything: float) -> float:
    """An eager block that has ``everything`` its forward keeps when w2's input is cast for w2's gradient: scaled and
    clamped in fp32, with the product's gradient, two copies of the block's (under autocast a third in bf16, under
    TP it whole) and one of w2."""
    copy, product, weight = s.tokens * s.dim, s.tokens * s.ffn / s.tp, s.dim * s.ffn / s.tp
    casts = s.path is ParamPath.AUTOCAST and s.param_bytes == FP32_BYTES
    whole = s.compute_bytes * copy if casts or s.tp > 1 else 0.0
    return everything + (s.compute_bytes + 2 * FP32_BYTES + 1) * product + 2 * copy + whole + weight
