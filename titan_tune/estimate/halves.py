"""What the two halves of a zero-bubble backward hold: input gradients first, weight gradients later.

Follows ``torch.distributed.pipelining._backward`` (torch 2.11) and, to the last MiB, traces and H200 dry runs of
dense models without AC and with full AC. MoE blocks take the same shape and were not measured; compiled blocks and
selective op AC do not run in two halves at all.

- The input half keeps the graph and, for the weight half, the gradient of every linear's and every norm's output.
- The weight half runs the graph once per weight. A checkpointed block recomputes in each of these runs, and of what
  it recomputes only that linear's input is taken out; the rest stays until the graph dies.
- The gradients that a run starts from are summed first, which copies them (``sum`` begins with 0).
"""

from __future__ import annotations

from typing import NamedTuple

from titan_tune.estimate.activations import saved_block_bytes
from titan_tune.estimate.backward import working_set
from titan_tune.estimate.parameters import FP32_BYTES, Recompute, Shapes

FEED_FORWARD_LINEARS = 3
BLOCK_NORMS = 2


class Halves(NamedTuple):
    """One stage, bytes beyond what a microbatch in flight holds."""

    retained: float
    """Kept by one microbatch between the halves; its input's gradient and the logits' are counted apart."""
    input_peak: float
    """The first block of the input half, its own needs."""
    input_kept: float
    """Kept by all that the input half ran before that block."""
    weight_peak: float
    """The weight half beyond ``retained``, without the weights' gradients."""
    weight_gradients: float
    """Weights' gradients in the compute dtype that are there by then, less what more is gone than came."""


NO_HALVES = Halves(0.0, 0.0, 0.0, 0.0, 0.0)


class _Block(NamedTuple):
    """One block, bytes."""

    gradients: float
    """Of the outputs of its linears and norms."""
    leftover: float
    """Recomputed by one run of the weight half and held to the end of the graph."""
    inputs: float
    """Recomputed besides: inputs of the feed-forward's norm and linears."""
    freed: float
    """Of ``gradients``, gone when w2's gradient is made."""


def halves_of(s: Shapes, first: int, end: int, *, is_last: bool, logits: float) -> Halves:
    """The halves of the stage of blocks ``first`` ... ``end - 1``; ``logits``: bytes of their gradient."""
    num_layers = end - first
    wide, hidden = s.compute_bytes * s.tokens * s.dim, s.residual_stream_bytes
    routed = s.num_moe_layers(first, end)
    # under TP a block's last gradient is gathered, the input's gradient is not
    shared = hidden if s.tp == 1 and num_layers else 0.0
    tail = wide + hidden if is_last else 0.0  # gradients of the final norm's output and input
    blocks = (num_layers - routed) * _gradients(s, False) + (routed * _gradients(s, True) if routed else 0.0)
    retained = blocks - shared + tail
    if not num_layers:
        params = s.compute_bytes * s.embedding_shard_params if is_last else 0.0
        return Halves(retained, 0.0, 0.0, logits if is_last else 0.0, params)
    is_moe = s.is_moe(end - 1)
    block = _block(s, is_moe)
    params = s.compute_bytes * s.whole_blocks(first, end)
    weight_peak, weight_gradients = _weight_half(s, block, blocks, num_layers, params, is_moe, is_last)
    if is_last:
        weight_peak += logits  # their sum's copy
        weight_peak -= retained
        weight_gradients += s.compute_bytes * (s.embedding_shard_params + s.dim)
    if weight_peak < 0:
        weight_peak, weight_gradients = 0.0, max(0.0, weight_gradients + weight_peak)
    return Halves(
        retained=retained,
        input_peak=_input_half(s, hidden),
        input_kept=blocks - block.gradients + tail,
        weight_peak=weight_peak,
        weight_gradients=weight_gradients,
    )


def _weight_half(
    s: Shapes, block: _Block, gradients: float, num_layers: int, params: float, is_moe: bool, is_last: bool
) -> tuple[float, float]:
    """Peak and weights' gradients; on the last stage before its logits, and ``retained`` not yet taken off."""
    size, hidden = s.compute_bytes, s.residual_stream_bytes
    wide = size * s.tokens * s.dim
    of_w1 = size * s.dim * s.ffn / s.tp
    share = {Recompute.FULL: 1.0, Recompute.EVERY: 1 / max(1, s.every)}.get(s.recompute, 0.0)
    inner = _inner_norms(s)
    attention = max(4, len(s.attention.matmuls)) + inner
    runs = attention + FEED_FORWARD_LINEARS + BLOCK_NORMS
    if share and is_last:  # the output's graph keeps every block's to the end
        return share * runs * num_layers * block.leftover - hidden, params
    if share:  # w2 of the last block: behind it its feed-forward dies
        before = share * runs * (num_layers - 1) * block.leftover - (gradients - block.gradients)
        before += hidden if s.tp == 1 else 0.0  # of the first block's, the input's gradient stays
        here = (attention + 2) * (block.leftover + block.inputs) + 2 * wide + 2 * hidden - block.freed
        return max(0.0, before + here), params - 2 * of_w1
    if is_last:  # everything but what no linear or norm takes is gone
        taken = 2 * wide + 2 * hidden + _product(s, is_moe)
        return -num_layers * taken, params
    # w1 of the first block
    copied = size * s.tokens * s.ffn / s.tp
    return max(0.0, copied - (block.freed - copied)), size * (s.attention.params_split / s.tp) + of_w1


def _input_half(s: Shapes, hidden: float) -> float:
    """The first block's backward, which the blocks behind it gave its output gradient."""
    size, tokens = s.compute_bytes, s.tokens
    working, scores = working_set(s)
    working -= 2 * hidden if s.recompute is not Recompute.NONE else hidden
    if s.math_attention:
        return max(0.0, working + scores)
    key = s.attention.query_key - s.attn_dim
    held = size * tokens * (2 * s.ffn + key) / s.tp + 2 * hidden
    rope = 0.0 if s.attention.rope_cast else FP32_BYTES * tokens * (2 * s.attn_dim + key) / s.tp
    return max(0.0, working, held + rope)


def _block(s: Shapes, is_moe: bool) -> _Block:
    size, tokens, hidden = s.compute_bytes, s.tokens, s.residual_stream_bytes
    wide = size * tokens * s.dim
    product = _product(s, is_moe)
    mode = Recompute.FULL if s.recompute is Recompute.EVERY else s.recompute
    leftover = 0.0
    if mode is Recompute.FULL:
        none, full = saved_block_bytes(s, Recompute.NONE, is_moe), saved_block_bytes(s, mode, is_moe)
        leftover = max(0.0, none - full - hidden - 2 * wide - product)
    gradients = _gradients(s, is_moe)
    freed = size * tokens * (_attention_outputs(s) + s.ffn) / s.tp + 2 * wide
    return _Block(gradients, leftover, product + wide + hidden, freed)


def _gradients(s: Shapes, is_moe: bool) -> float:
    """Of the outputs of a block's linears and norms."""
    size, tokens = s.compute_bytes, s.tokens
    wide = size * tokens * s.dim
    outputs = _attention_outputs(s) + (s.attention.query_key if _inner_norms(s) else 0)
    held = size * tokens * outputs / s.tp + 2 * s.residual_stream_bytes + 2 * wide
    if is_moe and s.moe is not None:
        held += size * s.moe.rows * (2 * s.moe.hidden + s.dim) + FP32_BYTES * tokens * s.moe.experts
        return held + 2 * size * tokens * s.moe.shared_hidden / s.tp
    return held + 2 * size * tokens * s.ffn / s.tp


def _attention_outputs(s: Shapes) -> float:
    """Width of queries, keys and values (and latents)."""
    key = s.attention.query_key - s.attn_dim
    return s.attention.query_key + key + s.attention.latents


def _product(s: Shapes, is_moe: bool) -> float:
    """Input of w2."""
    if is_moe and s.moe is not None:
        return s.compute_bytes * (s.moe.rows * s.moe.hidden + s.tokens * s.moe.shared_hidden / s.tp)
    return s.compute_bytes * s.tokens * s.ffn / s.tp


def _inner_norms(s: Shapes) -> int:
    """Norms of queries and keys, or of their latents."""
    return 2 if s.attention.norms_split or s.attention.latents else 0
