"""How long one microbatch takes a GPU: matmuls by shape, attention, traffic, and a host too slow for it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from titan_tune.estimate.communication import Work
from titan_tune.estimate.parameters import FP32_BYTES, ParamPath, Recompute, Shapes
from titan_tune.estimate.speeds import Constants, Speeds

ATTENTION_BACKWARD = 2.5
"""Flash backward does 2.5 times the forward's matmul work (five products for two)."""
ROUTED_DIM_BYTES = 40.0
"""Elementwise traffic of a routed token per dim: gathered, scored, permuted and put back, forward and
backward. A count, not measured."""
HOST_SHARPNESS = 4
"""How suddenly the host becomes the bottleneck: the power of the norm that joins its time and the device's."""


def compute_seconds(
    s: Shapes, work: Work, k: Constants, speeds: Speeds, *, waits_for_host: bool
) -> dict[str, float]:
    """Forward and backward of one microbatch by cause, no communication."""
    layers, traffic, recomputed = work.layers, speeds.traffic, _recomputed_share(s)
    launch = k.compiled_launch if s.compile_block else k.eager_launch
    parts = {
        "matmul": layers * _block_matmul_seconds(s, recomputed, k, speeds),
        "attention": layers * _attention_seconds(s, recomputed, k, speeds),
        "elementwise": layers * _elementwise_bytes(s, recomputed, k) / traffic,
        "launch": layers * launch,
        "loss": 0.0,
    }
    if s.float8:
        parts["float8_casts"] = layers * _cast_bytes(s, recomputed, k) / traffic
    if work.has_output:
        loss_bytes = k.compiled_loss_bytes if s.compile_loss else k.eager_loss_bytes
        local_logits = s.tokens * s.vocab / (s.tp if s.loss_parallel else 1)
        parts["matmul"] += _output_seconds(s, k, speeds)
        parts["loss"] = loss_bytes * local_logits / traffic
    busy = sum(parts.values())
    host = layers * _host_seconds(s, recomputed, k) if waits_for_host else 0.0
    parts["host"] = joined_seconds(busy, host) - busy if host else 0.0
    return parts


def joined_seconds(busy: float, host: float) -> float:
    """How long a device and the host that feeds it take together: the host stalls the device now and then long before
    it takes as long as the device does."""
    joined: float = (busy**HOST_SHARPNESS + host**HOST_SHARPNESS) ** (1 / HOST_SHARPNESS)
    return joined


def _recomputed_share(s: Shapes) -> float:
    """Part of a block's forward that backward runs again, its matmuls apart."""
    mode = s.recompute
    if mode is Recompute.NONE:
        return 0.0
    if mode is Recompute.FULL:
        return 1.0
    if mode is Recompute.OP:
        # the policy keeps outputs of aten.mm, and an eager float8 product is none
        return 1.0 if s.float8 and not s.compile_block else 0.5
    return (s.layers // s.every) / s.layers if mode is Recompute.EVERY else 1 - s.budget


def matmul_params(s: Shapes) -> float:
    """Parameters that each token of a rank meets in a block's matmuls, averaged over the blocks."""
    if s.moe is None:
        return s.block_matmul / s.tp
    share = s.num_moe_layers(0, s.layers) / s.layers
    active = s.moe.expert_params / s.moe.experts * s.moe.expert_parallel * s.moe.routed / s.tokens
    return _linear_params(s) + share * active


def _linear_params(s: Shapes) -> float:
    """Parameters of a block's linears on one TP rank, averaged over the blocks; no routed experts."""
    share = s.num_moe_layers(0, s.layers) / s.layers
    routed = (s.moe.rest_split / s.tp + s.moe.rest_whole) if s.moe else 0.0
    dense = 3 * s.dim * s.ffn / s.tp
    attention = s.attention.params_split / s.tp + s.attention.params_whole
    return attention + share * routed + (1 - share) * dense


def _elementwise_bytes(s: Shapes, recomputed: float, k: Constants) -> float:
    """Traffic of a block's elementwise operators, forward and backward."""
    size = s.compute_bytes / 2
    if s.compile_block:
        dim_bytes = k.compiled_residuals * s.residual_bytes + k.compiled_dims * s.compute_bytes
        ffn_bytes = k.compiled_ffns * s.compute_bytes
    else:
        dim_bytes = k.eager_residuals * s.residual_bytes + k.eager_dims * s.compute_bytes
        ffn_bytes = k.eager_ffns * s.compute_bytes
    hidden, routed = float(s.ffn), 0.0
    if s.moe is not None:
        share = s.num_moe_layers(0, s.layers) / s.layers
        experts = s.moe.shared_hidden + s.moe.routed / s.tokens * s.moe.hidden * s.tp
        hidden = share * experts + (1 - share) * s.ffn
        routed = share * ROUTED_DIM_BYTES * s.moe.routed * s.dim * size
    moved = s.tokens * (dim_bytes * s.dim + ffn_bytes * hidden) / s.tp + routed
    return moved * (1 + recomputed / 3)


def _cast_bytes(s: Shapes, recomputed: float, k: Constants) -> float:
    """Traffic of a block's casts to float8: inputs and weights once in forward and once in backward, gradients of
    outputs twice in backward."""
    tp = s.tp
    # what is as wide as the model is gathered under TP, the rest is split
    inputs = 2 * s.dim + (s.attn_dim + s.ffn) / tp
    gradients = 2 * s.dim + (s.attn_dim + 2 * s.kv_dim + 2 * s.ffn) / tp
    linears = s.block_matmul if s.moe is None else tp * _linear_params(s)
    weight_bytes = s.param_bytes if s.path is ParamPath.AUTOCAST else s.compute_bytes
    weights = k.float8_weight_casts * (2 * weight_bytes + 1) * linears / tp
    weights /= s.shards if s.float8_all_gather else 1
    per_element = k.float8_cast_bytes * s.tokens
    moved = per_element * (inputs + gradients) + weights
    if s.compile_block:
        return moved * k.rowwise_casts if s.rowwise else moved
    return k.eager_float8_casts * (moved + recomputed * (per_element * inputs + weights) / 2)


def _host_seconds(s: Shapes, recomputed: float, k: Constants) -> float:
    """What a block costs the host, forward and backward."""
    if s.compile_block:
        seconds = k.compiled_host + (k.compiled_float8_host if s.float8 else 0.0)
    else:
        seconds = k.eager_host + (k.eager_float8_host if s.float8 else 0.0)
        if s.tp > 1:
            seconds += k.eager_tp_host
        if s.cp > 1:
            seconds += k.eager_cp_host
        seconds *= 1 + recomputed * k.recomputed_host
        seconds *= k.eager_op_host if s.recompute is Recompute.OP else 1.0
    if s.moe is not None:
        seconds += (
            k.expert_host * s.num_moe_layers(0, s.layers) / s.layers * (1 + recomputed * k.recomputed_host)
        )
    if s.shards > 1:
        seconds += k.fsdp_host + (k.float8_gather_host if s.float8_all_gather else 0.0)
    return seconds


class _Flops(NamedTuple):
    """Floating-point operations of a block's linears (:func:`_linear_flops`)."""

    forward: float
    backward: float
    every_second: float
    """Of the forward: those whose outputs selective op AC does not keep."""
    all_but_last: float
    """Of the forward: those whose outputs something in the block reads."""


def _block_matmul_seconds(s: Shapes, recomputed: float, k: Constants, speeds: Speeds) -> float:
    """Forward, backward and what backward runs again of one block's linears."""
    rate, tile, reduction = _matmul_rate(s, k, speeds)
    float8_rate = speeds.float8_rowwise if s.rowwise else speeds.float8_tensorwise
    if s.float8 and float8_rate > 0:
        rate, tile, reduction = float8_rate, k.tile_elements, k.float8_reduction
    tp = s.tp
    if s.moe is not None or s.attention.latents:  # one linear of the same size stands for all
        outputs = round(matmul_params(s) / s.dim)
        forward, backward = _linear_flops(s.tokens, s.dim, outputs, tile, reduction)
        return (forward * (1 + recomputed) + backward) / rate
    flops = _block_flops(s.tokens, s.dim, s.attn_dim // tp, s.kv_dim // tp, s.ffn // tp, tile, reduction)
    return (flops.forward + _recomputed_flops(s, recomputed, flops) + flops.backward) / rate


def _output_seconds(s: Shapes, k: Constants, speeds: Speeds) -> float:
    """Forward and backward of the output head, which is never float8."""
    rate, tile, reduction = _matmul_rate(s, k, speeds)
    return sum(_linear_flops(s.tokens, s.dim, s.vocab // s.tp, tile, reduction)) / rate


def _matmul_rate(s: Shapes, k: Constants, speeds: Speeds) -> tuple[float, float, float]:
    """FLOP/s of linears in the compute dtype; what tiles and reductions cost (fp32 is too slow to show it)."""
    if s.compute_bytes == FP32_BYTES:
        return speeds.float32, 0.0, 0.0
    return speeds.matmul, k.tile_elements, k.reduction


def _recomputed_flops(s: Shapes, recomputed: float, flops: _Flops) -> float:
    """What backward runs again. The feed-forward's last product goes only into the residual stream: compiled
    recomputation leaves it out, eager runs it all the same (torchtitan's ``early_stop`` is off)."""
    if s.recompute is Recompute.OP and (s.compile_block or not s.float8):
        return flops.every_second
    return recomputed * (flops.all_but_last if s.compile_block else flops.forward)


@lru_cache(maxsize=4096)
def _block_flops(
    tokens: int, dim: int, attn_dim: int, kv_dim: int, ffn: int, tile_elements: float, reduction: float
) -> _Flops:
    """Of a dense block on one TP rank."""
    linears = (  # in the order in which they run
        *((dim, attn_dim), (dim, kv_dim), (dim, kv_dim), (attn_dim, dim)),
        *((dim, ffn), (dim, ffn), (ffn, dim)),
    )
    found = [_linear_flops(tokens, inputs, outputs, tile_elements, reduction) for inputs, outputs in linears]
    forwards = [forward for forward, _ in found]
    backward = sum(backward for _, backward in found)
    return _Flops(sum(forwards), backward, sum(forwards[1::2]), sum(forwards[:-1]))


@lru_cache(maxsize=4096)
def _linear_flops(
    tokens: int, inputs: int, outputs: int, tile_elements: float, reduction: float
) -> tuple[float, float]:
    """Floating-point operations of one linear's forward and backward, counted higher the less they suit a GPU."""
    flops = 2.0 * tokens * inputs * outputs
    forward = flops * (1 + tile_elements / (tokens * outputs)) * (1 + reduction / inputs)
    backward = flops * (1 + tile_elements / (tokens * inputs)) * (1 + reduction / outputs)
    backward += flops * (1 + tile_elements / (inputs * outputs)) * (1 + reduction / tokens)
    return forward, backward


def _attention_seconds(s: Shapes, recomputed: float, k: Constants, speeds: Speeds) -> float:
    """Causal attention of one block, forward and backward."""
    passes = 1 + ATTENTION_BACKWARD
    if s.math_attention or s.recompute is Recompute.FULL or s.recompute is Recompute.BUDGET:
        passes += 1
    if s.recompute is Recompute.EVERY:
        passes += recomputed
    forward = s.batch * s.seq_full**2 * float(s.attn_dim + s.attention.output) / (s.tp * s.cp)
    if s.math_attention:  # no causal saving, and every step crosses memory
        return (
            2 * passes * forward / speeds.float32 + k.math_attention_passes * s.score_bytes / speeds.traffic
        )
    return passes * forward / speeds.attention
