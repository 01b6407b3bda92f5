"""Layouts that no H200 row covers, against traces of whole torchtitan steps.

The traced figures are peak active MiB of one rank: Llama 3 with dim 1024, 4 layers, op AC, compiled,
torchtitan 0.2.2, torch 2.13 CPU with fake tensors (benchmarks/formula_against_trace.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.estimate import estimate_memory
from titan_tune.titan.job import job_from_text
from titan_tune.titan.settings import settings_from
from titan_tune.units import MIB

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
NONE = {"activation_checkpoint.mode": "none"}
EAGER = {"compile.enable": False}
BF16 = {"training.dtype": "bfloat16"}
TP = {"parallelism.tensor_parallel_degree": 2}
CP = {"parallelism.context_parallel_degree": 2}
HSDP = {"parallelism.data_parallel_replicate_degree": 2}
BUDGET = {"activation_checkpoint.mode": "memory_budget"}
PP = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 8}
SCHEDULE = "parallelism.pipeline_parallel_schedule"
ACCUMULATE = "training.global_batch_size"


def estimate(world_size: int, values: dict[str, Any], pipeline_rank: int = 0) -> float:
    job = job_from_text(JOB, name="job").with_values(values)
    cluster = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=world_size)
    memory = estimate_memory(settings_from(job.resolved(), job.model, cluster))
    return memory.stages[pipeline_rank].active_bytes / MIB


@pytest.mark.parametrize(
    ("world_size", "values", "traced"),
    [
        (4, {ACCUMULATE: 16}, 1274.2),
        (1, {ACCUMULATE: 4}, 2604.3),
        (1, {**EAGER, ACCUMULATE: 4}, 3636.2),
        (4, HSDP, 1489.2),
        (4, {**HSDP, ACCUMULATE: 16}, 1704.2),
        (4, {**HSDP, **BF16}, 1166.7),
        (4, BF16, 1005.4),
        (4, TP, 1171.9),
        (4, {**TP, **EAGER}, 1595.0),
        (4, {**TP, **NONE}, 1332.0),
        (4, {**TP, "parallelism.disable_loss_parallel": True}, 1207.2),
        (2, {**TP, **BF16, ACCUMULATE: 8}, 1279.5),
        (4, {"parallelism.fsdp_reshard_after_forward": "always"}, 1104.2),
        (4, CP, 848.2),
        (4, {**CP, "activation_checkpoint.mode": "full"}, 723.7),
        (4, {"training.mixed_precision_param": "float32", **EAGER, **NONE}, 5308.3),
        (4, {**BUDGET, "activation_checkpoint.memory_budget": 0.3}, 1133.6),
        (4, {**BUDGET, "activation_checkpoint.memory_budget": 0.6}, 1269.8),
        (4, {**BUDGET, "activation_checkpoint.memory_budget": 0.9}, 1302.8),
    ],
)
def test_layouts_that_traces_confirm(world_size: int, values: dict[str, Any], traced: float) -> None:
    assert estimate(world_size, values) == pytest.approx(traced, rel=5e-4)


@pytest.mark.parametrize(
    ("schedule", "extra", "traced"),
    [
        ("1F1B", {}, (913.3, 1116.6)),
        ("Interleaved1F1B", {}, (1010.9, 1227.3)),
        ("GPipe", {}, (1188.1, 2188.2)),
        ("1F1B", {**TP, **BF16}, (426.7, 643.5)),
        ("Interleaved1F1B", {**TP, **BF16}, (492.3, 703.1)),
        ("GPipe", {**TP, **BF16}, (582.3, 2132.1)),
    ],
)
def test_pipelines_that_traces_confirm(
    schedule: str, extra: dict[str, Any], traced: tuple[float, float]
) -> None:
    values = {**PP, **extra, SCHEDULE: schedule}
    for rank, expected in enumerate(traced):
        assert estimate(4, values, rank) == pytest.approx(expected, rel=0.01)
