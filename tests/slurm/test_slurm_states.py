"""One probe against a scripted scheduler: orders of events that a real one shows only now and then."""

import json
import time
from dataclasses import replace

import pytest
from slurm_helpers import SHORT, cause_of, spec_in, wait_until

from titan_tune.domain.probe import ProbeStatus
from titan_tune.probe.classify import StopReason
from titan_tune.probe.slurm.jobs import JobEnd, JobRow, Listing, SubmissionError, UnreachableError
from titan_tune.probe.slurm.monitor import Monitor
from titan_tune.probe.slurm.nodes import NodeLedger
from titan_tune.probe.slurm.probe import JobProbe


class ScriptedJobs:
    """``Jobs`` whose answers are attributes."""

    def __init__(self):
        self.submitted, self.cancelled, self.located = [], [], 0
        self.state, self.reason, self.reachable = "PENDING", "Priority", True
        self.name = None
        self.end = {}
        self.refusals = []
        self.found = None

    def submit(self, spec, name, avoid, lane):
        if self.refusals:
            raise self.refusals.pop(0)
        self.submitted.append(name)
        return str(len(self.submitted))

    def locate(self, name):
        self.located += 1
        return self.found

    def listing(self, job_ids):
        if not self.reachable or self.state is None:
            return Listing(reachable=self.reachable)
        row = (self.state, None, 8, 1, "node1", self.reason, self.name or self.submitted[-1])
        return Listing(reachable=True, jobs={job_ids[-1]: JobRow(job_ids[-1], *row)})

    def end_of(self, job_id, name):
        return JobEnd(job_id, **({"state": self.state or "", "exit_code": 0} | self.end))

    def cancel(self, job_id, name):
        if self.reachable:
            self.cancelled.append(job_id)
            self.state = "CANCELLED"
        return self.reachable


@pytest.fixture
def start(tmp_path):
    """Start a probe on scripted jobs."""
    monitors = []

    def begin(jobs, *, patience=SHORT, **settings):
        monitors.append(Monitor(jobs.listing, interval=0.0))
        spec = spec_in(tmp_path / "trial", **settings)
        return JobProbe(spec, jobs, monitors[-1], NodeLedger(), patience, "tt-x")

    yield begin
    for monitor in monitors:
        monitor.close()


def write_steps(probe, steps, *, rank=0):
    lines = [{"kind": "header", "hostname": "node1", "float8_linear_modules": 0}]
    lines += [
        {
            "kind": "step", "step": step, "loss": 8.0, "grad_norm": 1.0, "step_seconds": 0.5 + 0.1 * (step % 2),
            "tokens_per_second": 1.0, "active_bytes": 1, "reserved_bytes": 1, "device_bytes": 1, "alloc_retries": 0,
            "ooms": 0, "time": time.time(),
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (probe.spec.directory / f"metrics.rank{rank}.jsonl").write_text(text)


def polled(probe, times=20):
    for _ in range(times):
        assert probe.poll() is None, probe.outcome
        time.sleep(0.01)


def test_a_listing_older_than_the_ranks_files_is_no_requeue(start):
    jobs = ScriptedJobs()
    probe = start(jobs, retries=1)
    wait_until(lambda: probe.poll() or jobs.submitted)
    polled(probe)
    write_steps(probe, 10)
    polled(probe)
    jobs.state = "COMPLETED"
    outcome = wait_until(probe.poll)
    assert (outcome.status, outcome.attempts, jobs.cancelled) == (ProbeStatus.COMPLETED, 1, [])


def test_a_job_that_waits_again_after_its_ranks_wrote_was_requeued(start):
    jobs = ScriptedJobs()
    probe = start(jobs, patience=replace(SHORT, requeued=0.2))
    wait_until(lambda: probe.poll() or jobs.submitted)
    write_steps(probe, 3)
    outcome = wait_until(probe.poll)
    assert (cause_of(outcome), jobs.cancelled) == ("requeued", ["1"])


def test_a_job_of_another_name_is_not_ours(start):
    """A controller that has lost its state gives the same ids again."""
    jobs = ScriptedJobs()
    jobs.state, jobs.name, jobs.end = "RUNNING", "somebody-elses", {"state": ""}
    probe = start(jobs, patience=replace(SHORT, forgotten=0.3))
    outcome = wait_until(probe.poll)
    assert cause_of(outcome) == "forgotten"
    assert jobs.cancelled == []


def test_an_unknown_job_whose_ranks_write_is_not_forgotten(start):
    jobs = ScriptedJobs()
    jobs.state = None
    probe = start(jobs, patience=replace(SHORT, forgotten=0.5), steps=50)
    wait_until(lambda: probe.poll() or jobs.submitted)
    for steps in range(1, 40):
        write_steps_appending(probe, steps)
        assert probe.poll() is None
        time.sleep(0.03)
    assert cause_of(wait_until(probe.poll)) == "forgotten"


def write_steps_appending(probe, step):
    if step == 1:
        write_steps(probe, 1)
        return
    path = probe.spec.directory / "metrics.rank0.jsonl"
    last = json.loads(path.read_text().splitlines()[-1])
    with path.open("a") as file:
        file.write(json.dumps({**last, "step": step, "step_seconds": 0.3 + step % 7}) + "\n")


def test_a_submission_without_an_answer_is_looked_for_before_it_is_repeated(start):
    jobs = ScriptedJobs()
    jobs.refusals = [UnreachableError("Socket timed out")]
    jobs.found = "77"
    probe = start(jobs)
    wait_until(lambda: probe.poll() or jobs.located)
    wait_until(lambda: probe.poll() or json.loads((probe.spec.directory / "job.json").read_text())["job_id"])
    assert (jobs.submitted, jobs.located) == ([], 1)
    assert json.loads((probe.spec.directory / "job.json").read_text())["job_id"] == "77"


def test_a_full_queue_is_waited_for_and_a_refusal_is_not(start):
    jobs = ScriptedJobs()
    jobs.refusals = [SubmissionError("job submit limit", limited=True)]
    probe = start(jobs)
    wait_until(lambda: probe.poll() or jobs.submitted)
    assert probe.outcome is None
    refused = ScriptedJobs()
    refused.refusals = [SubmissionError("Invalid qos", limited=False)]
    outcome = wait_until(start(refused, retries=3).poll)
    assert (cause_of(outcome), outcome.attempts, refused.submitted) == ("refused", 1, [])


def test_the_controller_is_waited_for_in_vain(start):
    jobs = ScriptedJobs()
    probe = start(jobs, patience=replace(SHORT, unreachable=0.3, cancel=0.2))
    wait_until(lambda: probe.poll() or jobs.submitted)
    jobs.reachable = False
    outcome = wait_until(probe.poll)
    assert (outcome.status, cause_of(outcome)) == (ProbeStatus.INFRASTRUCTURE, "unreachable")
    assert "job 1 may still run" in outcome.warnings[0]


def test_files_that_arrive_after_the_job_has_ended_count(start):
    jobs = ScriptedJobs()
    probe = start(jobs, patience=replace(SHORT, settle=30))
    wait_until(lambda: probe.poll() or jobs.submitted)
    jobs.state = "COMPLETED"
    polled(probe)
    write_steps(probe, 10)
    assert wait_until(probe.poll).status is ProbeStatus.COMPLETED


def test_steps_are_waited_for_in_the_accounting(start):
    jobs = ScriptedJobs()
    jobs.end = {"state": "FAILED", "exit_code": 1, "accounted": False}
    probe = start(jobs, patience=replace(SHORT, accounting=30, settle=0))
    wait_until(lambda: probe.poll() or jobs.submitted)
    jobs.state = "FAILED"
    polled(probe)
    jobs.end |= {"accounted": True, "step_states": ("OUT_OF_MEMORY",)}
    outcome = wait_until(probe.poll)
    assert (outcome.status, cause_of(outcome)) == (ProbeStatus.OOM, "host_oom")


def test_a_probe_that_cannot_win_ends_its_job(start):
    jobs = ScriptedJobs()
    jobs.state = "RUNNING"
    probe = start(jobs, steps=50)
    probe.spec = replace(probe.spec, beat=1e6)
    wait_until(lambda: probe.poll() or jobs.submitted)
    write_steps(probe, 6)
    outcome = wait_until(probe.poll)
    assert (outcome.status, jobs.cancelled) == (ProbeStatus.COMPLETED, ["1"])
    assert outcome.details["cannot_win"]
    assert outcome.measurement.stopped_early


def test_a_measurement_that_is_whole_survives_its_job(start):
    jobs = ScriptedJobs()
    jobs.state = "RUNNING"
    probe = start(jobs, retries=1)
    wait_until(lambda: probe.poll() or jobs.submitted)
    write_steps(probe, 10)
    jobs.state = "NODE_FAIL"
    outcome = wait_until(probe.poll)
    assert (outcome.status, outcome.attempts) == (ProbeStatus.COMPLETED, 1)


def test_a_stop_is_not_undone_by_a_later_one(start):
    jobs = ScriptedJobs()
    probe = start(jobs)
    wait_until(lambda: probe.poll() or jobs.submitted)
    probe.request_stop(StopReason.CANCELLED)
    probe.request_stop(StopReason.HANG)
    assert wait_until(probe.poll).status is ProbeStatus.CANCELLED


def test_cpus_too_few_for_the_ranks_are_told(start):
    jobs = ScriptedJobs()
    jobs.state = "RUNNING"
    probe = start(jobs, nproc=16, device="cuda")
    wait_until(lambda: probe.poll() or jobs.submitted)
    for rank in range(16):
        write_steps(probe, 10, rank=rank)
    wait_until(lambda: probe.poll() or probe.progress().step == 10)
    polled(probe)
    jobs.state = "COMPLETED"
    outcome = wait_until(probe.poll)
    assert outcome.warnings == ("16 ranks share 8 CPUs of a node: set [slurm] cpus_per_task",)
