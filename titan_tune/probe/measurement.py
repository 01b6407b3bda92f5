"""From the ranks' metrics to a Measurement, and what the metrics themselves warn of. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_tune.domain.probe import Measurement, ProbeSpec, StepRecord
from titan_tune.probe.files import Metrics
from titan_tune.probe.statistics import measured, median_interval


def measurement_of(
    spec: ProbeSpec, metrics: Metrics, *, launched: float, stopped_early: bool
) -> Measurement | None:
    """Throughput, memory and losses of a probe; ``None`` where no step was measured.

    Throughput is the tokens of a step over the time of its slowest rank. ``launched`` is Unix time.
    """
    steps = metrics.slowest(spec.nproc_per_node)
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
        found.append(f"{retries} allocation retries: memory is too tight, throughput suffers and will vary")
    return tuple(found)


def asks_for(tables: Mapping[str, Any]) -> tuple[bool, bool]:
    """(float8 linear layers, a compiled model or loss), from the parsed job file."""
    converters = tables.get("model", {}).get("converters", [])
    return "quantize.linear.float8" in converters, bool(tables.get("compile", {}).get("enable", False))
