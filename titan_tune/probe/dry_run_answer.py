"""A dry run's outcome as an estimate: the figures and words of ``estimate --method dry-run``. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from titan_tune.domain.candidate import Finding, Value
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import MemoryEstimate, Phase, StageMemory, StepTimeEstimate
from titan_tune.domain.probe import ProbeOutcome, ProbeStatus
from titan_tune.domain.settings import Settings
from titan_tune.errors import ProbesFailedError
from titan_tune.estimate.answer import Answer
from titan_tune.estimate.items import by_component
from titan_tune.estimate.memory import estimate_of, worst_of
from titan_tune.probe.dry_run_outcome import assumptions, memory_margin
from titan_tune.titan import rules
from titan_tune.units import GIB

METHOD: Final = "dry-run"
PHASE: Final = "whole_step"
"""A dry run sees the peak of a step, not the moment."""
RULE: Final = "dry-run"

_REFUSED: Final = (ProbeStatus.UNSUPPORTED, ProbeStatus.COMPILE_FAILURE)


def rejected(settings: Settings, values: Mapping[str, Value]) -> Answer | None:
    """The answer for a job that the rules reject: it is not run."""
    broken = rules.invalid(settings, values)
    return Answer(settings, broken, rules.warnings(settings, values), method=METHOD) if broken else None


def answer_from(
    settings: Settings,
    values: Mapping[str, Value],
    machine: ClusterSpec,
    outcome: ProbeOutcome,
    *,
    tokens_per_step_per_rank: float,
) -> Answer:
    """What a dry run's outcome says of the job.

    Raises:
        ProbesFailedError: it could not run here, which says nothing of the job.
    """
    warnings = (
        *rules.warnings(settings, values),
        *(Finding(RULE, warning) for warning in outcome.warnings),
    )
    if outcome.status in _REFUSED:
        return Answer(settings, (Finding(RULE, outcome.message),), warnings, method=METHOD)
    details = outcome.details.get("dry_run")
    if outcome.status is ProbeStatus.OOM and details is None:
        memory = _at_least(settings, outcome)
        return Answer(settings, (), warnings, memory, method=METHOD, dry_run={"validity_only": False})
    if outcome.status not in (ProbeStatus.COMPLETED, ProbeStatus.OOM) or details is None:
        raise ProbesFailedError(f"--method dry-run: {outcome.message}")
    if details["validity_only"]:
        return Answer(settings, (), warnings, method=METHOD, dry_run=details)
    return Answer(
        settings,
        (),
        warnings,
        memory=_memory(settings, machine, details),
        step_time=_step_time(details, tokens_per_step_per_rank),
        method=METHOD,
        dry_run=details,
    )


def _memory(settings: Settings, machine: ClusterSpec, details: Mapping[str, Any]) -> MemoryEstimate:
    stages = tuple(
        _stage(rank["pipeline_rank"], GIB * rank["active_gib"], GIB * rank["reserved_gib"])
        for rank in details["ranks"]
    )
    return estimate_of(
        METHOD,
        settings,
        stages,
        worst_of(stages),
        margin=(memory_margin(settings), memory_margin(settings)),
        components=by_component(worst_of(stages).peak.items),
        assumptions=assumptions(settings, machine, details),
    )


def _stage(stage: int, active: float, reserved: float) -> StageMemory:
    peak = Phase(PHASE, {"other": active})
    return StageMemory(stage, peak, (peak,), active_bytes=active, reserved_bytes=reserved)


def _at_least(settings: Settings, outcome: ProbeOutcome) -> MemoryEstimate:
    """Of a run that ended out of memory: what it held, and the allocation that failed."""
    held = outcome.details.get("allocated_bytes", 0) + outcome.details.get("bytes_asked", 0)
    active = max(float(held), settings.cluster.gpu.memory_gib * GIB)
    dims = settings.dims
    stage = _stage(outcome.details["simulated_rank"] * dims.pp // dims.world_size, active, active)
    return estimate_of(
        METHOD,
        settings,
        (stage,),
        worst_of((stage,)),
        margin=(0.0, 0.0),
        components=by_component(stage.peak.items),
        assumptions=(f"{outcome.message}: the figures are the least that it needs",),
    )


def _step_time(details: Mapping[str, Any], tokens_per_step_per_rank: float) -> StepTimeEstimate:
    seconds = details["step_seconds"]
    rate, half = tokens_per_step_per_rank / seconds, details["relative_interval"]
    names = ("compute", "communication", "bubble")
    return StepTimeEstimate(
        seconds=seconds,
        tokens_per_second_per_gpu=rate,
        interval=(rate * (1 - half), rate * (1 + half)),
        components={name: details[f"{name}_seconds"] for name in names},
    )
