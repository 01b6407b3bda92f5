"""What dry runs of single ranks say of the whole job: one outcome, as of a probe. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import Verdict
from titan_tune.domain.probe import Measurement, Origin, ProbeOutcome, ProbeStatus, RankMemory
from titan_tune.domain.settings import Settings
from titan_tune.estimate.reserved import outside_bytes
from titan_tune.estimate.verdict import verdict_of
from titan_tune.probe.dry_run_model import Prediction, RankRun
from titan_tune.units import GIB, format_gib

MEMORY_MARGIN: Final = 0.002
"""Relative, both ways. 18 layouts of two H200s (FSDP, DDP, TP, CP, EP; 1B to 16B; torch 2.11) have the dry run's active
peak to 0.01 %; the rest is for layouts that were not compared."""
PIPELINE_MARGIN: Final = 0.0075
"""With a pipeline: four ranks with 1F1B to 0.01 %, four with Interleaved1F1B 0 to 0.54 % below the real rank, by whole
hidden states: a real message waits for its peer, and what it carries is kept until then."""


def memory_margin(settings: Settings) -> float:
    """Relative half width of a measured active peak as that of the real job."""
    return PIPELINE_MARGIN if settings.dims.pp > 1 else MEMORY_MARGIN


FAKE_BACKEND_LIMITS: Final = re.compile(
    r"[Bb]ackend fake|FakeProcessGroup|FakeStore"
    r"|[Ss]ymm(etric)?_?[Mm]em"  # async TP and other one-sided kernels want real peers
    r"|deep_ep|nvshmem|NVSHMEM"
    r"|get_sequence_number|_verify_params_across_processes"
)
"""Errors that say nothing of the job: one process without peers cannot do it."""

CPU_LIMITS: Final = re.compile(
    r"\"histogram_cpu\" not implemented"  # counting tokens of experts
    r"|_scaled_dot_product_\w+_for_cpu"  # context parallelism has no sharding rule for it
    r"|float8 is only supported on SM89|SM(89|90|100)"
    r"|FlexAttention.*CPU|flex_attention.*(cpu|CPU)|not supported on CPU"
    r"|Torch not compiled with CUDA|CUDA.*not available|0 active drivers"
)
"""Errors that come from running on a processor what is meant for a GPU."""

_NOT_HELD_AGAINST: Final = "says nothing of the job"


def failed_outcome(
    settings: Settings, machine: ClusterSpec, rank: int, outcome: ProbeOutcome, *, seconds: float
) -> ProbeOutcome:
    """The outcome of a job of which one simulated rank did not complete: whose fault it is, told apart."""
    status, message = outcome.status, outcome.message
    if status is ProbeStatus.OOM and outcome.details.get("memory", "device") == "device":
        status, message = _out_of_memory(settings, machine, message)
    elif status is ProbeStatus.DIVERGED:
        status = ProbeStatus.INFRASTRUCTURE
        message = f"a loss that is not finite, of numbers without meaning, {_NOT_HELD_AGAINST}: {message}"
    elif status in (ProbeStatus.UNSUPPORTED, ProbeStatus.COMPILE_FAILURE):
        if FAKE_BACKEND_LIMITS.search(message):
            status, message = ProbeStatus.INFRASTRUCTURE, f"the fake backend cannot run this: {message}"
        elif machine.gpu.is_cpu and CPU_LIMITS.search(message):
            status, message = ProbeStatus.INFRASTRUCTURE, f"a processor cannot run this: {message}"
    return ProbeOutcome(
        status=status,
        message=message,
        seconds=seconds,
        details={**outcome.details, "simulated_rank": rank},
        warnings=outcome.warnings,
        attempts=outcome.attempts,
    )


def _out_of_memory(settings: Settings, machine: ClusterSpec, message: str) -> tuple[ProbeStatus, str]:
    """Held against the job only where the target has no more memory than the GPU that ran out."""
    here, target = machine.gpu, settings.cluster.gpu
    if target.memory_gib > here.memory_gib:
        return (
            ProbeStatus.INFRASTRUCTURE,
            f"{message}: this GPU ({here.name}) has {format_gib(here.memory_gib * GIB)}, the target ({target.name}) "
            f"{format_gib(target.memory_gib * GIB)}; simulate it on a GPU that is no smaller",
        )
    return ProbeStatus.OOM, message


def validity_outcome(
    settings: Settings, ranks: Sequence[int], outcomes: Sequence[ProbeOutcome], *, seconds: float
) -> ProbeOutcome:
    """Of a dry run on a processor: the configuration runs, and that is all it says."""
    steps = min(outcome.details["steps"] for outcome in outcomes)
    return ProbeOutcome(
        status=ProbeStatus.COMPLETED,
        message=f"valid: {_ranks_text(settings, ranks)} ran {steps} steps on a processor, "
        "which says nothing of memory and speed",
        seconds=seconds,
        details={"steps": steps, "dry_run": {"validity_only": True, "ranks": list(ranks)}},
        warnings=_warnings(outcomes),
        attempts=max(outcome.attempts for outcome in outcomes),
    )


def measured_outcome(
    settings: Settings,
    machine: ClusterSpec,
    runs: Sequence[RankRun],
    outcomes: Sequence[ProbeOutcome],
    prediction: Prediction,
    *,
    tokens_per_step_per_rank: float,
    seconds: float,
) -> ProbeOutcome:
    """Of a dry run on a GPU: measured memory of each rank, predicted throughput of the job.

    Out of memory where the ranks need more than the target has, whatever the GPU that ran could hold.
    """
    outside = outside_bytes(settings)
    capacity = settings.cluster.gpu.memory_gib * GIB
    worst = max(runs, key=lambda run: run.memory.active_bytes)
    reserved = max(run.memory.reserved_bytes for run in runs)
    active = worst.memory.active_bytes
    margin = memory_margin(settings)
    verdict = verdict_of((active * (1 - margin), active * (1 + margin)), reserved, outside, capacity)
    details = {
        "steps": min(run.measured_steps for run in runs),
        "dry_run": dry_run_details(settings, machine, runs, prediction, outside_bytes=outside),
    }
    warnings = list(_warnings(outcomes))
    if verdict is Verdict.DOES_NOT_FIT:
        return ProbeOutcome(
            status=ProbeStatus.OOM,
            message=f"rank {worst.rank} needs {format_gib(active + outside)}, "
            f"the target ({settings.cluster.gpu.name}) has {format_gib(capacity)}",
            seconds=seconds,
            details={**details, "memory": "device", "rank": worst.rank},
            warnings=tuple(warnings),
        )
    if verdict is Verdict.PRESSURE:
        warnings.append(
            f"{format_gib(reserved + outside)} would be reserved of {format_gib(capacity)}: expect allocation retries"
        )
    return ProbeOutcome(
        status=ProbeStatus.COMPLETED,
        message=f"{_ranks_text(settings, [run.rank for run in runs])}; {prediction_text(prediction)}",
        seconds=seconds,
        measurement=_measurement(runs, outcomes, prediction, outside, tokens_per_step_per_rank),
        details=details,
        warnings=tuple(warnings),
        attempts=max(outcome.attempts for outcome in outcomes),
    )


def prediction_text(prediction: Prediction) -> str:
    """``a step takes 1.25 s: compute 1.10, communication 0.08, slowest rank 0.02, bubble 0.05``."""
    return (
        f"a step takes {prediction.step_seconds:.3g} s: compute {prediction.compute_seconds:.3g}, "
        f"communication {prediction.communication_seconds:.3g}, slowest rank {prediction.waiting_seconds:.3g}, "
        f"bubble {prediction.bubble_seconds:.3g}"
    )


def _measurement(
    runs: Sequence[RankRun],
    outcomes: Sequence[ProbeOutcome],
    prediction: Prediction,
    outside: float,
    tokens_per_step_per_rank: float,
) -> Measurement:
    rate = tokens_per_step_per_rank / prediction.step_seconds
    measured = [outcome.measurement for outcome in outcomes if outcome.measurement is not None]
    return Measurement(
        tokens_per_second_per_gpu=rate,
        interval=prediction.interval(rate),
        step_seconds=prediction.step_seconds,
        measured_steps=min(run.measured_steps for run in runs),
        warmup_steps=max(found.warmup_steps for found in measured),
        stopped_early=any(found.stopped_early for found in measured),
        time_to_first_step=max(found.time_to_first_step for found in measured),
        losses=(),
        memory=tuple(target_memory(run.memory, outside) for run in runs),
        alloc_retries=max(found.alloc_retries for found in measured),
        origin=Origin.DRY_RUN,
    )


def target_memory(memory: RankMemory, outside: float) -> RankMemory:
    """What the rank holds in the job: as measured, with NCCL's and the context's part from the model."""
    return RankMemory(
        rank=memory.rank,
        active_bytes=memory.active_bytes,
        reserved_bytes=memory.reserved_bytes,
        device_bytes=round(memory.reserved_bytes + outside),
    )


def dry_run_details(
    settings: Settings,
    machine: ClusterSpec,
    runs: Sequence[RankRun],
    prediction: Prediction,
    *,
    outside_bytes: float,
) -> dict[str, Any]:
    """The ``dry_run`` object of an outcome's details and of ``estimate --json``; seconds and GiB."""
    return {
        "validity_only": False,
        "gpu": machine.gpu.name,
        "world_size": settings.dims.world_size,
        "compute_seconds": prediction.compute_seconds,
        "communication_seconds": prediction.communication_seconds,
        "waiting_seconds": prediction.waiting_seconds,
        "bubble_seconds": prediction.bubble_seconds,
        "step_seconds": prediction.step_seconds,
        "relative_interval": prediction.relative_interval,
        "exposed_seconds": {str(cause): seconds for cause, seconds in prediction.exposed.items()},
        "outside_allocator_gib": outside_bytes / GIB,
        "ranks": [_rank_details(settings, run) for run in runs],
    }


def _rank_details(settings: Settings, run: RankRun) -> dict[str, Any]:
    dims = settings.dims
    return {
        "rank": run.rank,
        "pipeline_rank": run.rank * dims.pp // dims.world_size,
        "active_gib": run.memory.active_bytes / GIB,
        "reserved_gib": run.memory.reserved_bytes / GIB,
        "compute_seconds": run.step_seconds,
        "microbatch_passes": {
            kind: _passes(run, kind) for kind in ("F", "B", "I", "W") if _passes(run, kind)
        },
        "collectives": _collectives_summary(run),
    }


def _passes(run: RankRun, kind: str) -> int:
    return sum(chunk.count for chunk in run.chunks if chunk.kind == kind)


def _collectives_summary(run: RankRun) -> list[dict[str, Any]]:
    """Calls and GiB a step by cause, operation and group size, the most bytes first."""
    found: dict[tuple[str, str, int, int], list[float]] = {}
    for record in run.collectives:
        key = (str(record.cause), str(record.op), record.group_size, record.stride)
        found.setdefault(key, []).extend([record.count, record.count * record.bytes])
    rows = [
        {
            "cause": cause,
            "op": op,
            "group_size": size,
            "stride": stride,
            "count": int(math.fsum(values[::2])),
            "gib": math.fsum(values[1::2]) / GIB,
        }
        for (cause, op, size, stride), values in found.items()
    ]
    return sorted(rows, key=lambda row: -float(row["gib"]))


def assumptions(settings: Settings, machine: ClusterSpec, details: Mapping[str, Any]) -> tuple[str, ...]:
    """What the figures take for granted, one sentence each."""
    dims, target = settings.dims, settings.cluster.gpu
    ranks = [rank["rank"] for rank in details["ranks"]]
    said = [f"ran: {_ranks_text(settings, ranks)}, alone, on {machine.gpu.name}; losses mean nothing"]
    if len(ranks) < dims.pp:
        said.append("pipeline ranks that did not run take as long as the nearest that did")
    said.append("communication and bubble are computed: from the collectives that were counted")
    if target.name != machine.gpu.name:
        said.append(
            f"speed on {target.name}: what was measured on {machine.gpu.name} times the formula's ratio of the two"
        )
    if dims.ep > 1:
        said.append("tokens are routed evenly: every expert gets the same number")
    return tuple(said)


def _ranks_text(settings: Settings, ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {names} of {settings.dims.world_size}"


def _warnings(outcomes: Sequence[ProbeOutcome]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(warning for outcome in outcomes for warning in outcome.warnings))
