"""The H200 rows (96 runs and 22 dry runs, torch 2.11, torchtitan 0.2.2) as Settings with what was measured.

``h200_measured.jsonl``: dense Llama on one and two GPUs with speeds. ``h200_rows_layouts.jsonl``: more
layouts and every model family, memory only, routing of experts forced to be even. ``h200_dry_runs.jsonl``: one
rank of N on one GPU, memory only here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from titan_tune.catalog.loader import gpu_spec, model_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.model import ModelSpec
from titan_tune.domain.settings import Settings
from titan_tune.space.file import load_space
from titan_tune.titan.job import job_from_text
from titan_tune.titan.keys import defaults
from titan_tune.titan.settings import resolve, settings_from

DATA = Path(__file__).parents[1] / "data" / "h200_measured.jsonl"
LAYOUTS = DATA.with_name("h200_rows_layouts.jsonl")
ROOT = Path(__file__).parents[2]
TABLES = ROOT / "tests" / "data" / "tables"
DRY_RUNS = DATA.with_name("h200_dry_runs.jsonl")
MODEL_ARGS = "titan_tune.model_args."


@dataclass(frozen=True)
class Row:
    id: str
    settings: Settings
    active_gib: tuple[float, ...]
    reserved_gib: tuple[float, ...]
    device_gib: tuple[float, ...]
    tokens_per_second: float
    is_fake: bool
    """One rank of the job on one GPU with collectives that do nothing."""


@lru_cache(maxsize=1)
def rows() -> tuple[Row, ...]:
    return tuple(_row(json.loads(line)) for line in DATA.read_text().splitlines())


def _row(raw: dict[str, Any]) -> Row:
    model = ModelSpec(
        name=raw["model"],
        flavor=raw["flavor"],
        dim=raw["dim"],
        n_layers=raw["n_layers"],
        n_heads=raw["n_heads"],
        n_kv_heads=raw["n_kv_heads"] or raw["n_heads"],
        head_dim=raw["dim"] // raw["n_heads"],
        ffn_hidden_dim=raw["ffn_hidden_dim"],
        vocab_size=raw["vocab_size"],
    )
    world = raw["world_size"]
    cluster = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=world)
    values = {**defaults(), **raw["config"]}
    return Row(
        id=raw["id"],
        settings=settings_from(values, model, cluster),
        active_gib=tuple(raw["active_gib"]),
        reserved_gib=tuple(raw["reserved_gib"]),
        device_gib=tuple(raw["device_used_gib"]),
        tokens_per_second=raw["median_tps_per_gpu"],
        is_fake=raw["comm"] == "fake",
    )


@dataclass(frozen=True)
class LayoutRow:
    id: str
    settings: Settings
    active_gib: float
    reserved_gib: float


@lru_cache(maxsize=1)
def layout_rows() -> tuple[LayoutRow, ...]:
    return tuple(_layout_row(json.loads(line)) for line in LAYOUTS.read_text().splitlines())


def _layout_row(raw: dict[str, Any]) -> LayoutRow:
    config = raw["config"]
    args = {key.removeprefix(MODEL_ARGS): value for key, value in config.items() if MODEL_ARGS in key}
    keys = {key: value for key, value in config.items() if MODEL_ARGS not in key}
    model = model_spec(
        keys["model.name"], keys["model.flavor"], model_args=args or None, seq_len=keys["training.seq_len"]
    )
    cluster = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=raw["world_size"])
    (active,), (reserved,) = raw["active_gib"], raw["reserved_gib"]
    return LayoutRow(raw["id"], settings_from({**defaults(), **keys}, model, cluster), active, reserved)


@dataclass(frozen=True)
class DryRank:
    """One rank of N on one GPU."""

    id: str
    real: str
    """Id of the real run of the same job, if there is one."""
    rank: int
    settings: Settings
    active_bytes: int
    reserved_bytes: int

    @property
    def stage(self) -> int:
        """Its pipeline rank: the pipeline is the outermost dimension of torchtitan's mesh."""
        return self.rank * self.settings.dims.pp // self.settings.dims.world_size


@lru_cache(maxsize=1)
def dry_ranks() -> tuple[DryRank, ...]:
    return tuple(rank for line in DRY_RUNS.read_text().splitlines() for rank in _dry_ranks(json.loads(line)))


def _dry_ranks(raw: dict[str, Any]) -> list[DryRank]:
    world = raw["world_size"]
    cluster = ClusterSpec(gpu=gpu_spec("h200"), num_nodes=max(1, world // 8), gpus_per_node=min(world, 8))
    settings = resolve(job_from_text("", name=raw["id"]).with_values(raw["config"]), cluster)
    return [
        DryRank(
            raw["id"],
            raw.get("real") or "",
            int(rank),
            settings,
            found["active_bytes"],
            found["reserved_bytes"],
        )
        for rank, found in raw["ranks"].items()
    ]


@lru_cache(maxsize=1)
def real_pair_rows() -> tuple[Row, ...]:
    """Real two-GPU runs that were made beside dry runs, alone on their machine."""
    lines = (json.loads(line) for line in DRY_RUNS.read_text().splitlines())
    return tuple(
        _real_pair_row(raw) for raw in lines if "tokens_per_second_per_gpu" in raw.get("real_run", {})
    )


def _real_pair_row(raw: dict[str, Any]) -> Row:
    cluster, real = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=raw["world_size"]), raw["real_run"]
    return Row(
        id=raw["id"],
        settings=resolve(job_from_text("", name=raw["id"]).with_values(raw["config"]), cluster),
        active_gib=tuple(size / 2**30 for size in real["active_bytes"]),
        reserved_gib=tuple(size / 2**30 for size in real["reserved_bytes"]),
        device_gib=(),
        tokens_per_second=real["tokens_per_second_per_gpu"],
        is_fake=False,
    )


@dataclass(frozen=True)
class TableRow:
    """One configuration of an exhaustive table (benchmarks/measure_table.py)."""

    table: str
    choices: str
    settings: Settings
    active_bytes: tuple[int, ...]
    """Peak of every rank."""


@lru_cache(maxsize=1)
def table_rows() -> tuple[TableRow, ...]:
    """Every configuration that completed, once."""
    found = []
    for path in sorted(TABLES.glob("*.jsonl")):
        head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        space = load_space(ROOT / head["space"])
        base, seen = space.base.resolved(), set()
        for line in lines:
            if line["status"] != "completed" or line["config_id"] in seen:
                continue
            seen.add(line["config_id"])
            settings = settings_from({**base, **line["values"]}, space.base.model, space.cluster)
            choices = ", ".join(map(str, line["choices"].values()))
            active = tuple(rank[1] for rank in line["memory"])
            found.append(TableRow(path.stem, choices, settings, active))
    return tuple(found)
