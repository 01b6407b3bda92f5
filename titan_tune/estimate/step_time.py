"""Predicted time of an optimizer step: a roofline with the overheads that H200 runs showed.

Per rank: matmuls at an efficiency that depends on their shape, attention, elementwise traffic, casts,
loss, launches, a host that cannot keep up, optimizer, copies around collectives, and the communication
that compute does not hide. ``CONSTANTS`` were fitted on one- and two-GPU H200 runs (torch 2.11,
torchtitan 0.2.2) by benchmarks/step_time_accuracy.py, which also reports how well they predict models
left out of the fit. Layouts beyond two GPUs are the same terms extended, not measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import StepTimeEstimate
from titan_tune.domain.settings import Settings
from titan_tune.estimate.collectives import Cause, CollectiveRecord, Exposure, Op, exposed_seconds
from titan_tune.estimate.communication import Work, records
from titan_tune.estimate.interconnect import interconnect_of
from titan_tune.estimate.parameters import FP32_BYTES, ParamPath, Recompute, Shapes, shapes_of
from titan_tune.estimate.pipeline import split_model
from titan_tune.estimate.reserved import uses_cuda_graphs
from titan_tune.estimate.schedule import V_SCHEDULES, ZERO_BUBBLE_SCHEDULES, stages_of_rank

FP32_SHARE_OF_BF16 = 1 / 15
"""H100/H200 data sheet: 67 TFLOP/s fp32 without tensor cores against 989 bf16 (torchtitan leaves TF32 off)."""
PCIE_GB_PER_S = 25.0
HOST_MEMORY_GB_PER_S = 20.0
"""What one rank gets of the bus and of the host's memory under CPU offload; nominal, not measured."""
AUTOCAST_BYTES = 12.0
"""Per parameter: bf16 copies of the fp32 weights, and their bf16 gradients as fp32."""
ATTENTION_BACKWARD = 2.5
"""Flash backward does 2.5 times the forward's matmul work (five products for two)."""


class Constants(NamedTuple):
    """What the roofline cannot know."""

    matmul_efficiency: float = 0.69
    """Of the bf16 peak, for many tokens."""
    tile_elements: float = 3.37e5
    """Outputs for which a matmul takes as long again: tiles that fill the GPU in part."""
    reduction: float = 101.0
    """Reduced width for which it takes as long again: a tile's prologue and epilogue."""
    fp32_efficiency: float = 0.801
    float8_tensorwise: float = 0.734
    """Share of the float8 peak (dense), casts apart."""
    float8_rowwise: float = 0.5
    float8_reduction: float = 501.0
    """As ``reduction``: a tile's products take half the time."""
    float8_cast_bytes: float = 15.0
    """Traffic of the casts per token and element of a linear's input or output gradient: read for the scale, read
    and written, and turned for the weight gradient."""
    float8_weight_casts: float = 2.15
    """Times a weight is read for its scale, read again and written as float8: forward and backward."""
    eager_float8_casts: float = 6.64
    """Times the traffic of compiled casts: every operator of a cast by itself."""
    attention_efficiency: float = 0.486
    memory_efficiency: float = 0.9
    """Copy rate against the data sheet's: 4.3 of 4.8 TB/s."""
    compiled_residuals: float = 13.0
    """Times a block moves the residual stream, forward and backward, fused as inductor does; likewise below, in
    the matmuls' type: other tensors of the model's width and those of the feed-forward's."""
    compiled_dims: float = 8.0
    compiled_ffns: float = 9.0
    eager_dim_bytes: float = 112.0
    eager_ffn_bytes: float = 53.9
    compiled_loss_bytes: float = 26.8
    """Per token and vocabulary entry."""
    eager_loss_bytes: float = 68.3
    optimizer_bytes: float = 40.0
    """Per local fp32 parameter: fused AdamW reads four tensors and writes three, clipping reads the gradient twice
    and writes it."""
    compiled_launch: float = 3.37e-4
    """Seconds a block that small kernels and launches add, forward and backward."""
    eager_launch: float = 8.27e-4
    compiled_host: float = 1.82e-3
    """Seconds of Python and launches that a block costs the host, forward and backward; likewise below."""
    eager_host: float = 4.98e-3
    eager_op_host: float = 1.4
    """Times that under selective op AC, whose policy looks at every operator."""
    compiled_float8_host: float = 1.58e-3
    """Added by float8 linears."""
    eager_float8_host: float = 0.012
    fsdp_host: float = 2.38e-3
    """Added by FSDP's hooks and copies."""
    float8_gather_host: float = 7.79e-3
    """Added by float8 gathers, each weight a tensor subclass with hooks of its own."""
    math_attention_passes: float = 12.5
    """Times an S x S fp32 matrix crosses memory a block, forward, recomputation and backward."""
    overlapped_exposed: float = 1.1
    """Of FSDP's and DDP's communication: what overlap does not hide, contention included."""
    tensor_parallel_exposed: float = 1.67
    """TP's collectives against a ring at link speed: none is hidden, compute waits for the slower rank."""


CONSTANTS = Constants()
INTERVAL = (0.89, 1.11)
"""90 % of the single runs of models left out of the fit lie within it (reports/step_time_accuracy.md). A machine whose
host is busy with other jobs can lie below all of it: the one-GPU table does by 14 %."""
UNMEASURED_INTERVAL = (0.65, 1.25)
"""Other GPUs, more than two of them: a guess, skewed as the roofline is optimistic."""
EXPERTS_INTERVAL = (0.4, 1.3)
"""Mixture of experts and families other than llama3: the same roofline, no row."""
ROUTED_DIM_BYTES = 40.0
"""Elementwise traffic of a routed token per dim: gathered, scored, permuted and put back, forward and
backward. A count, not measured."""

HOST_SHARPNESS = 4
"""How suddenly the host becomes the bottleneck: the power of the norm that joins its time and the device's."""
CUDA_GRAPH_SHARE = 0.02
"""Of forward and backward: copies into the graphs' inputs, less the launches saved. 1B on H200s (torch 2.11),
reduce-overhead against default: 3 to 7 % slower on an idle machine, 3 to 17 % faster where four jobs shared a host."""
FITTED_GPU = "h200"
"""The constants are shares of its data sheet that training reached: a calibration, whose kernels run alone and cooler,
adds nothing to them but the links."""


class Speeds(NamedTuple):
    """What one GPU reaches in training, FLOP/s and bytes/s."""

    matmul: float
    float32: float
    float8_tensorwise: float
    float8_rowwise: float
    attention: float
    traffic: float


def speeds_of(cluster: ClusterSpec, k: Constants) -> Speeds:
    """The data sheet at the efficiencies of the fit, or what a calibration of another GPU measured."""
    gpu, measured = cluster.gpu, cluster.rates
    peak, float8 = gpu.bf16_tflops * 1e12, gpu.float8_tflops * 1e12
    known = Speeds(
        matmul=peak * k.matmul_efficiency,
        float32=peak * (k.matmul_efficiency if gpu.is_cpu else FP32_SHARE_OF_BF16 * k.fp32_efficiency),
        float8_tensorwise=float8 * k.float8_tensorwise,
        float8_rowwise=float8 * k.float8_rowwise,
        attention=peak * k.attention_efficiency,
        traffic=gpu.memory_gb_per_s * 1e9 * k.memory_efficiency,
    )
    if measured is None or gpu.name == FITTED_GPU:
        return known
    return Speeds(
        matmul=measured.matmul_tflops * 1e12 or known.matmul,
        float32=measured.float32_tflops * 1e12 or known.float32,
        float8_tensorwise=measured.float8_tensorwise_tflops * 1e12 or known.float8_tensorwise,
        float8_rowwise=measured.float8_rowwise_tflops * 1e12 or known.float8_rowwise,
        attention=measured.attention_tflops * 1e12 or known.attention,
        traffic=measured.copy_gb_per_s * 1e9 or known.traffic,
    )


def estimate_step_time(settings: Settings, constants: Constants = CONSTANTS) -> StepTimeEstimate:
    """Predicted seconds of an optimizer step and tokens/s per GPU (all GPUs counted).

    Raises:
        NotCoveredError: as :func:`titan_tune.estimate.estimate_memory`.
    """
    shapes = shapes_of(settings)
    dims, accumulation = settings.dims, settings.gradient_accumulation_steps
    microbatches, bubble, work = _pipeline_of(settings, shapes)
    speeds = speeds_of(settings.cluster, constants)
    forward_backward = _compute_seconds(shapes, work, constants, speeds)
    passes = accumulation * microbatches
    forward_backward["host"] = _host_bound_seconds(settings, shapes, work, constants, forward_backward)
    parts = {name: passes * seconds for name, seconds in forward_backward.items()}
    compute = sum(parts.values())
    if uses_cuda_graphs(settings):
        parts["cuda_graphs"] = CUDA_GRAPH_SHARE * compute
    parts["optimizer"] = _optimizer_seconds(shapes, work, constants, speeds)
    collectives = records(settings, shapes, work, passes)
    parts["sharding"] = _copied_bytes(shapes, collectives) / speeds.traffic
    parts["communication"] = _communication_seconds(settings, collectives, compute, constants)
    if dims.pp > 1:
        parts["pipeline_bubble"] = compute * bubble
    seconds = sum(parts.values())
    tokens = accumulation * settings.local_batch_size * dims.dp_degree * settings.seq_len
    speed = tokens / seconds / dims.world_size
    low, high = INTERVAL if _is_measured(settings) else UNMEASURED_INTERVAL
    if settings.model.name != "llama3":
        low, high = EXPERTS_INTERVAL
    return StepTimeEstimate(seconds, speed, (speed * low, speed * high), parts)


def _is_measured(settings: Settings) -> bool:
    """Whether rows cover this kind of layout: up to two H200s."""
    return settings.cluster.gpu.name == FITTED_GPU and settings.dims.world_size <= 2


def _pipeline_of(settings: Settings, s: Shapes) -> tuple[int, float, Work]:
    """Microbatches, idle time over busy time of the worst rank, and that rank's work."""
    if s.pp == 1:
        return 1, 0.0, Work(s.layers, True)
    pipeline = settings.pipeline
    split = split_model(pipeline, pp=s.pp, num_layers=s.layers)
    microbatches = max(1, settings.local_batch_size // pipeline.microbatch_size)
    name = pipeline.schedule.lower()
    ranks = [stages_of_rank(name, rank, s.pp, split.stages_per_rank) for rank in range(s.pp)]
    last_stage = len(split.layers) - 1
    output_rank = next(rank for rank, stages in enumerate(ranks) if last_stage in stages)
    output_blocks = s.vocab * s.dim / (s.tp * _matmul_params(s))  # output head, counted in blocks
    loads = [
        sum(split.layers[stage] for stage in stages) + (output_blocks if rank == output_rank else 0)
        for rank, stages in enumerate(ranks)
    ]
    worst = max(range(s.pp), key=loads.__getitem__)
    layers = sum(split.layers[stage] for stage in ranks[worst])
    # filling and draining costs every other rank's work once a chunk
    bubble = (sum(loads) / loads[worst] - 1) / (microbatches * split.stages_per_rank)
    if name in ZERO_BUBBLE_SCHEDULES:
        bubble /= 2 if name not in V_SCHEDULES else 3
    return microbatches, bubble, Work(layers, worst == output_rank, split.stages_per_rank)


def _compute_seconds(s: Shapes, work: Work, k: Constants, speeds: Speeds) -> dict[str, float]:
    """Forward and backward of one microbatch by cause, no communication."""
    traffic = speeds.traffic
    size = s.compute_bytes / 2
    tokens, tp = s.tokens, s.tp
    if s.compile_block:
        dim_bytes = k.compiled_residuals * s.residual_bytes + k.compiled_dims * s.compute_bytes
        ffn_bytes = k.compiled_ffns * s.compute_bytes
    else:
        dim_bytes, ffn_bytes = size * k.eager_dim_bytes, size * k.eager_ffn_bytes
    recomputed = _recomputed_share(s)
    hidden, routed = float(s.ffn), 0.0
    if s.moe is not None:
        share = s.num_moe_layers(0, s.layers) / s.layers
        experts = s.moe.shared_hidden + s.moe.routed / tokens * s.moe.hidden * tp
        hidden = share * experts + (1 - share) * s.ffn
        routed = share * ROUTED_DIM_BYTES * s.moe.routed * s.dim * size
    elementwise = tokens * (dim_bytes * s.dim + ffn_bytes * hidden) / tp + routed
    elementwise *= 1 + recomputed / 3
    parts = {
        "matmul": work.layers * _block_matmul_seconds(s, k, speeds),
        "attention": work.layers * _attention_seconds(s, k, speeds),
        "elementwise": work.layers * elementwise / traffic,
        "launch": work.layers * (k.compiled_launch if s.compile_block else k.eager_launch),
        "loss": 0.0,
    }
    if s.float8:
        # what is as wide as the model is gathered under TP, the rest is split
        cast = 4 * s.dim + (2 * s.attn_dim + 2 * s.kv_dim + 3 * s.ffn) / tp
        linears = s.block_matmul if s.moe is None else tp * _linear_params(s)
        weight_bytes = s.param_bytes if s.path is ParamPath.AUTOCAST else s.compute_bytes
        weights = k.float8_weight_casts * (2 * weight_bytes + 1) * linears / tp
        casts = k.float8_cast_bytes * tokens * cast + weights / (s.shards if s.float8_all_gather else 1)
        if not s.compile_block:
            casts *= k.eager_float8_casts * (1 + recomputed / 2)
        parts["float8_casts"] = work.layers * casts / traffic
    if work.has_output:
        loss_bytes = k.compiled_loss_bytes if s.compile_loss else k.eager_loss_bytes
        local_logits = tokens * s.vocab / (tp if s.loss_parallel else 1)
        parts["matmul"] += _linears_seconds(s, ((s.dim, s.vocab // tp),), 0.0, k, speeds)
        parts["loss"] = loss_bytes * local_logits / traffic
    return parts


def _host_bound_seconds(
    settings: Settings, s: Shapes, work: Work, k: Constants, device: Mapping[str, float]
) -> float:
    """What a host that launches too slowly adds to one microbatch: it stalls the device now and then long before
    it takes as long as the device does."""
    if settings.cluster.gpu.is_cpu or uses_cuda_graphs(settings):
        return 0.0
    block = k.compiled_host if s.compile_block else k.eager_host
    if s.float8:
        block += k.compiled_float8_host if s.compile_block else k.eager_float8_host
    if not s.compile_block:
        block *= 1 + _recomputed_share(s) / 3
        block *= k.eager_op_host if s.recompute is Recompute.OP else 1.0
    if s.shards > 1:
        block += k.fsdp_host + (k.float8_gather_host if s.float8_all_gather else 0.0)
    busy, host = sum(device.values()), work.layers * block
    joined: float = (busy**HOST_SHARPNESS + host**HOST_SHARPNESS) ** (1 / HOST_SHARPNESS)
    return joined - busy


def _matmul_params(s: Shapes) -> float:
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


def _recomputed_share(s: Shapes) -> float:
    """Part of a block's forward matmuls that backward runs again."""
    if s.recompute is Recompute.EVERY:
        return (s.layers // s.every) / s.layers
    if s.recompute is Recompute.BUDGET:
        return 1 - s.budget
    if s.recompute is Recompute.OP and s.float8 and not s.compile_block:
        return 1.0  # the policy keeps outputs of aten.mm, and a float8 product is none
    return {Recompute.NONE: 0.0, Recompute.OP: 0.5, Recompute.FULL: 1.0}[s.recompute]


def _block_matmul_seconds(s: Shapes, k: Constants, speeds: Speeds) -> float:
    """Forward, backward and what backward runs again of one block."""
    return _linears_seconds(s, _linears(s), _recomputed_share(s), k, speeds, float8=s.float8)


def _linears(s: Shapes) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of a block's linears on one TP rank; of MoE and latent attention one of the same size."""
    if s.moe is not None or s.attention.latents:
        return ((s.dim, round(_matmul_params(s) / s.dim)),)
    q, kv, ffn = s.attn_dim // s.tp, s.kv_dim // s.tp, s.ffn // s.tp
    return ((s.dim, q), (s.dim, kv), (s.dim, kv), (q, s.dim), (s.dim, ffn), (s.dim, ffn), (ffn, s.dim))


def _linears_seconds(
    s: Shapes,
    linears: tuple[tuple[int, int], ...],
    recomputed: float,
    k: Constants,
    speeds: Speeds,
    *,
    float8: bool = False,
) -> float:
    rate, reduction = speeds.matmul, k.reduction
    float8_rate = speeds.float8_rowwise if s.rowwise else speeds.float8_tensorwise
    if float8 and float8_rate > 0:
        rate, reduction = float8_rate, k.float8_reduction
    elif s.compute_bytes == FP32_BYTES:
        flops = 2.0 * s.tokens * sum(inputs * outputs for inputs, outputs in linears) * (3 + recomputed)
        return flops / speeds.float32
    forward, backward = _padded_flops(s.tokens, linears, k.tile_elements, reduction)
    return (forward * (1 + recomputed) + backward) / rate


@lru_cache(maxsize=4096)
def _padded_flops(
    tokens: int, linears: tuple[tuple[int, int], ...], tile_elements: float, reduction: float
) -> tuple[float, float]:
    """Floating-point operations of forward and backward, counted higher the less they suit a GPU."""
    forward = backward = 0.0
    for inputs, outputs in linears:
        flops = 2.0 * tokens * inputs * outputs
        forward += flops * (1 + tile_elements / (tokens * outputs)) * (1 + reduction / inputs)
        backward += flops * (1 + tile_elements / (tokens * inputs)) * (1 + reduction / outputs)
        backward += flops * (1 + tile_elements / (inputs * outputs)) * (1 + reduction / tokens)
    return forward, backward


def _attention_seconds(s: Shapes, k: Constants, speeds: Speeds) -> float:
    """Causal attention of one block, forward and backward."""
    recomputed = s.recompute is Recompute.FULL or s.recompute is Recompute.BUDGET
    passes = 1 + ATTENTION_BACKWARD + (1 if recomputed or s.math_attention else 0)
    if s.recompute is Recompute.EVERY:
        passes += _recomputed_share(s)
    forward = s.batch * s.seq_full**2 * float(s.attn_dim + s.attention.output) / (s.tp * s.cp)
    if s.math_attention:  # no causal saving, and every step crosses memory
        return (
            2 * passes * forward / speeds.float32 + k.math_attention_passes * s.score_bytes / speeds.traffic
        )
    return passes * forward / speeds.attention


def _rank_params(s: Shapes, work: Work) -> float:
    if s.pp == 1:
        return s.local_params
    blocks = s.stored_blocks(0, s.layers) * work.layers / s.layers
    return blocks + (s.embedding_shard_params / s.shards if work.has_output else 0.0)


def _optimizer_seconds(s: Shapes, work: Work, k: Constants, speeds: Speeds) -> float:
    per_param = k.optimizer_bytes * s.param_bytes / 4
    if s.path is ParamPath.AUTOCAST and s.param_bytes == 4:
        per_param += AUTOCAST_BYTES
    params = _rank_params(s, work)
    if s.offload:  # parameters go down for forward and backward, gradients up; Adam runs on the host
        bus = 3 * s.param_bytes * params / (PCIE_GB_PER_S * 1e9)
        return bus + per_param * params / (HOST_MEMORY_GB_PER_S * 1e9)
    return per_param * params / speeds.traffic


def _communication_seconds(
    settings: Settings, collectives: Sequence[CollectiveRecord], compute: float, k: Constants
) -> float:
    if not collectives:
        return 0.0
    exposure = Exposure(k.overlapped_exposed, tensor_parallel=k.tensor_parallel_exposed)
    return exposed_seconds(collectives, interconnect_of(settings.cluster), compute, exposure).exposed_seconds


def _copied_bytes(s: Shapes, collectives: Sequence[CollectiveRecord]) -> float:
    """Traffic of the copies around collectives.

    FSDP copies what it gathers out of one flat buffer into the parameters, and gradients into one to scatter,
    in fp32. TP gathers and scatters along the sequence, dimension 1: the pieces are rearranged each time.
    """
    moved = 0.0
    for record in collectives:
        whole = record.count * record.bytes
        if record.cause is Cause.TP or (record.cause is Cause.FSDP and record.op is Op.ALL_GATHER):
            moved += 2 * whole
        elif record.cause is Cause.FSDP:
            moved += whole * (1 + s.compute_bytes / FP32_BYTES)
    return moved
