"""From the ranks' metrics to a Measurement, and what the metrics themselves warn of. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from titan_tune.domain.probe import Measurement, ProbeSpec, StepRecord
from titan_tune.probe.files import Metrics, RankLog
from titan_tune.probe.statistics import jitter, measured, median_interval

SLOW_STEP: Final = 1.5
"""Times the median: what a step has to take to count as slow."""


def measurement_of(
    spec: ProbeSpec, metrics: Metrics, *, launched: float, stopped_early: bool
) -> Measurement | None:
    """Throughput, memory and losses of a probe; ``None`` where no step was measured.

    Throughput is the tokens of a step over the time of its slowest rank. ``launched`` is Unix time.
    """
    steps = metrics.slowest(spec.world_size)
    kept = measured(steps, spec.settings.warmup_steps)
    if not kept:
        return None
    rate, low, high = median_interval(throughputs(spec, kept))
    memory = metrics.memory()
    return Measurement(
        tokens_per_second_per_gpu=rate,
        interval=(low, high),
        step_seconds=spec.tokens_per_step_per_rank / rate,
        measured_steps=len(kept),
        warmup_steps=len(steps) - len(kept),
        stopped_early=stopped_early,
        time_to_first_step=steps[0].time - launched,
        losses=metrics.losses()[: len(steps)],
        memory=memory,
        alloc_retries=max((r.alloc_retries for log in metrics.logs.values() for r in log.steps), default=0),
        memory_kind="cuda" if spec.device == "cuda" else "rss",
    )


def throughputs(spec: ProbeSpec, records: tuple[StepRecord, ...]) -> tuple[float, ...]:
    """Tokens per second per GPU of each record."""
    return tuple(spec.tokens_per_step_per_rank / record.step_seconds for record in records)


def facts(metrics: Metrics) -> dict[str, Any]:
    """What the ranks said of themselves, for the details of any outcome; empty before training began."""
    if not metrics.logs:
        return {}
    first = metrics.logs[min(metrics.logs)]
    names = ("device_name", "torch", "float8_linear_modules", "num_parameters", "hostname")
    said: dict[str, Any] = {name: first.header[name] for name in names if name in first.header}
    return {**said, **({"compiler": first.compiler} if first.compiler else {})}


def phases(metrics: Metrics, *, launched: float, ended: float) -> dict[str, float]:
    """Where the wall time went, in seconds that add up to ``ended - launched`` (Unix times).

    ``launch`` ends when the first rank's process begins, every other phase when the last rank is through it:
    ``imports`` of Python, ``init`` of processes and model, ``first_step``, ``steps``, ``shutdown``.
    ``compile`` is the part of ``first_step`` that Dynamo and Inductor took, and no phase of its own.
    Empty before training began.
    """
    logs = [log for log in metrics.logs.values() if "process_start" in log.header]
    if not logs:
        return {}
    first = [log.steps[0].time for log in logs if log.steps]
    last = [log.steps[-1].time for log in logs if log.steps]
    marks = (
        ("launch", min(log.header["process_start"] for log in logs)),
        ("imports", max(log.header["plugin_import"] for log in logs)),
        ("init", max(log.header["training_start"] for log in logs)),
        *((("first_step", max(first)), ("steps", max(last))) if first else ()),
        ("shutdown", ended),
    )
    found, before = {}, launched
    for name, mark in marks:
        until = max(mark, before)  # the kernel's start times are coarse
        found[name] = round(until - before, 3)
        before = until
    compiled = max((log.first_compiler.get("compile_seconds", 0.0) for log in logs), default=0.0)
    return {**found, **({"compile": compiled} if first else {})}


def trend(spec: ProbeSpec, metrics: Metrics) -> dict[str, Any]:
    """What a check of the trend needs beside losses and memory; empty before the first complete step.

    Where ranks differ the worst counts. ``step_jitter`` is (p90 - p10) / median of the measured steps' time and
    ``slow_steps`` counts those above ``SLOW_STEP`` medians; ``recompilations`` are Dynamo's guard failures and
    ``late_compilations`` the graphs captured after step 1; ``late_alloc_retries`` are those of the measured
    steps; ``fused_collective_matmuls`` is ``None`` where the job does not ask for async tensor parallelism.
    """
    records = metrics.slowest(spec.world_size)
    if not records:
        return {}
    kept = [record.step_seconds for record in measured(records, spec.settings.warmup_steps)]
    logs = list(metrics.logs.values())
    norms = [record.grad_norm for record in records if math.isfinite(record.grad_norm)]
    fused = [
        log.compiler["fused_collective_matmuls"] for log in logs if _has(log, "fused_collective_matmuls")
    ]
    return {
        "step_jitter": jitter(kept),
        "slow_steps": sum(seconds > SLOW_STEP * median(kept) for seconds in kept),
        "recompilations": _worst(logs, "recompilations"),
        "late_compilations": max(_late_compilations(log) for log in logs),
        "graph_breaks": _worst(logs, "graph_breaks"),
        "alloc_retries": max(record.alloc_retries for log in logs for record in log.steps),
        "late_alloc_retries": max(_late_retries(log, spec.settings.warmup_steps) for log in logs),
        "ooms": max(record.ooms for log in logs for record in log.steps),
        "grad_norm_first": norms[0] if norms else None,
        "grad_norm_last": norms[-1] if norms else None,
        "grad_norm_max": max(norms, default=None),
        "not_finite": metrics.has_diverged(),
        "float8_linear_modules": _in_headers(logs, "float8_linear_modules"),
        "linear_modules": _in_headers(logs, "linear_modules"),
        "fused_collective_matmuls": min(fused, default=None),
    }


def _has(log: RankLog, name: str) -> bool:
    return log.compiler.get(name) is not None


def _worst(logs: Sequence[RankLog], name: str) -> int:
    return max(int(log.compiler.get(name, 0)) for log in logs)


def _in_headers(logs: Sequence[RankLog], name: str) -> int | None:
    """Of the rank that has most: pipeline stages hold different parts of the model."""
    return max((log.header[name] for log in logs if name in log.header), default=None)


def _late_compilations(log: RankLog) -> int:
    if not log.first_compiler:
        return 0
    return int(log.compiler.get("captured_graphs", 0)) - int(log.first_compiler.get("captured_graphs", 0))


def _late_retries(log: RankLog, warmup_steps: int) -> int:
    before = max((record.alloc_retries for record in log.steps if record.step <= warmup_steps), default=0)
    return max((record.alloc_retries for record in log.steps), default=0) - before


def silent_failures(metrics: Metrics, *, wants_float8: bool, wants_compile: bool) -> tuple[str, ...]:
    """What the configuration asked for and the run did not do, and allocator thrashing."""
    found = []
    headers = [log.header for log in metrics.logs.values() if log.header]
    compilers = [log.compiler for log in metrics.logs.values() if log.compiler]
    if wants_float8 and headers and all(header["float8_linear_modules"] == 0 for header in headers):
        found.append("float8 is on but no layer became Float8Linear")
    if wants_compile and compilers and all(counters["captured_graphs"] == 0 for counters in compilers):
        found.append("compile is on but nothing was compiled")
    retries = max((record.alloc_retries for log in metrics.logs.values() for record in log.steps), default=0)
    if retries:
        word = "retry" if retries == 1 else "retries"
        found.append(f"{retries} allocation {word}: memory is too tight, throughput suffers and will vary")
    return tuple(found)


def asks_for(tables: Mapping[str, Any]) -> tuple[bool, bool]:
    """(float8 linear layers, a compiled model or loss), from the parsed job file."""
    converters = tables.get("model", {}).get("converters", [])
    return "quantize.linear.float8" in converters, bool(tables.get("compile", {}).get("enable", False))
