"""What becomes of a job, by its state, its exit, its log and what its ranks wrote. No Slurm is needed."""

import pytest

from titan_tune.domain.probe import ProbeSettings, ProbeStatus
from titan_tune.probe.classify import Evidence, StopReason
from titan_tune.probe.slurm.classify import Abandoned, Cause, hopeless, judge, judge_abandoned
from titan_tune.probe.slurm.jobs import JobEnd
from titan_tune.probe.slurm.script import EXIT_CACHE, EXIT_NO_FOLDER

SETTINGS = ProbeSettings(steps=10, warmup_steps=2)
OOM = {
    "time": 5.0, "rank": 1, "type": "torch.OutOfMemoryError", "message": "CUDA out of memory.", "phase": "forward",
    "step": 3, "bytes_asked": None,
}  # fmt: skip
PEER = {**OOM, "type": "builtins.RuntimeError", "message": "Connection closed by peer [127.0.1.2]:4"}
UNSUPPORTED = {
    **OOM,
    "type": "builtins.ValueError",
    "message": "dim must be divisible",
    "phase": "init",
    "step": 0,
}
OF_THE_CONFIGURATION = (ProbeStatus.OOM, ProbeStatus.DIVERGED, ProbeStatus.COMPILE_FAILURE)


def end(state, **more):
    return JobEnd("7", state=state, **{"nodes": ("node1", "node2"), "batch_host": "node1", **more})


def evidence(**changes):
    return Evidence(**{"settings": SETTINGS, "returncode": None, "complete_steps": 3, **changes})


@pytest.mark.parametrize(
    ("job", "log", "cause", "suspects", "says"),
    [
        (end("NODE_FAIL", bad_nodes={"node2": "down: lost power"}), "", Cause.NODE_FAIL, ("node2",), "lost power"),
        (end("NODE_FAIL"), "srun: error: Node failure on node2\n", Cause.NODE_FAIL, ("node2",), "node node2 failed"),
        (end("NODE_FAIL"), "", Cause.NODE_FAIL, (), "one of the nodes node1, node2 failed"),
        (end("NODE_FAIL", nodes=("node1",)), "", Cause.NODE_FAIL, ("node1",), "node node1 failed"),
        (end("BOOT_FAIL", nodes=("node1",)), "", Cause.BOOT_FAIL, ("node1",), "did not boot"),
        (end("PREEMPTED"), "", Cause.PREEMPTED, (), "preempted"),
        (end("REVOKED"), "", Cause.REQUEUED, (), "revoked"),
        (end("CANCELLED"), "", Cause.CANCELLED_OUTSIDE, (), "by somebody else"),
        (end("CANCELLED", cancelled_by="1001"), "", Cause.CANCELLED_OUTSIDE, (), "by user id 1001"),
        (end("TIMEOUT"), "", Cause.TIME_LIMIT, (), "after 3 of 10 steps"),
        (end("DEADLINE"), "", Cause.TIME_LIMIT, (), "time limit"),
        (end("OUT_OF_MEMORY"), "", Cause.HOST_OOM, (), "host memory"),
        (end("FAILED", exit_code=1, step_states=("FAILED", "OUT_OF_MEMORY")), "", Cause.HOST_OOM, (), "host memory"),
        (end("FAILED", exit_code=1), "error: Detected 1 oom-kill event(s) in StepId=7.0", Cause.HOST_OOM, (), "memory"),
        (end("FAILED", exit_code=1), "srun: error: node1: task 0: Out Of Memory", Cause.HOST_OOM, (), "host memory"),
        (end("FAILED", reason="JobLaunchFailure"), "", Cause.LAUNCH_FAILURE, ("node1",), "could not start job 7 on"),
        (end("FAILED", exit_code=0, exit_signal=53), "", Cause.LAUNCH_FAILURE, ("node1",), "trial folder"),
        (end("FAILED", exit_code=1), "srun: error: Task launch for StepId=7.0 failed on node node2: Communication",
         Cause.LAUNCH_FAILURE, ("node2",), "node node2"),
        (end("FAILED", exit_code=1), "srun: error: Node failure on node2", Cause.NODE_FAIL, ("node2",), "node2 failed"),
        (end("FAILED", exit_code=EXIT_NO_FOLDER), "titan-tune: node1 has no folder /a b", Cause.NO_FOLDER, ("node1",),
         "node1 has no folder /a b (job 7)"),
        (end("FAILED", exit_code=EXIT_CACHE), "titan-tune: node2: cannot use /tmp/x", Cause.CACHE_FOLDER, (), "/tmp/x"),
        # the other node's task was killed first: 128 + SIGTERM is the higher code
        (end("FAILED", exit_code=143), "titan-tune: node2: cannot use /tmp/x as a folder of this user",
         Cause.CACHE_FOLDER, (), "/tmp/x"),
        (JobEnd("7"), "", Cause.FORGOTTEN, (), "does not know job 7"),
        (end("FAILED", exit_code=1), "NCCL WARN system error", Cause.RANK, (), "NCCL"),
        (end("FAILED", exit_code=137), "", Cause.RANK, (), "code 137"),
    ],
)  # fmt: skip
def test_what_happened_to_the_job(job, log, cause, suspects, says):
    verdict = judge(job, evidence(log_tail=log))
    assert (verdict.cause, verdict.suspects) == (cause, suspects)
    assert says in verdict.classification.message
    expected = {Cause.HOST_OOM: ProbeStatus.OOM, Cause.TIME_LIMIT: ProbeStatus.TIMEOUT}
    assert verdict.classification.status is expected.get(cause, ProbeStatus.INFRASTRUCTURE)
    assert verdict.classification.details["slurm"]["cause"] == cause
    assert verdict.classification.details["slurm"]["job_id"] == "7"


@pytest.mark.parametrize(
    "state", ["FAILED", "NODE_FAIL", "PREEMPTED", "TIMEOUT", "CANCELLED", "OUT_OF_MEMORY", ""]
)
def test_what_a_rank_said_of_the_configuration_stands(state):
    job = end(state, exit_code=1)
    assert judge(job, evidence(errors=(OOM, PEER))).classification.status is ProbeStatus.OOM
    assert judge(job, evidence(diverged=True)).classification.status is ProbeStatus.DIVERGED
    whole = judge(job, evidence(complete_steps=10, losses=(8.0,) * 10))
    assert (whole.classification.status, whole.cause) == (ProbeStatus.COMPLETED, None)


def test_an_error_that_a_dead_node_may_have_caused_is_not_the_configurations():
    assert judge(end("FAILED", exit_code=1), evidence(errors=(UNSUPPORTED,))).classification.status is (
        ProbeStatus.UNSUPPORTED
    )
    for state in ("NODE_FAIL", "PREEMPTED", "CANCELLED"):
        verdict = judge(end(state), evidence(errors=(UNSUPPORTED,)))
        assert verdict.classification.status is ProbeStatus.INFRASTRUCTURE
    assert judge(end("NODE_FAIL"), evidence(errors=(PEER,))).cause is Cause.NODE_FAIL


def test_a_dead_node_is_no_hang():
    hang = evidence(stop=StopReason.HANG, stop_time=9.0)
    assert judge(end("CANCELLED"), hang).classification.status is ProbeStatus.HANG
    for job in (end("NODE_FAIL"), end("CANCELLED", bad_nodes={"node2": "allocated*: Not responding"})):
        verdict = judge(job, hang)
        assert (verdict.classification.status, verdict.cause) == (ProbeStatus.INFRASTRUCTURE, Cause.NODE_FAIL)
        assert verdict.cause.worth_another_attempt


@pytest.mark.parametrize(
    ("stop", "status"),
    [
        (StopReason.CANCELLED, ProbeStatus.CANCELLED),
        (StopReason.EARLY, ProbeStatus.COMPLETED),
        (StopReason.FINISHED, ProbeStatus.COMPLETED),
        (StopReason.STARTUP, ProbeStatus.TIMEOUT),
        (StopReason.TIMEOUT, ProbeStatus.TIMEOUT),
    ],
)
def test_what_the_search_ended_is_not_slurms_doing(stop, status):
    verdict = judge(
        end("CANCELLED", cancelled_by="0"), evidence(stop=stop, complete_steps=8, losses=(8.0,) * 8)
    )
    assert (verdict.classification.status, verdict.cause) == (status, None)


def test_a_network_error_is_laid_at_its_ranks_node():
    error = {
        **OOM,
        "type": "torch.distributed.DistBackendError",
        "message": "NCCL error in: x, ncclSystemError",
    }
    verdict = judge(end("FAILED", exit_code=1), evidence(errors=(error,)), hosts={0: "node1", 1: "node2"})
    assert (verdict.cause, verdict.suspects) == (Cause.RANK, ("node2",))
    assert "on node2 (job 7)" in verdict.classification.message


def test_an_abandoned_job_is_told_by_why_it_was_given_up():
    given_up = Abandoned(Cause.STUCK_PENDING, "job 7 still waits after 60 s: PartitionConfig")
    verdict = judge_abandoned(given_up, end("CANCELLED"), evidence(complete_steps=0))
    assert verdict.classification.status is ProbeStatus.INFRASTRUCTURE
    assert verdict.classification.message == given_up.message
    assert not verdict.cause.worth_another_attempt
    requeued = judge_abandoned(Abandoned(Cause.REQUEUED, "x"), JobEnd("7"), evidence(errors=(OOM,)))
    assert requeued.classification.status is ProbeStatus.OOM


def test_only_jobs_and_nodes_are_tried_again():
    again = {cause for cause in Cause if cause.worth_another_attempt}
    assert again == {
        Cause.NODE_FAIL, Cause.PREEMPTED, Cause.REQUEUED, Cause.BOOT_FAIL, Cause.LAUNCH_FAILURE, Cause.FORGOTTEN,
        Cause.NO_FOLDER, Cause.CACHE_FOLDER, Cause.RANK,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reason", "expected"),
    [("PartitionConfig", True), ("(BadConstraints)", True), ("Resources", False), ("Priority", False),
     ("QOSMaxNodePerJobLimit", True), ("ReqNodeNotAvail, UnavailableNodes:node2", False), ("None", False)],
)  # fmt: skip
def test_reasons_that_do_not_go_away(reason, expected):
    assert hopeless(reason) is expected
