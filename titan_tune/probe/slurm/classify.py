"""From how a job ended and what its ranks wrote to what it means. Pure.

What a rank said of the configuration (out of memory, not finite, a compiler failure) stands, whatever Slurm says of
the job: Slurm only sees that something ended. Beyond that, whatever happened to the job or to its nodes is
infrastructure, which is never held against a configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from typing import Any, Final, NamedTuple

from titan_tune.domain.probe import ProbeStatus
from titan_tune.probe.classify import Classification, Evidence, StopReason, classify
from titan_tune.probe.slurm.jobs import JobEnd
from titan_tune.probe.slurm.script import EXIT_CACHE, EXIT_NO_FOLDER


class Cause(StrEnum):
    """What happened to a job, where it was not the configuration."""

    NODE_FAIL = "node_fail"
    PREEMPTED = "preempted"
    """Ended, or suspended, for another job."""
    REQUEUED = "requeued"
    BOOT_FAIL = "boot_fail"
    LAUNCH_FAILURE = "launch_failure"
    FORGOTTEN = "forgotten"
    """Slurm does not know the job (any more)."""
    UNREACHABLE = "unreachable"
    """The controller has not answered for long, and no rank writes."""
    REFUSED = "refused"
    """``sbatch`` said no."""
    NO_FOLDER = "no_folder"
    CACHE_FOLDER = "cache_folder"
    HOST_OOM = "host_oom"
    TIME_LIMIT = "time_limit"
    STUCK_PENDING = "stuck_pending"
    CANCELLED_OUTSIDE = "cancelled_outside"
    RANK = "rank"
    """A rank reported it: a network, driver or disk error."""

    @property
    def worth_another_attempt(self) -> bool:
        """Whether the same job, submitted again, may fare better."""
        return self not in (
            Cause.REFUSED,
            Cause.STUCK_PENDING,
            Cause.CANCELLED_OUTSIDE,
            Cause.TIME_LIMIT,
            Cause.UNREACHABLE,
            Cause.HOST_OOM,
        )

    @property
    def may_be_a_node(self) -> bool:
        """Whether a bad node would explain it."""
        return self in (
            Cause.NODE_FAIL,
            Cause.BOOT_FAIL,
            Cause.LAUNCH_FAILURE,
            Cause.NO_FOLDER,
            Cause.CACHE_FOLDER,
            Cause.RANK,
        )


class Abandoned(NamedTuple):
    """Why the runner gave a job up, where it is the job's fate and not the probe's."""

    cause: Cause
    message: str


class Verdict(NamedTuple):
    """What is said of one attempt."""

    classification: Classification
    cause: Cause | None
    """``None``: judged by what the ranks did."""
    suspects: tuple[str, ...] = ()
    """Nodes that may be to blame."""


HOPELESS_REASONS: Final = frozenset((
    "PartitionConfig", "PartitionNodeLimit", "PartitionTimeLimit", "PartitionDown", "PartitionInactive",
    "BadConstraints", "DependencyNeverSatisfied", "JobHeldAdmin", "JobHeldUser", "InvalidAccount", "InvalidQOS",
    "AccountNotAllowed", "QOSNotAllowed", "QOSMaxNodePerJobLimit", "QOSMaxCpuPerJobLimit", "QOSMaxGRESPerJob",
    "QOSMaxWallDurationPerJobLimit", "AssocMaxNodePerJobLimit", "AssocMaxCpuPerJobLimit", "AssocMaxGRESPerJob",
    "AssocMaxWallDurationPerJobLimit", "ReservationDeleted", "user_env_retrieval_failed_requeued_held",
    "launch_failed_requeued_held",
))  # fmt: skip
"""``squeue``'s reasons for waiting that no end of another job removes."""

_OWN_VERDICTS: Final = (
    ProbeStatus.COMPLETED,
    ProbeStatus.OOM,
    ProbeStatus.DIVERGED,
    ProbeStatus.COMPILE_FAILURE,
)
"""What is the configuration's own whatever else happened to the job."""

_DEADLINES: Final = (StopReason.HANG, StopReason.STARTUP, StopReason.TIMEOUT)

_LAUNCH_FAILED: Final = re.compile(
    r"Task launch for \S+ failed(?: on node (?P<node>[\w.-]+))?|[Uu]nable to create step|launch failed"
    r"|Unable to confirm allocation|Application launch failed|Error configuring interconnect"
)
_NODE_FAILED: Final = re.compile(r"Node failure on (?P<nodes>[\w.,\[\]-]+)|DUE TO NODE FAILURE")
_NODE_OF_FAILURE: Final = re.compile(r"Node failure on (?P<node>[\w.-]+)")
_HOST_OOM: Final = re.compile(r"oom.kill event|task \d+: Out Of Memory|\bOUT_OF_MEMORY\b")
_EXIT_TEXT: Final = re.compile(r"titan-tune: (?P<text>.+)")
_CACHE_REFUSED: Final = re.compile(r"titan-tune: (?P<text>\S+: cannot use .+ as a folder of this user)")
"""The first node's word: when srun kills the tasks of the others, the job's exit code is that of the signal."""
_SIGNAL_LAUNCH: Final = 53
"""Slurm's exit signal for a script that it could not start, such as for want of the output's folder."""


def judge(end: JobEnd, evidence: Evidence, *, hosts: Mapping[int, str] | None = None) -> Verdict:
    """What an attempt means. ``hosts`` are the nodes of the ranks that said where they are."""
    if evidence.stop in _DEADLINES and (end.state == "NODE_FAIL" or end.bad_nodes):
        # a dead node looks like a hang until Slurm notices it, minutes later
        nodes = tuple(end.bad_nodes)
        message = f"{_which(nodes, end)} failed under job {end.job_id}"
        return _verdict(Cause.NODE_FAIL, message, end, evidence, nodes)
    if evidence.stop is not None:
        return Verdict(classify(evidence), None)
    own = classify(_with_job(end, evidence))
    normal = end.state in ("COMPLETED", "FAILED", "OUT_OF_MEMORY", "")
    if own.status in _OWN_VERDICTS or (own.status is ProbeStatus.UNSUPPORTED and normal):
        return Verdict(own, None)
    found = _of_state(end, evidence)
    if found is not None:
        cause, message, suspects = found
        return _verdict(cause, message, end, evidence, suspects)
    if own.status is ProbeStatus.INFRASTRUCTURE:
        rank = own.details.get("rank")
        host = (hosts or {}).get(rank) if isinstance(rank, int) else None
        details = {**own.details, "slurm": _facts(end, Cause.RANK)}
        where = f" on {host}" if host else ""
        message = f"{own.message}{where} (job {end.job_id})"
        return Verdict(Classification(own.status, message, details), Cause.RANK, (host,) if host else ())
    return Verdict(own, None)


def judge_abandoned(abandoned: Abandoned, end: JobEnd, evidence: Evidence) -> Verdict:
    """What a job means that the runner gave up; a rank's own verdict on the configuration still stands."""
    own = classify(_with_job(end, evidence))
    if own.status in _OWN_VERDICTS:
        return Verdict(own, None)
    return _verdict(abandoned.cause, abandoned.message, end, evidence, ())


def hopeless(reason: str) -> bool:
    """Whether a pending job with this reason will not start by itself."""
    return reason.partition(" ")[0].strip("()") in HOPELESS_REASONS


def _verdict(
    cause: Cause, message: str, end: JobEnd, evidence: Evidence, suspects: tuple[str, ...]
) -> Verdict:
    status = {Cause.HOST_OOM: ProbeStatus.OOM, Cause.TIME_LIMIT: ProbeStatus.TIMEOUT}.get(
        cause, ProbeStatus.INFRASTRUCTURE
    )
    details: dict[str, Any] = {
        **evidence.facts,
        "steps": evidence.complete_steps,
        "slurm": _facts(end, cause),
    }
    if cause is Cause.HOST_OOM:
        details["memory"] = "host"
    if cause is Cause.TIME_LIMIT:
        details["deadline"] = "slurm"
    return Verdict(Classification(status, message, details), cause, suspects)


def _facts(end: JobEnd, cause: Cause) -> dict[str, Any]:
    return {
        "cause": str(cause),
        "job_id": end.job_id,
        "state": end.state,
        "reason": end.reason,
        "nodes": list(end.nodes),
    }


def _of_state(end: JobEnd, evidence: Evidence) -> tuple[Cause, str, tuple[str, ...]] | None:
    """(cause, message, suspects) where the job's state, its exit or Slurm's own lines in the log say it."""
    job, log = f"job {end.job_id}", evidence.log_tail
    everywhere = end.nodes if len(end.nodes) == 1 else ()
    match end.state:
        case "NODE_FAIL":
            nodes = tuple(end.bad_nodes) or _named_in(_NODE_OF_FAILURE, log) or everywhere
            which = _which(nodes, end)
            return Cause.NODE_FAIL, f"{which} failed under {job}", nodes
        case "BOOT_FAIL":
            nodes = tuple(end.bad_nodes) or everywhere
            return Cause.BOOT_FAIL, f"{_which(nodes, end)} did not boot for {job}", nodes
        case "PREEMPTED":
            return Cause.PREEMPTED, f"{job} was preempted", ()
        case "REVOKED":
            return Cause.REQUEUED, f"{job} was revoked", ()
        case "TIMEOUT" | "DEADLINE":
            done = f"after {evidence.complete_steps} of {evidence.settings.steps} steps"
            return Cause.TIME_LIMIT, f"the time limit of {job} ended it {done}", ()
        case "OUT_OF_MEMORY":
            return Cause.HOST_OOM, _oom_message(end), ()
        case "CANCELLED":
            who = f"by user id {end.cancelled_by}" if end.cancelled_by else "by somebody else"
            return Cause.CANCELLED_OUTSIDE, f"{job} was cancelled {who}, not by this search", ()
        case "":
            return Cause.FORGOTTEN, f"Slurm does not know {job} any more", ()
    return _of_failed_job(end, log, job, everywhere)


def _of_failed_job(
    end: JobEnd, log: str, job: str, everywhere: tuple[str, ...]
) -> tuple[Cause, str, tuple[str, ...]] | None:
    if "OUT_OF_MEMORY" in end.step_states or _HOST_OOM.search(log):
        return Cause.HOST_OOM, _oom_message(end), ()
    refused = _CACHE_REFUSED.search(log)
    if refused or end.exit_code in (EXIT_NO_FOLDER, EXIT_CACHE):
        said = refused or _EXIT_TEXT.search(log)
        cause = Cause.NO_FOLDER if end.exit_code == EXIT_NO_FOLDER else Cause.CACHE_FOLDER
        host = (end.batch_host,) if end.batch_host and cause is Cause.NO_FOLDER else everywhere
        text = said["text"] if said else f"exit code {end.exit_code}"
        return cause, f"{text} ({job})", host
    if end.reason == "JobLaunchFailure" or end.exit_signal == _SIGNAL_LAUNCH:
        where = end.batch_host or ", ".join(end.nodes) or "its node"
        return (
            Cause.LAUNCH_FAILURE,
            f"Slurm could not start {job} on {where}: does the trial folder exist there?",
            (end.batch_host,) if end.batch_host else everywhere,
        )
    if _NODE_FAILED.search(log):
        nodes = _named_in(_NODE_OF_FAILURE, log) or tuple(end.bad_nodes)
        return Cause.NODE_FAIL, f"{_which(nodes, end)} failed under {job}", nodes
    if found := _LAUNCH_FAILED.search(log):
        nodes = (found["node"],) if found["node"] else tuple(end.bad_nodes) or everywhere
        return Cause.LAUNCH_FAILURE, f"srun could not start on {_which(nodes, end)} of {job}", nodes
    return None


def _oom_message(end: JobEnd) -> str:
    return f"out of host memory: Slurm's limit ended job {end.job_id}"


def _which(nodes: tuple[str, ...], end: JobEnd) -> str:
    if nodes:
        because = next((f" ({end.bad_nodes[node]})" for node in nodes if node in end.bad_nodes), "")
        return f"node {', '.join(nodes)}{because}"
    return f"one of the nodes {', '.join(end.nodes)}" if end.nodes else "a node"


def _named_in(pattern: re.Pattern[str], log: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(match["node"] for match in pattern.finditer(log)))


def _with_job(end: JobEnd, evidence: Evidence) -> Evidence:
    """The evidence with what the job adds: torchrun's code, and that the steps that were asked for are done."""
    code = 0 if end.state == "COMPLETED" else end.exit_code
    if end.exit_signal and not code:
        code = -end.exit_signal
    done = evidence.complete_steps >= evidence.settings.steps
    return replace(
        evidence,
        returncode=code,
        # the measurement is whole: what became of the job afterwards does not matter
        stop=StopReason.FINISHED if done else None,
    )
