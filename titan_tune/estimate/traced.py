"""Peak memory of a job from traces of the real torchtitan model, beside which the formula is not needed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from titan_tune.domain.candidate import Value
from titan_tune.domain.cluster import GpuSpec
from titan_tune.domain.estimate import MemoryEstimate, Phase, StageMemory
from titan_tune.domain.settings import AcMode, Settings
from titan_tune.errors import InputError
from titan_tune.estimate.items import COMPONENTS
from titan_tune.estimate.memory import estimate_memory, estimate_of, worst_of
from titan_tune.estimate.parameters import NotCoveredError
from titan_tune.estimate.verdict import Margin
from titan_tune.trace import TraceError, TraceResult, trace_memory
from titan_tune.trace.allocator import AllocatorMode

METHOD: Final = "trace"
MAX_PIPELINE_TRACES: Final = 4
"""Pipeline ranks up to here are all traced; a trace takes 10 s to minutes."""

MEASURED_MARGIN: Final = 0.005
"""Traces of 52 H200 values (torch 2.11, no pipeline, peak elsewhere than in a compiled block's own
backward) are at most 0.01 % off (reports/trace_accuracy.md); the rest is for other versions of torch."""
PIPELINE_MARGIN: Final = 0.005
"""More with a pipeline: real ones are at most 0.33 % off, dry runs 0.17 %, but for what follows."""
COMPILED_STAGE_MARGIN: Final = 0.026
"""More below where a compiled block's own backward is the peak of a pipeline rank: with the two above twice the 1.77 %
that one dry run (Interleaved1F1B) is below its trace (reports/trace_layouts.md)."""
COMPILED_BLOCK_MARGIN: Final = 0.01
"""More where a compiled block's own backward is the peak: three values, one 0.8 % above its trace."""
SPLIT_BLOCK_MARGIN: Final = 0.08
"""More above with DDP, compile and no AC: blocks are traced whole, and torch.compile splits them at DDP's buckets. One
H200 job has 7.7 % more."""
COMPILED_RING_MARGIN: Final = 0.04
"""More above with CP, compile and no AC: one H200 job has 4.2 % more on one rank and 1.2 % on the other."""
ROUTING_MARGIN: Final = 0.1
"""More above for a mixture of experts: a trace routes evenly, a router need not. Not measured."""

OnRank = Callable[[int, int], None]
"""Told the pipeline rank that is traced next, and how many pipeline ranks there are."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A memory estimate and the traces that it was read off, one for each traced pipeline rank."""

    memory: MemoryEstimate
    results: tuple[TraceResult, ...]


def traced_memory(
    settings: Settings,
    values: Mapping[str, Value],
    model_args: Mapping[str, Any],
    *,
    on_rank: OnRank = lambda rank, ranks: None,
) -> Traced:
    """Trace two training steps of one rank, or of the pipeline ranks that matter.

    Raises:
        InputError: a GPU that is a CPU, a configuration that torchtitan refuses, or a trace that broke; the
            message is torchtitan's own.
    """
    if settings.cluster.gpu.is_cpu:
        raise InputError("--method trace: it traces the memory of a GPU: name one with --gpu, e.g. h100-80gb")
    pp, world_size = settings.dims.pp, settings.cluster.world_size
    allocator = allocator_of(settings.cluster.gpu)
    results: list[TraceResult] = []
    ranks = traced_pipeline_ranks(settings)
    for rank in ranks:
        on_rank(rank, pp)
        # the pipeline is the outermost dimension of torchtitan's mesh
        first = rank * (world_size // pp)
        try:
            traced = trace_memory(
                values, model_args=model_args, world_size=world_size, rank=first, allocator=allocator
            )
        except TraceError as error:
            raise InputError(f"--method trace: {error}") from error
        results.append(traced)
    return Traced(_memory(settings, ranks, results), tuple(results))


def allocator_of(gpu: GpuSpec) -> AllocatorMode:
    """The segments that torchtitan's ``PYTORCH_ALLOC_CONF=expandable_segments:True`` comes to on that GPU: ROCm
    builds of torch ignored it until March 2026 (pytorch/pytorch#177974)."""
    is_amd = gpu.compute_capability is None and not gpu.is_cpu
    return "classic" if is_amd else "expandable"


def traced_pipeline_ranks(settings: Settings) -> tuple[int, ...]:
    """Every pipeline rank of a short pipeline; else the first, the last and the formula's worst."""
    pp = settings.dims.pp
    if pp <= MAX_PIPELINE_TRACES:
        return tuple(range(pp))
    ranks = {0, pp - 1}
    try:
        ranks.add(estimate_memory(settings).worst_stage)
    except NotCoveredError:
        return tuple(sorted(ranks))
    return tuple(sorted(ranks))


def _memory(settings: Settings, ranks: tuple[int, ...], results: list[TraceResult]) -> MemoryEstimate:
    stages = tuple(_stage(rank, result) for rank, result in zip(ranks, results, strict=True))
    worst = worst_of(stages)
    return estimate_of(
        METHOD,
        settings,
        stages,
        worst,
        margin=trace_margins(settings, worst.peak.name),
        components=dict(worst.peak.items),
        assumptions=_assumptions(settings, ranks, results),
    )


def _stage(rank: int, result: TraceResult) -> StageMemory:
    """Phases have one item each: a trace breaks down its peak only."""
    components = {name: float(result.components.get(name, 0)) for name in COMPONENTS}
    return StageMemory(
        stage=rank,
        peak=Phase(result.phase, components),
        phases=tuple(Phase(name, {"other": float(size)}) for name, size in result.phases.items()),
        active_bytes=float(result.active_bytes),
        reserved_bytes=float(result.reserved_bytes or result.active_bytes),
    )


def _assumptions(settings: Settings, ranks: tuple[int, ...], results: list[TraceResult]) -> tuple[str, ...]:
    said = dict.fromkeys(sentence for result in results for sentence in result.assumptions)
    traced = f"rank 0 of {settings.cluster.world_size}; all ranks are alike"
    if settings.dims.pp > 1:
        names = ", ".join(map(str, ranks))
        traced = f"pipeline ranks {names} of {settings.dims.pp}"
        if len(ranks) < settings.dims.pp:
            traced += " (the first, the last and the formula's worst); the others are not in the figures"
    return (f"traced: {traced}", f"allocator: {_ALLOCATORS[results[0].allocator]}", *said)


_ALLOCATORS: Final = {
    "expandable": "PYTORCH_ALLOC_CONF=expandable_segments:True",
    "classic": "classic segments, as ROCm builds of torch had no expandable ones until March 2026",
}


def trace_margins(settings: Settings, peak: str) -> Margin:
    """``(below, above)`` as fractions of the traced peak. ``peak`` is the name of the peak phase."""
    below = above = MEASURED_MARGIN
    if settings.dims.pp > 1:
        below += PIPELINE_MARGIN
        above += PIPELINE_MARGIN
    if settings.compile.model and peak == "backward":
        above += COMPILED_BLOCK_MARGIN
        below += COMPILED_STAGE_MARGIN if settings.dims.pp > 1 else 0.0
    if settings.compile.model and settings.ac.mode is AcMode.NONE:
        dims = settings.dims
        if dims.dp_replicate > 1 and dims.fsdp_degree == 1:
            above += SPLIT_BLOCK_MARGIN
        if dims.cp > 1:
            above += COMPILED_RING_MARGIN
    if settings.model.moe is not None:
        above += ROUTING_MARGIN
    return below, above
