"""Peak memory of a configuration from the closed forms."""

from __future__ import annotations

from collections.abc import Sequence

from titan_tune.domain.estimate import MemoryEstimate, Phase, StageMemory
from titan_tune.domain.settings import Settings
from titan_tune.estimate.items import by_component
from titan_tune.estimate.parameters import Shapes, shapes_of
from titan_tune.estimate.phases import phases_of
from titan_tune.estimate.pipeline import pipeline_phases
from titan_tune.estimate.reserved import outside_bytes, reserved_bytes
from titan_tune.estimate.verdict import relative_margins, verdict_of
from titan_tune.units import GIB

METHOD = "formula"


def estimate_memory(settings: Settings) -> MemoryEstimate:
    """Peak active, reserved and device memory of the worst rank, bytes.

    Under pipeline parallelism a stage is a pipeline rank (its stages together): memory is the rank's.

    Raises:
        NotCoveredError: for mixture of experts, multi-head latent attention, query/key norms, tied
            embeddings, families other than llama3, stage splits that the job spells out, and DDP
            combined with TP or PP.
        InputError: when the pipeline cannot cut the model into its stages.
    """
    shapes = shapes_of(settings)
    ranks = pipeline_phases(settings, shapes) if shapes.pp > 1 else (phases_of(shapes),)
    caches = not settings.cluster.gpu.is_cpu
    stages = tuple(_stage_memory(shapes, rank, phases, caches) for rank, phases in enumerate(ranks))
    worst = max(stages, key=lambda stage: stage.active_bytes)
    reserved = max(stage.reserved_bytes for stage in stages)
    below, above = relative_margins(settings, shapes, worst.peak.name)
    active, outside = worst.active_bytes, outside_bytes(settings)
    upper, capacity = active * (1 + above), settings.cluster.gpu.memory_gib * GIB
    return MemoryEstimate(
        method=METHOD,
        stages=stages,
        worst_stage=worst.stage,
        active_bytes=active,
        active_interval=(active * (1 - below), upper),
        reserved_bytes=reserved,
        device_bytes=reserved + outside,
        outside_bytes=outside,
        components=by_component(worst.peak.items),
        capacity_bytes=capacity,
        verdict=verdict_of(upper, reserved, outside, capacity),
    )


def _stage_memory(shapes: Shapes, rank: int, phases: Sequence[Phase], caches: bool) -> StageMemory:
    """``caches``: whether a caching allocator holds more than what is alive (not on a CPU)."""
    peak = max(phases, key=lambda phase: phase.total_bytes)
    active = peak.total_bytes
    return StageMemory(
        stage=rank,
        peak=peak,
        phases=tuple(phases),
        active_bytes=active,
        reserved_bytes=max(active, reserved_bytes(shapes, phases)) if caches else active,
    )
