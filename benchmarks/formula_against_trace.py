"""Holds the memory formula against traces of whole torchtitan steps, where no measured row exists.

Writes reports/formula_against_trace.md; about ten minutes on two cores. The traced model is small
(dim 1024, 4 layers) and runs under fake tensors on a CPU: no GPU is involved on either side.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.estimate import estimate_memory
from titan_tune.titan.job import job_from_text
from titan_tune.titan.settings import settings_from
from titan_tune.trace import trace_memory

REPORT = Path(__file__).parents[1] / "reports" / "formula_against_trace.md"
MIB = 1024**2
JOB = """\
[model]
name = "llama3"
flavor = "small"

[titan_tune.model_args]
dim = 1024
n_layers = 4
n_heads = 16
n_kv_heads = 8
vocab_size = 32000
multiple_of = 256

[training]
local_batch_size = 2
seq_len = 2048

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[compile]
enable = true
"""
EAGER = {"compile.enable": False}
NONE = {"activation_checkpoint.mode": "none"}
FULL = {"activation_checkpoint.mode": "full"}
BF16 = {"training.dtype": "bfloat16"}
TP = {"parallelism.tensor_parallel_degree": 2}
CP = {"parallelism.context_parallel_degree": 2}
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
SMALL_VOCABULARY = {"titan_tune.model_args.vocab_size": 2048}
FP32_COMPUTE = {"training.mixed_precision_param": "float32"}
ACCUMULATE = "training.global_batch_size"
FLOAT8 = {
    "model.converters": ["quantize.linear.float8"],
    "quantize.linear.float8.filter_fqns": ["output"],
}


@dataclass(frozen=True)
class Case:
    """One job, and the ranks to trace (pipeline ranks differ)."""

    name: str
    world_size: int
    values: Mapping[str, Any]
    ranks: tuple[int, ...] = (0,)


def cases() -> Iterator[Case]:
    yield Case("FSDP 4, 4 accumulation steps", 4, {ACCUMULATE: 32})
    yield Case("one GPU, 2 accumulation steps", 1, {ACCUMULATE: 4})
    yield Case("one GPU, eager, 2 accumulation steps", 1, {**EAGER, ACCUMULATE: 4})
    yield Case("HSDP 2 x 2", 4, HSDP)
    yield Case("HSDP 2 x 2, 2 accumulation steps", 4, {**HSDP, ACCUMULATE: 16})
    yield Case("HSDP 2 x 2, bf16 states", 4, {**HSDP, **BF16})
    yield Case("FSDP 4, bf16 states", 4, BF16)
    yield Case("FSDP 2 x TP 2", 4, TP)
    yield Case("FSDP 2 x TP 2, eager", 4, {**TP, **EAGER})
    yield Case("FSDP 2 x TP 2, no AC", 4, {**TP, **NONE})
    yield Case("FSDP 2 x TP 2, no loss parallel", 4, {**TP, "parallelism.disable_loss_parallel": True})
    yield Case("TP 2, bf16, 4 accumulation steps", 2, {**TP, **BF16, ACCUMULATE: 8})
    yield Case("FSDP 4, reshard always", 4, {"parallelism.fsdp_reshard_after_forward": "always"})
    yield Case("FSDP 2 x CP 2", 4, CP)
    yield Case("FSDP 2 x CP 2, full AC", 4, {**CP, **FULL})
    yield Case("FSDP 2 x CP 2, eager, no AC", 4, {**CP, **EAGER, **NONE})
    yield Case("FSDP 4, fp32 compute", 4, FP32_COMPUTE)
    yield Case("FSDP 4, fp32 compute, eager, no AC", 4, {**FP32_COMPUTE, **EAGER, **NONE})
    yield Case("FSDP 4, float8 tensorwise, no AC", 4, {**FLOAT8, **NONE})
    for budget in (0.3, 0.6, 0.9):
        mode = {"activation_checkpoint.mode": "memory_budget"}
        yield Case(
            f"FSDP 4, memory budget {budget}", 4, {**mode, "activation_checkpoint.memory_budget": budget}
        )
    for name, ac in (
        ("op", {}),
        ("full", FULL),
        ("none", NONE),
        ("every 2", {"activation_checkpoint.selective_ac_option": "2"}),
    ):
        yield Case(f"FSDP 4, vocabulary 2048, eager, {name}", 4, {**SMALL_VOCABULARY, **EAGER, **ac})
    yield Case("FSDP 4, vocabulary 2048, no AC", 4, {**SMALL_VOCABULARY, **NONE})
    yield from float8_cases()
    yield from pipeline_cases()


def float8_cases() -> Iterator[Case]:
    """Where a block's own backward is the peak: float8, a compiled ring, a memory budget."""
    for layout, values in (("FSDP 4", {}), ("FSDP 2 x TP 2", TP)):
        for recipe in ("tensorwise", "rowwise"):
            of_recipe = {"quantize.linear.float8.recipe_name": recipe} if recipe != "tensorwise" else {}
            for name, ac in (("op", {}), ("full", FULL), ("none", NONE)):
                keys = {**SMALL_VOCABULARY, **FLOAT8, **of_recipe, **values, **ac}
                yield Case(f"{layout}, vocabulary 2048, float8 {recipe}, {name}", 4, keys)
    eager = {**SMALL_VOCABULARY, **FLOAT8, **EAGER}
    yield Case("FSDP 4, vocabulary 2048, float8 tensorwise, eager, op", 4, eager)
    yield Case("FSDP 2 x CP 2, vocabulary 2048, no AC", 4, {**SMALL_VOCABULARY, **CP, **NONE})
    budget = {"activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": 0.5}
    yield Case("FSDP 4, vocabulary 2048, memory budget 0.5", 4, {**SMALL_VOCABULARY, **budget})


def pipeline_cases() -> Iterator[Case]:
    pipeline = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 8}
    key = "parallelism.pipeline_parallel_schedule"
    for schedule in ("1F1B", "Interleaved1F1B", "GPipe"):
        yield Case(f"PP 2 x FSDP 2, {schedule}", 4, {**pipeline, key: schedule}, (0, 3))
        yield Case(f"PP 2 x TP 2, bf16, {schedule}", 4, {**pipeline, **TP, **BF16, key: schedule}, (0, 3))
    yield Case("PP 2, bf16, eager, 1F1B", 2, {**pipeline, **EAGER, **BF16, key: "1F1B"}, (0, 1))
    for schedule in ("InterleavedZeroBubble", "ZBVZeroBubble"):
        values = {**pipeline, **EAGER, **FULL, **BF16, key: schedule}
        yield Case(f"PP 2, bf16, eager, full AC, {schedule}", 2, values, (0, 1))


def row(case: Case, rank: int) -> str:
    job = job_from_text(JOB, name="traced job").with_values(case.values)
    cluster = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=case.world_size)
    settings = settings_from(job.resolved(), job.model, cluster)
    stages = estimate_memory(settings).stages
    stage = stages[rank // (case.world_size // settings.dims.pp)] if settings.dims.pp > 1 else stages[0]
    traced = trace_memory(
        job.resolved(), model_args=job.model_args, world_size=case.world_size, rank=rank
    ).active_bytes
    name = f"{case.name}, rank {rank}" if len(stages) > 1 else case.name
    return (
        f"| {name} | {stage.peak.name} | {traced / MIB:.1f} | {stage.active_bytes / MIB:.1f} "
        f"| {100 * (stage.active_bytes / traced - 1):+.2f} |"
    )


def main() -> None:
    start, lines = time.monotonic(), []
    for case in cases():
        for rank in case.ranks:
            lines.append(row(case, rank))
            print(lines[-1], file=sys.stderr, flush=True)
    text = [
        "# Memory: the formula against traces of whole steps",
        "",
        "What no H200 row covers. Llama 3, dim 1024, 4 layers, 16 heads, 8 KV heads, vocabulary 32000, local",
        "batch 2 (8 with PP), sequence 2048, op AC and compile unless said; torchtitan 0.2.2, torch 2.13 CPU,",
        "fake tensors, two training steps. Peak active memory of one rank. Written by",
        f"benchmarks/formula_against_trace.py in {(time.monotonic() - start) / 60:.0f} minutes.",
        "",
        "| job | peak in | traced MiB | formula MiB | error % |",
        "|---|---|---|---|---|",
        *lines,
        "",
        "Compiled float8 with scales for whole tensors, without TP: torch 2.13 writes an F-wide buffer in fp32 that",
        "torch 2.11 writes in bf16. The formula is for 2.11, which the H200s ran (titan_tune/estimate/float8.py).",
        "",
        "Zero-bubble schedules run a block's weight half once per weight, and a checkpoint recomputes each time",
        "(titan_tune/estimate/halves.py has what is alive between the halves).",
        "",
    ]
    REPORT.write_text("\n".join(text))
    print(f"wrote {REPORT}")


if __name__ == "__main__":
    main()
