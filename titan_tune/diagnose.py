"""What a torchtitan log says went wrong, or silently did not happen, with the fix. Pure.

One cause: the first rank that failed for a reason of its own. What other ranks say after it (lost connections,
timeouts, torchrun's summary) is the consequence, and is told only where nothing else is known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Final

from titan_tune.probe.statistics import loss_noise
from titan_tune.titan.logs import Milestone, ParsedLog, StepLine
from titan_tune.titan.signs.causes import failure_cause
from titan_tune.titan.signs.facts import MIN_MEASURED_LINES, RunFacts, reported_steps, run_facts
from titan_tune.titan.signs.finding import Diagnosis, Severity
from titan_tune.titan.signs.traps import TRAP_CHECKS

__all__ = ["Diagnosis", "RunFacts", "Severity", "diagnose", "run_facts"]

_ORDER: Final = {Severity.ERROR: 0, Severity.WARNING: 1, Severity.NOTE: 2}

JITTER: Final = 0.10
"""Spread of tokens/s over the median from which a note is due: ten times the interval a probe aims at."""
NEAR_CAPACITY_PERCENT: Final = 95.0
"""Reserved memory from which the allocator, not the model, decides the figure."""
MIN_LINES_FOR_TREND: Final = 12
MIN_LINES_FOR_JITTER: Final = 5
INIT_TIMEOUT_SECONDS: Final = 300
"""torchtitan's default of ``comm.init_timeout_seconds``; step 1 runs under it."""


def diagnose(log: ParsedLog) -> tuple[Diagnosis, ...]:
    """Every finding, most serious first; the cause of a failure is the first of all."""
    if not log.is_titan and not log.errors and not log.failed_workers:
        return (_not_titan(log),)
    facts = run_facts(log)
    cause = failure_cause(log, facts)
    found = [] if cause is None else [cause]
    found += loss_findings(log)
    for check in TRAP_CHECKS:
        found += check(log)
    found += throughput_findings(log, facts)
    if cause is None:
        found += _incomplete(log, facts)
    once = {finding.rule: finding for finding in reversed(found)}  # what says it first says it best
    ordered = sorted(once.values(), key=lambda finding: (_ORDER[finding.severity], found.index(finding)))
    return tuple(ordered)


def _not_titan(log: ParsedLog) -> Diagnosis:
    return Diagnosis(
        "no-torchtitan-output",
        Severity.WARNING,
        f"none of the {log.num_lines} lines is torchtitan's: the log is another program's, or the run died before it",
        "give the file that has torchrun's output (stdout and stderr)",
        log.lines[0] if log.lines else None,
    )


# --- what the steps say --------------------------------------------------------------------------


def loss_findings(log: ParsedLog) -> list[Diagnosis]:
    """A loss or gradient norm that is not finite, or a loss that does not fall."""
    steps = [step for step in reported_steps(log) if step.has_loss]
    broken = next((s for s in steps if not math.isfinite(s.loss) or not math.isfinite(s.grad_norm)), None)
    if broken is not None:
        return [_diverged(broken, log)]
    trend = _loss_trend(steps)
    found = [] if trend is None else [trend]
    if len(steps) >= MIN_MEASURED_LINES and all(step.grad_norm == 0.0 for step in steps):
        message = "grad_norm is 0 in every step: optimizer.early_step_in_backward leaves nothing to clip"
        fix = "set optimizer.early_step_in_backward = false where clipping matters"
        found.append(Diagnosis("early-step-clipping", Severity.WARNING, message, fix, steps[0].line))
    return found


def _diverged(step: StepLine, log: ParsedLog) -> Diagnosis:
    what = "the loss" if not math.isfinite(step.loss) else "grad_norm"
    fix = "lower optimizer.lr or raise lr_scheduler.warmup_steps; look for bad data"
    if log.first(Milestone.FLOAT8) is not None:
        fix = f"float8 is on: compare with a bf16 run first; then {fix}"
    return Diagnosis(
        "diverged", Severity.ERROR, f"{what} is not finite from step {step.step} on", fix, step.line
    )


def _loss_trend(steps: Sequence[StepLine]) -> Diagnosis | None:
    """First against last third of the lines, beside the noise of one line."""
    losses = [step.loss for step in steps]
    if len(losses) < MIN_LINES_FOR_TREND:
        return None
    third = len(losses) // 3
    rise = fmean(losses[-third:]) - fmean(losses[:third])
    noise = loss_noise(losses)
    if rise > 3 * noise * math.sqrt(2 / third):  # three standard errors of the difference of two means
        message = f"the loss rises: by {rise:.3g} from the first third of the lines to the last"
        fix = "lower optimizer.lr, or raise lr_scheduler.warmup_steps"
        return Diagnosis("loss-rising", Severity.WARNING, message, fix, steps[-1].line)
    if steps[0].step == 1 and rise > -noise:
        message = f"the loss does not fall: {losses[0]:.4g} at step 1, {losses[-1]:.4g} at the end"
        fix = "check optimizer.lr, the data and the labels"
        return Diagnosis("loss-not-falling", Severity.WARNING, message, fix, steps[-1].line)
    return None


def throughput_findings(log: ParsedLog, facts: RunFacts) -> list[Diagnosis]:
    """Why the tokens/s should not be trusted: memory pressure, jitter."""
    found = []
    if facts.alloc_retries or facts.ooms:
        what = (
            f"retried {facts.alloc_retries} times" if facts.alloc_retries else f"ran out {facts.ooms} times"
        )
        message = f"the allocator {what}: memory is full, and tokens/s suffer from it"
        fix = (
            "lower training.local_batch_size or checkpoint more; PYTORCH_ALLOC_CONF=expandable_segments:True"
        )
        line = log.find(r"memory allocation retries|OOM errors thrown")
        found.append(Diagnosis("allocation-retries", Severity.WARNING, message, fix, line))
    elif (facts.peak_reserved_percent or 0.0) >= NEAR_CAPACITY_PERCENT:
        step = max(log.steps, key=lambda s: s.memory_percent)
        message = f"{step.memory_percent:g}% of the GPU is reserved: the allocator decides this figure"
        fix = "leave a few GiB free"
        found.append(Diagnosis("memory-at-capacity", Severity.NOTE, message, fix, step.line))
    if (facts.spread or 0.0) > JITTER and facts.measured_lines >= MIN_LINES_FOR_JITTER:
        message = f"tokens/s vary by {facts.spread:.0%} of their median over {facts.measured_lines} lines"
        fix = "measure longer; look for data loading, other users of the machine, garbage collection"
        found.append(Diagnosis("throughput-jitter", Severity.NOTE, message, fix))
    return found + _memory_growth(log) + _slow_first_step(log)


def _slow_first_step(log: ParsedLog) -> list[Diagnosis]:
    """A first step that used most of the time it has before collectives are aborted."""
    start = log.first(Milestone.TRAINING_STARTS)
    first = min((s.line.time for s in log.steps if s.line.time is not None), default=None)
    if start is None or start.time is None or first is None:
        return []
    limit = log.config.get("comm.init_timeout_seconds", INIT_TIMEOUT_SECONDS)
    seconds = (first - start.time).total_seconds()
    if not isinstance(limit, int) or seconds < limit / 2:
        return []
    message = f"the first step took {seconds:.0f} of the {limit} s after which it would have been aborted"
    fix = "raise comm.init_timeout_seconds: a cold compile cache takes longer"
    return [Diagnosis("init-timeout", Severity.NOTE, message, fix, start)]


def _memory_growth(log: ParsedLog) -> list[Diagnosis]:
    """Reserved memory that is larger in the last lines than in any of the first third."""
    steps = [step for step in reported_steps(log) if step.step > 2]  # Adam's state exists from step 2 on
    if len(steps) < MIN_LINES_FOR_TREND or log.first(Milestone.CAPACITY, "CPU capacity") is not None:
        return []
    third = len(steps) // 3
    early, late = max(s.memory_gib for s in steps[:third]), max(s.memory_gib for s in steps[-third:])
    if late <= early * 1.05:
        return []
    message = f"memory still grows: {early:g} GiB in the first third of the lines, {late:g} GiB in the last"
    return [
        Diagnosis(
            "memory-growing",
            Severity.NOTE,
            message,
            "do not judge the fit by the first steps",
            steps[-1].line,
        )
    ]


def _incomplete(log: ParsedLog, facts: RunFacts) -> list[Diagnosis]:
    """A log that ends in the middle without a reason."""
    done = facts.total_steps is not None and facts.last_step == facts.total_steps
    if facts.completed or done or log.first(Milestone.PROCESS_GROUP_DESTROYED) is not None:
        return []
    times = [line.time for line in (*log.lines, *(s.line for s in log.steps)) if line.time is not None]
    where = f"at step {facts.last_step}" if facts.last_step is not None else "before the first step"
    of = f" of {facts.total_steps}" if facts.total_steps is not None and facts.last_step is not None else ""
    at = f" (last line {max(times):%Y-%m-%d %H:%M:%S})" if times else ""
    return [
        Diagnosis(
            "incomplete",
            Severity.WARNING,
            f"the log ends {where}{of} without a reason{at}: the run is still going, hangs, or was killed",
            "if it no longer runs, see who ended it (dmesg, scancel, sacct); if it hangs, py-spy dump shows where",
            log.lines[-1] if log.lines else None,
        )
    ]
