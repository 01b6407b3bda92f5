"""Predicted time of an optimizer step: a roofline with the overheads that H200 runs showed.

Per rank: matmuls at an efficiency that falls with few tokens, attention, elementwise traffic, loss,
launches, optimizer, and the communication that compute does not hide. ``CONSTANTS`` were fitted on
one- and two-GPU H200 runs (torch 2.11, torchtitan 0.2.2) by benchmarks/step_time_accuracy.py, which
also reports how well they predict models left out of the fit. Layouts beyond two GPUs are the same
terms extended, not measured.
"""

from __future__ import annotations

from typing import NamedTuple

from titan_tune.domain.estimate import StepTimeEstimate
from titan_tune.domain.settings import Settings
from titan_tune.estimate.parameters import ParamPath, Recompute, Shapes, shapes_of
from titan_tune.estimate.pipeline import split_model
from titan_tune.estimate.reserved import uses_cuda_graphs
from titan_tune.estimate.schedule import V_SCHEDULES, ZERO_BUBBLE_SCHEDULES, stages_of_rank

FP32_SHARE_OF_BF16 = 1 / 15
"""H100/H200 data sheet: 67 TFLOP/s fp32 without tensor cores against 989 bf16 (torchtitan leaves TF32 off)."""
INTER_NODE_GB_PER_S = 50.0
"""One 400 Gb/s adapter a GPU, the usual H100/H200 node; data sheet, not measured."""
PCIE_GB_PER_S = 25.0
HOST_MEMORY_GB_PER_S = 20.0
"""What one rank gets of the bus and of the host's memory under CPU offload; nominal, not measured."""
ATTENTION_BACKWARD = 2.5
"""Flash backward does 2.5 times the forward's matmul work (five products for two)."""


class Constants(NamedTuple):
    """What the roofline cannot know."""

    matmul_efficiency: float = 0.68
    """Of the bf16 peak, for many tokens."""
    half_tokens: float = 414.0
    """Tokens at which a matmul reaches half of that."""
    fp32_efficiency: float = 0.80
    float8_tensorwise: float = 0.82
    """Share of the float8 peak (dense), casts apart."""
    float8_rowwise: float = 0.59
    float8_half_dim: float = 1016.0
    """Model width at which a float8 matmul reaches half of that."""
    float8_cast_bytes: float = 8.3
    """Traffic of the casts per token and linear-input element, forward and backward."""
    float8_weight_bytes: float = 37.0
    """Traffic of the weight casts per block parameter, forward and backward."""
    attention_efficiency: float = 0.473
    memory_efficiency: float = 0.9
    """Copy rate against the data sheet's: 4.3 of 4.8 TB/s."""
    compiled_dim_bytes: float = 34.0
    """Elementwise traffic of a block per token and dim, forward and backward; likewise below."""
    compiled_ffn_bytes: float = 12.0
    eager_dim_bytes: float = 116.0
    eager_ffn_bytes: float = 46.0
    compiled_loss_bytes: float = 46.6
    """Per token and vocabulary entry."""
    eager_loss_bytes: float = 77.3
    optimizer_bytes: float = 28.0
    """Per local parameter: fused AdamW and gradient clipping."""
    compiled_launch: float = 3.3e-4
    """Seconds a block that small kernels and launches add, forward and backward."""
    eager_launch: float = 1.2e-3
    math_attention_passes: float = 12.0
    """Times an S x S fp32 matrix crosses memory a block, forward, recomputation and backward."""
    link_efficiency: float = 0.47
    exposed_fraction: float = 0.78
    """Of FSDP's and DDP's communication: what overlap does not hide, contention included."""
    tensor_parallel_exposed: float = 1.73
    """TP's collectives against their bytes at link speed: none is hidden, and sizes are small."""


CONSTANTS = Constants()
INTERVAL = (0.89, 1.11)
"""90 % of the rows of models left out of the fit lie within it (reports/step_time_accuracy.md)."""
UNMEASURED_INTERVAL = (0.65, 1.25)
"""Other GPUs, more than two of them, context parallelism: a guess, skewed as the roofline is optimistic."""
EXPERTS_INTERVAL = (0.4, 1.3)
"""Mixture of experts and families other than llama3: the same roofline, no row."""
ROUTED_DIM_BYTES = 40.0
"""Elementwise traffic of a routed token per dim: gathered, scored, permuted and put back, forward and
backward. A count, not measured."""


class _Work(NamedTuple):
    """One microbatch of one rank."""

    layers: float
    has_output: bool


CUDA_GRAPH_SHARE = 0.05
"""Of forward and backward: copies into the graphs' inputs. 1B on an H200, reduce-overhead against default with two
accumulation steps (torch 2.11): 7 % slower without AC, 3 % with op AC."""


def estimate_step_time(settings: Settings, constants: Constants = CONSTANTS) -> StepTimeEstimate:
    """Predicted seconds of an optimizer step and tokens/s per GPU (all GPUs counted).

    Raises:
        NotCoveredError: as :func:`titan_tune.estimate.estimate_memory`.
    """
    shapes = shapes_of(settings)
    dims, accumulation = settings.dims, settings.gradient_accumulation_steps
    microbatches, bubble, work = _pipeline_of(settings, shapes)
    forward_backward = _compute_seconds(settings, shapes, work, constants)
    passes = accumulation * microbatches
    parts = {name: passes * seconds for name, seconds in forward_backward.items()}
    compute = sum(parts.values())
    if uses_cuda_graphs(settings):
        parts["cuda_graphs"] = CUDA_GRAPH_SHARE * compute
    parts["optimizer"] = _optimizer_seconds(settings, shapes, work, constants)
    parts["communication"] = _communication_seconds(settings, shapes, work, compute, passes, constants)
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
    """Whether rows cover this kind of layout: up to two H200s, no context parallelism."""
    dims = settings.dims
    return settings.cluster.gpu.name == "h200" and dims.world_size <= 2 and dims.cp == 1


def _pipeline_of(settings: Settings, s: Shapes) -> tuple[int, float, _Work]:
    """Microbatches, idle time over busy time of the worst rank, and that rank's work."""
    if s.pp == 1:
        return 1, 0.0, _Work(s.layers, True)
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
    return microbatches, bubble, _Work(layers, worst == output_rank)


def _compute_seconds(settings: Settings, s: Shapes, work: _Work, k: Constants) -> dict[str, float]:
    """Forward and backward of one microbatch by cause, no communication."""
    gpu = settings.cluster.gpu
    traffic = k.memory_efficiency * gpu.memory_gb_per_s * 1e9
    size = s.compute_bytes / 2
    tokens, tp = s.tokens, s.tp
    dim_bytes = k.compiled_dim_bytes if s.compile_block else k.eager_dim_bytes
    ffn_bytes = k.compiled_ffn_bytes if s.compile_block else k.eager_ffn_bytes
    recomputed = _recomputed_share(s)
    hidden, routed = float(s.ffn), 0.0
    if s.moe is not None:
        share = s.num_moe_layers(0, s.layers) / s.layers
        experts = s.moe.shared_hidden + s.moe.routed / tokens * s.moe.hidden * tp
        hidden = share * experts + (1 - share) * s.ffn
        routed = share * ROUTED_DIM_BYTES * s.moe.routed * s.dim * size
    elementwise = tokens * (dim_bytes * s.dim + ffn_bytes * hidden) * size / tp + routed
    elementwise *= 1 + recomputed / 3
    parts = {
        "matmul": work.layers * _block_matmul_seconds(settings, s, k),
        "attention": work.layers * _attention_seconds(settings, s, k, traffic),
        "elementwise": work.layers * elementwise / traffic,
        "launch": work.layers * (k.compiled_launch if s.compile_block else k.eager_launch),
        "loss": 0.0,
    }
    if s.float8:
        inputs = 3 * s.dim + 2 * s.attn_dim + 2 * s.kv_dim + 3 * s.ffn
        linears = s.block_matmul if s.moe is None else tp * _linear_params(s)
        weights = k.float8_weight_bytes * linears / (s.shards if s.float8_all_gather else 1)
        casts = k.float8_cast_bytes * tokens * inputs + weights
        parts["float8_casts"] = work.layers * casts / tp / traffic
    if work.has_output:
        head = 6.0 * tokens * s.dim * s.vocab / tp
        loss_bytes = k.compiled_loss_bytes if s.compile_loss else k.eager_loss_bytes
        local_logits = tokens * s.vocab / (tp if s.loss_parallel else 1)
        parts["matmul"] += head / _matmul_rate(settings, s, k)
        parts["loss"] = loss_bytes * local_logits / traffic
    return parts


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
    return {Recompute.NONE: 0.0, Recompute.OP: 0.5, Recompute.FULL: 1.0}[s.recompute]


def _matmul_rate(settings: Settings, s: Shapes, k: Constants) -> float:
    """FLOP/s of unquantised matmuls."""
    peak = settings.cluster.gpu.bf16_tflops * 1e12
    if s.compute_bytes == 4 and not settings.cluster.gpu.is_cpu:
        return peak * FP32_SHARE_OF_BF16 * k.fp32_efficiency
    return peak * k.matmul_efficiency * s.tokens / (s.tokens + k.half_tokens)


def _block_matmul_seconds(settings: Settings, s: Shapes, k: Constants) -> float:
    flops = 2.0 * s.tokens * _matmul_params(s) * (3 + _recomputed_share(s))
    float8_peak = settings.cluster.gpu.float8_tflops * 1e12
    if not s.float8 or float8_peak == 0:
        return flops / _matmul_rate(settings, s, k)
    share = k.float8_rowwise if s.rowwise else k.float8_tensorwise
    share *= s.dim / (s.dim + k.float8_half_dim)
    return flops / (float8_peak * share * s.tokens / (s.tokens + k.half_tokens))


def _attention_seconds(settings: Settings, s: Shapes, k: Constants, traffic: float) -> float:
    """Causal attention of one block, forward and backward."""
    recomputed = s.recompute is Recompute.FULL or s.recompute is Recompute.BUDGET
    passes = 1 + ATTENTION_BACKWARD + (1 if recomputed or s.math_attention else 0)
    if s.recompute is Recompute.EVERY:
        passes += _recomputed_share(s)
    forward = s.batch * s.seq_full**2 * float(s.attn_dim + s.attention.output) / (s.tp * s.cp)
    if s.math_attention:  # no causal saving, and every step crosses memory
        rate = settings.cluster.gpu.bf16_tflops * 1e12 * FP32_SHARE_OF_BF16 * k.fp32_efficiency
        return 2 * passes * forward / rate + k.math_attention_passes * s.score_bytes / traffic
    return passes * forward / (settings.cluster.gpu.bf16_tflops * 1e12 * k.attention_efficiency)


def _rank_params(s: Shapes, work: _Work) -> float:
    if s.pp == 1:
        return s.local_params
    blocks = s.stored_blocks(0, s.layers) * work.layers / s.layers
    return blocks + (s.embedding_shard_params / s.shards if work.has_output else 0.0)


def _optimizer_seconds(settings: Settings, s: Shapes, work: _Work, k: Constants) -> float:
    traffic = k.memory_efficiency * settings.cluster.gpu.memory_gb_per_s * 1e9
    per_param = k.optimizer_bytes * s.param_bytes / 4
    if s.path is ParamPath.AUTOCAST and s.param_bytes == 4:
        per_param += 10  # bf16 weight copies of each forward and backward
    params = _rank_params(s, work)
    if s.offload:  # parameters go down for forward and backward, gradients up; Adam runs on the host
        bus = 3 * s.param_bytes * params / (PCIE_GB_PER_S * 1e9)
        return bus + per_param * params / (HOST_MEMORY_GB_PER_S * 1e9)
    return per_param * params / traffic


def _communication_seconds(
    settings: Settings, s: Shapes, work: _Work, compute: float, passes: int, k: Constants
) -> float:
    """What compute does not hide, per optimizer step."""
    seconds = 0.0
    accumulation = settings.gradient_accumulation_steps
    stored = _rank_params(s, work)
    params = stored * s.shards
    if s.moe is not None:  # experts of other ranks are not gathered
        params = s.gathered_blocks(0, s.layers) * work.layers / s.layers + 2 * s.embedding_shard_params
    if s.shards > 1:
        rate = _link_rate(settings, s.shards, s.tp, k)
        share = (s.shards - 1) / s.shards
        gathers = 1 if s.keep_gathered else 2 * accumulation
        scatters = 1 if s.pp > 1 else accumulation
        moved = share * params * (gathers * s.compute_bytes + scatters * 4)
        seconds += _exposed(moved / rate, compute, k)
    if s.replicate > 1:  # a ring all-reduce moves everything twice
        rate = _link_rate(settings, s.replicate, s.tp * s.shards, k)
        moved = 2 * (s.replicate - 1) / s.replicate * 4 * stored * accumulation
        seconds += _exposed(moved / rate, compute, k)
    if s.tp > 1:
        rate = _link_rate(settings, s.tp, 1, k)
        collectives = 8 + (2 if s.recompute is Recompute.FULL else 0)
        full = s.compute_bytes * s.tokens * s.dim * (s.tp - 1) / s.tp
        seconds += passes * work.layers * collectives * full / rate * k.tensor_parallel_exposed
    if s.moe is not None and s.moe.own_group:  # tokens to the experts and back, forward and backward
        degree = s.moe.expert_parallel
        exchanges = 4 + (2 if s.recompute is Recompute.FULL else 0)
        sent = s.compute_bytes * s.moe.routed * s.dim * (degree - 1) / degree
        share = s.num_moe_layers(0, s.layers) / s.layers
        rate = _link_rate(settings, degree, 1, k)
        seconds += passes * work.layers * share * exchanges * sent / rate
    if s.cp > 1:  # keys and values of all ranks, forward and (with gradients) backward
        rate = _link_rate(settings, s.cp, s.tp, k)
        kept = s.attention.query_key - s.attn_dim
        gathered = 2 * s.compute_bytes * s.tokens * kept / s.tp * (s.cp - 1)
        seconds += passes * work.layers * 3 * gathered / rate
    return seconds


def _exposed(seconds: float, compute: float, k: Constants) -> float:
    return max(k.exposed_fraction * seconds, seconds - compute)


def _link_rate(settings: Settings, degree: int, inner: int, k: Constants) -> float:
    """Bytes a second that each rank receives in a collective of ``degree`` ranks, ``inner`` apart.

    A ring enters a node once, over all adapters of the group's ranks there.
    """
    cluster = settings.cluster
    rate = cluster.gpu.link_gb_per_s
    if degree * inner > cluster.gpus_per_node:
        rate = min(rate, INTER_NODE_GB_PER_S * max(1, cluster.gpus_per_node // inner))
    return rate * 1e9 * k.link_efficiency
