"""Device memory outside the allocator against every row and table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from h200 import rows

from titan_tune.domain.settings import ParallelDims
from titan_tune.estimate.reserved import outside_bytes
from titan_tune.units import GIB

TABLES = Path(__file__).parents[1] / "data" / "tables"
DIMS = {
    "": ParallelDims(),
    "dp_shard=2": ParallelDims(dp_shard=2),
    "dp_replicate=2": ParallelDims(dp_replicate=2),
    "tp=2": ParallelDims(tp=2),
    "cp=2": ParallelDims(cp=2),
    "pp=2": ParallelDims(pp=2),
}
JOB = next(row.settings for row in rows() if row.id == "1B-b4-s4096-op-c-bf16-fsdp2")


def table_lines() -> list[dict[str, object]]:
    lines = [
        json.loads(line) for path in sorted(TABLES.glob("*.jsonl")) for line in path.read_text().splitlines()
    ]
    return [line for line in lines if line.get("status") == "completed"]


def test_every_table_row() -> None:
    layouts = set()
    for line in table_lines():
        layout = line["choices"].get("parallelism", "").partition(",")[0]
        layouts.add(layout)
        measured = max(device - reserved for _, _, reserved, device in line["memory"]) / GIB
        settings = replace(JOB, dims=DIMS[layout])
        assert outside_bytes(settings) / GIB == pytest.approx(measured, abs=0.02), line["choices"]
    assert layouts == set(DIMS)


def test_expert_parallelism_exchanges_tokens_as_peers() -> None:
    sharded = outside_bytes(replace(JOB, dims=ParallelDims(dp_shard=8)))
    assert outside_bytes(replace(JOB, dims=ParallelDims(dp_shard=8, ep=8))) - sharded == pytest.approx(
        0.436 * GIB
    )
