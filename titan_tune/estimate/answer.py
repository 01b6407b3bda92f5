"""Everything that ``estimate`` says about one job, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from titan_tune.domain.candidate import Finding, Value
from titan_tune.domain.estimate import MemoryEstimate, StageMemory, StepTimeEstimate, Verdict
from titan_tune.domain.settings import Settings
from titan_tune.estimate.accounting import Accounting, accounting_json
from titan_tune.estimate.advice import Suggestion, suggestions
from titan_tune.estimate.changes import Asked
from titan_tune.estimate.memory import METHOD, estimate_memory
from titan_tune.estimate.minimum import Minimum, minimum_gpus
from titan_tune.estimate.parameters import NotCoveredError
from titan_tune.estimate.step_time import estimate_step_time
from titan_tune.titan import rules
from titan_tune.units import gib

if TYPE_CHECKING:
    from titan_tune.estimate.traced import Traced
    from titan_tune.trace import TraceResult

SCHEMA = 1
TORCHTITAN = "0.2.2"
GIB_DIGITS = 3
FORMULA_ASSUMPTIONS = (
    "nothing was run: closed forms from the torchtitan 0.2.2 source, held against H200 runs (torch 2.11)",
    "PYTORCH_ALLOC_CONF=expandable_segments:True; without it the allocator reserves more",
)
BESIDE_TRACE = "speed, minimum GPUs and suggestions are the formula's: only the job itself was traced"


@dataclass(frozen=True, slots=True)
class Answer:
    """``memory``, ``step_time`` and ``minimum`` are ``None`` for a job that the rules reject.

    A traced job may be one that the formula does not cover: it has ``memory``, the others are ``None``.
    """

    settings: Settings
    invalid: tuple[Finding, ...]
    warnings: tuple[Finding, ...]
    memory: MemoryEstimate | None = None
    step_time: StepTimeEstimate | None = None
    minimum: Minimum | None = None
    suggestions: tuple[Suggestion, ...] = ()
    method: str = METHOD
    traces: tuple[TraceResult, ...] = ()
    accounting: Accounting | None = None
    dry_run: Mapping[str, Any] | None = None
    """What a dry run says of each rank, as in the details of its outcome."""

    @property
    def advice_method(self) -> str | None:
        """By what speed, minimum GPUs and suggestions are found; ``None`` where there are none. Of other
        configurations only the formula answers at once, whatever the job's own memory is from."""
        if self.dry_run is not None:
            return METHOD if self.minimum is not None or self.suggestions else None
        return None if self.step_time is None else METHOD

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the figures take for granted, one sentence each."""
        if self.memory is None:
            return ()
        if self.dry_run is not None:
            return self.memory.assumptions
        rates = self.settings.cluster.rates
        speeds = () if rates is None else (f"speeds: {rates.source}",)
        if self.traces:
            by_formula = () if self.advice_method is None else (BESIDE_TRACE,)
            return (*self.memory.assumptions, *by_formula, *speeds)
        return (*FORMULA_ASSUMPTIONS, *self.memory.assumptions, *speeds)


def answer(
    settings: Settings,
    values: Mapping[str, Value],
    *,
    advise: bool = True,
    trace: Callable[[], Traced] | None = None,
    gpus_per_node: int | None = None,
) -> Answer:
    """Rules first; figures for a job that passes them, suggestions for one that does not fit or only under
    pressure, unless ``advise`` is off.

    ``trace`` is called for the memory in place of the formula. ``gpus_per_node`` is how many a full node has,
    where the cluster's one node may not be full.

    Raises:
        NotCoveredError: the formula does not cover the model, and there is no trace.
    """
    broken = rules.invalid(settings, values)
    found = Answer(settings, broken, rules.warnings(settings, values), method="trace" if trace else METHOD)
    if broken:
        return found
    asked = Asked.of(settings, values, gpus_per_node)
    if trace is None:
        return _advised(replace(found, memory=estimate_memory(settings)), asked, advise=advise)
    traced = trace()
    found = replace(found, memory=traced.memory, traces=traced.results)
    try:
        return _advised(found, asked, advise=advise)
    except NotCoveredError:
        return found


def _advised(found: Answer, asked: Asked, *, advise: bool) -> Answer:
    """With what the formula alone can say: speed, minimum GPUs, suggestions."""
    offered: tuple[Suggestion, ...] = ()
    if advise and found.memory is not None and found.memory.verdict is not Verdict.FITS:
        offered = suggestions(asked, found.memory.verdict)
    return replace(
        found,
        step_time=estimate_step_time(asked.settings),
        minimum=minimum_gpus(asked),
        suggestions=offered,
    )


def answer_json(result: Answer) -> dict[str, Any]:
    """The stable JSON object (schema 1). Figures are ``null`` for an invalid job."""
    cluster = result.settings.cluster
    head: dict[str, Any] = {
        "schema": SCHEMA,
        "torchtitan": TORCHTITAN,
        "world_size": cluster.world_size,
        "gpu": {"name": cluster.gpu.name, "capacity_gib": _rounded(cluster.gpu.memory_gib)},
        "method": result.method,
    }
    tail: dict[str, Any] = {
        "step_time": _step_time_json(result.step_time),
        "advice_method": result.advice_method,
        "minimum_gpus": result.minimum.fits if result.minimum else None,
        "minimum_gpus_under_pressure": result.minimum.pressure if result.minimum else None,
        "warnings": [finding.as_dict() for finding in result.warnings],
        "invalid": [finding.as_dict() for finding in result.invalid],
        "suggestions": [_suggestion_json(suggestion) for suggestion in result.suggestions],
        "assumptions": list(result.assumptions),
    }
    if result.traces:
        tail["traces"] = [_trace_json(trace) for trace in result.traces]
    if result.dry_run is not None:
        tail["dry_run"] = dict(result.dry_run)
    if result.accounting is not None:
        tail["accounting"] = accounting_json(result.accounting)
    return head | _memory_json(result.memory) | tail


def _memory_json(memory: MemoryEstimate | None) -> dict[str, Any]:
    if memory is None:
        names = (
            "fits", "verdict", "peak_active_gib", "peak_active_interval_gib", "peak_reserved_gib",
            "device_used_gib", "peak_phase", "worst_stage", "components_gib", "stages",
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
        "stages": [_stage_json(stage) for stage in memory.stages],
    }


def _stage_json(stage: StageMemory) -> dict[str, Any]:
    return {
        "stage": stage.stage,
        "peak_active_gib": _gib(stage.active_bytes),
        "peak_reserved_gib": _gib(stage.reserved_bytes),
        "peak_phase": stage.peak.name,
    }


def _step_time_json(step_time: StepTimeEstimate | None) -> dict[str, Any] | None:
    if step_time is None:
        return None
    return {
        "seconds": round(step_time.seconds, 4),
        "tokens_per_second_per_gpu": round(step_time.tokens_per_second_per_gpu, 1),
        "interval": [round(bound, 1) for bound in step_time.interval],
    }


def _suggestion_json(suggestion: Suggestion) -> dict[str, Any]:
    return {
        "values": dict(suggestion.values),
        "gpus": suggestion.gpus,
        "gpus_per_node": suggestion.gpus_per_node,
        "global_batch_size": suggestion.settings.global_batch_size,
        "verdict": str(suggestion.memory.verdict),
        "peak_active_gib": _gib(suggestion.memory.active_bytes),
        "device_used_gib": _gib(suggestion.memory.device_bytes),
        "tokens_per_second_per_gpu": round(suggestion.tokens_per_second_per_gpu, 1),
        "changes_numerics": suggestion.changes_numerics,
        "host_gib_per_node": None if suggestion.host_bytes is None else _gib(suggestion.host_bytes),
        "warnings": list(suggestion.warnings),
    }


def _trace_json(trace: TraceResult) -> dict[str, Any]:
    return {
        "rank": trace.rank,
        "stages": list(trace.stages),
        "torch": trace.torch_version,
        "allocator": trace.allocator,
        "seconds": trace.seconds,
        "phases_gib": {name: _gib(size) for name, size in trace.phases.items()},
    }


def _gib(size: float) -> float:
    return _rounded(gib(size))


def _rounded(value: float) -> float:
    return round(value, GIB_DIGITS)
