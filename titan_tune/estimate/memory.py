"""Peak memory of a configuration from the closed forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, overload

from titan_tune.domain.estimate import MemoryEstimate, Phase, StageMemory
from titan_tune.domain.settings import Settings
from titan_tune.estimate.items import by_component
from titan_tune.estimate.parameters import ParamPath, Shapes, shapes_of
from titan_tune.estimate.phases import phases_of
from titan_tune.estimate.pipeline import PipelineMemory
from titan_tune.estimate.reserved import CUDA_GRAPH_POOL, outside_bytes, reserved_bytes, uses_cuda_graphs
from titan_tune.estimate.verdict import Margin, relative_margins, verdict_of
from titan_tune.units import GIB, format_gib

METHOD = "formula"
GROUPED_MM_CAPABILITY = (9, 0)
"""Below it torchtitan computes one expert after another."""
TOLD_PADDING = 1.05
"""From how many times their size padded blocks are named."""


def estimate_memory(settings: Settings) -> MemoryEstimate:
    """Peak active, reserved and device memory of the worst rank, bytes.

    Under pipeline parallelism a stage is a pipeline rank (its stages together): memory is the rank's.

    Raises:
        NotCoveredError: for stage splits that the job spells out, and DDP combined with TP or PP.
        InputError: when the pipeline cannot cut the model into its stages.
    """
    shapes = shapes_of(settings)
    caches = not settings.cluster.gpu.is_cpu
    pools = 1 + CUDA_GRAPH_POOL if uses_cuda_graphs(settings) else 1.0
    stages: Sequence[StageMemory]
    if shapes.pp > 1:
        ranks = PipelineMemory(settings, shapes)
        rank, phase, active, reserved = ranks.worst()
        reserved = pools * reserved if caches else active
        stages = LazyStages(
            shapes.pp, lambda number: _stage_memory(shapes, number, ranks.phases(number), caches, pools)
        )
    else:
        only = _stage_memory(shapes, 0, phases_of(shapes), caches, pools)
        stages, rank, phase = (only,), 0, only.peak
        active, reserved = only.active_bytes, only.reserved_bytes
    return estimate_of(
        METHOD,
        settings,
        stages,
        Worst(rank, phase, active, reserved),
        margin=relative_margins(settings, shapes, phase.name),
        components=by_component(phase.items),
        assumptions=_assumptions(settings, shapes),
    )


class LazyStages(Sequence[StageMemory]):
    """The memory of every pipeline rank, computed when somebody looks: a search does not."""

    def __init__(self, count: int, stage: Callable[[int], StageMemory]) -> None:
        self._count = count
        self._stage = stage

    @cached_property
    def _all(self) -> tuple[StageMemory, ...]:
        return tuple(map(self._stage, range(self._count)))

    @overload
    def __getitem__(self, index: int) -> StageMemory: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StageMemory]: ...
    def __getitem__(self, index: int | slice) -> StageMemory | Sequence[StageMemory]:
        return self._all[index]

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        return self._all == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


class Worst(NamedTuple):
    """Figures that decide, bytes."""

    stage: int
    peak: Phase
    active_bytes: float
    """Of that stage, the highest."""
    reserved_bytes: float
    """The highest of any stage."""


def worst_of(stages: Sequence[StageMemory]) -> Worst:
    """The stage whose active memory decides, the first of equals, and the most that any stage reserves."""
    worst = max(stages, key=lambda stage: stage.active_bytes)
    reserved = max(stage.reserved_bytes for stage in stages)
    return Worst(worst.stage, worst.peak, worst.active_bytes, reserved)


def estimate_of(
    method: str,
    settings: Settings,
    stages: Sequence[StageMemory],
    worst: Worst,
    *,
    margin: Margin,
    components: Mapping[str, float],
    assumptions: tuple[str, ...],
) -> MemoryEstimate:
    """The worst stage's figures, its interval and the verdict, however the stages' memory was found.

    ``margin`` is how far below and above the figure the truth may lie, as shares of it.
    """
    active, reserved, outside = worst.active_bytes, worst.reserved_bytes, outside_bytes(settings)
    below, above = margin
    interval = (active * (1 - below), active * (1 + above))
    capacity = settings.cluster.gpu.memory_gib * GIB
    return MemoryEstimate(
        method=method,
        stages=stages,
        worst_stage=worst.stage,
        active_bytes=active,
        active_interval=interval,
        reserved_bytes=reserved,
        device_bytes=reserved + outside,
        outside_bytes=outside,
        components=components,
        capacity_bytes=capacity,
        verdict=verdict_of(interval, reserved, outside, capacity),
        assumptions=assumptions,
    )


def _active_bytes(settings: Settings, shapes: Shapes) -> float:
    """Peak of the worst rank."""
    if shapes.pp > 1:
        return PipelineMemory(settings, shapes).worst().active_bytes
    return max(phase.total_bytes for phase in phases_of(shapes))


def _assumptions(settings: Settings, shapes: Shapes) -> tuple[str, ...]:
    """What holds for this model or layout only, one sentence each."""
    said = []
    moe = shapes.moe
    if moe is not None:
        even = "tokens are routed evenly: every expert gets the same number"
        if moe.own_group:
            everything = moe._replace(rows=moe.rows * moe.expert_parallel)
            worst = _active_bytes(settings, shapes._replace(moe=everything))
            even += f"; were all sent to one rank's experts, it would hold {format_gib(worst)} active"
        else:
            even += " (without expert parallelism memory does not depend on it)"
        said.append(even)
        capability = settings.cluster.gpu.compute_capability
        if capability is not None and capability < GROUPED_MM_CAPABILITY:
            said.append("experts run in a loop on this GPU; their memory is taken as that of grouped matmuls")
    if shapes.shards > 1:
        larger = shapes.gathered_blocks(0, shapes.layers) / shapes.whole_blocks(0, shapes.layers)
        if larger >= TOLD_PADDING:
            said.append(
                f"FSDP pads dimension 0 of each weight to a multiple of its shards: with {shapes.shards} shards "
                f"gathered blocks are {larger:.3g} times as large"
            )
    if shapes.tables == 1 and shapes.path is ParamPath.FSDP:
        said.append(
            "embedding and output share one weight, as in torch 2.11; torch 2.13 refuses to shard them apart"
        )
    return tuple(said)


def _stage_memory(
    shapes: Shapes, rank: int, phases: Sequence[Phase], caches: bool, pools: float
) -> StageMemory:
    """``caches``: whether a caching allocator holds more than what is alive (not on a CPU); ``pools``: how many
    times as much where CUDA graphs keep pools of their own."""
    totals = [phase.total_bytes for phase in phases]
    active = max(totals)
    return StageMemory(
        stage=rank,
        peak=phases[totals.index(active)],
        phases=tuple(phases),
        active_bytes=active,
        reserved_bytes=pools * max(active, reserved_bytes(shapes, phases, totals)) if caches else active,
    )
