"""Holds the memory formula, traces and other estimators against measured runs: reports/memory_accuracy.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import public_rows
from h200_rows import DRY_RUN, ROOT, DryRow, Row, dry_run_rows, layout_rows, real_pair_rows, rows
from measured_tables import table_section
from other_estimators import ESTIMATORS
from rejections import decision_section
from traced_rows import Traces, traces, worst_trace

from titan_tune.domain.settings import AcMode, Settings
from titan_tune.estimate import estimate_memory
from titan_tune.estimate.traced import trace_margins
from titan_tune.units import GIB

REPORT = ROOT / "reports" / "memory_accuracy.md"


@dataclass(frozen=True)
class Comparison:
    """One rank's measured and estimated figures, GiB."""

    row: Row
    rank: int
    many: bool
    phase: str
    active: tuple[float, float]
    reserved: tuple[float, float]
    device: tuple[float, float] | None
    traced: tuple[float, float] | None
    """Active and reserved, where a trace was made."""

    @property
    def run(self) -> str:
        return self.row.id + (f" rank {self.rank}" if self.many else "")

    @property
    def path(self) -> str:
        settings = self.row.settings
        dims = settings.dims
        shards = dims.fsdp_degree // dims.cp
        names = (
            ("PP", dims.pp > 1),
            ("HSDP", dims.dp_replicate > 1 and shards > 1),
            ("DDP", dims.dp_replicate > 1 and shards == 1),
            ("FSDP", dims.dp_replicate == 1 and shards > 1),
            ("CP", dims.cp > 1),
            ("TP", dims.tp > 1),
            ("EP", dims.ep > 1),
        )
        layout = " + ".join(name for name, is_used in names if is_used) or "one GPU"
        accumulates = ", accumulation" if settings.gradient_accumulation_steps > 1 else ""
        return f"{settings.model.name}: {layout}{accumulates}"


def percent(pair: tuple[float, float]) -> float:
    measured, estimated = pair
    return 100 * (estimated / measured - 1)


def comparisons(row: Row, traced: Traces) -> Iterator[Comparison]:
    """One for each pipeline rank, or one where all ranks are alike."""
    estimate = estimate_memory(row.settings)
    for stage in estimate.stages:
        rank = stage.stage
        trace = traced.get((row.id, rank))
        device = None
        if row.device_gib and not row.is_fake:
            device = (row.device_gib[rank], (stage.reserved_bytes + estimate.outside_bytes) / GIB)
        yield Comparison(
            row=row,
            rank=rank,
            many=len(estimate.stages) > 1,
            phase=stage.peak.name,
            active=(row.active_gib[rank], stage.active_bytes / GIB),
            reserved=(row.reserved_gib[rank], stage.reserved_bytes / GIB),
            device=device,
            traced=trace[:2] if trace else None,
        )


def dry_comparisons(dry: DryRow, traced: Traces) -> Iterator[Comparison]:
    """One for each rank that ran."""
    estimate = estimate_memory(dry.row.settings)
    ranks = zip(dry.ranks, dry.stages, dry.row.active_gib, dry.row.reserved_gib, strict=True)
    for rank, index, active, reserved in ranks:
        stage = estimate.stages[index]
        trace = traced.get((dry.row.id, rank)) or traced.get((dry.real, rank))
        yield Comparison(
            row=dry.row,
            rank=rank,
            many=len(dry.ranks) > 1,
            phase=stage.peak.name,
            active=(active, stage.active_bytes / GIB),
            reserved=(reserved, stage.reserved_bytes / GIB),
            device=None,
            traced=trace[:2] if trace else None,
        )


def intervals(measured: Sequence[Row]) -> list[str]:
    """How many runs lie in the interval that was said beforehand, worst rank."""
    by_formula, by_trace, traced = 0, 0, traces()
    with_trace = [row for row in measured if (row.id, 0) in traced]
    for row in measured:
        low, high = estimate_memory(row.settings).active_interval
        by_formula += low <= max(row.active_gib) * GIB <= high
    for row in with_trace:
        active, phase = worst_trace(row, traced)
        below, above = trace_margins(row.settings, phase)
        by_trace += active * (1 - below) <= max(row.active_gib) <= active * (1 + above)
    lines = [f"- measured active within the formula's interval: {by_formula} of {len(measured)} runs"]
    if with_trace:
        lines.append(f"- measured active within the trace's interval: {by_trace} of {len(with_trace)} runs")
    return lines


def stats(pairs: Sequence[tuple[float, float]]) -> str:
    errors = [abs(percent(pair)) for pair in pairs]
    return f"mean {statistics.mean(errors):.2f} %, worst {max(errors):.2f} %"


def report() -> str:
    measured = (*rows(), *layout_rows(), *real_pair_rows())
    dense = [row for row in measured if row.settings.model.is_dense_llama]
    traced = traces()
    found = [comparison for row in measured for comparison in comparisons(row, traced)]
    dry = dry_run_rows()
    dry_found = [comparison for row in dry for comparison in dry_comparisons(row, traced)]
    larger = {row.row.id for row in dry if row.is_larger}
    real = [row for row in measured if row.device_gib and not row.is_fake]
    parts = (
        head(found, measured),
        by_path(found),
        table_section(),
        dry_head(dry_found, larger),
        by_path([c for c in dry_found if c.row.id in larger]),
        against_others(dense, traced),
        decision_section(real, [row for row in measured if row not in real] + [row.row for row in dry]),
        public_rows.section(),
        limits(),
        every_row("Every value", found),
        every_row("Every rank of a dry run", dry_found),
    )
    return "\n".join(line for part in parts for line in (*part, ""))


def head(found: Sequence[Comparison], measured: Sequence[Row]) -> list[str]:
    devices = [c.device for c in found if c.device is not None]
    lines = [
        "# Memory: predicted against measured",
        "",
        f"{len(found)} values of runs on NVIDIA H200 (torch 2.11.0+cu130, torchtitan 0.2.2, torchao 0.17.0,",
        "`PYTORCH_ALLOC_CONF=expandable_segments:True`), one run each, the peak over all steps: tests/data/",
        "h200_measured.jsonl, h200_rows_layouts.jsonl (one rank of a larger job under a fake process group;",
        "mixture-of-experts rows with forced even routing) and the real runs of h200_dry_runs.jsonl, 15 jobs run",
        "after the formula was written: 10 were predicted to 0.01 %; two with Interleaved1F1B, one with 1F1B and one",
        "with rowwise float8 to 1.1 %; 8B with CP and bf16 parameters was 2.9 % too low, which added what gradients",
        "reduced in fp32 take while they are cast. Written by benchmarks/memory_accuracy.py.",
        "",
        f"- formula, active: |error| {stats([c.active for c in found])}; "
        f"{sum(abs(percent(c.active)) <= 0.1 for c in found)} of {len(found)} within 0.1 %",
        f"- formula, reserved: |error| {stats([c.reserved for c in found])}",
        f"- formula, device used (without fake process groups): |error| {stats(devices)}",
    ]
    return [
        *lines,
        *trace_stats(found),
        *intervals(measured),
        "",
        "The formula's active memory has no fitted constant. Its reserved has nine (fragmentation by what is",
        "recomputed and its limit, pipelines, segments) and device four (context and NCCL), all taken from these",
        "same rows: treat those errors as in-sample. A trace has no fitted constant in either.",
    ]


def trace_stats(found: Sequence[Comparison]) -> list[str]:
    both = [c for c in found if c.traced is not None]
    if not both:
        return []
    active = [(c.active[0], c.traced[0]) for c in both if c.traced]
    reserved = [(c.reserved[0], c.traced[1]) for c in both if c.traced]
    return [
        f"- trace, active: |error| {stats(active)} over {len(both)} values",
        f"- trace, reserved: |error| {stats(reserved)}",
    ]


def dry_head(found: Sequence[Comparison], larger: set[str]) -> list[str]:
    """The ranks of dry runs, all and those of more than two GPUs."""
    lines = [
        "## Layouts beyond two GPUs, by dry run",
        "",
        f"{len(found)} ranks of {len({c.row.id for c in found})} jobs, each alone on one H200 with the other ranks'",
        "messages answered locally (tests/data/h200_dry_runs.jsonl): kernels, allocator and sizes are real. Two-GPU",
        "jobs among them are held against real runs in reports/dry_run.md, where both peaks agree.",
        "",
    ]
    for name, of_kind in (
        ("all", found),
        ("beyond two GPUs", [c for c in found if c.row.id in larger]),
    ):
        inside = sum(in_interval(c) for c in of_kind)
        lines += [
            f"{name}, {len(of_kind)} ranks:",
            "",
            f"- formula, active: |error| {stats([c.active for c in of_kind])}",
            f"- formula, reserved: |error| {stats([c.reserved for c in of_kind])}",
            f"- measured active within the formula's interval: {inside} of {len(of_kind)} ranks",
            *trace_stats(of_kind),
            "",
        ]
    return lines[:-1]


def in_interval(c: Comparison) -> bool:
    """Whether a rank's measured active memory lies in the interval around its own stage's figure."""
    estimate = estimate_memory(c.row.settings)
    low, high = (end / estimate.active_bytes for end in estimate.active_interval)
    measured, estimated = c.active
    return estimated * low <= measured <= estimated * high


def by_path(found: Sequence[Comparison]) -> list[str]:
    lines = ["| model: layout | values | active | reserved |", "|---|---|---|---|"]
    for path in sorted({c.path for c in found}):
        of_path = [c for c in found if c.path == path]
        active, reserved = stats([c.active for c in of_path]), stats([c.reserved for c in of_path])
        lines.append(f"| {path} | {len(of_path)} | {active} | {reserved} |")
    return lines


def against_others(measured: Sequence[Row], traced: Traces) -> list[str]:
    """Errors of peak active memory of the worst rank."""
    lines = [
        "## Beside what people use instead",
        "",
        "Peak active memory of the worst rank, dense Llama runs. Megatron-LM's estimator",
        "(megatron/training/theoretical_memory_usage.py) takes 18 bytes a parameter and, for activations,",
        "s·b·h·(18 + 4·ffn/h) a layer (arXiv 2205.05198, table 2: selective recomputation) plus 4·s·b·(h + V) for",
        "the output. It knows no FSDP, so its parameters are divided by the sharding here, in its favour. The third",
        "line is the same with ZeRO's 16 bytes. accelerate's estimator and Hugging Face's model-memory-usage say 4 ×",
        "the weights, without activations; it is divided by the sharding too.",
        "",
        "| method | runs | median error | mean absolute error | worst | mean absolute error, selective op alone |",
        "|---|---|---|---|---|---|",
    ]
    worst_rank = [max(row.active_gib) for row in measured]
    errors = {
        name: {
            row.id: percent((m, predict(row.settings))) for row, m in zip(measured, worst_rank, strict=True)
        }
        for name, predict in ESTIMATORS.items()
    }
    by_trace = {
        row.id: percent((m, worst_trace(row, traced)[0]))
        for row, m in zip(measured, worst_rank, strict=True)
        if (row.id, 0) in traced
    }
    if by_trace:
        errors = {"titan-tune trace": by_trace, **errors}
    selective = {row.id for row in measured if is_selective_op(row.settings)}
    for name, values in errors.items():
        every = list(values.values())
        op = [abs(value) for run, value in values.items() if run in selective]
        lines.append(
            f"| {name} | {len(every)} | {statistics.median(every):+.2f} % | {statistics.mean(map(abs, every)):.2f} % "
            f"| {max(every, key=abs):+.1f} % | {statistics.mean(op):.2f} % ({len(op)} runs) |"
        )
    return lines


def is_selective_op(settings: Settings) -> bool:
    """Megatron's activations assume selective recomputation; this is torchtitan's nearest to it."""
    return settings.ac.mode is AcMode.SELECTIVE and settings.ac.every == 0


def limits() -> list[str]:
    return [
        "## What is not covered",
        "",
        "No H200 row covers: PP with mixtures of experts, GPipe and interleaved schedules other than Interleaved1F1B,",
        "compiled blocks under zero bubbles, CPU offload, mxfp8, ETP, uneven routing of tokens to experts. The",
        "estimate widens its interval where it has no other evidence; dense layouts among them were held against",
        "traces of whole steps instead (reports/formula_against_trace.md).",
    ]


def every_row(title: str, found: Sequence[Comparison]) -> list[str]:
    lines = [
        f"## {title}",
        "",
        "GiB; in brackets the error in per cent.",
        "",
        "| run | peak in | active | formula | trace | reserved | formula | trace |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for c in found:
        cells = []
        for place, (measured, estimated) in enumerate((c.active, c.reserved)):
            trace = "–" if c.traced is None else cell(measured, c.traced[place])
            cells += [f"{measured:.3f}", cell(measured, estimated), trace]
        lines.append(f"| {c.run.removeprefix(DRY_RUN)} | {c.phase} | {' | '.join(cells)} |")
    return lines


def cell(measured: float, estimated: float) -> str:
    return f"{estimated:.3f} ({percent((measured, estimated)):+.2f})"


def main() -> None:
    REPORT.write_text(report())
    print(f"wrote {REPORT}")


if __name__ == "__main__":
    main()
