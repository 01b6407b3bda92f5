"""What the backward of a transformer block needs beyond what the block saved.

Derived from the torchtitan 0.2.2 source and fake-tensor traces of whole steps, then held against
H200 runs (torch 2.11). Sizes are bytes on one rank.
"""

from __future__ import annotations

from typing import NamedTuple

from titan_tune.estimate.activations import (
    attention_kept_bytes,
    inner_norm_bytes,
    ring_attention_bytes,
    saved_block_bytes,
)
from titan_tune.estimate.blocks import ROUTED_INDEX_BYTES, Moe
from titan_tune.estimate.parameters import FP32_BYTES, ParamPath, Recompute, Shapes


def working_set(s: Shapes) -> tuple[float, float]:
    """``(bytes, attention score bytes)`` of one dense block's backward beyond what the block saved."""
    if s.math_attention:
        return _math_working_set(s)
    need = _fused_working_set(s)
    if s.path is not ParamPath.AUTOCAST and not s.flex_attention and s.cp == 1:
        mode = Recompute.FULL if s.recompute is Recompute.EVERY else s.recompute
        behind = s.compute_bytes * (3 * s.dim * s.ffn + s.dim * s.attention.output) / s.tp  # w1 ... w3, wo
        held = _held_in_attention(s, s.compute_bytes * s.tokens * s.dim, is_moe=False)
        need = max(need, held + behind - saved_block_bytes(s, mode))
        if s.compile_block and s.tp > 1:
            need = max(need, _end_of_block(s) - saved_block_bytes(s, mode))
    if s.cp > 1:
        mode = Recompute.FULL if s.recompute is Recompute.EVERY else s.recompute
        held = saved_block_bytes(s, Recompute.FULL) + attention_kept_bytes(s)
        held += s.compute_bytes * (s.tokens * s.dim + 3 * s.dim * s.ffn / s.tp)  # and w1's ... w3's gradients
        need = max(need, held + _ring_backward_bytes(s) - saved_block_bytes(s, mode))
    return need, 0.0


def _end_of_block(s: Shapes) -> float:
    """Where a compiled block's backward ends under TP: every weight's gradient, and at full width the norm's output
    and the gradients of queries, keys and values (traced; 405B with TP 8 and one sequence on an H200)."""
    full_width = 4 * s.compute_bytes * s.tokens * s.dim
    gradients = s.compute_bytes * s.gathered_params(False)
    return saved_block_bytes(s, Recompute.FULL) + s.residual_stream_bytes + full_width + gradients


def _ring_backward_bytes(s: Shapes) -> float:
    """The ring's backward: fp32 sums of the three gradients, those of keys and values joined and on
    their way, gathered keys and values, and one step's gradients (traced)."""
    key_value = s.attention.query_key - s.attn_dim
    key_value += s.attention.output if s.attention.latents else key_value
    gradients = s.attn_dim + key_value
    fp32 = FP32_BYTES * (gradients + 2 * key_value)
    own = s.compute_bytes * ((s.cp + 2) * key_value + gradients + s.attn_dim / 4)
    return (fp32 + own) * s.tokens / s.tp


def _fused_working_set(s: Shapes) -> float:
    """Backward of the feed-forward. Compiled, inductor's fused SwiGLU backward reads w1, w3 and d_product
    and writes product, d_w1 and d_w3 at once: six F-wide buffers (five under op AC, which saved w1).
    """
    size, tokens, dim, tp = s.compute_bytes, s.tokens, s.dim, s.tp
    mode = s.recompute
    if not s.compile_block:
        return _eager_working_set(s)
    if mode is Recompute.OP:
        need = size * tokens * 5 * s.ffn / tp + 2 * size * tokens * dim
    elif mode is Recompute.NONE:
        need = size * tokens * 3 * s.ffn / tp + size * tokens * dim
    else:
        kept = s.attention.kept_split / tp + s.attention.kept_whole
        need = size * tokens * (6 * s.ffn / tp + kept + 3 * dim) + 4 * tokens * s.heads / tp
    if mode is not Recompute.OP and mode is not Recompute.NONE:
        need += ring_attention_bytes(s)
    if s.path is ParamPath.AUTOCAST and s.param_bytes == 4 and mode is not Recompute.NONE:
        need += (1 if s.float8 else 2) * s.block_matmul  # recomputed low-precision weights
    if s.float8 and s.rowwise:  # feed-forward operands, row- and column-scaled
        need += (tokens * 5 * s.ffn + 3 * dim * s.ffn) / tp + 3 * tokens * dim
    return need


def _math_working_set(s: Shapes) -> tuple[float, float]:
    """MATH attention: fp32 score matrices. Eager, the backward of softmax has four: its result, two
    gradients, and their product inside the kernel (H200: 3 % more than two); without AC the result is among
    what the block saved, and what its feed-forward saved is gone."""
    if not s.compile_block and s.recompute is Recompute.NONE:
        feed_forward = _eager_working_set(s)
        softmax = 3 * s.score_bytes - s.compute_bytes * s.tokens * (4 * s.ffn / s.tp + s.dim)
        return (0.0, softmax) if softmax > feed_forward else (feed_forward, 0.0)
    if not s.compile_block:
        mask = float(s.seq_local**2)
        return mask + s.compute_bytes * s.tokens * s.kv_dim / s.tp, 4 * s.score_bytes
    rest = 4 * s.tokens * (2 * s.dim + 5 * s.attn_dim / s.tp)
    if s.path is not ParamPath.FSDP:
        rest += 4 * (3 * s.dim * s.ffn + s.dim * s.attn_dim) / s.tp
    return rest, 2 * s.score_bytes


def _eager_working_set(s: Shapes) -> float:
    """Everything the forward would have saved, and the gradients of the SwiGLU: two F-wide and two
    D-wide beyond the saved (three F-wide and one D-wide where nothing is recomputed)."""
    size, tokens = s.compute_bytes, s.tokens
    if s.recompute is Recompute.NONE:
        return size * tokens * (3 * s.ffn / s.tp + s.dim)
    mode = Recompute.FULL if s.recompute is Recompute.EVERY else s.recompute
    recomputed = saved_block_bytes(s, Recompute.NONE) - saved_block_bytes(s, mode)
    return max(0.0, recomputed) + size * tokens * (2 * s.ffn / s.tp + 2 * s.dim)


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
        moments = (*moments, _attention_gradient(s, s.moe, wide))
    if s.cp > 1:
        weights = s.compute_bytes * (s.moe.expert_params + s.moe.rest_split / s.tp)
        moments = (*moments, ExpertsBackward(held + _ring_backward_bytes(s) - wide, weights))
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


def _attention_gradient(s: Shapes, moe: Moe, wide: float) -> ExpertsBackward:
    """Backward of the block's attention, when all gradients of the experts are there."""
    attention = s.attention
    held = _held_in_attention(s, wide, is_moe=True)
    of_gradient = s.param_bytes if s.path is ParamPath.AUTOCAST else s.compute_bytes
    gradients = of_gradient * (moe.expert_params + moe.rest_split / s.tp)
    if s.path is ParamPath.AUTOCAST and s.param_bytes == FP32_BYTES:
        held += s.compute_bytes * (attention.params_split + attention.params_whole)  # casts of the weights
        if not s.compile_block:  # each linear that reads the norm output casts its own copy
            held += inner_norm_bytes(s) - s.compute_bytes * s.tokens * attention.kept_whole
            held += wide * (1 if attention.kept_whole else 2)
    return ExpertsBackward(held, gradients)


def _held_in_attention(s: Shapes, wide: float, *, is_moe: bool) -> float:
    """The attention half of a block at its kernel's backward: gradients of its output and its three inputs, and
    cuDNN's workspace, the query's gradient in fp32 and a sum of each row (H200, to 0.02 MiB)."""
    attention, per_rank = s.attention, s.tokens / s.tp
    query, value = s.attn_dim, attention.query_key - s.attn_dim
    if attention.latents:
        query, value = attention.query_key // 2, attention.output
    held = saved_block_bytes(s, Recompute.FULL, is_moe) + attention_kept_bytes(s) + wide
    gradients = s.compute_bytes * (attention.output + attention.query_key + value)
    held += per_rank * (gradients + FP32_BYTES * s.heads)
    return held + per_rank * FP32_BYTES * (query + s.heads)


def _experts_recomputed(s: Shapes, moe: Moe, wide: float) -> ExpertsBackward:
    """End of the recomputed forward: all that it keeps and its local variables, which are routed inputs
    and outputs, their unsorted copy and the sum over the experts."""
    in_fp32 = s.path is ParamPath.AUTOCAST and s.residual_bytes == FP32_BYTES
    element = FP32_BYTES if in_fp32 else s.compute_bytes
    variables = 3.0 * element * s.tokens * moe.top_k * s.dim
    if in_fp32:
        variables += 14 * s.tokens * s.dim
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
