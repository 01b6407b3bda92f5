"""Predicted time of an optimizer step: a roofline with the overheads that H200 runs showed.

Per rank: compute (:mod:`titan_tune.estimate.compute`), optimizer, copies around collectives, and the communication that
compute does not hide. benchmarks/step_time_accuracy.py fits the constants and reports how well they predict models
left out of the fit. Layouts beyond two GPUs are the same terms extended, not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import StepTimeEstimate
from titan_tune.domain.settings import Pipeline, Settings
from titan_tune.estimate.collectives import (
    Cause,
    CollectiveRecord,
    Interconnect,
    Op,
    busy_seconds,
    exposed_by_cause,
)
from titan_tune.estimate.communication import (
    ParameterGroups,
    Work,
    activation_records,
    parameter_groups,
    parameter_records,
)
from titan_tune.estimate.compute import ATTENTION_BACKWARD, compute_seconds, matmul_params
from titan_tune.estimate.interconnect import interconnect_of
from titan_tune.estimate.parameters import FP32_BYTES, ParamPath, Shapes, shapes_of
from titan_tune.estimate.reserved import uses_cuda_graphs
from titan_tune.estimate.schedule import V_SCHEDULES, ZERO_BUBBLE_SCHEDULES, stages_of_rank
from titan_tune.estimate.speeds import (
    CONSTANTS,
    FITTED_GPU,
    Constants,
    Speeds,
    exposure_of,
    speeds_of,
)
from titan_tune.estimate.stages import split_model

__all__ = ["ATTENTION_BACKWARD", "CONSTANTS", "Constants", "estimate_step_time"]

PCIE_GB_PER_S = 25.0
HOST_MEMORY_GB_PER_S = 20.0
"""What one rank gets of the bus and of the host's memory under CPU offload; nominal, not measured."""
AUTOCAST_BYTES = 12.0
"""Per parameter and pass: bf16 copies of the fp32 weights, and their bf16 gradients as fp32."""
INTERVAL = (0.89, 1.11)
"""All 71 single runs of dense models lie within it when their model is left out of the fit
(reports/step_time_accuracy.md). Some machines lie below all of it: the one-GPU table does by 13 %."""
UNMEASURED_INTERVAL = (0.65, 1.25)
"""Other GPUs, more than two of them: a guess, skewed as the roofline is optimistic."""
EXPERTS_INTERVAL = (0.4, 1.3)
"""Mixture of experts and families other than llama3: the same roofline, one row."""
CUDA_GRAPH_SHARE = 0.02
"""Of forward and backward: copies into the graphs' inputs, less the launches saved. 1B on H200s (torch 2.11),
reduce-overhead against default: 3 to 7 % slower on an idle machine, 3 to 17 % faster where four jobs shared a host."""


def estimate_step_time(settings: Settings, constants: Constants = CONSTANTS) -> StepTimeEstimate:
    """Predicted seconds of an optimizer step and tokens/s per GPU (all GPUs counted).

    Raises:
        NotCoveredError: as :func:`titan_tune.estimate.estimate_memory`.
    """
    shapes = shapes_of(settings)
    dims, cluster, accumulation = settings.dims, settings.cluster, settings.gradient_accumulation_steps
    microbatches, bubble, work = _pipeline_of(settings, shapes)
    passes = accumulation * microbatches
    speeds = speeds_of(cluster, constants)
    has_graphs = uses_cuda_graphs(settings)
    waits = not (has_graphs or cluster.gpu.is_cpu)
    parts = compute_seconds(shapes, work, constants, speeds, waits_for_host=waits)
    if passes > 1:
        for name in parts:
            parts[name] *= passes
    compute = sum(parts.values())
    if has_graphs:
        parts["cuda_graphs"] = CUDA_GRAPH_SHARE * compute
    parts["optimizer"] = constants.step_seconds + _optimizer_seconds(shapes, work, passes, constants, speeds)
    moved = _moved(settings, shapes, work, accumulation, passes)
    parts["sharding"] = moved.copied_bytes / speeds.traffic
    parts["communication"] = _exposed_seconds(moved, compute, cluster, constants)
    if dims.pp > 1:
        parts["pipeline_bubble"] = compute * bubble
    seconds = sum(parts.values())
    tokens = accumulation * settings.local_batch_size * dims.dp_degree * settings.seq_len
    speed = tokens / seconds / dims.world_size
    low, high = _interval(settings)
    return StepTimeEstimate(seconds, speed, (speed * low, speed * high), parts)


def _interval(settings: Settings) -> tuple[float, float]:
    """Of the speed, as factors: rows cover llama3 on up to two H200s."""
    if settings.model.name != "llama3":
        return EXPERTS_INTERVAL
    is_measured = settings.cluster.gpu.name == FITTED_GPU and settings.dims.world_size <= 2
    return INTERVAL if is_measured else UNMEASURED_INTERVAL


def _pipeline_of(settings: Settings, s: Shapes) -> tuple[int, float, Work]:
    """Microbatches, idle time over busy time of the worst rank, and that rank's work."""
    if s.pp == 1:
        return 1, 0.0, Work(s.layers, True)
    pipeline = settings.pipeline
    output_blocks = s.vocab * s.dim / (s.tp * matmul_params(s))  # output head, counted in blocks
    worst = _worst_rank(pipeline, s.pp, s.layers, output_blocks)
    microbatches = max(1, settings.local_batch_size // pipeline.microbatch_size)
    bubble = worst.idle / (microbatches * worst.work.chunks) / worst.filled
    return microbatches, bubble, worst.work


class _WorstRank(NamedTuple):
    """The pipeline rank with most to do."""

    work: Work
    idle: float
    """What the other ranks do over what it does, once through the model."""
    filled: int
    """By how much weight halves that fill the bubble shorten it."""


@lru_cache(maxsize=4096)
def _worst_rank(pipeline: Pipeline, pp: int, num_layers: int, output_blocks: float) -> _WorstRank:
    split = split_model(pipeline, pp=pp, num_layers=num_layers)
    name = pipeline.schedule.lower()
    ranks = [stages_of_rank(name, rank, pp, split.stages_per_rank) for rank in range(pp)]
    last_stage = len(split.layers) - 1
    output_rank = next(rank for rank, stages in enumerate(ranks) if last_stage in stages)
    loads = [
        sum(split.layers[stage] for stage in stages) + (output_blocks if rank == output_rank else 0)
        for rank, stages in enumerate(ranks)
    ]
    worst = max(range(pp), key=loads.__getitem__)
    layers = sum(split.layers[stage] for stage in ranks[worst])
    filled = 1
    if name in ZERO_BUBBLE_SCHEDULES:
        filled = 3 if name in V_SCHEDULES else 2
    # filling and draining costs every other rank's work once a chunk
    return _WorstRank(
        Work(layers, worst == output_rank, split.stages_per_rank), sum(loads) / loads[worst] - 1, filled
    )


def _rank_params(s: Shapes, work: Work) -> float:
    if s.pp == 1:
        return s.local_params
    blocks = s.stored_blocks(0, s.layers) * work.layers / s.layers
    return blocks + (s.embedding_shard_params / s.shards if work.has_output else 0.0)


def _optimizer_seconds(s: Shapes, work: Work, passes: int, k: Constants, speeds: Speeds) -> float:
    per_param = k.optimizer_bytes * s.param_bytes / 4
    if s.path is ParamPath.AUTOCAST and s.param_bytes == 4:
        per_param += AUTOCAST_BYTES * passes
    params = _rank_params(s, work)
    if s.offload:  # parameters go down for forward and backward, gradients up; Adam runs on the host
        bus = 3 * s.param_bytes * params / (PCIE_GB_PER_S * 1e9)
        return bus + per_param * params / (HOST_MEMORY_GB_PER_S * 1e9)
    return per_param * params / speeds.traffic


class _Moved(NamedTuple):
    """Communication of one optimizer step."""

    busy: Mapping[Cause, float]
    """Seconds that it takes on its own, by cause."""
    copied_bytes: float
    """Traffic of the copies around collectives."""


_NOTHING_MOVED = _Moved(MappingProxyType({}), 0.0)


def _moved(settings: Settings, s: Shapes, work: Work, accumulation: int, passes: int) -> _Moved:
    groups = parameter_groups(s, work, accumulation)
    found = activation_records(s, work, passes, etp=settings.dims.etp)
    if groups is None and not found:
        return _NOTHING_MOVED
    interconnect = interconnect_of(settings.cluster)
    parameters = _NOTHING_MOVED if groups is None else _moved_parameters(groups, interconnect)
    if not found:
        return parameters
    busy = {**parameters.busy, **busy_seconds(found, interconnect)}
    return _Moved(busy, _copied_bytes(found, s.compute_bytes, parameters.copied_bytes))


@lru_cache(maxsize=4096)
def _moved_parameters(groups: ParameterGroups, interconnect: Interconnect) -> _Moved:
    """The part that does not depend on the batch, and so is that of many candidates."""
    found = parameter_records(groups)
    return _Moved(busy_seconds(found, interconnect), _copied_bytes(found, groups.compute_bytes))


def _exposed_seconds(moved: _Moved, compute: float, cluster: ClusterSpec, k: Constants) -> float:
    if not moved.busy:
        return 0.0
    return sum(exposed_by_cause(moved.busy, compute, exposure_of(cluster, k)).values())


def _copied_bytes(collectives: Iterable[CollectiveRecord], compute_bytes: int, before: float = 0.0) -> float:
    """Traffic of the copies around collectives, added to ``before``.

    FSDP copies what it gathers out of one flat buffer into the parameters, and gradients into one to scatter,
    in fp32. TP gathers and scatters along the sequence, dimension 1: the pieces are rearranged each time.
    """
    moved = before
    for record in collectives:
        whole = record.count * record.bytes
        if record.cause is Cause.TP or (record.cause is Cause.FSDP and record.op is Op.ALL_GATHER):
            moved += 2 * whole
        elif record.cause is Cause.FSDP:
            moved += whole * (1 + compute_bytes / FP32_BYTES)
    return moved
