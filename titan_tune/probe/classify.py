"""From what a probe left behind to what it means: one status, one message, the facts. Pure.

The order of judgement: what the search itself did; numbers that are not finite; the first error of the
first rank that failed (the others' errors are its consequences); deadlines; the exit; what the log says.
A word such as "Error" in the log proves nothing: torchrun and libraries print it on success too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from titan_tune.domain.probe import ProbeSettings, ProbeStatus
from titan_tune.probe import patterns
from titan_tune.probe.statistics import loss_gap, loss_noise
from titan_tune.units import format_gib

NOISE_STANDARD_DEVIATIONS: Final = 2.0
"""How much of the baseline's own noise is allowed on top of ``loss_tolerance``."""

MESSAGE_CHARACTERS: Final = 500


class StopReason(StrEnum):
    """Why the runner ended a probe that would have gone on."""

    CANCELLED = "cancelled"
    EARLY = "early"
    """The interval of the median is tight."""
    CANNOT_WIN = "cannot win"
    """It is slower than what it has to beat."""
    FINISHED = "finished"
    """All steps are done, but the processes did not end."""
    DIVERGED = "diverged"
    STARTUP = "startup"
    HANG = "hang"
    TIMEOUT = "timeout"

    @property
    def is_a_success(self) -> bool:
        """Whether what was measured until then stands."""
        return self in (StopReason.EARLY, StopReason.CANNOT_WIN, StopReason.FINISHED)


class WorkerExit(NamedTuple):
    """How one worker ended, from torchrun's summary; negative for a signal."""

    rank: int
    exitcode: int


class Classification(NamedTuple):
    """What is said of a probe."""

    status: ProbeStatus
    message: str
    details: dict[str, Any]


@dataclass(frozen=True)
class Evidence:
    """All that is known when the last process of a probe is gone."""

    settings: ProbeSettings
    returncode: int | None
    """torchrun's; ``None`` where even its supervisor was killed."""
    complete_steps: int
    """Steps that all ranks finished."""
    losses: tuple[float, ...] = ()
    diverged: bool = False
    """A loss or gradient norm was not finite."""
    errors: tuple[Mapping[str, Any], ...] = ()
    """The ranks' ``error.rank*.json`` records."""
    log_tail: str = ""
    stop: StopReason | None = None
    stop_time: float = float("inf")
    """Unix time of the stop; errors after it are its consequences."""
    baseline_losses: tuple[float, ...] = ()
    host_oom_kills: int = 0
    """Processes that the kernel killed for memory on this machine while the probe ran."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts that every outcome's details carry."""


def classify(evidence: Evidence) -> Classification:
    """The status of a probe, with torchtitan's own message where there is one."""
    found = (
        _cancelled(evidence)
        or _not_finite(evidence)
        or _failed(evidence)
        or _stopped(evidence)
        or _completed(evidence)
        or _dead(evidence)
    )
    return found._replace(details={**evidence.facts, **found.details})


def root_error(
    errors: tuple[Mapping[str, Any], ...], before: float = float("inf")
) -> Mapping[str, Any] | None:
    """The earliest error, but one that only says a peer has gone after one that says why.

    A worker that is killed leaves no record; then the peers' records are all there is.
    """
    early = sorted((e for e in errors if e["time"] <= before), key=lambda e: e["time"])
    own = [error for error in early if not patterns.PEER_IS_GONE.search(error["message"])]
    return next(iter(own or early), None)


def worker_exits(log: str) -> tuple[WorkerExit, ...]:
    """The failed workers that torchrun's summary lists, its "root cause" first."""
    summary, _, root = log.partition("Root Cause (first observed failure)")
    return tuple(
        WorkerExit(int(match["rank"]), int(match["exitcode"]))
        for part in (root, summary)
        for match in patterns.WORKER_EXIT.finditer(part)
    )


def _cancelled(evidence: Evidence) -> Classification | None:
    if evidence.stop is not StopReason.CANCELLED:
        return None
    return Classification(ProbeStatus.CANCELLED, "stopped by the search", {"steps": evidence.complete_steps})


def _not_finite(evidence: Evidence) -> Classification | None:
    if not evidence.diverged:
        return None
    message = f"the loss or the gradient norm is not finite by step {max(1, len(evidence.losses))}"
    return Classification(
        ProbeStatus.DIVERGED, message, {"cause": "not_finite", "steps": len(evidence.losses)}
    )


def _failed(evidence: Evidence) -> Classification | None:
    """A Python exception of a rank decides, unless it only reports a peer that a signal killed."""
    error = root_error(evidence.errors, before=evidence.stop_time)
    if error is None or (evidence.stop is not None and evidence.stop.is_a_success):
        return None
    if patterns.PEER_IS_GONE.search(error["message"]) and any(e.exitcode < 0 for e in _exits(evidence)):
        return None
    details = {
        key: error[key]
        for key in ("type", "phase", "step", "rank", "bytes_asked", "allocated_bytes", "reserved_bytes")
        if error.get(key) is not None
    }
    text = f"{error['type']}: {error['message']}"
    status = patterns.status_of_error(error["type"], error["message"], error["phase"])
    where = f"rank {error['rank']}, {error['phase']}" + (f" of step {error['step']}" if error["step"] else "")
    if status is ProbeStatus.OOM:
        asked = error.get("bytes_asked")
        wanted = f", {format_gib(asked)} more asked for" if asked else ""
        memory = "host" if patterns.HOST_OOM.search(text) else "device"
        return Classification(
            status, f"out of {memory} memory on {where}{wanted}", {**details, "memory": memory}
        )
    what = f"{error['type'].rpartition('.')[2]}: {patterns.first_lines(error['message'])}"
    return Classification(status, f"{what[:MESSAGE_CHARACTERS]} ({where})", details)


def _stopped(evidence: Evidence) -> Classification | None:
    settings, steps = evidence.settings, evidence.complete_steps
    match evidence.stop:
        case StopReason.STARTUP:
            message = f"no step within startup_seconds={settings.startup_seconds:g}"
            return Classification(
                ProbeStatus.TIMEOUT, message, {"deadline": "startup_seconds", "steps": steps}
            )
        case StopReason.TIMEOUT:
            message = f"{steps} of {settings.steps} steps within timeout_seconds={settings.timeout_seconds:g}"
            return Classification(
                ProbeStatus.TIMEOUT, message, {"deadline": "timeout_seconds", "steps": steps}
            )
        case StopReason.HANG:
            message = f"no step for hang_seconds={settings.hang_seconds:g} after step {steps}"
            return Classification(ProbeStatus.HANG, message, {"steps": steps})
    return None


def _completed(evidence: Evidence) -> Classification | None:
    all_steps = evidence.returncode == 0 and evidence.complete_steps >= evidence.settings.steps
    if not all_steps and not (evidence.stop is not None and evidence.stop.is_a_success):
        return None
    steps: dict[str, Any] = {"steps": evidence.complete_steps}
    if excess := _excess_over_baseline(evidence):
        gap, allowed = excess
        message = f"the loss is {gap:+.4f} from the baseline's; {allowed:.4f} is allowed"
        details = {**steps, "cause": "baseline", "loss_gap": gap, "loss_gap_allowed": allowed}
        return Classification(ProbeStatus.DIVERGED, message, details)
    if evidence.stop is StopReason.CANNOT_WIN:
        message = f"{evidence.complete_steps} steps, given up: it cannot win"
        return Classification(ProbeStatus.COMPLETED, message, {**steps, "cannot_win": True})
    return Classification(ProbeStatus.COMPLETED, f"{evidence.complete_steps} steps", steps)


def _excess_over_baseline(evidence: Evidence) -> tuple[float, float] | None:
    """(gap, allowed gap) where the mean of the last losses leaves the baseline's by more than allowed."""
    common = min(len(evidence.losses), len(evidence.baseline_losses))
    if common == 0:
        return None
    gap = loss_gap(evidence.losses, evidence.baseline_losses)
    noise = NOISE_STANDARD_DEVIATIONS * loss_noise(evidence.baseline_losses)
    allowed = evidence.settings.loss_tolerance * abs(evidence.baseline_losses[common - 1]) + noise
    return (gap, allowed) if abs(gap) > allowed else None


def _dead(evidence: Evidence) -> Classification:
    """No exception was recorded and nothing was finished: exit codes and the log are all there is."""
    details: dict[str, Any] = {"returncode": evidence.returncode, "steps": evidence.complete_steps}
    exits = _exits(evidence)
    if exits:
        details |= {"rank": exits[0].rank, "exitcode": exits[0].exitcode}
    if evidence.returncode is None:
        return Classification(ProbeStatus.INFRASTRUCTURE, "the probe's supervisor was killed", details)
    if found := patterns.status_of_log(evidence.log_tail):
        return Classification(found.status, found.line[:MESSAGE_CHARACTERS], details)
    if any(worker.exitcode == -9 for worker in exits):
        return _killed(evidence, details)
    if any(worker.exitcode < 0 for worker in exits):
        signals = ", ".join(f"rank {e.rank} signal {-e.exitcode}" for e in exits if e.exitcode < 0)
        return Classification(ProbeStatus.INFRASTRUCTURE, f"ended by a signal: {signals}", details)
    if evidence.returncode == 0:
        message = f"ended after {evidence.complete_steps} of {evidence.settings.steps} steps without an error"
        return Classification(ProbeStatus.INFRASTRUCTURE, message, details)
    last = patterns.last_exception(evidence.log_tail)
    message = (
        last[:MESSAGE_CHARACTERS]
        if last
        else f"torchrun ended with code {evidence.returncode} and no error record"
    )
    return Classification(ProbeStatus.INFRASTRUCTURE, message, details)


def _killed(evidence: Evidence, details: dict[str, Any]) -> Classification:
    """SIGKILL with no other cause. Host memory is the configuration's doing; any other killer is not.

    The kernel's own count of out-of-memory kills tells the two apart.
    """
    if evidence.host_oom_kills > 0:
        message = "the kernel killed a worker: out of host memory"
        return Classification(ProbeStatus.OOM, message, {**details, "memory": "host"})
    return Classification(ProbeStatus.INFRASTRUCTURE, "a worker was killed from outside (SIGKILL)", details)


def _exits(evidence: Evidence) -> tuple[WorkerExit, ...]:
    return worker_exits(evidence.log_tail)
