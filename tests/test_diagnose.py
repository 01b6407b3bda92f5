# ruff: noqa: E501 - texts as torchtitan, torch and Slurm print them
from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from titan_tune.cli.diagnose import read_run, run_diagnose
from titan_tune.diagnose import Diagnosis, Severity, diagnose, run_facts
from titan_tune.errors import InputError
from titan_tune.titan.logs import ParsedLog, StepLine, parse_log
from titan_tune.titan.rules import REGISTRY
from titan_tune.titan.signs.classify import FAILURES, size_bytes
from titan_tune.titan.signs.facts import measured_steps
from titan_tune.titan.signs.line_traps import LINE_TRAPS

LOGS = Path(__file__).parent / "logs" / "diagnose"
SINGLE = (LOGS / "cpu_single.log").read_text(encoding="utf-8")
UNMEASURED = "throughput-jitter"
"""The fixtures were made on a busy machine: how much their tokens/s vary says nothing."""


def read(name: str) -> ParsedLog:
    return parse_log((LOGS / name).read_text(encoding="utf-8"))


def found_in(log: ParsedLog) -> dict[str, Diagnosis]:
    return {finding.rule: finding for finding in diagnose(log) if finding.rule != UNMEASURED}


def titan(text: str, level: str = "INFO") -> str:
    return f"[titan] 2026-03-01 10:00:00,000 - root - {level} - {text}"


def raised(
    text: str, *, frame: str = "torchtitan/train.py", function: str = "__init__", rank: int | None = None
) -> str:
    lines = [
        "Traceback (most recent call last):",
        f'  File "/venv/{frame}", line 7, in {function}',
        *text.split("\n"),
    ]
    return "\n".join(lines if rank is None else (f"[rank{rank}]: {line}" for line in lines))


# --- whole logs ----------------------------------------------------------------------------------

CASES = {
    "cpu_single.log": [],
    "cpu_fsdp.log": [],
    "cpu_compiled_print_config.log": [],
    "cpu_tensor_parallel_print_config.log": ["fp32-tensor-parallel"],
    "cpu_pipeline_gpipe.log": ["fp32-pipeline-parallel", "pp-unnormalized-loss", "pp-bubble"],
    "cpu_ddp.log": ["ddp-unsharded", "ddp-gradient-division"],
    "cpu_hsdp_accumulation.log": ["hsdp-accumulation"],
    "cpu_float8_tensor_parallel.log": [
        "fp32-tensor-parallel",
        "float8-eager",
        "float8-tensor-parallel",
        "float8-small-model",
        "float8-unproven",
    ],
    "cpu_float8_filter_print_model.log": ["float8-filter"],
    "cpu_short_warmup.log": ["warmup-steps"],
    "cpu_diverged.log": ["diverged"],
    "cpu_gpt_oss_compile_print_config.log": ["cpu-attention", "gpt-oss-compile", "grouped-mm"],
    "cpu_moe_without_grouped_mm.log": ["unhandled-exception", "grouped-mm"],
    "cpu_global_batch.log": ["batch-divides"],
    "cpu_degrees_above_world_size.log": ["world-size"],
    "cpu_converter_float8.log": ["converter-name"],
    "cpu_float8_recipe_all_gather.log": ["float8-recipe-all-gather"],
    "cpu_float8_hardware.log": ["float8-hardware"],
    "cpu_zero_bubble_op_ac.log": ["zero-bubble-op-ac", "fp32-pipeline-parallel"],
    "cpu_odd_sequence.log": ["sequence-divides"],
    "cpu_kv_heads.log": ["tp-divides-heads", "fp32-tensor-parallel"],
    "cpu_qwen3_pipeline.log": ["pp-family"],
    "cpu_no_cxx_compiler.log": ["no-cxx-compiler"],
    "cpu_missing_module.log": ["module-missing"],
    "cpu_missing_tokenizer.log": ["tokenizer-missing"],
    "cpu_unknown_option.log": ["unknown-option"],
    "cpu_unknown_key.log": ["unknown-key"],
    "cpu_unknown_flavor.log": ["unknown-flavor"],
    "cpu_port_in_use.log": ["rendezvous-port-in-use"],
    "cpu_rank_killed.log": ["killed-by-system"],
    "cpu_rank_hangs.log": ["collective-timeout"],
    "cpu_stopped_by_sigterm.log": ["stopped"],
    "cpu_host_out_of_memory.log": ["host-out-of-memory"],
    "composed_cuda_oom_backward.log": ["cuda-out-of-memory"],
    "composed_cuda_oom_fragmented_loss.log": ["cuda-out-of-memory"],
    "composed_nccl_timeout.log": ["collective-timeout"],
    "composed_nccl_timeout_first_step.log": ["collective-timeout"],
    "composed_allocation_retries.log": ["allocation-retries"],
    "composed_recompile_limit_fatal.log": ["recompile-limit"],
    "composed_checkpoint_error.log": ["checkpoint-recompute-mismatch"],
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_log_shows(name: str) -> None:
    log = read(name)
    assert list(found_in(log)) == CASES[name]
    lines = (LOGS / name).read_text(encoding="utf-8").splitlines()
    for finding in diagnose(log):
        if finding.evidence is not None:
            first_word = finding.evidence.text.split()[0]
            assert first_word in lines[finding.evidence.number - 1]


def test_every_fixture_is_checked() -> None:
    assert {path.name for path in LOGS.glob("*.log")} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_errors_first_and_one_cause(name: str) -> None:
    severities = [finding.severity for finding in diagnose(read(name))]
    assert severities == sorted(severities, key=[*Severity].index)
    assert severities.count(Severity.ERROR) <= 1


def test_out_of_memory_says_who_when_and_how_much() -> None:
    finding = found_in(read("composed_cuda_oom_backward.log"))["cuda-out-of-memory"]
    assert finding.ranks == (1,)
    assert finding.message == (
        "rank 1 ran out of GPU memory in the backward of step 2: it asked for 3.91 GiB; 2.08 GiB of 79.11 GiB were "
        "free, PyTorch had 73.40 GiB in use and 1.22 GiB reserved but unused"
    )
    assert "expandable_segments" not in finding.fix
    assert "reference cycles" in finding.fix  # eager selective checkpointing


def test_fragmentation_is_told_from_lack_of_memory() -> None:
    finding = found_in(read("composed_cuda_oom_fragmented_loss.log"))["cuda-out-of-memory"]
    assert "in the loss of step 1" in finding.message
    assert finding.fix.startswith("PYTORCH_ALLOC_CONF=expandable_segments:True")
    assert "compile the loss" in finding.fix


def test_a_hang_names_the_rank_that_is_missing() -> None:
    finding = found_in(read("composed_nccl_timeout.log"))["collective-timeout"]
    assert finding.message == (
        "a collective (_ALLGATHER_BASE) timed out after 100 s at step 9; ranks that did not report it: 3 "
        "(look there first)"
    )
    assert finding.ranks == (0, 1, 2)
    assert "train_timeout_seconds" in finding.fix
    first_step = found_in(read("composed_nccl_timeout_first_step.log"))["collective-timeout"]
    assert "init_timeout_seconds" in first_step.fix
    gloo = found_in(read("cpu_rank_hangs.log"))["collective-timeout"]
    assert "after 8 s at step 5; ranks that did not report it: 1" in gloo.message


def test_a_rank_of_which_the_log_has_nothing_is_not_accused() -> None:
    text = (LOGS / "composed_nccl_timeout.log").read_text(encoding="utf-8")
    rank_2_alone = "\n".join(line for line in text.splitlines() if line.startswith("[rank2]"))
    assert "did not report" not in found_in(parse_log(rank_2_alone))["collective-timeout"].message


def test_the_rank_that_torchrun_saw_fail_first_wins() -> None:
    table = "\n".join(
        [
            "Root Cause (first observed failure):",
            "[0]:",
            "  rank      : 3 (local_rank: 3)",
            "  exitcode  : 1 (pid: 9)",
        ]
    )
    errors = "\n".join(
        [titan("x"), raised("ValueError: second", rank=0), raised("TypeError: first", rank=3), table]
    )
    (finding,) = [f for f in diagnose(parse_log(errors)) if f.severity is Severity.ERROR]
    assert "TypeError: first" in finding.message
    assert finding.ranks == (3,)


@given(st.permutations([0, 1, 2, 3]), st.sampled_from([0, 1, 2, 3]))
def test_consequences_never_hide_the_cause(order: list[int], culprit: int) -> None:
    consequences = [
        "torch.distributed.DistBackendError: NCCL error in: x.cpp\nncclRemoteError: A call failed",
        "RuntimeError: [1] Connection closed by peer [127.0.0.1]:1",
        "RuntimeError: [y.cc:129] Timed out waiting 300000ms for recv operation to complete",
    ]
    texts = {rank: consequences[rank % 3] for rank in order}
    texts[culprit] = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    log = parse_log("\n".join([titan("x"), *(raised(texts[rank], rank=rank) for rank in order)]))
    (finding,) = [f for f in diagnose(log) if f.severity is Severity.ERROR]
    assert finding.rule == "cuda-out-of-memory"
    assert finding.ranks == (culprit,)


def test_consequences_are_told_where_nothing_else_is_known() -> None:
    log = parse_log(f"{titan('x')}\n{raised('RuntimeError: Connection reset by peer', rank=0)}")
    assert found_in(log)["lost-peer"].severity is Severity.ERROR


def test_the_launchers_summary_is_used_where_the_ranks_are_silent() -> None:
    text = (LOGS / "cpu_global_batch.log").read_text(encoding="utf-8")
    launcher_only = "\n".join(line for line in text.splitlines() if not line.startswith("[rank"))
    finding = found_in(parse_log(launcher_only))["batch-divides"]
    assert finding.ranks == (0, 1)


def test_an_exit_without_a_reason() -> None:
    text = (LOGS / "cpu_unknown_option.log").read_text(encoding="utf-8")
    launcher_only = "\n".join(line for line in text.splitlines() if line[:1] not in "╭│╰")
    finding = found_in(parse_log(launcher_only))["worker-exited"]
    assert "rank 0 ended with code 2" in finding.message


# --- single texts: torchtitan's and torch's own ---------------------------------------------------

EXCEPTIONS = [
    (
        "world-size",
        "AssertionError: Invalid parallel dims: dp_replicate(1) * dp_shard(3) * cp(1) * tp(2) * pp(1) != WORLD_SIZE(8)",
    ),
    ("expert-tensor-parallel", "AssertionError: Currently we only support ETP=TP or ETP=1"),
    ("expert-mesh", "ValueError: The product of mesh_sizes=(2, 3) is not 8"),
    (
        "ep-needs-fsdp",
        "ValueError: Mesh '['fsdp']' is not available. Ensure the corresponding parallelism dimension is enabled.",
    ),
    ("ddp-more-dimensions", "RuntimeError: DDP has not supported > 1D parallelism"),
    ("cp-attention", "NotImplementedError: Variable-length attention CP is not yet supported"),
    (
        "cp-attention",
        "ValueError: PTRRLoadBalancer requires attention_masks to be a BlockMask, but got None or dict[str, BlockMask]",
    ),
    (
        "tokens-divide",
        "ValueError: Uneven split of tokens of is not supported yet. Requires EP degree dividing batch size * seq len.",
    ),
    (
        "pp-stages-divide",
        "ValueError: Number of virtual stages (3) must be divisible by pipeline parallel size (2). Model has 6 layers",
    ),
    (
        "pp-stages-per-rank",
        "ValueError: Single stage schedule requires exactly 1 stage per rank, but got 2 stages per rank. Model",
    ),
    ("pp-stages-layers", "ValueError: Number of stages (16) cannot be greater than effective layers (8)"),
    ("pp-microbatch-divides", "ValueError: Batch size 5 must be divisible by microbatch_size 2. Update"),
    (
        "pp-microbatches",
        "ValueError: Number of microbatches (2) must be greater than or equal to the number of stages (4).",
    ),
    (
        "pp-microbatches",
        "ValueError: Zero bubble requires the number of microbatches to be a multiple of the number of rounds (2), but got 5.",
    ),
    (
        "zero-bubble-compile",
        "RuntimeError: The ScheduleInterleavedZeroBubble schedule is not supported with stage modules that have used torch.compile. Found",
    ),
    (
        "dualpipev-ep-ac",
        "NotImplementedError: Expert Parallel with DualPipeV and Activation Checkpointing cannot be used together.",
    ),
    (
        "converter-mix",
        "AssertionError: Cannot combine model converters with different quantization types: 'float8' and 'mx'",
    ),
    (
        "grouped-float8",
        "AssertionError: Float8 MoE training prototype does not yet support pipeline parallelism",
    ),
    (
        "mxfp8-hardware",
        "AssertionError: MXFP8 is only supported on CUDA SM100 or later, or ROCm gfx950 or later",
    ),
    ("mxfp8-tensor-parallel-compile", "AssertionError: TP not yet supported with torch.compile for mxfp8"),
    ("memory-budget-compile", "AssertionError: Memory budget mode requires model to be compiled"),
    (
        "ac-option",
        "ValueError: Invalid selective AC option: ops. Valid options: 'op' or a positive int representing layer frequency",
    ),
    (
        "async-tp-compile",
        "RuntimeError: Async TP requires 'model' in --compile.components and --compile.enable",
    ),
    ("early-step", "NotImplementedError: Optimizers in backward is not supported with Expert Parallel."),
    ("unknown-model", "ValueError: TrainSpec llama5 is not registered."),
    ("dataset-unknown", "ValueError: Dataset c5 is not supported. Supported datasets are: ['c4']"),
    ("not-under-torchrun", "KeyError: 'LOCAL_RANK'"),
    ("disk-full", "OSError: [Errno 28] No space left on device: '/tmp/x'"),
    ("no-gpu", "RuntimeError: No CUDA GPUs are available"),
    (
        "gpu-without-kernels",
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
    ),
    ("gpu-fault", "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
    ("cuda-out-of-memory-outside-allocator", "torch.AcceleratorError: CUDA error: out of memory"),
    (
        "nccl-duplicate-gpu",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp, invalid usage\nncclInvalidUsage: x\nLast error:\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000",
    ),
    (
        "shared-memory-full",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp\nLast error:\nError while creating shared memory segment /dev/shm/nccl-ABC (size 9637888)",
    ),
    (
        "rendezvous-failed",
        "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms while trying to connect to (node1, 29500).",
    ),
    ("fake-backend-limit", "RuntimeError: Backend fake does not yet support sequence numbers."),
    (
        "nccl-error",
        "torch.distributed.DistBackendError: NCCL error in: x.cpp:1, unhandled system error\nncclSystemError: System call failed",
    ),
    (
        "triton-cache-race",
        "FileNotFoundError: [Errno 2] No such file or directory: '/tmp/torchinductor_root/triton/0/ABC'",
    ),
    (
        "triton-out-of-resources",
        "torch._inductor.exc.InductorError: OutOfResources: out of resource: shared memory, Required: 262144",
    ),
    ("no-triton", "torch._inductor.exc.TritonMissing: Cannot find a working triton installation."),
    (
        "no-python-headers",
        "torch._inductor.exc.InductorError: CppCompileError: C++ compile error\nfatal error: Python.h: No such file or directory",
    ),
    ("graph-break", "torch._dynamo.exc.Unsupported: Data-dependent branching"),
    ("compile-failed", "torch._inductor.exc.InductorError: LoweringException: AssertionError: x"),
]


@pytest.mark.parametrize(("rule", "text"), EXCEPTIONS)
def test_exceptions_are_known(rule: str, text: str) -> None:
    (finding,) = [
        f
        for f in diagnose(parse_log(f"{titan('x')}\n{raised(text, rank=2)}"))
        if f.severity is Severity.ERROR
    ]
    assert finding.rule == rule
    assert finding.fix
    assert "{" not in finding.message + finding.fix.replace("{first,last}", "")


@pytest.mark.parametrize(
    ("rule", "frame", "function", "text"),
    [
        ("converter-name", "torchtitan/protocols/model_converter.py", "<listcomp>", "KeyError: 'float9'"),
        ("unknown-flavor", "torchtitan/train.py", "__init__", "KeyError: '8X'"),
        ("unhandled-exception", "torchtitan/components/checkpoint.py", "load", "KeyError: 'model'"),
        ("unhandled-exception", "torchtitan/train.py", "train", "AssertionError"),
        ("world-size", "torchtitan/distributed/parallel_dims.py", "_validate", "AssertionError"),
    ],
)
def test_where_an_exception_came_from_tells_what_it_means(
    rule: str, frame: str, function: str, text: str
) -> None:
    log = parse_log(f"{titan('x')}\n{raised(text, frame=frame, function=function)}")
    assert diagnose(log)[0].rule == rule


LINES = [
    (
        "float8-not-applied",
        "WARNING",
        "Failed to swap to Float8Linear with recipe lookup because the torchao version is too old",
    ),
    (
        "float8-auto-filter",
        "WARNING",
        "Using default module_filter_fn for float8 model conversion. To use _auto_filter",
    ),
    (
        "float8-eager",
        "WARNING",
        "Compile is required for high performance float8 MoE training; enable it with --compile.enable",
    ),
    ("grouped-mm", "WARNING", "Failed to use grouped mm, which is only supported on SM90 or later"),
    ("sequence-over-range", "WARNING", "Sequence length 262144 exceeds original maximum 131072."),
    ("mfu-peak", "WARNING", "Peak flops undefined for: NVIDIA L4, fallback to A100"),
    ("out-of-data", "WARNING", "Ran out of data; last step was canceled."),
    ("dataset-relooped", "WARNING", "Dataset c4_test is being re-looped"),
    ("deterministic", "INFO", "Deterministic algorithm enabled (expect perf degradation)."),
    ("profiling", "INFO", "Profiling active. Traces will be saved at /x"),
    ("async-tp-not-proven", "INFO", "Async TP is enabled"),
    (
        "async-tp-not-fused",
        "INFO",
        "no producer matmul found for reduce scatter, skipping fuse_matmul_reduce_scatter fusion",
    ),
    ("recompile-limit", "INFO", "torch._dynamo hit config.recompile_limit (8)"),
]


@pytest.mark.parametrize(("rule", "level", "text"), LINES)
def test_lines_are_known(rule: str, level: str, text: str) -> None:
    finding = found_in(parse_log(f"{SINGLE}{titan(text, level)}"))[rule]
    assert finding.evidence is not None
    assert finding.evidence.text == text
    assert finding.severity is not Severity.ERROR


def test_every_row_of_the_tables_formats() -> None:
    for failure in FAILURES:
        names = dict.fromkeys(failure.pattern.groupindex, "x")
        assert failure.message.format_map(names)
        assert failure.fix.format_map(names)
    for trap in LINE_TRAPS:
        names = dict.fromkeys(trap.pattern.groupindex, "x")
        assert trap.message.format_map(names)
        assert trap.fix.format_map(names)


def test_ids_shared_with_the_rules_are_theirs() -> None:
    """The ids a rule has before a run, so that one search of the documentation finds both."""
    shared = {rule for rules in CASES.values() for rule in rules} & set(REGISTRY)
    assert shared >= {
        "fp32-tensor-parallel",
        "batch-divides",
        "zero-bubble-op-ac",
        "pp-bubble",
        "converter-name",
    }


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (
            "slurmstepd: error: *** JOB 17 ON node1 CANCELLED AT 2026-03-01T10:00:00 DUE TO TIME LIMIT ***",
            "slurm-time-limit",
        ),
        (
            "slurmstepd: error: *** JOB 17 ON node1 CANCELLED AT 2026-03-01T10:00:00 DUE TO PREEMPTION ***",
            "slurm-preempted",
        ),
        (
            "slurmstepd: error: *** JOB 17 ON node1 CANCELLED AT 2026-03-01T10:00:00 DUE TO NODE FAILURE ***",
            "slurm-node-failure",
        ),
        ("srun: error: node1: task 0: Out Of Memory", "host-out-of-memory"),
        ("slurmstepd: error: *** JOB 17 ON node1 CANCELLED AT 2026-03-01T10:00:00 ***", "stopped"),
    ],
)
def test_slurm_says_why(line: str, rule: str) -> None:
    unfinished = "\n".join(SINGLE.splitlines()[:46])
    assert diagnose(parse_log(f"{unfinished}\n{line}"))[0].rule == rule


# --- what the steps say --------------------------------------------------------------------------


def steps(losses: list[float], *, tps: list[float] | None = None, first: int = 1, gib: float = 10.0) -> str:
    rates = tps or [1000.0] * len(losses)
    return "\n".join(
        titan(
            f"step: {first + i:2}  loss: {loss:8.5f}  grad_norm: {1.0:7.4f}  memory: {gib:5.2f}GiB(12.00%)  "
            f"tps: {round(rates[i]):,}  tflops: 1.00  mfu: 1.00%"
        )
        for i, loss in enumerate(losses)
    )


def test_a_loss_that_rises_stays_or_falls() -> None:
    rising = [8.0 + 0.1 * i for i in range(24)]
    flat = [8.0 + 0.01 * (-1) ** i for i in range(24)]
    assert "loss-rising" in found_in(parse_log(steps(rising)))
    assert "loss-not-falling" in found_in(parse_log(steps(flat)))
    assert not {"loss-rising", "loss-not-falling"} & set(found_in(parse_log(steps(rising[::-1]))))
    assert "loss-not-falling" not in found_in(parse_log(steps(flat, first=90_000))), (
        "a plateau late in a run is normal"
    )
    assert "loss-rising" not in found_in(parse_log(steps(rising[:6]))), "too short to say"


@given(st.lists(st.floats(min_value=0.01, max_value=0.5), min_size=12, max_size=60))
def test_a_loss_that_only_falls_is_never_accused(drops: list[float]) -> None:
    losses, loss = [], 50.0
    for drop in drops:
        losses.append(loss)
        loss -= drop
    assert not {"loss-rising", "diverged"} & set(found_in(parse_log(steps(losses))))


def test_throughput_leaves_the_warm_up_out() -> None:
    facts = run_facts(parse_log(steps([1.0] * 12, tps=[10.0] * 5 + [1000.0] * 7)))
    assert facts.tokens_per_second_per_gpu == 1000
    assert facts.measured_lines == 7
    assert facts.spread == 0
    assert run_facts(parse_log(steps([1.0, 1.0]))).is_short


@given(st.lists(st.integers(1, 10**6), min_size=0, max_size=40))
def test_measured_lines_are_never_those_of_the_first_step(tps: list[int]) -> None:
    lines = [StepLine(i + 1, 1.0, 1.0, 1.0, 1.0, float(t), 1.0, 1.0) for i, t in enumerate(tps)]
    assert all(line.step > 1 for line in measured_steps(lines))


def test_jitter() -> None:
    rates = [1000.0] * 5 + [1000.0, 700.0] * 6
    assert UNMEASURED in {f.rule for f in diagnose(parse_log(steps([1.0] * 17, tps=rates)))}


def test_memory_that_grows() -> None:
    text = f"{steps([9.0 - i * 0.1 for i in range(10)])}\n{steps([8.0 - i * 0.1 for i in range(10)], first=11, gib=12.0)}"
    assert "memory grows" in found_in(parse_log(text))["memory-growing"].message.replace("still ", "")


def test_only_the_last_attempt_counts() -> None:
    facts = run_facts(parse_log(f"{steps([9.0] * 20)}\n{steps([3.0, 2.0])}"))
    assert (facts.last_step, facts.first_loss, facts.last_loss) == (2, 3.0, 2.0)


def test_a_log_that_ends_in_the_middle() -> None:
    finding = found_in(parse_log("\n".join(SINGLE.splitlines()[:46])))["incomplete"]
    assert "the log ends at step 3 of 8" in finding.message


def test_the_first_step_near_its_timeout() -> None:
    text = SINGLE.replace(
        "20:01:56,869 - root - INFO - Training starts", "19:58:00,000 - root - INFO - Training starts"
    )
    assert "took 238 of the 300 s" in found_in(parse_log(text))["init-timeout"].message


def test_bf16_parameters_are_no_fp32_trap() -> None:
    text = (LOGS / "cpu_tensor_parallel_print_config.log").read_text(encoding="utf-8")
    as_bf16 = text.replace('"dtype": "float32"', '"dtype": "bfloat16"')
    assert as_bf16 != text
    assert "fp32-tensor-parallel" not in found_in(parse_log(as_bf16))


def test_pipeline_gradients_are_sound_from_0_3_on() -> None:
    text = (LOGS / "cpu_pipeline_gpipe.log").read_text(encoding="utf-8")
    assert "pp-unnormalized-loss" in found_in(parse_log(text))
    assert "pp-unnormalized-loss" not in found_in(parse_log(text.replace("version: 0.2.2", "version: 0.3.0")))


def test_another_programs_output() -> None:
    (finding,) = diagnose(parse_log("Collecting torch\nInstalling\n"))
    assert finding.rule == "no-torchtitan-output"


@given(st.sampled_from(["bytes", "KiB", "MiB", "GiB"]), st.floats(0, 10**6))
def test_sizes(unit: str, number: float) -> None:
    assert (
        size_bytes(f"{number:.2f} {unit}")
        == float(f"{number:.2f}") * {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[unit]
    )


@given(st.text(max_size=30))
def test_no_size_raises(text: str) -> None:
    assert size_bytes(text) >= 0


# --- the command ---------------------------------------------------------------------------------


def shown(path: Path) -> str:
    output = io.StringIO()
    assert run_diagnose(path, as_json=False, console=Console(file=output, width=120)) == 0
    return output.getvalue()


def as_json(path: Path, capsys: pytest.CaptureFixture[str]) -> dict:
    assert run_diagnose(path, as_json=True, console=Console(file=io.StringIO())) == 0
    return json.loads(capsys.readouterr().out)


def test_what_is_printed() -> None:
    text = shown(LOGS / "cpu_converter_float8.log")
    assert text.startswith("error [converter-name] model.converters names 'float8'")
    assert 'fix: write model.converters = ["quantize.linear.float8"]' in text
    assert "line 88 rank 0: KeyError: 'float8'" in text
    clean = shown(LOGS / "cpu_single.log")
    assert clean.startswith("nothing is wrong")
    assert "throughput: 2,295 tokens/s per GPU" in clean


def test_json_is_complete_and_valid(capsys: pytest.CaptureFixture[str]) -> None:
    values = as_json(LOGS / "cpu_diverged.log", capsys)
    assert values["schema"] == 1
    assert values["facts"]["last_loss"] == "nan"
    assert values["findings"][0]["rule"] == "diverged"
    assert values["findings"][0]["evidence"]["line"] == 45


def test_a_trial_folder(capsys: pytest.CaptureFixture[str]) -> None:
    values = as_json(LOGS / "trial_kv_heads", capsys)
    first = values["findings"][0]
    assert first["rule"] == "tp-divides-heads"
    assert first["evidence"]["source"].startswith("error.rank"), "what the plug-in recorded has the time"
    values = as_json(LOGS / "trial_float8_filter", capsys)
    assert [f["rule"] for f in values["findings"] if f["rule"] != UNMEASURED] == ["float8-filter"]


def test_the_outcome_of_a_trial_is_heard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stopped = (LOGS / "cpu_stopped_by_sigterm.log").read_text(encoding="utf-8")
    (tmp_path / "stdout.log").write_text(stopped)
    for status, expected in (
        ("completed", []),
        ("hang", ["probe-hang"]),
        ("timeout", ["probe-timeout"]),
        ("cancelled", ["probe-cancelled"]),
        ("infrastructure", ["stopped"]),
    ):
        (tmp_path / "outcome.json").write_text(json.dumps({"status": status, "message": "enough"}))
        for path in (tmp_path, tmp_path / "stdout.log"):
            rules = [f["rule"] for f in as_json(path, capsys)["findings"] if f["rule"] != UNMEASURED]
            assert rules == expected
    (tmp_path / "stdout.log").write_text(SINGLE)
    (tmp_path / "outcome.json").write_text(json.dumps({"status": "timeout", "message": "no step for 300 s"}))
    assert as_json(tmp_path, capsys)["findings"][0]["rule"] == "probe-timeout"


@pytest.mark.parametrize(
    ("status", "says"),
    [
        ("completed", "steps: {n} of {n}, completed"),
        (None, "steps: {n} of {n}, all done, but torchtitan's last line is missing"),
    ],
)
def test_all_steps_without_torchtitans_last_line(tmp_path: Path, status: str | None, says: str) -> None:
    (tmp_path / "stdout.log").write_text(SINGLE.replace("Training completed", ""))
    if status is not None:
        (tmp_path / "outcome.json").write_text(json.dumps({"status": status, "message": ""}))
    steps = run_facts(parse_log(SINGLE)).total_steps
    text = shown(tmp_path)
    assert says.format(n=steps) in text
    assert ("outcome: completed\n" in text) == (status is not None)


def test_a_probe_that_had_measured_enough_says_so(tmp_path: Path) -> None:
    (tmp_path / "stdout.log").write_text((LOGS / "cpu_stopped_by_sigterm.log").read_text(encoding="utf-8"))
    (tmp_path / "outcome.json").write_text(json.dumps({"status": "completed", "message": "12 steps"}))
    text = shown(tmp_path)
    assert "ended early: titan-tune had measured enough" in text
    assert "stopped from outside" not in text and "not completed" not in text


@pytest.mark.parametrize("accumulation", [1, 4, 16])
def test_the_placeholder_of_a_pipeline_stage_without_the_loss(accumulation: int) -> None:
    text = (
        (LOGS / "cpu_pipeline_gpipe.log")
        .read_text(encoding="utf-8")
        .replace("-1.00000", f"{-accumulation}.00000")
    )
    both = run_facts(parse_log(text))
    assert both.first_loss == 8.14422
    first_stage = parse_log("\n".join(line for line in text.splitlines() if not line.startswith("[rank1]")))
    assert first_stage.steps and run_facts(first_stage).first_loss is None


def test_what_is_no_file_is_not_called_missing() -> None:
    with pytest.raises(InputError, match="/dev/null is neither a file nor a folder"):
        read_run(Path("/dev/null"))


def test_a_folder_of_ranks(tmp_path: Path) -> None:
    text = (LOGS / "composed_cuda_oom_backward.log").read_text(encoding="utf-8")
    for rank in (0, 1):
        folder = tmp_path / "run_1" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        prefix = f"[rank{rank}]:"
        own = (line.removeprefix(prefix) for line in text.splitlines() if line.startswith(prefix))
        (folder / "stdout.log").write_text("\n".join(own))
        (folder / "stderr.log").write_text("")
    run = read_run(tmp_path)
    finding = diagnose(run.log)[0]
    assert finding.rule == "cuda-out-of-memory"
    assert finding.ranks == (1,)
    assert finding.evidence is not None
    assert finding.evidence.source == "run_1/attempt_0/1/stdout.log"


def test_ten_ranks_come_in_order(tmp_path: Path) -> None:
    for rank in range(12):
        (tmp_path / f"rank{rank}.log").write_text(titan(f"hello from {rank}"))
    assert [line.rank for line in read_run(tmp_path).log.lines] == list(range(12))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("empty.log", b"", "is empty"),
        ("blank.log", b" \n\n", "is empty"),
        ("binary.log", b"\x7fELF\0\0\0", "not a text file"),
        ("compressed.log", bytes(range(128, 256)) * 50, "not a text file"),
    ],
)
def test_no_log(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=says) as error:
        read_run(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_run(tmp_path / "none.log")
    with pytest.raises(InputError, match="holds no log"):
        read_run(tmp_path)
    (tmp_path / "trials").mkdir()
    with pytest.raises(InputError, match="name one of its trials"):
        read_run(tmp_path)


@given(st.binary(max_size=300))
def test_no_bytes_crash_the_reader(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("logs") / "a.log"
    path.write_bytes(content)
    try:
        run = read_run(path)
    except InputError:
        return
    diagnose(run.log)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda x: (
            st.lists(x, max_size=3)
            | st.dictionaries(
                st.sampled_from(["type", "message", "frames", "rank", "time", "phase", "status"]),
                x,
                max_size=6,
            )
        ),
        max_leaves=12,
    )
)
@example({"type": "a", "message": "b", "frames": None})
@example({"type": "a", "message": "b", "frames": 3})
def test_no_record_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, value: object) -> None:
    folder = tmp_path_factory.mktemp("trial")
    shutil.copy(LOGS / "cpu_single.log", folder / "stdout.log")
    for name in ("outcome.json", "error.rank0.json", "metrics.rank0.jsonl"):
        (folder / name).write_text(json.dumps(value))
    shown(folder)
