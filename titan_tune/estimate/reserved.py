"""From active to reserved to device memory.

Reserved is what the caching allocator holds (torchtitan logs it): each CUDA stream has its own
pool, and freed holes inside a pool are not given back. Constants are from H200 runs (torch 2.11,
``expandable_segments:True``); ``benchmarks/memory_accuracy.py`` reports how well they do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from titan_tune.domain.estimate import Phase
from titan_tune.domain.settings import CompileMode, Settings
from titan_tune.estimate.items import GATHER_POOL, SHARD_GRADIENTS
from titan_tune.estimate.parameters import ParamPath, Recompute, Shapes
from titan_tune.estimate.phases import loss_bytes
from titan_tune.units import GIB, MIB

WEIGHT_HALF = "weight_backward"
"""Phase of a pipeline rank: the weight half of a split backward."""
FRAGMENTATION: Mapping[Recompute, float] = {
    Recompute.NONE: 0.004,
    Recompute.OP: 0.016,
    Recompute.EVERY: 0.02,
    Recompute.BUDGET: 0.02,
    Recompute.FULL: 0.10,
}
"""Share of the main pool lost to holes that later tensors do not fit, by what is recomputed."""
PIPELINE_FRAGMENTATION = 0.05
"""The same for pipeline ranks, whose activations come and go by microbatch: rows 0 to 8 %."""
FRAGMENTATION_LIMIT_BYTES = 2.3 * GIB
"""Holes do not grow with the pool: full AC loses this much from 1B to 8B."""
SEGMENT_BYTES = 0.6 * GIB
"""Half-used segments of the extra pools and streams of a sharded rank."""
LEAST_SEGMENT_BYTES = 3 * 10 * MIB
"""Half a page (20 MiB) of an expandable segment on each of a sharded rank's streams."""
SEGMENT_SHARE = 0.05
"""Of the main pool at most: small jobs leave small holes (traces replayed through the allocator)."""
CUDA_GRAPH_POOL = 0.22
"""Reserved above the same job without CUDA graphs, as a share: graphs keep a pool that nothing else may use. 1B on an
H200 with reduce-overhead (torch 2.11), over active: +17 % at 103 GiB, +20 % at 47, +28 % at 34."""
CONTEXT_BYTES = 0.817 * GIB
"""CUDA context, cuBLAS and loaded kernels; rows with a fake process group show it alone."""
COMMUNICATOR_BYTES = 0.477 * GIB
"""NCCL's first communicator: one-GPU rows against fake process groups."""
MESH_COMMUNICATOR_BYTES = 0.278 * GIB
"""Each mesh dimension whose collectives reach another GPU: FSDP, DDP, TP and PP rows on two GPUs against one-GPU
rows (0.277 to 0.281; fp32 TP 0.263). That two dimensions take twice this is not measured."""
PEER_TO_PEER_BYTES = 0.436 * GIB
"""Buffers of sends, receives and all-to-alls: PP and CP rows against TP and FSDP rows, 0.43 to 0.44 in both."""
CPU_PROCESS_BYTES = 0.52 * GIB
"""Resident set of an idle process: torchtitan imported, gloo up, one tiny backward run (torch 2.13,
CPU build: 0.514 GiB)."""


def uses_cuda_graphs(settings: Settings) -> bool:
    """Whether the compiled blocks are replayed as CUDA graphs."""
    if settings.cluster.gpu.is_cpu or not settings.compile.model:
        return False
    return settings.compile.mode in (CompileMode.REDUCE_OVERHEAD, CompileMode.MAX_AUTOTUNE)


def reserved_bytes(shapes: Shapes, phases: Sequence[Phase], totals: Sequence[float]) -> float:
    """Peak of the allocator's pools of one rank, bytes; ``totals`` are those of the phases."""
    sharded = shapes.path is ParamPath.FSDP
    main = gather = shards = 0.0
    for phase, total in zip(phases, totals, strict=True):
        phase_gather = phase_shards = 0.0
        if sharded:
            for name, size in phase.items.items():
                if name in GATHER_POOL:
                    phase_gather += size
                elif name in SHARD_GRADIENTS:
                    phase_shards += size
        phase_main = total - phase_gather - phase_shards
        if phase.name.startswith("loss_"):
            phase_main += logits_hole_bytes(shapes)
        elif phase.name == WEIGHT_HALF and phase.items.get("logits_loss"):
            phase_main += loss_hole_bytes(shapes)
        main, gather = max(main, phase_main), max(gather, phase_gather)
        shards = max(shards, phase_shards)
    return pool_bytes(shapes, main, gather, shards)


class Pools(NamedTuple):
    """What of a phase lies outside the main stream's pool, bytes."""

    gather: float
    shards: float


def pools_of(shapes: Shapes, items: Mapping[str, float]) -> Pools:
    """The other streams' part of a pipeline rank's items: weights kept gathered, and sharded gradients."""
    if shapes.path is not ParamPath.FSDP:
        return Pools(0.0, 0.0)
    return Pools(
        items.get("gathered_kept", 0.0), items.get("gradients", 0.0) + items.get("new_gradients", 0.0)
    )


def pool_bytes(shapes: Shapes, main: float, gather: float, shards: float) -> float:
    """Reserved bytes of one rank from the most that each pool holds."""
    sharded = shapes.path is ParamPath.FSDP
    if shapes.pp > 1:
        main *= 1 + PIPELINE_FRAGMENTATION
    elif not sharded:
        return main + min(FRAGMENTATION_LIMIT_BYTES, FRAGMENTATION[shapes.recompute] * main)
    if not sharded:
        return main
    # the last block's reduce-scatter input is freed late, when its stream has run
    late_input = 4 * shapes.gathered_params(shapes.is_moe(shapes.layers - 1))
    segments = max(LEAST_SEGMENT_BYTES, min(SEGMENT_BYTES, SEGMENT_SHARE * main))
    return main + max(gather, _gather_pool(shapes)) + shards + late_input + segments


def logits_hole_bytes(s: Shapes) -> float:
    """Eager loss frees the logits in the middle of what it allocates; nothing fits there."""
    if s.compile_loss:
        return 0.0
    # under TP without loss parallelism the pieces are gathered later, where more is freed
    return s.compute_bytes * s.tokens * s.vocab / s.tp


def loss_hole_bytes(s: Shapes) -> float:
    """Fp32 buffers of the loss where a rank also runs the last stage's weight half: what that half recomputes comes in
    many small pieces, and some of the memory between them is never free in one piece again (H200, ZBVZeroBubble with
    full AC, and the trace's allocator: 8 of 27 GiB)."""
    if s.compile_loss or s.recompute not in (Recompute.FULL, Recompute.EVERY):
        return 0.0
    return loss_bytes(s)


def _gather_pool(s: Shapes) -> float:
    """All-gather outputs of the output weight and a block, with their inputs."""
    if s.pp > 1:
        return 0.0
    block = s.gathered_params(s.is_moe(s.layers - 1))
    outputs = s.compute_bytes * (s.gathered_table_params + block)
    return outputs * (1 + 1 / s.shards)


def outside_bytes(settings: Settings) -> float:
    """Device memory outside the allocator: context, cuBLAS and NCCL (the process on a CPU)."""
    if settings.cluster.gpu.is_cpu:
        return CPU_PROCESS_BYTES
    dims = settings.dims
    talking = sum(degree > 1 for degree in (dims.dp_replicate, dims.fsdp_degree, dims.tp, dims.pp))
    peers = sum(degree > 1 for degree in (dims.pp, dims.cp, dims.ep))
    return CONTEXT_BYTES + COMMUNICATOR_BYTES + talking * MESH_COMMUNICATOR_BYTES + peers * PEER_TO_PEER_BYTES
