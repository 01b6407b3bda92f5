import json
from pathlib import Path

import pytest

from titan_tune.domain.probe import ProbeSettings, ProbeStatus
from titan_tune.probe.classify import Evidence, StopReason, WorkerExit, classify, root_error, worker_exits
from titan_tune.probe.patterns import status_of_error, status_of_log

LOGS = Path(__file__).parents[1] / "logs" / "probe"
SETTINGS = ProbeSettings(steps=10, warmup_steps=2)


def evidence(**fields):
    defaults = {"settings": SETTINGS, "returncode": 1, "complete_steps": 0}
    return Evidence(**{**defaults, **fields})


def from_log(name, **fields):
    """A real run of torchtitan 0.2.2 on torch 2.13 (CPU, gloo) that ended as ``name`` says."""
    record = json.loads((LOGS / f"{name}.json").read_text())
    log = (LOGS / f"{name}.log").read_text()
    return evidence(returncode=record["returncode"], errors=tuple(record["errors"]), log_tail=log, **fields)


def error(message="bad", kind="builtins.ValueError", *, time=1.0, rank=0, phase="init", step=0, **more):
    return {
        "type": kind,
        "message": message,
        "time": time,
        "rank": rank,
        "phase": phase,
        "step": step,
        **more,
    }


@pytest.mark.parametrize(
    ("name", "status", "says"),
    [
        ("wrong_degrees", ProbeStatus.UNSUPPORTED, "AssertionError: assert dp_shard >= 1"),
        ("float8_key_error", ProbeStatus.UNSUPPORTED, "KeyError: 'float8'"),
        ("unknown_key", ProbeStatus.UNSUPPORTED, "Invalid field names"),
        ("tp_kv_heads", ProbeStatus.UNSUPPORTED, "shape '[2, 128, -1, 16]' is invalid"),
        ("tp_kv_heads_compiled", ProbeStatus.COMPILE_FAILURE, "making fake tensor call"),
        ("zero_bubble_op_ac", ProbeStatus.UNSUPPORTED, "Trying to backward an extra time"),
        ("host_oom_killed", ProbeStatus.INFRASTRUCTURE, "killed from outside"),
        ("worker_killed", ProbeStatus.INFRASTRUCTURE, "killed from outside"),
        ("gloo_timeout", ProbeStatus.HANG, "Timed out waiting 5000ms"),
    ],
)
def test_real_failures(name, status, says):
    found = classify(from_log(name))
    assert (found.status, says in found.message) == (status, True), found


@pytest.mark.parametrize("name", ["completed", "pipeline_completed"])
def test_real_successes_whatever_their_logs_say(name):
    assert "Error" in (LOGS / f"{name}.log").read_text()  # "Error running lspci"
    assert classify(from_log(name, complete_steps=10)).status is ProbeStatus.COMPLETED


def test_a_kill_is_the_configurations_memory_only_if_the_kernel_says_so():
    found = classify(from_log("host_oom_killed", host_oom_kills=1))
    assert found.status is ProbeStatus.OOM
    assert found.details["memory"] == "host"


def test_workers_exits_come_from_torchruns_summary():
    assert worker_exits((LOGS / "worker_killed.log").read_text())[0] == WorkerExit(1, -9)
    assert worker_exits((LOGS / "completed.log").read_text()) == ()


def test_the_earliest_error_is_the_cause():
    late, early = error("late", time=9.0), error("early", time=2.0, rank=3)
    assert root_error((late, early)) is early


def test_a_lost_peer_is_a_consequence_even_if_recorded_first():
    consequence = error("Connection closed by peer [10.0.0.1]:1", "builtins.RuntimeError", time=1.0)
    cause = error("CUDA out of memory.", "torch.OutOfMemoryError", time=1.2, rank=5, phase="backward", step=1)
    found = classify(evidence(errors=(consequence, cause)))
    assert found.status is ProbeStatus.OOM
    assert found.details["rank"] == 5


def test_out_of_memory_carries_phase_rank_and_bytes():
    oom = error(
        "CUDA out of memory. Tried to allocate 4.00 GiB.", "torch.OutOfMemoryError",
        phase="backward", step=1, rank=2, bytes_asked=4 * 2**30, reserved_bytes=70 * 2**30,
    )  # fmt: skip
    found = classify(evidence(errors=(oom,)))
    assert found.status is ProbeStatus.OOM
    assert found.message == "out of device memory on rank 2, backward of step 1, 4.0 GiB more asked for"
    assert found.details["bytes_asked"] == 4 * 2**30
    assert found.details["phase"] == "backward"


@pytest.mark.parametrize(
    ("kind", "message", "phase", "status"),
    [
        ("torch.OutOfMemoryError", "CUDA out of memory. Tried to allocate 20.00 MiB", "forward", "oom"),
        ("torch.AcceleratorError", "CUDA error: out of memory\nCUDA kernel errors might be", "forward", "oom"),
        ("torch._inductor.exc.InductorError", "OutOfMemoryError: CUDA out of memory.", "compile", "oom"),
        ("torch.distributed.DistBackendError", "NCCL error: Cuda failure 2 'out of memory'", "init", "oom"),
        ("builtins.RuntimeError", "DefaultCPUAllocator: can't allocate memory: you tried to", "init", "oom"),
        ("builtins.RuntimeError", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate", "x", "oom"),
        ("torch._dynamo.exc.Unsupported", "Graph break", "compile", "compile_failure"),
        ("torch._dynamo.exc.BackendCompilerFailed", "backend='inductor' raised:", "forward", "compile_failure"),
        ("triton.compiler.errors.CompilationError", "at 3:4", "forward", "compile_failure"),
        ("builtins.AssertionError", "size mismatch", "compile", "compile_failure"),
        ("builtins.FileNotFoundError", "[Errno 2] ... /rank0/triton/abc.cubin", "compile", "infrastructure"),
        ("builtins.OSError", "[Errno 28] No space left on device", "compile", "infrastructure"),
        ("torch._inductor.exc.InvalidCxxCompiler", "No working C++ compiler found", "compile", "infrastructure"),
        ("torch.distributed.DistNetworkError", "EADDRINUSE: address already in use", "init", "infrastructure"),
        ("torch.distributed.DistBackendError", "NCCL error in: x.cpp:1, ncclSystemError", "x", "infrastructure"),
        ("builtins.RuntimeError", "Found no NVIDIA driver on your system.", "init", "infrastructure"),
        ("torch.AcceleratorError", "CUDA error: uncorrectable ECC error encountered", "x", "infrastructure"),
        ("builtins.ModuleNotFoundError", "No module named 'torchtitan'", "init", "infrastructure"),
        ("builtins.ImportError", "torchao is not installed. Please install it", "init", "unsupported"),
        ("builtins.RuntimeError", "DDP has not supported > 1D parallelism", "init", "unsupported"),
        ("builtins.ValueError", "Failed to swap to Float8Linear because float8 is only", "init", "unsupported"),
        ("torch.utils.checkpoint.CheckpointError", "Recomputed values have different", "x", "unsupported"),
        ("torch.distributed.DistBackendError", "Watchdog caught collective operation timeout", "x", "hang"),
    ],
)  # fmt: skip
def test_exceptions(kind, message, phase, status):
    assert status_of_error(kind, message, phase) == status


@pytest.mark.parametrize(
    ("log", "status"),
    [
        ("[rank0]:[E119 ProcessGroupNCCL.cpp:1] Watchdog caught collective operation timeout: x", "hang"),
        ("node1:1:1 [0] NCCL WARN Cuda failure 2 'out of memory'", "oom"),
        (
            "/usr/bin/python: Error while finding module specification for 'torchtitan.train'",
            "infrastructure",
        ),
        ("[rank0]:[titan] - root - WARNING - Ran out of data; last step was canceled.", "unsupported"),
    ],
)
def test_logs_without_an_exception_record(log, status):
    assert classify(evidence(log_tail=f"noise\n{log}\nmore noise")).status == status


def test_a_log_that_says_nothing_decides_nothing():
    assert status_of_log("INFO - Error running lspci, fallback\nWARNING: error handling") is None
    assert classify(evidence(log_tail="")).status is ProbeStatus.INFRASTRUCTURE


@pytest.mark.parametrize(
    ("stop", "status"),
    [
        (StopReason.CANCELLED, ProbeStatus.CANCELLED),
        (StopReason.EARLY, ProbeStatus.COMPLETED),
        (StopReason.FINISHED, ProbeStatus.COMPLETED),
        (StopReason.STARTUP, ProbeStatus.TIMEOUT),
        (StopReason.TIMEOUT, ProbeStatus.TIMEOUT),
        (StopReason.HANG, ProbeStatus.HANG),
    ],
)
def test_what_the_runner_stopped_is_judged_by_why(stop, status):
    consequence = error("Connection closed by peer", time=101.0)
    found = classify(
        evidence(returncode=-15, complete_steps=6, stop=stop, stop_time=100.0, errors=(consequence,))
    )
    assert found.status is status


def test_an_error_before_a_deadline_explains_it():
    found = classify(evidence(stop=StopReason.HANG, stop_time=100.0, errors=(error("wrong", time=50.0),)))
    assert found.status is ProbeStatus.UNSUPPORTED


def test_success_needs_the_exit_code_and_all_steps():
    assert classify(evidence(returncode=0, complete_steps=10)).status is ProbeStatus.COMPLETED
    assert classify(evidence(returncode=0, complete_steps=9)).status is ProbeStatus.INFRASTRUCTURE
    assert classify(evidence(returncode=1, complete_steps=10)).status is ProbeStatus.INFRASTRUCTURE


def test_a_killed_supervisor_is_no_fault_of_the_configuration():
    assert classify(evidence(returncode=None)).status is ProbeStatus.INFRASTRUCTURE


BASELINE = tuple(8.0 - 0.1 * i for i in range(10))


@pytest.mark.parametrize(
    ("losses", "status"),
    [
        (BASELINE, ProbeStatus.COMPLETED),
        (tuple(x * 1.04 for x in BASELINE), ProbeStatus.COMPLETED),
        (tuple(x * 1.08 for x in BASELINE), ProbeStatus.DIVERGED),
        (tuple(x * 0.5 for x in BASELINE), ProbeStatus.DIVERGED),
        ((), ProbeStatus.COMPLETED),
    ],
)
def test_losses_are_held_against_the_baselines(losses, status):
    found = classify(evidence(returncode=0, complete_steps=10, losses=losses, baseline_losses=BASELINE))
    assert found.status is status


def test_a_noisy_baseline_allows_more():
    noisy = tuple(x + (0.6 if i % 2 else -0.6) for i, x in enumerate(BASELINE))
    losses = tuple(x * 1.08 for x in BASELINE)
    found = classify(evidence(returncode=0, complete_steps=10, losses=losses, baseline_losses=noisy))
    assert found.status is ProbeStatus.COMPLETED


def test_a_loss_that_is_not_finite_is_divergence():
    found = classify(evidence(returncode=0, complete_steps=10, losses=(8.0, float("nan")), diverged=True))
    assert found.status is ProbeStatus.DIVERGED
