"""What the backward of a transformer block needs beyond what the block saved.

Derived from the torchtitan 0.2.2 source and fake-tensor traces of whole steps, then held against
H200 runs (torch 2.11). Sizes are bytes on one rank.
"""

from __future__ import annotations

from typing import NamedTuple

from titan_tune.estimate.activations import (
    attention_kept_bytes,
    inner_norm_bytes,
    num_saved_products,
    saved_block_bytes,
)
from titan_tune.estimate.blocks import ROUTED_INDEX_BYTES, Moe
from titan_tune.estimate.float8 import eager_float8_feed_forward, float8_feed_forward
from titan_tune.estimate.parameters import FP32_BYTES, ParamPath, Recompute, Shapes


def working_set(s: Shapes, saved: float | None = None) -> tuple[float, float]:
    """``(bytes, attention score bytes)`` of one dense block's backward beyond what the block ``saved`` (by default
    computed)."""
    if s.math_attention:
        return _math_working_set(s)
    mode = Recompute.FULL if s.recompute is Recompute.EVERY else s.recompute
    if mode is Recompute.BUDGET and not s.compile_block:  # torchtitan sets the budget of compiled blocks only
        mode = Recompute.NONE
    if saved is None:
        saved = saved_block_bytes(s, mode)
    least = saved if mode is Recompute.FULL else saved_block_bytes(s, Recompute.FULL)
    attention = attention_kept_bytes(s)
    if not s.compile_block:
        held = _eager_feed_forward(s, mode)
    elif s.float8:
        held = float8_feed_forward(s, mode, saved, least + attention)
    else:
        held = _compiled_feed_forward(s, mode, saved, least + attention)
    if s.cp > 1:
        weights = 3 * s.compute_bytes * s.dim * s.ffn / s.tp  # gradients of w1 ... w3
        held = max(held, least + attention + weights + _ring_backward_bytes(s))
    elif s.compile_block and s.float8:  # all weights' gradients, the block's input and its gradient
        of_gradient = FP32_BYTES if _has_fp32_masters(s) else s.compute_bytes
        held = max(held, least + s.residual_stream_bytes + of_gradient * s.block_shard_params)
    elif not s.flex_attention:
        kernel = _held_in_attention(s, least + attention, is_moe=False)
        if s.compile_block:
            held = _with_compiled_attention(s, mode, held, kernel)
        else:
            held = max(held, _eager_attention(s, kernel))
    return held - saved, 0.0


def _has_fp32_masters(s: Shapes) -> bool:
    """Autocast over fp32 parameters: linears cast their inputs and weights, gradients are cast back."""
    return s.path is ParamPath.AUTOCAST and s.param_bytes == FP32_BYTES


def _joins_gradients(s: Shapes) -> bool:
    """Whether a weight's gradient is added to an earlier one as soon as it is made: eager, one after the other
    (``fully_shard`` adds them up after a block, a compiled block hands out all at once)."""
    return s.path is not ParamPath.FSDP and (s.accumulates or s.pp > 1)


def _eager_feed_forward(s: Shapes, mode: Recompute) -> float:
    """An eager block around the backward of its feed-forward, what it saved included (traced, to the byte)."""
    size, everything = s.compute_bytes, saved_block_bytes(s, Recompute.NONE)
    wide, hidden = size * s.tokens * s.dim, size * s.tokens * s.ffn / s.tp
    weight = size * s.dim * s.ffn / s.tp
    joins = _joins_gradients(s)
    # w2's gradient; the product's gradient and both that it is multiplied into, the product itself is gone
    held = everything + (0.0 if joins else weight) + 2 * hidden
    if joins and s.tp == 1:
        if _has_fp32_masters(s):  # w2's cast is gone; or its gradient in bf16
            held = max(held - weight, everything + wide + weight + hidden, everything + 2 * weight)
        else:
            held = max(held, everything + weight + hidden)
    elif s.tp > 1:  # the output's gradient gathered, and joined
        held = max(held, everything + 2 * wide, everything + wide + weight + hidden)
    elif _has_fp32_masters(s):  # bf16 gradients of w3, then of w1, beside what is cast to fp32 by then
        held = max(held, everything + wide + 3 * weight - 2 * hidden, everything + 4 * (weight - hidden))
    if s.float8 and not s.bf16_weight_gradients:
        held = max(held, eager_float8_feed_forward(s, everything))
    if mode is Recompute.NONE:
        return held
    # end of the recomputed forward: outputs of w2 and of the block
    variables = wide + s.residual_stream_bytes
    if s.tp > 1:  # gathered gradient; w2's output, its pieces and their sum; output of the norm
        variables = 3 * wide + 2 * s.residual_stream_bytes
    elif _has_fp32_masters(s):  # the gradient was cast before
        variables += wide
    return max(held, everything + variables)


def _compiled_feed_forward(s: Shapes, mode: Recompute, saved: float, attention: float) -> float:
    """A compiled block around the backward of its feed-forward, what it saved included; ``attention`` is what its
    attention keeps without AC, with the block's input. Where w1 and w3 are recomputed, inductor's fused SwiGLU
    backward reads them and d_product and writes product, d_w1 and d_w3 at once: six F-wide buffers, those that were
    saved among them.
    """
    size, tokens, dim, tp = s.compute_bytes, s.tokens, s.dim, s.tp
    wide, hidden, weight = size * tokens * dim, size * tokens * s.ffn / tp, size * dim * s.ffn / tp
    if mode is Recompute.NONE:  # w2's gradient; d_product takes the product's place, d_w3 is beside it
        return max(saved + weight + hidden, saved + 2 * wide if tp > 1 else 0.0)
    num_saved = 1 if mode is Recompute.OP else num_saved_products(s) if mode is Recompute.BUDGET else 0
    if num_saved == 2:
        held = saved + 4 * hidden
    elif num_saved == 1:
        held = saved + 5 * hidden + (2 if s.cp == 1 else 3) * wide  # the ring's output once more
    else:
        held = attention + 4 * tokens * s.heads / tp + 6 * hidden + 2 * wide + size * tokens * dim / tp
        if s.cp > 1:  # halves of the queries and of the output with its log-sum-exp
            held += tokens / tp * (size * (s.attn_dim + s.attention.output) + FP32_BYTES * s.heads) / 2
        held += wide if tp > 1 else 0.0  # the output's gradient, gathered
    if _has_fp32_masters(s):  # casts of the output's gradient and of weights: w3's place is taken by w2's
        cast = s.attention.params_split if mode is not Recompute.OP else s.attention.output * dim
        held += wide + 2 * weight + size * cast
        held -= weight if mode is Recompute.OP else 0.0
    return held


def _eager_attention(s: Shapes, held: float) -> float:
    """An eager dense block at its attention kernel's backward, and at its end, when every weight's gradient is
    there: the norm's output, the queries' gradient and two of the norm output's. ``held``: at the kernel, gradients
    of weights left out."""
    size, wide, hidden = s.compute_bytes, s.compute_bytes * s.tokens * s.dim, s.residual_stream_bytes
    behind, block = size * s.dim * (3 * s.ffn + s.attention.output) / s.tp, size * s.block_shard_params
    if _joins_gradients(s):
        return held
    if _has_fp32_masters(s):
        query = size * s.dim * s.attn_dim
        return max(held + 2 * behind, hidden + 2 * block + max(2 * wide + query, 4 * wide))
    return max(held + behind, hidden + 3 * wide + size * s.tokens * s.attn_dim / s.tp + block)


def _with_compiled_attention(s: Shapes, mode: Recompute, feed_forward: float, kernel: float) -> float:
    """A compiled dense block at its highest: in its feed-forward, at its attention kernel's backward (``kernel``,
    gradients of weights left out) or at its end.

    Inductor keeps buffers that it will use again, here gradients of the norm output and what was gathered; how many,
    and in which order it runs the weights' gradients, are those of traces.
    """
    size, wide = s.compute_bytes, s.compute_bytes * s.tokens * s.dim
    has_fp32_masters = _has_fp32_masters(s)
    of_gradient = FP32_BYTES if has_fp32_masters else size
    kernel += of_gradient * 3 * s.dim * s.ffn / s.tp
    key = s.attention.query_key - s.attn_dim
    is_complex = not s.attention.rope_cast and not s.attention.latents
    rotated = FP32_BYTES * s.tokens * (s.attn_dim + key) / s.tp if is_complex else 0.0
    if s.tp > 1:
        return max(feed_forward, _split_attention(s, mode, kernel, rotated, feed_forward))
    kernel += size * s.tokens * s.dim
    kernel += (3 if has_fp32_masters else 2) * wide
    if mode is not Recompute.OP and mode is not Recompute.NONE:
        # fp32 gradients of the queries on both sides of their rotation
        queries = 2 * FP32_BYTES * s.tokens * s.attn_dim - 2 * size * s.tokens * key
        return max(feed_forward, kernel, kernel - _attention_workspace(s) + queries if is_complex else 0.0)
    # where that is lower, the gradients of w1 ... w3 are made last
    product, weight = size * s.tokens * s.ffn, size * s.dim * s.ffn
    late = kernel - of_gradient * 3 * s.dim * s.ffn + 3 * product + 2 * wide
    if mode is Recompute.OP:  # fp32 queries and keys before their rotation
        kernel += rotated
    if mode is Recompute.OP and not has_fp32_masters:
        return max(feed_forward, kernel)
    end = size * s.block_shard_params + wide + product
    if has_fp32_masters:  # the last gradient is there in bf16 too
        end = 2 * size * s.block_shard_params + weight
    if mode is Recompute.NONE:
        late = max(late, feed_forward - weight + (wide if has_fp32_masters else 0.0))
    return min(max(feed_forward, kernel), max(late, end))


def _split_attention(s: Shapes, mode: Recompute, kernel: float, rotated: float, feed_forward: float) -> float:
    """The same under TP, the feed-forward left out; ``kernel`` without what inductor keeps."""
    size, wide, hidden = s.compute_bytes, s.compute_bytes * s.tokens * s.dim, s.residual_stream_bytes
    if mode is Recompute.NONE:
        return kernel + 4 * wide + 2 * hidden
    output = size * s.dim * s.attention.output / s.tp
    # every weight's gradient; at full width the norm's output and gradients of queries, keys and values (405B with
    # TP 8 and one sequence on an H200)
    end = hidden * (1 if mode is Recompute.OP else 2) + 4 * wide + size * s.block_shard_params
    if mode is Recompute.OP:
        return max(end, kernel + output + 2 * wide + rotated)
    if end > feed_forward:
        return max(end, kernel + output + 2 * wide + hidden)
    return kernel + 3 * wide + 2 * hidden


def _attention_workspace(s: Shapes) -> float:
    """Of cuDNN's backward: the query's gradient in fp32 and a sum of each row (H200, to 0.02 MiB)."""
    query = s.attention.query_key // 2 if s.attention.latents else s.attn_dim
    return FP32_BYTES * (query + s.heads) * s.tokens / s.tp


def _ring_backward_bytes(s: Shapes) -> float:
    """The ring's backward, beside what the forward left and gradients of weights (traced). Eager: fp32 sums of the
    three gradients, those of keys and values joined and on their way, gathered keys and values, and one step's
    gradients. Compiled: those of keys and values joined and on their way, one and a half steps' gradients, five hidden
    states; the rank's own keys and values are gone."""
    key_value = s.attention.query_key - s.attn_dim
    key_value += s.attention.output if s.attention.latents else key_value
    gradients, wide = s.attn_dim + key_value, s.compute_bytes * s.tokens * s.dim
    if s.compile_block:
        own = s.compute_bytes * (1.5 * s.attn_dim + key_value)
        return 5 * wide + (2 * FP32_BYTES * key_value + own + FP32_BYTES * s.heads) * s.tokens / s.tp
    fp32 = FP32_BYTES * (gradients + 2 * key_value)
    own = s.compute_bytes * ((s.cp + 2) * key_value + gradients + s.attn_dim / 4)
    return wide + (fp32 + own) * s.tokens / s.tp


def _math_working_set(s: Shapes) -> tuple[float, float]:
    """MATH attention: fp32 score matrices. Eager, the backward of softmax has four: its result, two
    gradients, and their product inside the kernel (H200: 3 % more than two); without AC the result is among
    what the block saved, and what its feed-forward saved is gone."""
    if not s.compile_block and s.recompute is Recompute.NONE:
        feed_forward = _eager_feed_forward(s, Recompute.NONE) - saved_block_bytes(s, Recompute.NONE)
        softmax = 3 * s.score_bytes - s.compute_bytes * s.tokens * (4 * s.ffn / s.tp + s.dim)
        return (0.0, softmax) if softmax > feed_forward else (feed_forward, 0.0)
    if not s.compile_block:
        mask = float(s.seq_local**2)
        return mask + s.compute_bytes * s.tokens * s.kv_dim / s.tp, 4 * s.score_bytes
    rest = 4 * s.tokens * (2 * s.dim + 5 * s.attn_dim / s.tp)
    if s.path is not ParamPath.FSDP:
        rest += 4 * (3 * s.dim * s.ffn + s.dim * s.attn_dim) / s.tp
    return rest, 2 * s.score_bytes


class ExpertsBackward(NamedTuple):
    """What the backward of one MoE block holds at one of its moments, bytes. Includes what it saved."""

    contents: float
    gradients: float = 0.0
    """Unsharded gradients of the block's parameters that are there."""
    reduce_scatter_input: float | None = None
    """Of the experts' own FSDP group; ``None``: that of the block before."""
    experts_gathered: bool = True


def experts_backward(s: Shapes, mode: Recompute) -> tuple[ExpertsBackward, ...]:
    """The moments at which a MoE block's backward can peak."""
    assert s.moe is not None
    wide = s.compute_bytes * s.tokens * s.dim
    # the attention half, both norm outputs and the router
    held = saved_block_bytes(s, Recompute.FULL, True) + attention_kept_bytes(s) + 2 * wide
    held += s.residual_stream_bytes + (0.0 if s.math_attention else 4 * s.tokens * s.heads / s.tp)
    held += FP32_BYTES * s.tokens * s.moe.experts + ROUTED_INDEX_BYTES * s.moe.routed
    first = (
        _experts_entered(s, s.moe, wide) if mode is Recompute.NONE else _experts_recomputed(s, s.moe, wide)
    )
    moments: tuple[ExpertsBackward, ...] = (_experts_gradient(s, s.moe, held, wide), first)
    if not (s.flex_attention or s.math_attention or s.cp > 1):
        moments = (*moments, _attention_gradient(s, s.moe))
    if s.cp > 1:
        weights = s.compute_bytes * (s.moe.expert_params + s.moe.rest_split / s.tp)
        moments = (*moments, ExpertsBackward(held + _ring_backward_bytes(s) - 2 * wide, weights))
    return (*moments, _experts_scattered(s, s.moe, held)) if s.moe.own_group else moments


def _experts_gradient(s: Shapes, moe: Moe, held: float, wide: float) -> ExpertsBackward:
    """The last of the experts' weight gradients is made: permuted inputs, both halves of their
    gradient and one expert-wide gradient (gpt_oss: of twice the width) are there."""
    width = 2 if moe.is_gpt_oss else 1
    rows = s.compute_bytes * moe.rows * (3 * s.dim + width * moe.hidden)
    gradients = s.compute_bytes * (moe.expert_params + moe.rest_split / s.tp)
    if s.path is ParamPath.AUTOCAST and s.param_bytes == FP32_BYTES:
        held += 2 * s.gathered_params(True)  # casts of the weights
        gradients += s.compute_bytes * moe.expert_params * 2 / 3  # two of three are cast to fp32 by then
    return ExpertsBackward(held + rows + (wide if moe.shared_hidden else 0.0), gradients)


def _attention_gradient(s: Shapes, moe: Moe) -> ExpertsBackward:
    """Backward of the block's attention, when all gradients of the experts are there."""
    of_gradient = s.param_bytes if s.path is ParamPath.AUTOCAST else s.compute_bytes
    gradients = of_gradient * (moe.expert_params + moe.rest_split / s.tp)
    held = saved_block_bytes(s, Recompute.FULL, True) + attention_kept_bytes(s)
    return ExpertsBackward(_held_in_attention(s, held, is_moe=True), gradients)


def _held_in_attention(s: Shapes, held: float, *, is_moe: bool) -> float:
    """The attention half of a block at its kernel's backward, of which the forward left ``held``: gradients of its
    output and its three inputs, and the kernel's workspace."""
    attention, per_rank, wide = s.attention, s.tokens / s.tp, s.compute_bytes * s.tokens * s.dim
    value = attention.output if attention.latents else attention.query_key - s.attn_dim
    held += wide
    gradients = s.compute_bytes * (attention.output + attention.query_key + value)
    held += per_rank * (gradients + FP32_BYTES * s.heads)
    if _has_fp32_masters(s):  # casts of the weights, of the output's in a MoE block only
        weights = attention.params_split + attention.params_whole
        held += s.compute_bytes * (weights - (0 if is_moe else s.dim * (attention.output + 2)))
        if not s.compile_block:  # each linear that reads the norm output casts its own copy
            held += inner_norm_bytes(s) - s.compute_bytes * s.tokens * attention.kept_whole
            held += wide * (1 if attention.kept_whole else 2)
    return held + _attention_workspace(s)


def _experts_recomputed(s: Shapes, moe: Moe, wide: float) -> ExpertsBackward:
    """End of the recomputed forward: all that it keeps and its local variables, which are routed inputs
    and outputs, their unsorted copy and the sum over the experts."""
    in_fp32 = s.path is ParamPath.AUTOCAST and s.residual_bytes == FP32_BYTES
    element = FP32_BYTES if in_fp32 else s.compute_bytes
    variables = 3.0 * element * s.tokens * moe.top_k * s.dim
    if in_fp32:
        of_norm_and_sum = 14
        if s.compile_block:
            # the norm's output and the routed sum in fp32, and bf16 copies; with shared experts the sum of both, their
            # output and its copy, and where scores come last one more of the routed sum
            with_shared = 18 if moe.score_before_experts else 20
            of_norm_and_sum = with_shared if moe.shared_hidden else 12
        variables += of_norm_and_sum * s.tokens * s.dim
    else:  # scored after the experts, the sum is an fp32 product, and so is its gradient
        variables += ((3 if moe.score_before_experts else 5) + (moe.shared_hidden > 0)) * wide
    if s.tp > 1:  # the gradient gathered to full width
        variables += wide + s.residual_stream_bytes
    return ExpertsBackward(saved_block_bytes(s, Recompute.NONE, True) + variables)


def _experts_entered(s: Shapes, moe: Moe, wide: float) -> ExpertsBackward:
    """Begin of the backward where nothing is recomputed: everything kept, and the first gradient."""
    scores = wide if moe.score_before_experts else FP32_BYTES * s.tokens * s.dim * (moe.top_k + 1)
    return ExpertsBackward(saved_block_bytes(s, Recompute.NONE, True) + scores)


def _experts_scattered(s: Shapes, moe: Moe, held: float) -> ExpertsBackward:
    """Reduce-scatter of experts that are an FSDP group of their own."""
    return ExpertsBackward(
        contents=held + s.compute_bytes * moe.rows * s.dim,
        gradients=s.compute_bytes * (moe.expert_params + moe.rest_split / s.tp),
        reduce_scatter_input=FP32_BYTES * moe.padded_expert_params,
        experts_gathered=False,
    )
