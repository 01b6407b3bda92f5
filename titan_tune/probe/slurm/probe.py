"""One probe as a job: submitted, watched through the files of its ranks, ended by its own deadlines.

The trial folder is the truth. Slurm is asked only whether the job lives, so an outage of its controller costs
nothing but the knowledge of that.
"""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field, replace

from titan_tune.domain.probe import ProbeOutcome, ProbeProgress, ProbeSpec, ProbeStatus
from titan_tune.probe import files
from titan_tune.probe.classify import Classification, StopReason
from titan_tune.probe.record import write_outcome, write_whole
from titan_tune.probe.slurm.attempt import Attempt
from titan_tune.probe.slurm.classify import Cause, Verdict, judge, judge_abandoned
from titan_tune.probe.slurm.jobs import (
    PAUSED,
    TERMINAL,
    WAITING,
    JobEnd,
    Jobs,
    SubmissionError,
    UnreachableError,
)
from titan_tune.probe.slurm.monitor import Monitor, Seen
from titan_tune.probe.slurm.nodes import NodeLedger
from titan_tune.probe.slurm.notes import JobNote
from titan_tune.probe.slurm.patience import Patience
from titan_tune.probe.watch import Watch


@dataclass(slots=True)
class JobProbe:
    """One probe in flight; see ``ProbeHandle``. Work is done in ``poll``, which never waits for Slurm."""

    spec: ProbeSpec
    jobs: Jobs
    monitor: Monitor
    ledger: NodeLedger
    patience: Patience
    label: str
    """First part of the jobs' names."""
    lane: int = 0
    """Which compile caches its jobs use; no other probe in flight has the same."""
    found: JobNote | None = None
    """The job that an earlier search submitted, where this continues one."""
    attempts: int = 0
    outcome: ProbeOutcome | None = None
    _attempt: Attempt = field(init=False)
    _avoid: tuple[str, ...] = ()
    _seconds: float = 0.0
    """Run time of the attempts before this one."""
    _warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.spec = replace(self.spec, directory=self.spec.directory.resolve())
        if self.found is not None:
            self._continue(self.found)
            return
        self.spec.directory.mkdir(parents=True, exist_ok=True)
        files.set_aside(self.spec.directory, "earlier")
        self._submit()

    # ---- ProbeHandle

    def poll(self) -> ProbeOutcome | None:
        """The outcome once the job is gone, else ``None``."""
        if self.outcome is None:
            if self._attempt.job_id is None:
                self._await_submission()
            else:
                self._watch(self._attempt.job_id)
        return self.outcome

    def progress(self) -> ProbeProgress:
        """What the probe is doing, as of the last ``poll``; ``seconds`` is run time without the queue."""
        attempt = self._attempt
        if attempt.ending or attempt.ended is not None or self.outcome is not None:
            phase = "stopping"
        elif attempt.watch.steps_seen:
            phase = "step"
        elif attempt.metrics.logs:
            phase = "compiling"
        elif attempt.began is not None:
            phase = "starting"
        else:
            phase = f"queued ({attempt.row.reason})" if attempt.row is not None else "queued"
        return ProbeProgress(
            phase=phase,
            step=attempt.watch.steps_seen,
            steps=self.spec.settings.steps,
            tokens_per_second=attempt.watch.tokens_per_second,
            seconds=self._seconds + attempt.run_seconds(),
        )

    def cancel(self) -> ProbeOutcome:
        """Cancel the job, wait until it is gone, and return the outcome."""
        while (outcome := self.poll()) is None:
            self.request_stop(StopReason.CANCELLED)
            time.sleep(0.05)
        return outcome

    def request_stop(self, reason: StopReason) -> None:
        """Begin to stop, for the first reason given; returns at once."""
        if self.outcome is None:
            self._attempt.ask_to_end(reason)

    # ---- submission

    def _submit(self) -> None:
        self.attempts += 1
        name = f"{self.label}-{uuid.uuid4().hex[:10]}"
        JobNote(name, self.attempts, lane=self.lane).write(self.spec.directory)
        write_whole(self.spec.directory / files.CONFIG, self.spec.toml)
        call = self.monitor.call(self.jobs.submit, self.spec, name, self._avoid, self.lane)
        self._attempt = Attempt(name, Watch(files.Metrics(self.spec.directory)), call)

    def _continue(self, note: JobNote) -> None:
        self.attempts, self.lane = note.attempt, note.lane
        self._attempt = Attempt(note.name, Watch(files.Metrics(self.spec.directory)), None)
        if note.job_id is not None:
            self._submitted(note.job_id)
        else:
            self._attempt.call = self.monitor.call(self.jobs.locate, note.name)

    def _submitted(self, job_id: str) -> None:
        attempt = self._attempt
        attempt.job_id, attempt.call, attempt.unreachable_since = job_id, None, None
        JobNote(attempt.name, self.attempts, job_id, self.lane).write(self.spec.directory)
        self.monitor.watch(job_id)

    def _await_submission(self) -> None:
        attempt, now = self._attempt, time.monotonic()
        if attempt.call is None:
            if attempt.ending:
                self._conclude_unsubmitted(_cancelled("stopped by the search"))
            elif now >= attempt.call_again:
                attempt.call = self.monitor.call(self.jobs.locate, attempt.name)
            return
        if not attempt.call.done():
            return
        call, attempt.call = attempt.call, None
        try:
            job_id = call.result()
        except UnreachableError as error:
            self._not_reached(str(error))
        except OSError as error:
            self._refused(str(error))
        except SubmissionError as error:
            attempt.call_again = now + self.patience.again
            if not error.limited or now - attempt.asked > self.patience.limited:
                self._refused(str(error))
        else:
            if job_id is not None:
                self._submitted(job_id)
            elif self.found is not None and self.attempts == self.found.attempt:
                self._conclude_unsubmitted(_cancelled("the search ended before its job was submitted"))
            elif not attempt.ending:
                attempt.call = self.monitor.call(
                    self.jobs.submit, self.spec, attempt.name, self._avoid, self.lane
                )

    def _not_reached(self, said: str) -> None:
        """Neither yes nor no: the job may exist. It is looked for by its name before it is submitted again."""
        attempt, now = self._attempt, time.monotonic()
        attempt.call_again = now + self.patience.again
        attempt.unreachable_since = attempt.unreachable_since or now
        if attempt.ending:
            self._warnings.append(f"job {attempt.name} may have been submitted; Slurm did not answer: {said}")
        elif now - attempt.unreachable_since > self.patience.unreachable:
            message = f"Slurm's controller did not answer for {self.patience.unreachable:g} s: {said}"
            self._conclude_unsubmitted(_unsubmitted(Cause.UNREACHABLE, message))

    def _refused(self, said: str) -> None:
        self._conclude_unsubmitted(_unsubmitted(Cause.REFUSED, f"the job could not be submitted: {said}"))

    # ---- watching

    def _watch(self, job_id: str) -> None:
        attempt = self._attempt
        attempt.read_metrics(self.spec)
        seen = self.monitor.seen(job_id)
        if attempt.ended is None and seen is not None:
            self._note(seen)
        if attempt.ended is not None:
            self._post_mortem(job_id)
        elif attempt.ending:
            self._pursue_end(job_id)
        else:
            self._decide()

    def _note(self, seen: Seen) -> None:
        """Take in what the controller said last."""
        attempt = self._attempt
        if not seen.reachable:
            attempt.unreachable_since = attempt.unreachable_since or seen.at
            return
        attempt.unreachable_since = None
        if seen.row is None or seen.row.name != attempt.name:
            attempt.unknown_since = attempt.unknown_since or seen.at
            self._look_for_unknown()
            return
        attempt.unknown_since, attempt.row, attempt.listed = None, seen.row, seen.at
        if seen.row.state in TERMINAL:
            attempt.ended = time.monotonic()
        elif seen.row.state not in WAITING and seen.row.state not in PAUSED:
            attempt.ran = True
            attempt.begin(seen.row.start)

    def _look_for_unknown(self) -> None:
        """The controller has no such job: it ended long ago, or it was lost with the controller's state."""
        attempt, now = self._attempt, time.monotonic()
        since = max(attempt.unknown_since or now, attempt.grown)
        if attempt.end_call is None:
            attempt.end_call = self.monitor.call(self.jobs.end_of, attempt.job_id or "", attempt.name)
        elif attempt.end_call.done():
            if attempt.end_call.result().state or now - since > self.patience.forgotten:
                attempt.ended = now
            else:
                attempt.end_call = None

    def _decide(self) -> None:
        """End a job that would go on, where there is a reason to."""
        attempt = self._attempt
        why = attempt.reason_to_stop(self.spec.settings) or attempt.reason_to_abandon(self.patience)
        if why is not None:
            attempt.ask_to_end(why)

    # ---- the end

    def _pursue_end(self, job_id: str) -> None:
        """Cancel until it is heard; give up where the controller stays away."""
        attempt, now = self._attempt, time.monotonic()
        if attempt.cancel_call is not None and not attempt.cancel_call.done():
            return
        if attempt.unknown_since is None and (attempt.cancel_call is None or now >= attempt.cancel_again):
            attempt.cancel_call = self.monitor.call(self.jobs.cancel, job_id, attempt.name)
            attempt.cancel_again = now + self.patience.again
        away = attempt.unreachable_since is not None and now - attempt.end_asked > self.patience.cancel
        if away:
            self._warnings.append(f"job {job_id} may still run: Slurm's controller did not answer scancel")
            self._finish_attempt(JobEnd(job_id))

    def _post_mortem(self, job_id: str) -> None:
        """The job has ended: learn how, wait for its last files, conclude."""
        attempt, patience, now = self._attempt, self.patience, time.monotonic()
        if attempt.end is None:
            if attempt.end_call is None:
                attempt.end_call = self.monitor.call(self.jobs.end_of, job_id, attempt.name)
            if not attempt.end_call.done():
                return
            end, attempt.end_call = attempt.end_call.result(), None
            since_end = now - (attempt.ended or now)
            if end.state and not end.accounted and since_end < patience.accounting:
                return  # its steps are not in the accounting yet
            row = attempt.row
            if not end.state and row is not None and row.state in TERMINAL:
                end = JobEnd(job_id, state=row.state, reason=row.reason)
            attempt.end = end
        if (
            attempt.may_be_unsettled(self.spec, attempt.end)
            and now - (attempt.ended or now) < patience.settle
        ):
            return
        self._finish_attempt(attempt.end)

    def _finish_attempt(self, end: JobEnd) -> None:
        """The job is gone: judge, then submit another one or conclude."""
        attempt, spec = self._attempt, self.spec
        attempt.read_metrics(spec)
        if end.started is not None:
            attempt.begin(end.started)
        if attempt.abandoned is not None:
            verdict = judge_abandoned(attempt.abandoned, end, attempt.evidence(spec))
        else:
            verdict = judge(end, attempt.evidence(spec), hosts=attempt.hosts())
        verdict = self._blame(verdict)
        self.monitor.forget(end.job_id)
        seconds = attempt.run_seconds(end)
        if self._may_retry(verdict) and self.attempts <= spec.settings.retries:
            self._seconds += seconds
            self._avoid = verdict.suspects
            self._warnings.append(f"attempt {self.attempts}: {verdict.classification.message}")
            files.set_aside(spec.directory, "attempt")
            self._submit()
            return
        self._conclude(verdict.classification, seconds)

    def _may_retry(self, verdict: Verdict) -> bool:
        cancelled = self._attempt.stop is StopReason.CANCELLED
        return verdict.cause is not None and verdict.cause.worth_another_attempt and not cancelled

    def _blame(self, verdict: Verdict) -> Verdict:
        """Count failures against nodes; say so where a node is now kept away from."""
        if verdict.cause is None or not verdict.cause.may_be_a_node:
            return verdict
        excluded = self.ledger.blame(verdict.suspects)
        if not excluded:
            return verdict
        self._warnings.append(f"{', '.join(excluded)} failed repeatedly: excluded from now on")
        found = verdict.classification
        message = f"{found.message}; {', '.join(excluded)} is excluded from now on"
        return verdict._replace(classification=found._replace(message=message))

    def _conclude_unsubmitted(self, found: Classification) -> None:
        self._conclude(found, 0.0)

    def _conclude(self, found: Classification, seconds: float) -> None:
        attempt, spec = self._attempt, self.spec
        # Slurm's clock has whole seconds, the ranks' has more
        last_words = [log.steps[-1].time for log in attempt.metrics.logs.values() if log.steps]
        ended = max([(attempt.launched or 0.0) + seconds, *last_words])
        findings = attempt.watch.findings(spec, launched=attempt.launched, ended=ended, stop=attempt.stop)
        outcome = ProbeOutcome(
            status=found.status,
            message=found.message,
            seconds=self._seconds + seconds,
            measurement=findings.measurement,
            details={
                **found.details,
                **findings.details,
                "job_id": attempt.job_id,
                "queue_seconds": attempt.queue_seconds(),
            },
            warnings=(*findings.warnings, *self._too_few_cpus(), *self._warnings),
            attempts=self.attempts,
        )
        write_outcome(spec.directory, outcome)
        self.outcome = outcome

    def _too_few_cpus(self) -> tuple[str, ...]:
        row, ranks = self._attempt.row, self.spec.nproc_per_node
        if row is None or not row.num_nodes or self.spec.device != "cuda":
            return ()
        cpus = row.cpus // row.num_nodes
        if cpus >= ranks:
            return ()
        return (f"{ranks} ranks share {cpus} CPUs of a node: set [slurm] cpus_per_task",)


def _unsubmitted(cause: Cause, message: str) -> Classification:
    return Classification(ProbeStatus.INFRASTRUCTURE, message, {"slurm": {"cause": str(cause)}})


def _cancelled(message: str) -> Classification:
    return Classification(ProbeStatus.CANCELLED, message, {})
