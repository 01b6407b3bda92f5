"""What each method rejects and lets through, over every measured run and card size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from h200_rows import Row
from other_estimators import ESTIMATORS
from traced_rows import Traces, traces, worst_trace

from titan_tune.domain.estimate import Verdict
from titan_tune.domain.settings import Settings
from titan_tune.estimate import estimate_memory
from titan_tune.estimate.traced import trace_margins
from titan_tune.units import GIB

CAPACITIES = [16 + step / 4 for step in range(4 * (141 - 16) + 1)]
"""GiB."""


def need_gib(row: Row) -> float:
    """The least card that this run needs: active and what lay outside the allocator, worst rank. Where the latter was
    not measured it is as estimated."""
    if row.is_fake or not row.device_gib:
        return max(row.active_gib) + estimate_memory(row.settings).outside_bytes / GIB
    both = zip(row.active_gib, row.device_gib, row.reserved_gib, strict=True)
    return max(active + device - reserved for active, device, reserved in both)


def formula_rejects(row: Row) -> Callable[[float], bool]:
    """The verdict at a capacity in GiB."""

    def rejects(capacity: float) -> bool:
        return estimate_memory(on_card(row.settings, capacity)).verdict is Verdict.DOES_NOT_FIT

    return rejects


def on_card(settings: Settings, capacity_gib: float) -> Settings:
    """The same job on cards of another size."""
    gpu = settings.cluster.gpu.model_copy(update={"memory_gib": capacity_gib})
    return replace(settings, cluster=settings.cluster.model_copy(update={"gpu": gpu}))


@dataclass(frozen=True)
class Decisions:
    """Over all runs and card sizes."""

    method: str
    runs: int
    fitting: int
    """Pairs of a run and a card that it fits."""
    false_rejections: int
    rejecting_runs: int
    lacking: int
    missed: int
    missing_runs: int


def decisions(method: str, judged: Sequence[tuple[Row, Callable[[float], bool]]]) -> Decisions:
    fitting = false = lacking = missed = 0
    rejecting: set[str] = set()
    missing: set[str] = set()
    for row, rejects in judged:
        need = need_gib(row)
        for capacity in CAPACITIES:
            is_rejected = rejects(capacity)
            if need <= capacity:
                fitting += 1
                false += is_rejected
                if is_rejected:
                    rejecting.add(row.id)
            else:
                lacking += 1
                missed += not is_rejected
                if not is_rejected:
                    missing.add(row.id)
    return Decisions(method, len(judged), fitting, false, len(rejecting), lacking, missed, len(missing))


def all_decisions(real: Sequence[Row]) -> Iterator[Decisions]:
    yield decisions("titan-tune formula", [(row, formula_rejects(row)) for row in real])
    traced = traces()
    judged = [(row, trace_rejects(row, traced)) for row in real if (row.id, 0) in traced]
    if judged:
        yield decisions("titan-tune trace", judged)
    for name, predict in list(ESTIMATORS.items())[1:]:
        thresholds = [(row, predict(row.settings)) for row in real]
        yield decisions(name, [(row, lambda c, need=need: need > c) for row, need in thresholds])


def trace_rejects(row: Row, traced: Traces) -> Callable[[float], bool]:
    """As ``estimate --method trace`` decides: the lower end of the interval and what lies outside."""
    active, phase = worst_trace(row, traced)
    outside = estimate_memory(row.settings).outside_bytes / GIB
    lower = active * (1 - trace_margins(row.settings, phase)[0])
    return lambda capacity: lower + outside > capacity


def decision_section(real: Sequence[Row], others: Sequence[Row]) -> list[str]:
    lines = [
        "## Rejected or let through, on cards of 16 to 141 GiB",
        "",
        f"{len(real)} runs (those with a fake process group left out: NCCL's memory is missing there) on every card",
        "size from 16 to 141 GiB in steps of 0.25. A run fits a card when what it needs (measured active, and what",
        "lay outside the allocator) is no more than the card. False rejection: said not to fit, and it does. Missed:",
        "not rejected, and it needs more. titan-tune rejects only where the lower end of its interval is too much.",
        "",
        *_HEAD,
    ]
    lines += map(_line, all_decisions(real))
    formula = decisions("titan-tune formula", [(row, formula_rejects(row)) for row in others])
    return [
        *lines,
        "",
        f"The other {len(others)} runs, with fake process groups and dry runs of all layouts, where what lies outside",
        "the allocator is taken as estimated, so that only the active memory is on trial (of a dry run the ranks that",
        "ran):",
        "",
        *_HEAD,
        _line(formula),
    ]


_HEAD = ("| method | false rejections | runs | missed | runs |", "|---|---|---|---|---|")


def _line(d: Decisions) -> str:
    return (
        f"| {d.method} ({d.runs} runs) | {d.false_rejections:,} of {d.fitting:,} "
        f"({100 * d.false_rejections / d.fitting:.2f} %) | {d.rejecting_runs} "
        f"| {d.missed:,} of {d.lacking:,} ({100 * d.missed / d.lacking:.2f} %) | {d.missing_runs} |"
    )
