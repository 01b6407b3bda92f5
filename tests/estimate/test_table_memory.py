"""The memory formula against the exhaustive H200 tables, whose rows no constant was fitted to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from titan_tune.domain.settings import Settings
from titan_tune.estimate import estimate_memory
from titan_tune.estimate.reserved import uses_cuda_graphs
from titan_tune.space.file import load_space
from titan_tune.titan.settings import settings_from

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "tests" / "data" / "tables").glob("*.jsonl"))


def rows() -> Iterator[Any]:
    """(settings, peak active bytes of every rank) of each configuration, once."""
    for path in TABLES:
        head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        space = load_space(ROOT / head["space"])
        base, seen = space.base.resolved(), set()
        for line in lines:
            if line["status"] == "completed" and line["config_id"] not in seen:
                seen.add(line["config_id"])
                settings = settings_from({**base, **line["values"]}, space.base.model, space.cluster)
                name = f"{path.stem}: {', '.join(map(str, line['choices'].values()))}"
                yield pytest.param(settings, [rank[1] for rank in line["memory"]], id=name)


ROWS = list(rows())


def is_exact(settings: Settings) -> bool:
    """Not what the margins name: split blocks, compiled rings, CUDA graphs with accumulation, pipelines."""
    dims, graphs = settings.dims, uses_cuda_graphs(settings)
    return not (
        dims.pp > 1
        or (graphs and settings.gradient_accumulation_steps > 1)
        or (settings.compile.model and settings.ac.mode == "none" and (dims.cp > 1 or dims.dp_replicate > 1))
    )


def test_there_are_tables() -> None:
    assert len(TABLES) == 3 and len(ROWS) >= 120
    assert sum(is_exact(row.values[0]) for row in ROWS) >= 90


@pytest.mark.parametrize(("settings", "measured"), ROWS)
def test_worst_rank_lies_in_the_interval(settings: Settings, measured: list[int]) -> None:
    low, high = estimate_memory(settings).active_interval
    assert low <= max(measured) <= high


@pytest.mark.parametrize(
    ("settings", "measured"),
    [row for row in ROWS if is_exact(row.values[0])],
)
def test_most_rows_are_exact(settings: Settings, measured: list[int]) -> None:
    assert estimate_memory(settings).active_bytes == pytest.approx(max(measured), rel=0.0015)
