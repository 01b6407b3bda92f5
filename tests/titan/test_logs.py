from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.diagnose import diagnose, run_facts
from titan_tune.titan.logs import Milestone, ParsedLog, merge, parse_log, parse_step, strip_ansi
from titan_tune.titan.signs.facts import degrees

LOGS = Path(__file__).parents[1] / "logs" / "diagnose"

COLORS = (
    "\033[31m",
    "\033[32m",
    "\033[38;2;180;60;0m",
    "\033[38;2;54;234;195m",
    "\033[34m",
    "\033[36m",
    "\033[35m",
)


def read(name: str) -> ParsedLog:
    return parse_log((LOGS / name).read_text(encoding="utf-8"))


def step_text(
    step: int,
    loss: float,
    grad_norm: float,
    gib: float,
    percent: float,
    tps: float,
    tflops: float,
    mfu: float,
    *,
    colored: bool = False,
) -> str:
    """``MetricsProcessor.log`` of torchtitan 0.2.2 (components/metrics.py)."""
    red, green, orange, turquoise, blue, cyan, magenta = COLORS if colored else ("",) * 7
    reset = "\033[39m" if colored else ""
    return (
        f"{red}step: {step:2}  {green}loss: {loss:8.5f}  {orange}grad_norm: {grad_norm:7.4f}  "
        f"{turquoise}memory: {gib:5.2f}GiB({percent:.2f}%)  {blue}tps: {round(tps):,}  "
        f"{cyan}tflops: {tflops:,.2f}  {magenta}mfu: {mfu:.2f}%{reset}"
    )


def titan(text: str, *, rank: int | None = None, level: str = "INFO") -> str:
    prefix = "" if rank is None else f"[rank{rank}]:"
    return f"{prefix}[titan] 2026-03-01 10:00:00,000 - root - {level} - {text}"


NUMBERS = st.floats(min_value=0, max_value=1e7)
LOSSES = st.one_of(
    st.floats(min_value=-1e6, max_value=1e6), st.sampled_from([math.nan, math.inf, -math.inf, -1.0])
)


@given(
    step=st.integers(1, 10**9),
    loss=LOSSES,
    grad_norm=LOSSES,
    gib=NUMBERS,
    percent=st.floats(0, 100),
    tps=NUMBERS,
    tflops=NUMBERS,
    mfu=st.floats(0, 100),
    colored=st.booleans(),
    rank=st.one_of(st.none(), st.integers(0, 9999)),
)
def test_step_lines_round_trip(step, loss, grad_norm, gib, percent, tps, tflops, mfu, colored, rank) -> None:
    text = step_text(step, loss, grad_norm, gib, percent, tps, tflops, mfu, colored=colored)
    log = parse_log(titan(text, rank=rank))
    (found,) = log.steps
    assert found.step == step
    assert found.line.rank == rank
    assert found.line.number == 1
    for value, printed, digits in (
        (found.loss, loss, 5),
        (found.grad_norm, grad_norm, 4),
        (found.memory_gib, gib, 2),
        (found.memory_percent, percent, 2),
        (found.tps, round(tps), 0),
        (found.tflops, tflops, 2),
        (found.mfu_percent, mfu, 2),
    ):
        assert value == float(f"{printed:.{digits}f}") or (math.isnan(value) and math.isnan(printed))
    alone = parse_step(text)
    assert alone is not None
    assert repr(replace(found, line=alone.line)) == repr(alone)  # nan differs from itself


PIECES = st.sampled_from(
    [
        "[rank0]:",
        "[rank1]:[rank1]: ",
        "0: ",
        "[titan] 2026-03-01 10:00:00,000 - root - INFO - ",
        "[titan] 9999-99-99 99:99:99,000 - root - WARNING - ",
        "step: ",
        "step: 1  loss: 1.0",
        "\033[31m",
        "\n",
        "  ",
        "Traceback (most recent call last):\n",
        '  File "a.py", line 3, in f\n',
        "RuntimeError: ",
        "  traceback : Traceback (most recent call last):\n",
        "CUDA out of memory. Tried to allocate ... GiB",
        "During handling of the above exception, another exception occurred:\n",
        "Building llama3 8Bwith {\n",
        "}\n",
        "Running with configs: {",
        "  rank      : 99 (local_rank: 1)\n",
        "  exitcode  : -9 (pid: 3)\n",
        "9" * 5000,
        "Root Cause (first observed failure):\n",
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        "Number of microbatches (1) is less than the total number of stages (2)",
        "tps=",
        "nan",
        "{",
        "[",
        "\0",
        "é",
    ]
)


@given(st.text(max_size=400))
def test_no_text_raises(text: str) -> None:
    log = parse_log(text)
    diagnose(log)
    run_facts(log)


@given(st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=30))
def test_no_arrangement_of_familiar_pieces_raises(pieces: list[str]) -> None:
    log = parse_log("".join(pieces))
    diagnose(log)
    run_facts(log)
    assert all(1 <= line.number <= log.num_lines for line in log.lines)


@given(st.data())
def test_a_log_cut_anywhere_never_raises(data: st.DataObject) -> None:
    name = data.draw(
        st.sampled_from(["cpu_kv_heads.log", "composed_cuda_oom_backward.log", "composed_nccl_timeout.log"])
    )
    text = (LOGS / name).read_text(encoding="utf-8")
    diagnose(parse_log(text[: data.draw(st.integers(0, len(text)))]))


@given(st.text(alphabet=st.characters(exclude_characters="[\x1b"), max_size=50))
def test_text_without_colors_is_left_as_it_is(text: str) -> None:
    assert strip_ansi(text) == text
    assert strip_ansi(f"\033[31m{text}\033[38;2;1;2;3m") == text
    assert strip_ansi(f"[31m{text}[39m") == text  # the escape character lost by a viewer


def test_quantized_models_of_0_3_have_no_mfu() -> None:
    step = parse_step(
        "step:  1  loss:  8.0  grad_norm:  0.5  memory:  1.00GiB(1.00%)  tps: 1,041  tflops: 0.04  mfu: N/A"
    )
    assert step is not None
    assert step.mfu_percent is None
    assert step.tps == 1041


def test_a_real_run_of_two_ranks() -> None:
    log = read("cpu_fsdp.log")
    assert [step.step for step in log.steps if step.line.rank == 0] == list(range(1, 9))
    assert [step.step for step in log.steps if step.line.rank == 1] == list(range(1, 9))
    assert {milestone for milestone, _ in log.milestones} >= {
        Milestone.VERSION,
        Milestone.MESH,
        Milestone.BUILDING,
        Milestone.CAPACITY,
        Milestone.MODEL_SIZE,
        Milestone.APPLIED,
        Milestone.MIXED_PRECISION,
        Milestone.INITIALIZED,
        Milestone.TRAINING_STARTS,
        Milestone.COMPLETED,
        Milestone.PROCESS_GROUP_DESTROYED,
    }
    assert degrees(log)["dp_shard"] == 2
    assert log.model_args["n_layers"] == 6
    assert not log.errors
    assert any("HF assets path" in line.text for line in log.warnings)


def test_the_printed_config_is_read() -> None:
    log = read("cpu_compiled_print_config.log")
    assert log.config["compile.enable"] is True
    assert log.config["compile.components"] == ["model", "loss"]
    assert log.config["training.steps"] == 12
    assert log.first(Milestone.COMPILING) is not None


def test_milestones_are_not_mistaken_for_each_other() -> None:
    log = read("cpu_single.log")
    by_kind = {milestone: line.text for milestone, line in log.milestones}
    assert by_kind[Milestone.BUILDING].startswith("Building llama3 debugmodelwith")
    assert by_kind[Milestone.MESH].startswith("Building device mesh")
    assert by_kind[Milestone.MODEL_SIZE].endswith("total parameters")


def test_tracebacks_by_rank_and_the_launchers_copies_last() -> None:
    log = read("cpu_zero_bubble_op_ac.log")
    own = [error for error in log.errors if not error.is_summary]
    assert {error.rank for error in own} == {0, 1}
    assert all(
        error.type == "RuntimeError" and error.message.startswith("Trying to backward") for error in own
    )
    assert all(error.frames[-1].file.endswith("torch/utils/checkpoint.py") for error in own)
    assert [error.is_summary for error in log.errors] == sorted(error.is_summary for error in log.errors)
    assert [(worker.rank, worker.is_root) for worker in log.failed_workers] == [(0, False), (1, True)]
    assert {error.rank for error in log.errors if error.is_summary} == {None, 0, 1}


def test_interleaved_ranks_are_kept_apart() -> None:
    lines = []
    for text in (
        "Traceback (most recent call last):",
        '  File "f.py", line 1, in f',
        "ValueError: of rank {}",
    ):
        lines += [f"[rank{rank}]:{text.format(rank)}" for rank in (0, 1, 2)]
    errors = parse_log("\n".join(lines)).errors
    assert {(error.rank, error.message) for error in errors} == {(r, f"of rank {r}") for r in (0, 1, 2)}


def test_a_chain_of_exceptions_is_one_error() -> None:
    (error,) = read("composed_recompile_limit_fatal.log").errors[:1]
    assert error.type.endswith("FailOnRecompileLimitHit")
    assert [cause.type for cause in error.causes] == ["torch._dynamo.exc.Unsupported"]
    assert "recompile limit exceeded" in error.text


def test_a_message_of_several_lines() -> None:
    error = read("cpu_odd_sequence.log").errors[0]
    assert error.type == "AssertionError"
    assert error.message.split() == [
        "Sequence",
        "length",
        "255",
        "must",
        "be",
        "divisible",
        "by",
        "the",
        "product",
        "of",
        "TP",
        "degree",
        "(1)",
        "and",
        "2",
        "*",
        "CP",
        "degree",
        "(1).",
    ]


def test_srun_labels_go() -> None:
    text = (LOGS / "cpu_single.log").read_text(encoding="utf-8")
    labelled = "\n".join(f"0: {line}" for line in text.splitlines())
    assert parse_log(labelled).steps == parse_log(text).steps
    assert parse_log(labelled).model_args == parse_log(text).model_args


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_line_ends(end: str) -> None:
    text = (LOGS / "cpu_single.log").read_text(encoding="utf-8").replace("\n", end)
    assert len(parse_log(text).steps) == 8
    assert parse_log(text).num_lines == text.count("\n")


def test_files_of_ranks_together_say_what_one_file_says() -> None:
    text = (LOGS / "cpu_zero_bubble_op_ac.log").read_text(encoding="utf-8")
    ranks = [
        parse_log(
            "\n".join(
                line.removeprefix(f"[rank{r}]:")
                for line in text.splitlines()
                if line.startswith(f"[rank{r}]:")
            ),
            source=f"rank{r}.log",
            rank=r,
        )
        for r in (0, 1)
    ]
    together, whole = merge(ranks), parse_log(text)
    assert {error.rank for error in together.errors} == {0, 1}
    assert together.model_args == whole.model_args
    assert {finding.rule for finding in diagnose(together)} == {finding.rule for finding in diagnose(whole)}


def test_float8_modules_are_counted_in_a_printed_model() -> None:
    assert read("cpu_float8_filter_print_model.log").float8_linear_modules == 0
    assert read("cpu_fsdp.log").float8_linear_modules is None
    printed = [
        titan("Model definion after conversion:"),
        "",
        "Transformer(",
        "  (wq): Float8Linear(in=1)",
        ")",
        titan("x"),
    ]
    assert parse_log("\n".join(printed)).float8_linear_modules == 1
