"""Holds the memory formula against the H200 rows and writes reports/memory_accuracy.md."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from h200_rows import ROOT, Row, rows

from titan_tune.estimate import estimate_memory
from titan_tune.units import GIB


@dataclass(frozen=True)
class Comparison:
    """One rank's measured and estimated figures, GiB."""

    run: str
    path: str
    phase: str
    active: tuple[float, float]
    reserved: tuple[float, float]
    device: tuple[float, float]
    is_fake: bool

    @staticmethod
    def percent(pair: tuple[float, float]) -> float:
        measured, estimated = pair
        return 100 * (estimated / measured - 1)


def path_of(row: Row) -> str:
    dims = row.settings.dims
    names = (("PP", dims.pp), ("TP", dims.tp), ("FSDP", dims.fsdp_degree), ("DDP", dims.dp_replicate))
    return " + ".join(name for name, degree in names if degree > 1) or "one GPU"


def comparisons(row: Row) -> Iterator[Comparison]:
    """One for each pipeline rank, or one where all ranks are alike."""
    estimate = estimate_memory(row.settings)
    for stage in estimate.stages:
        rank = stage.stage
        yield Comparison(
            run=row.id + (f" rank {rank}" if len(estimate.stages) > 1 else ""),
            path=path_of(row),
            phase=stage.peak.name,
            active=(row.active_gib[rank], stage.active_bytes / GIB),
            reserved=(row.reserved_gib[rank], stage.reserved_bytes / GIB),
            device=(row.device_gib[rank], (stage.reserved_bytes + estimate.outside_bytes) / GIB),
            is_fake=row.is_fake,
        )


def _stats(pairs: Sequence[tuple[float, float]]) -> str:
    errors = [abs(Comparison.percent(pair)) for pair in pairs]
    return f"mean {statistics.mean(errors):.2f} %, worst {max(errors):.2f} %"


def report(found: Sequence[Comparison]) -> str:
    real = [c for c in found if not c.is_fake]
    paths = sorted({c.path for c in found})
    lines = [
        "# Memory: the formula against measured runs",
        "",
        f"{len(found)} values of NVIDIA H200 runs (torch 2.11.0+cu130, torchtitan 0.2.2, torchao 0.17.0,",
        "`PYTORCH_ALLOC_CONF=expandable_segments:True`), one run each, the peak over all steps. Written by",
        "benchmarks/memory_accuracy.py.",
        "",
        f"- active: |error| {_stats([c.active for c in found])}; "
        f"{sum(abs(c.percent(c.active)) <= 0.1 for c in found)} of {len(found)} within 0.1 %",
        f"- reserved: |error| {_stats([c.reserved for c in found])}",
        f"- device used (without fake process groups): |error| {_stats([c.device for c in real])}",
        "",
        "Active memory has no fitted constant. Reserved has nine (fragmentation by what is recomputed and its",
        "limit, pipelines, segments) and device four (context and NCCL), all taken from these same rows: treat their",
        "errors as in-sample.",
        "",
        "| path | values | active | reserved |",
        "|---|---|---|---|",
    ]
    for path in paths:
        of_path = [c for c in found if c.path == path]
        active, reserved = _stats([c.active for c in of_path]), _stats([c.reserved for c in of_path])
        lines.append(f"| {path} | {len(of_path)} | {active} | {reserved} |")
    lines += [
        "",
        "No row covers: HSDP, PP with FSDP or TP, TP with FSDP, CP, schedules other than 1F1B, gradient",
        "accumulation, CPU offload, `reshard_after_forward` other than default, mxfp8, eager blocks whose own",
        "backward is the peak. The estimate widens its interval for each; most of them were held against traces",
        "of whole steps instead (reports/formula_against_trace.md).",
        "",
        "| run | peak in | active: measured, estimated GiB, error % | reserved: measured, estimated GiB, error % |",
        "|---|---|---|---|",
    ]
    for c in found:
        cells = (
            f"{measured:.3f}, {estimated:.3f}, {c.percent((measured, estimated)):+.2f}"
            for measured, estimated in (c.active, c.reserved)
        )
        lines.append(f"| {c.run} | {c.phase} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    found = [comparison for row in rows() for comparison in comparisons(row)]
    path = ROOT / "reports" / "memory_accuracy.md"
    path.write_text(report(found))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
