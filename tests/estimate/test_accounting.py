"""The rule of thumb and what torchtitan holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_tune.catalog.loader import gpu_spec, model_spec, parameter_count
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import ParallelDims, Settings
from titan_tune.estimate.accounting import GB, accounting, accounting_json, nominal_parameters


def job(flavor: str, dims: ParallelDims) -> Settings:
    gpus = dims.world_size
    per_node = min(gpus, 8)
    return Settings(
        model=model_spec("llama3", flavor),
        cluster=ClusterSpec(gpu=gpu_spec("h200"), num_nodes=gpus // per_node, gpus_per_node=per_node),
        dims=dims,
        local_batch_size=8,
        global_batch_size=8 * dims.dp_degree,
        seq_len=4096,
    )


def test_seventy_billion_as_people_quote_it() -> None:
    found = accounting(job("70B", ParallelDims(dp_shard=8)))
    assert [line.total_bytes / GB for line in found.quoted.lines] == [140, 140, 420]
    assert found.quoted.total_bytes / GB == 700
    assert found.mixed.total_bytes / GB == 16 * 70
    assert found.parameters == parameter_count("llama3", "70B")


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_torchtitan_holds_everything_in_the_training_dtype(dtype: str, size: int) -> None:
    found = accounting(replace(job("8B", ParallelDims(dp_shard=8)), dtype=dtype))  # type: ignore[arg-type]
    count = parameter_count("llama3", "8B")
    totals = [line.total_bytes for line in found.held.lines]
    assert totals == pytest.approx([size * count, size * count, 2 * size * count])
    assert found.held.rank_bytes == pytest.approx(4 * size * count / 8)
    assert {line.dtype for line in found.held.lines} == {dtype}


@given(
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((1, 2)),
    st.sampled_from((1, 2, 4)),
)
def test_ranks_together_hold_every_replica(replicate: int, shard: int, tp: int, pp: int) -> None:
    if replicate > 1 and shard == 1 and (tp > 1 or pp > 1):
        return
    found = accounting(job("8B", ParallelDims(dp_replicate=replicate, dp_shard=shard, tp=tp, pp=pp)))
    count = parameter_count("llama3", "8B")
    assert found.parameters == count
    copies = found.held.total_bytes / (16 * count * replicate)
    # only norm weights are there more than once in a replica
    assert 1 - 1e-9 <= copies < 1.0005
    rank = found.held.rank_bytes
    assert rank is not None
    assert rank * found.world_size >= found.held.total_bytes * (1 - 1e-9)


def test_offload_moves_the_bytes_and_keeps_their_number() -> None:
    here = job("8B", ParallelDims(dp_shard=8))
    away = accounting(replace(here, cpu_offload=True))
    assert away.held == accounting(here).held
    assert any("host memory" in note for note in away.notes)


@pytest.mark.parametrize(
    ("flavor", "count"),
    [("70B", 70e9), ("0.6B", 6e8), ("125M", 125e6), ("30B-A3B", 30e9), ("debugmodel", None)],
)
def test_nominal_size_is_what_the_name_says(flavor: str, count: float | None) -> None:
    assert nominal_parameters(flavor) == count


def test_json_adds_up() -> None:
    document = accounting_json(accounting(job("8B", ParallelDims(dp_shard=8))))
    for name in ("quoted", "quoted_fp32_optimizer", "held"):
        table = document[name]
        assert table["total_gb"] == pytest.approx(sum(c["total_gb"] for c in table["components"]), abs=0.01)
        assert [c["component"] for c in table["components"]] == ["parameters", "gradients", "optimizer"]
