"""One submission of a probe: what is known of its job, and what its ranks have written so far."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from titan_tune.domain.probe import ProbeSettings, ProbeSpec
from titan_tune.probe import files
from titan_tune.probe.classify import Evidence, StopReason
from titan_tune.probe.slurm.classify import Abandoned, Cause, hopeless
from titan_tune.probe.slurm.jobs import PAUSED, WAITING, JobEnd, JobRow
from titan_tune.probe.slurm.patience import Patience
from titan_tune.probe.watch import Watch


@dataclass(slots=True)
class Attempt:
    """Times are monotonic unless they are said to be Unix times; ``None`` is not yet."""

    name: str
    """The job's."""
    watch: Watch
    call: Future[str] | Future[str | None] | None
    """The submission, or the search for a job by its name."""
    asked: float = field(default_factory=time.monotonic)
    """First try to submit."""
    call_again: float = 0.0
    job_id: str | None = None
    row: JobRow | None = None
    """What the controller last listed."""
    listed: float = 0.0
    """When it was asked for that."""
    launched: float | None = None
    """Unix time at which it began to run."""
    began: float | None = None
    """The same, for deadlines."""
    ran: bool = False
    """Whether Slurm itself said that it runs; ranks may write before it is asked again."""
    grown: float = float("-inf")
    """When a rank last wrote."""
    stop: StopReason | None = None
    abandoned: Abandoned | None = None
    end_asked: float = 0.0
    """When its end was first asked for."""
    stop_time: float = float("inf")
    """The same, Unix time."""
    unreachable_since: float | None = None
    unknown_since: float | None = None
    cancel_call: Future[bool] | None = None
    cancel_again: float = 0.0
    end_call: Future[JobEnd] | None = None
    end: JobEnd | None = None
    ended: float | None = None
    """When the job was first known to have ended."""

    @property
    def metrics(self) -> files.Metrics:
        """What the ranks wrote."""
        return self.watch.metrics

    @property
    def ending(self) -> bool:
        """Whether the runner has asked for its end."""
        return self.stop is not None or self.abandoned is not None

    def ask_to_end(self, why: StopReason | Abandoned) -> None:
        """Note why it is to end; the first reason counts."""
        if self.ending:
            return
        if isinstance(why, Abandoned):
            self.abandoned = why
        else:
            self.stop = why
        self.end_asked, self.stop_time = time.monotonic(), time.time()

    def begin(self, start: float | None) -> None:
        """The job runs, since Unix time ``start`` where that is known."""
        now = time.time()
        if self.began is None or start is not None:
            self.launched = now if start is None else min(now, start)
            self.began = time.monotonic() - (now - self.launched)

    def read_metrics(self, spec: ProbeSpec) -> None:
        """Take in what the ranks have written since the last call."""
        if self.watch.read_new(spec):
            self.grown = time.monotonic()
            self.begin(None)

    def reason_to_stop(self, settings: ProbeSettings) -> StopReason | None:
        """Why the probe should end, by what its ranks did or did not do."""
        if self.began is None:
            return None
        # a job that ends by itself is cleaner than one that is cancelled: no hurry
        return self.watch.reason_to_stop(settings, began=self.began, all_ended=False)

    def reason_to_abandon(self, patience: Patience) -> Abandoned | None:
        """Why the job should be given up, by what Slurm says of it."""
        now, row = time.monotonic(), self.row
        if self.unreachable_since is not None:
            silent = now - max(self.unreachable_since, self.grown)
            if silent > patience.unreachable:
                return Abandoned(Cause.UNREACHABLE, f"Slurm's controller did not answer for {silent:.0f} s")
            return None
        if row is None or self.unknown_since is not None:
            return None
        if row.state in PAUSED:
            return Abandoned(Cause.PREEMPTED, f"job {row.job_id} was suspended")
        if row.state not in WAITING:
            return None
        if self.ran or (self.metrics.logs and self.listed - self.grown > patience.requeued):
            return Abandoned(Cause.REQUEUED, f"job {row.job_id} was requeued ({row.reason})")
        limit = min(patience.hopeless, patience.pending) if hopeless(row.reason) else patience.pending
        waited = now - self.asked
        if waited > limit:
            said = f"job {row.job_id} still waits after {waited:.0f} s: {row.reason}"
            return Abandoned(Cause.STUCK_PENDING, said)
        return None

    def may_be_unsettled(self, spec: ProbeSpec, end: JobEnd) -> bool:
        """Whether files of the ranks may be on their way: a network file system shows them late."""
        if self.ending or end.state not in ("COMPLETED", "FAILED", "OUT_OF_MEMORY"):
            return False
        done = self.watch.steps_seen >= spec.settings.steps or self.metrics.has_diverged()
        return not done and not files.read_errors(spec.directory)

    def evidence(self, spec: ProbeSpec) -> Evidence:
        """All that the ranks left."""
        return self.watch.evidence(spec, stop=self.stop, stop_time=self.stop_time)

    def hosts(self) -> dict[int, str]:
        """The nodes of the ranks that came to training."""
        logs: dict[int, Any] = {rank: log.header.get("hostname") for rank, log in self.metrics.logs.items()}
        return {rank: host for rank, host in logs.items() if host}

    def run_seconds(self, end: JobEnd | None = None) -> float:
        """For how long it has run, without the queue: by Slurm's clock where it has ended."""
        if end is not None and end.started is not None and end.ended is not None:
            return max(0.0, end.ended - end.started)
        if self.began is None:
            return 0.0
        return (self.ended or time.monotonic()) - self.began

    def queue_seconds(self) -> float:
        """For how long it has waited."""
        return max(0.0, (time.monotonic() if self.began is None else self.began) - self.asked)
