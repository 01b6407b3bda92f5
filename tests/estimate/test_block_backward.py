"""Dense blocks whose own backward is the peak: a small vocabulary, against traces of whole torchtitan steps."""

from __future__ import annotations

from typing import Any

import pytest

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import Settings
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
n_layers = 3
n_heads = 16
n_kv_heads = 8
vocab_size = 2048
multiple_of = 256

[training]
local_batch_size = 2
seq_len = 2048

[activation_checkpoint]
selective_ac_option = "op"
"""
FSDP: dict[str, Any] = {}
ONE = {"parallelism.data_parallel_shard_degree": 1}
BF16 = {**ONE, "training.dtype": "bfloat16"}
TP = {"parallelism.tensor_parallel_degree": 2}
SHORT = {"training.local_batch_size": 1, "training.seq_len": 768}


def settings_of(world_size: int, mode: str, compiled: bool, values: dict[str, Any]) -> Settings:
    job = job_from_text(JOB, name="traced").with_values(
        {"activation_checkpoint.mode": mode, "compile.enable": compiled, **values}
    )
    cluster = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=world_size)
    return settings_from(job.resolved(), job.model, cluster)


@pytest.mark.parametrize(
    ("world_size", "mode", "compiled", "values", "traced"),
    [
        (4, "selective", False, FSDP, 551.15),
        (4, "full", False, FSDP, 490.90),
        (4, "selective", True, FSDP, 517.63),
        (4, "full", True, FSDP, 485.40),
        (4, "none", True, FSDP, 635.21),
        (4, "selective", False, SHORT, 333.98),
        (4, "full", False, SHORT, 324.56),
        (4, "none", False, SHORT, 350.11),
        (4, "selective", True, SHORT, 332.28),
        (4, "full", True, SHORT, 321.45),
        (4, "none", True, SHORT, 340.16),
        (1, "selective", False, ONE, 930.45),
        (1, "full", False, ONE, 887.96),
        (1, "selective", True, ONE, 857.93),
        (1, "full", True, ONE, 852.96),
        (1, "selective", False, {**ONE, **SHORT}, 689.12),
        (1, "selective", False, BF16, 613.41),
        (1, "full", True, BF16, 536.41),
        (1, "selective", True, {**BF16, **SHORT}, 381.87),
        (1, "none", True, {**BF16, **SHORT}, 377.09),
        (4, "selective", False, TP, 404.78),
        (4, "full", False, TP, 356.28),
        (4, "selective", True, TP, 369.40),
        (4, "full", True, TP, 354.28),
        (4, "none", True, TP, 441.18),
        (4, "none", False, {**TP, **SHORT}, 273.46),
        (4, "selective", True, {**TP, **SHORT}, 264.79),
        (4, "none", True, {**TP, **SHORT}, 273.54),
    ],
)
def test_backward_of_a_block_is_what_traces_say(
    world_size: int, mode: str, compiled: bool, values: dict[str, Any], traced: float
) -> None:
    # peak active MiB of one rank: torchtitan 0.2.2, torch 2.13 CPU with fake tensors
    memory = estimate_memory(settings_of(world_size, mode, compiled, values))
    assert memory.stages[0].peak.name.endswith("block_backward")
    assert memory.active_bytes / MIB == pytest.approx(traced, rel=6e-4)


@pytest.mark.parametrize(
    ("values", "traced"),
    [
        ({"parallelism.tensor_parallel_degree": 2, "compile.enable": True}, 426.67),
        ({"compile.enable": False}, 716.31),
    ],
)
def test_first_rank_of_a_pipeline(values: dict[str, Any], traced: float) -> None:
    """A stage's output lives through its backward; eager weights' gradients are added to earlier ones at once."""
    keys = {
        "titan_tune.model_args.vocab_size": 32000,
        "titan_tune.model_args.n_layers": 4,
        "training.local_batch_size": 8,
        "training.dtype": "bfloat16",
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": "1F1B",
        **values,
    }
    world_size = 2 * values.get("parallelism.tensor_parallel_degree", 1)
    first = estimate_memory(settings_of(world_size, "selective", False, keys)).stages[0]
    assert first.active_bytes / MIB == pytest.approx(traced, rel=2e-4)


def test_gradients_of_earlier_microbatches_take_those_of_an_eager_block() -> None:
    # one w2 in bf16: 1024 x 2816
    once = settings_of(1, "full", False, BF16)
    twice = settings_of(1, "full", False, {**BF16, "training.global_batch_size": 4})

    def working_set(job: Settings) -> float:
        phases = {phase.name: phase for phase in estimate_memory(job).stages[0].phases}
        return phases["last_block_backward"].items["working_set"]

    assert working_set(once) - working_set(twice) == 2 * 1024 * 2816
