"""Everything that ``estimate`` says about one job, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titan_tune.domain.candidate import Finding, Value
from titan_tune.domain.estimate import MemoryEstimate, StepTimeEstimate, Verdict
from titan_tune.domain.settings import Settings
from titan_tune.estimate.advice import Suggestion, minimum_gpus, suggestions
from titan_tune.estimate.memory import METHOD, estimate_memory
from titan_tune.estimate.step_time import estimate_step_time
from titan_tune.titan import rules
from titan_tune.units import gib

SCHEMA = 1
TORCHTITAN = "0.2.2"
GIB_DIGITS = 3


@dataclass(frozen=True, slots=True)
class Answer:
    """``memory``, ``step_time`` and ``minimum_gpus`` are ``None`` for a job that the rules reject."""

    settings: Settings
    invalid: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    memory: MemoryEstimate | None = None
    step_time: StepTimeEstimate | None = None
    minimum_gpus: int | None = None
    suggestions: tuple[Suggestion, ...] = ()


def answer(settings: Settings, values: Mapping[str, Value], *, advise: bool = True) -> Answer:
    """Rules first; figures for a job that passes them, suggestions for one that does not fit.

    Raises:
        NotCoveredError: the formula does not cover the model.
    """
    broken = rules.invalid(settings, values)
    warnings = rules.warnings(settings, values)
    if broken:
        return Answer(settings, broken, warnings)

    def still_valid(changed: Settings, changes: Mapping[str, Value]) -> bool:
        return rules.first_invalid(changed, {**values, **changes}) is None

    memory = estimate_memory(settings)
    needs_help = advise and memory.verdict is Verdict.DOES_NOT_FIT
    return Answer(
        settings,
        broken,
        warnings,
        memory,
        estimate_step_time(settings),
        minimum_gpus(settings) if advise else None,
        suggestions(settings, is_valid=still_valid) if needs_help else (),
    )


def answer_json(result: Answer) -> dict[str, Any]:
    """The stable JSON object (schema 1). Figures are ``null`` for an invalid job."""
    cluster = result.settings.cluster
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "torchtitan": TORCHTITAN,
        "world_size": cluster.world_size,
        "gpu": {"name": cluster.gpu.name, "capacity_gib": _rounded(cluster.gpu.memory_gib)},
        "method": METHOD,
    }
    tail = {
        "minimum_gpus": result.minimum_gpus,
        "warnings": [finding.as_dict() for finding in result.warnings],
        "invalid": [finding.as_dict() for finding in result.invalid],
        "suggestions": [_suggestion_json(suggestion) for suggestion in result.suggestions],
    }
    return head | _figures(result.memory, result.step_time) | tail


def _figures(memory: MemoryEstimate | None, step_time: StepTimeEstimate | None) -> dict[str, Any]:
    if memory is None or step_time is None:
        names = (
            "fits", "verdict", "peak_active_gib", "peak_active_interval_gib", "peak_reserved_gib",
            "device_used_gib", "peak_phase", "worst_stage", "components_gib", "stages", "step_time",
        )  # fmt: skip
        return dict.fromkeys(names)
    return {
        "fits": memory.verdict is not Verdict.DOES_NOT_FIT,
        "verdict": str(memory.verdict),
        "peak_active_gib": _gib(memory.active_bytes),
        "peak_active_interval_gib": [_gib(bound) for bound in memory.active_interval],
        "peak_reserved_gib": _gib(memory.reserved_bytes),
        "device_used_gib": _gib(memory.device_bytes),
        "peak_phase": memory.peak.name,
        "worst_stage": memory.worst_stage,
        "components_gib": {name: _gib(size) for name, size in memory.components.items()},
        "stages": [
            {
                "stage": stage.stage,
                "peak_active_gib": _gib(stage.active_bytes),
                "peak_phase": stage.peak.name,
            }
            for stage in memory.stages
        ],
        "step_time": {
            "seconds": round(step_time.seconds, 4),
            "tokens_per_second_per_gpu": round(step_time.tokens_per_second_per_gpu, 1),
            "interval": [round(bound, 1) for bound in step_time.interval],
        },
    }


def _suggestion_json(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "values": dict(suggestion.values),
        "gpus": suggestion.gpus,
        "verdict": str(suggestion.memory.verdict),
        "peak_active_gib": _gib(suggestion.memory.active_bytes),
        "device_used_gib": _gib(suggestion.memory.device_bytes),
        "tokens_per_second_per_gpu": round(suggestion.tokens_per_second_per_gpu, 1),
        "changes_numerics": suggestion.changes_numerics,
    }


def _gib(size: float) -> float:
    return _rounded(gib(size))


def _rounded(value: float) -> float:
    return round(value, GIB_DIGITS)
