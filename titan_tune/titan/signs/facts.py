"""What a log measures: throughput, memory, loss, time to the first step. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, quantiles
from typing import Final

from titan_tune.titan.logs import LogLine, Milestone, ParsedLog, StepLine

WARMUP_STEPS: Final = 5
"""Steps that are not measured: compilation, autotuning, cold caches. As ``ProbeSettings.warmup_steps``."""
MIN_MEASURED_LINES: Final = 3

_TOTAL_STEPS: Final = re.compile(r"total steps (\d{1,12})")
_ACCUMULATION: Final = re.compile(r"gradient accumulation steps (\d{1,12})")
_RETRIES: Final = re.compile(r"(\d{1,12}) \w+ memory allocation retries\.")
_OOMS: Final = re.compile(r"(\d{1,12}) \w+ OOM errors thrown\.")
_DEGREES: Final = re.compile(r"\b(pp|dp_replicate|dp_shard|cp|tp|ep|etp)=(\d{1,9})")


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Numbers of one run; ``None`` where the log does not have them."""

    completed: bool = False
    last_step: int | None = None
    total_steps: int | None = None
    tokens_per_second_per_gpu: float | None = None
    """Median over the measured lines (those after the warm-up)."""
    measured_lines: int = 0
    spread: float | None = None
    """(90th - 10th percentile) / median of the same lines."""
    mfu_percent: float | None = None
    peak_reserved_gib: float | None = None
    peak_reserved_percent: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    seconds_to_first_step: float | None = None
    """From torchtitan's first line to the end of the first step."""
    alloc_retries: int = 0
    ooms: int = 0

    @property
    def is_short(self) -> bool:
        """Whether the log has too few steps for a throughput."""
        return self.tokens_per_second_per_gpu is None


def run_facts(log: ParsedLog) -> RunFacts:
    """Everything that the log measures."""
    steps = reported_steps(log)
    measured = measured_steps(steps)
    tps = [step.tps for step in measured]
    mfu = [step.mfu_percent for step in measured if step.mfu_percent is not None]
    losses = [step.loss for step in steps if step.has_loss]
    total = log.first(Milestone.INITIALIZED)
    return RunFacts(
        completed=log.first(Milestone.COMPLETED) is not None,
        last_step=steps[-1].step if steps else None,
        total_steps=_int(_TOTAL_STEPS, total) if total else None,
        tokens_per_second_per_gpu=median(tps) if tps else None,
        measured_lines=len(tps),
        spread=_spread(tps),
        mfu_percent=median(mfu) if mfu else None,
        peak_reserved_gib=max((step.memory_gib for step in log.steps), default=None),
        peak_reserved_percent=max((step.memory_percent for step in log.steps), default=None),
        first_loss=losses[0] if losses else None,
        last_loss=losses[-1] if losses else None,
        seconds_to_first_step=_seconds_to_first_step(log),
        alloc_retries=_largest(_RETRIES, log.warnings),
        ooms=_largest(_OOMS, log.warnings),
    )


def reported_steps(log: ParsedLog) -> tuple[StepLine, ...]:
    """The steps of one rank, of its last attempt: the rank with a loss, the most steps, the lowest number."""
    by_rank: dict[tuple[str, int | None], list[StepLine]] = {}
    for step in log.steps:
        by_rank.setdefault((step.line.source if step.line.rank is None else "", step.line.rank), []).append(
            step
        )
    if not by_rank:
        return ()
    best = max(
        by_rank.items(),
        key=lambda item: (any(s.has_loss for s in item[1]), len(item[1]), -(item[0][1] or 0)),
    )[1]
    starts = [0, *(i + 1 for i, (before, after) in enumerate(pairwise(best)) if after.step < before.step)]
    return tuple(best[starts[-1] :])


def measured_steps(steps: Sequence[StepLine]) -> tuple[StepLine, ...]:
    """The lines after the warm-up; of a shorter run those after step 1, if they are enough to take a median of."""
    first = steps[0].step if steps else 0
    for warmup in (WARMUP_STEPS, 1):
        measured = tuple(s for s in steps if s.step >= first + warmup and math.isfinite(s.tps) and s.tps > 0)
        if len(measured) >= MIN_MEASURED_LINES:
            return measured
    return ()


def degrees(log: ParsedLog) -> dict[str, int]:
    """Parallel degrees from the mesh line; empty where there is none."""
    line = log.first(Milestone.MESH)
    return {name: int(value) for name, value in _DEGREES.findall(line.text)} if line else {}


def accumulation_steps(log: ParsedLog) -> int:
    """Gradient accumulation steps; 1 where the log does not say."""
    line = log.first(Milestone.INITIALIZED)
    return (_int(_ACCUMULATION, line) or 1) if line else 1


def _spread(values: Sequence[float]) -> float | None:
    if len(values) < MIN_MEASURED_LINES:
        return None
    deciles = quantiles(values, n=10, method="inclusive")
    return (deciles[-1] - deciles[0]) / median(values)


def _seconds_to_first_step(log: ParsedLog) -> float | None:
    lines = [line.time for line in log.lines if line.time is not None]
    steps = [step.line.time for step in log.steps if step.line.time is not None]
    if not lines or not steps:
        return None
    seconds = (min(steps) - min(lines)).total_seconds()
    return seconds if seconds >= 0 else None


def _largest(pattern: re.Pattern[str], lines: Sequence[LogLine]) -> int:
    """The largest number: torchtitan's counters are cumulative, and each rank has its own."""
    return max((int(m[1]) for line in lines if (m := pattern.search(line.text)) is not None), default=0)


def _int(pattern: re.Pattern[str], line: LogLine) -> int | None:
    match = pattern.search(line.text)
    return int(match[1]) if match else None
