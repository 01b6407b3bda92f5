"""Does a measured configuration train soundly, and not only fast? Pure.

What people look at by hand in 20 to 50 steps: whether the loss follows the baseline's on the same tokens, whether
memory is what was expected, whether steps are even, and whether what the file asks for (compile, float8, asynchronous
tensor parallelism) really happened. Each check says ok, warn or fail, with the numbers it decided by; a check that a
probe has no figures for, or that does not concern its configuration, is left out.

A short probe clears nothing that shows later: float8 runs have been seen to break near step 80 and beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Any, Final

from titan_tune.domain.candidate import Value
from titan_tune.domain.probe import Measurement
from titan_tune.probe.statistics import loss_noise
from titan_tune.study.info import StudyInfo
from titan_tune.study.records import Role, TrialRecord
from titan_tune.study.selection import Standing
from titan_tune.units import GIB

LOSS_WINDOW: Final = 5
"""Last common steps whose mean difference counts, as in the divergence check of a probe."""
LOSS_WARN: Final = 0.01
"""Relative gap to the baseline's loss that is worth a look; ``loss_tolerance`` is what a probe may not exceed."""
GRADIENT_GROWTH: Final = 10.0
"""Times the first step's gradient norm: warm-up lets it fall, so growth of this size is a spike."""
MEMORY_WARN, MEMORY_FAIL = 0.03, 0.15
"""Relative gap to the estimate, whose worst error over 117 values from H200s is 1.1 % (reports/memory_accuracy.md)."""
JITTER_WARN, JITTER_FAIL = 0.10, 0.25
"""(p90 - p10) / median of the measured steps. Of probes on H200s 5 of 69 were beyond 10 % on a quiet host, and 17 of 66
beside three others."""
RECOMPILE_LIMIT: Final = 8
"""``torch._dynamo.config.recompile_limit``: from there on a function runs uncompiled."""
FLOAT8_SHARE: Final = 0.5
"""Of the linear layers; fewer in float8 means that a filter or a dimension keeps most of them out."""
FLOAT8: Final = "quantize.linear.float8"


class Grade(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


_SEVERITY: Final = {Grade.OK: 0, Grade.WARN: 1, Grade.FAIL: 2}


@dataclass(frozen=True, slots=True)
class Check:
    """One check of one probe."""

    name: str
    grade: Grade
    text: str
    """What was found, in one sentence without a full stop."""
    numbers: Mapping[str, float]
    """What it was decided by; memory in GiB."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What the checks look at."""

    measurement: Measurement
    figures: Mapping[str, Any]
    """``ProbeOutcome.details["trend"]``; empty where a probe recorded none."""
    values: Mapping[str, Value]
    """Every torchtitan key of the configuration."""
    predicted_active_gib: float | None
    baseline_losses: tuple[float, ...]
    """Empty for the baseline's own run."""
    same_tokens: bool
    """Whether baseline and probe trained on the same tokens, step by step."""
    loss_tolerance: float


def trend_checks(
    record: TrialRecord, info: StudyInfo, *, baseline: TrialRecord | None = None
) -> tuple[Check, ...]:
    """Every check that concerns one probe; none where it measured nothing.

    Raises:
        InputError: the study's base job is not one that this version can read.
    """
    measurement = record.measurement
    if measurement is None:
        return ()
    reference = baseline.measurement if baseline and baseline.number != record.number else None
    evidence = Evidence(
        measurement=measurement,
        figures=record.outcome.details.get("trend") or {},
        values=info.base().with_values(record.values).resolved(),
        predicted_active_gib=record.predicted.get("active_gib"),
        baseline_losses=reference.losses if reference else (),
        same_tokens=info.probe.get("data", "synthetic") == "synthetic",
        loss_tolerance=float(info.probe.get("loss_tolerance", 0.05)),
    )
    return tuple(check for make in CHECKS if (check := make(evidence)) is not None)


def study_checks(info: StudyInfo, records: Sequence[TrialRecord]) -> dict[int, tuple[Check, ...]]:
    """Trial number → its checks, for every measured trial of a study."""
    baseline = next((r for r in records if r.role is Role.BASELINE and r.measurement), None)
    return {r.number: trend_checks(r, info, baseline=baseline) for r in records if r.measurement}


def standing_checks(standing: Standing, checks: Mapping[int, Sequence[Check]]) -> tuple[Check, ...]:
    """The worst of each check over the runs of one configuration that count."""
    worst: dict[str, Check] = {}
    for run in standing.counted:
        for check in checks.get(run.number, ()):
            kept = worst.get(check.name)
            if kept is None or _SEVERITY[check.grade] > _SEVERITY[kept.grade]:
                worst[check.name] = check
    return tuple(worst.values())


def worst_grade(checks: Iterable[Check]) -> Grade:
    """``ok`` where there is no check."""
    return max((check.grade for check in checks), key=_SEVERITY.__getitem__, default=Grade.OK)


def problems(checks: Iterable[Check]) -> tuple[str, ...]:
    """One line for each check that is not ok, failures first."""
    found = sorted((c for c in checks if c.grade is not Grade.OK), key=lambda c: -_SEVERITY[c.grade])
    return tuple(f"{check.grade}: {check.name}: {check.text}" for check in found)


# --- the checks ---------------------------------------------------------------------------------------------


def _loss(evidence: Evidence) -> Check | None:
    losses, base = evidence.measurement.losses, evidence.baseline_losses
    if not all(map(math.isfinite, losses)):
        return Check("loss", Grade.FAIL, "it is not finite at every step", {"steps": len(losses)})
    common = min(len(losses), len(base))
    pairs = [(losses[i], base[i]) for i in range(common) if math.isfinite(base[i])]
    if len(pairs) < LOSS_WINDOW:
        return None
    differences = [loss - other for loss, other in pairs]
    gap = fmean(differences[-LOSS_WINDOW:])
    scale = abs(fmean(other for _, other in pairs[-LOSS_WINDOW:])) or 1.0
    half = len(differences) // 2
    growth = (fmean(differences[half:]) - fmean(differences[:half])) / scale
    noise = 3.0 * loss_noise(differences) / math.sqrt(LOSS_WINDOW)
    beyond = max(0.0, abs(gap) - noise) / scale
    numbers = {
        "steps": len(pairs),
        "gap": gap,
        "relative_gap": gap / scale,
        "noise": noise,
        "relative_growth": growth,
    }
    text = (
        f"{100 * gap / scale:+.2f} % from the baseline's over the last {LOSS_WINDOW} of {len(pairs)} steps"
        f" ({100 * growth:+.2f} % from the first half to the second)"
    )
    if not evidence.same_tokens:
        text += "; not on the same tokens: the probes read the job's data set"
    if beyond > evidence.loss_tolerance:
        return Check("loss", Grade.FAIL, text, numbers)
    limit = LOSS_WARN if evidence.same_tokens else evidence.loss_tolerance / 2
    return Check("loss", Grade.WARN if beyond > limit else Grade.OK, text, numbers)


def _gradients(evidence: Evidence) -> Check | None:
    first, last, largest = (evidence.figures.get(f"grad_norm_{which}") for which in ("first", "last", "max"))
    if evidence.figures.get("not_finite"):
        return Check("gradient norm", Grade.FAIL, "the loss or the gradient norm was not finite", {})
    if not first or last is None or largest is None:
        return None
    grade = Grade.WARN if largest > GRADIENT_GROWTH * first else Grade.OK
    return Check(
        "gradient norm",
        grade,
        f"{first:.3g} at first, {last:.3g} at last, {largest:.3g} at most",
        {"first": first, "last": last, "max": largest},
    )


def _memory(evidence: Evidence) -> Check | None:
    measurement, predicted = evidence.measurement, evidence.predicted_active_gib
    if predicted is None or predicted <= 0.0 or measurement.memory_kind == "rss":
        return None
    measured = measurement.peak_active_bytes / GIB
    error = measured / predicted - 1.0
    return Check(
        "peak memory",
        _graded(abs(error), MEMORY_WARN, MEMORY_FAIL),
        f"{measured:.1f} GiB active, {100 * error:+.1f} % from the estimate of {predicted:.1f} GiB",
        {"measured_gib": measured, "predicted_gib": predicted, "relative_error": error},
    )


def _jitter(evidence: Evidence) -> Check | None:
    jitter, slow = evidence.figures.get("step_jitter"), evidence.figures.get("slow_steps", 0)
    if jitter is None:
        return None
    grade = _graded(jitter, JITTER_WARN, JITTER_FAIL)
    if slow and grade is Grade.OK:
        grade = Grade.WARN
    steps = evidence.measurement.measured_steps
    return Check(
        "step time",
        grade,
        f"the middle 80 % of steps span {100 * jitter:.1f} % of the median; {slow} of {steps} took over 1.5 medians",
        {"jitter": jitter, "slow_steps": slow, "steps": steps},
    )


def _allocator(evidence: Evidence) -> Check | None:
    if evidence.measurement.memory_kind == "rss":
        return None
    retries = evidence.figures.get("alloc_retries", evidence.measurement.alloc_retries)
    late = evidence.figures.get("late_alloc_retries", 0)
    ooms = evidence.figures.get("ooms", 0)
    grade = Grade.FAIL if late or ooms else Grade.WARN if retries else Grade.OK
    text = f"{retries} retries, {late} of them in the measured steps"
    if retries or ooms:
        text += ": memory is too tight, and speed will vary"
    return Check("allocator", grade, text, {"retries": retries, "late_retries": late, "ooms": ooms})


def _compiler(evidence: Evidence) -> Check | None:
    figures = evidence.figures
    if not evidence.values["compile.enable"] or "late_compilations" not in figures:
        return None
    late, again = int(figures["late_compilations"]), int(figures.get("recompilations", 0))
    grade = Grade.FAIL if again >= RECOMPILE_LIMIT else Grade.WARN if late > 0 else Grade.OK
    text = f"{again} recompilations, {late} graphs compiled after step 1"
    if grade is Grade.FAIL:
        text += f"; Dynamo gives up at {RECOMPILE_LIMIT} for one function"
    numbers = {
        "recompilations": again,
        "late_compilations": late,
        "graph_breaks": figures.get("graph_breaks", 0),
    }
    return Check("compile", grade, text, numbers)


def _float8(evidence: Evidence) -> Check | None:
    modules, others = (
        evidence.figures.get("float8_linear_modules"),
        evidence.figures.get("linear_modules") or 0,
    )
    if FLOAT8 not in evidence.values["model.converters"] or modules is None:
        return None
    numbers = {"float8_linear_modules": modules, "linear_modules": others}
    if modules == 0:
        return Check("float8", Grade.FAIL, "asked for, and no layer became Float8Linear", numbers)
    few = modules < FLOAT8_SHARE * (modules + others)
    text = f"{modules} of {modules + others} linear layers"
    return Check("float8", Grade.WARN if few else Grade.OK, text, numbers)


def _async_tp(evidence: Evidence) -> Check | None:
    fused = evidence.figures.get("fused_collective_matmuls")
    asked = evidence.values["parallelism.enable_async_tensor_parallel"]
    if not asked or evidence.values["parallelism.tensor_parallel_degree"] == 1 or fused is None:
        return None
    if fused == 0:
        return Check(
            "async TP",
            Grade.FAIL,
            "asked for, and no collective was fused with a matmul",
            {"fused_collective_matmuls": 0},
        )
    return Check("async TP", Grade.OK, f"{fused} fused collectives ran", {"fused_collective_matmuls": fused})


def _graded(value: float, warn: float, fail: float) -> Grade:
    return Grade.FAIL if value > fail else Grade.WARN if value > warn else Grade.OK


CHECKS: Final[tuple[Callable[[Evidence], Check | None], ...]] = (
    _loss,
    _gradients,
    _memory,
    _jitter,
    _allocator,
    _compiler,
    _float8,
    _async_tp,
)
