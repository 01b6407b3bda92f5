"""Dry runs of single ranks on an H200 beside the real two-GPU runs of the same files."""

import importlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from titan_tune.calibrate.rates import rates_of
from titan_tune.calibrate.result import Calibration
from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import Verdict
from titan_tune.estimate import estimate_memory
from titan_tune.estimate.interconnect import interconnect_of
from titan_tune.probe.dry_run_model import predict
from titan_tune.probe.dry_run_outcome import MEMORY_MARGIN, PIPELINE_MARGIN
from titan_tune.titan.job import job_from_text
from titan_tune.titan.rules import first_invalid
from titan_tune.titan.settings import resolve
from titan_tune.units import GIB

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


def rows(*names):
    return [json.loads(line) for name in names for line in (DATA / name).read_text().splitlines()]


def real_peaks():
    """Row name to the (active, reserved) GiB of each rank."""
    found = {
        row["id"]: list(zip(row["active_gib"], row["reserved_gib"], strict=True))
        for row in rows("h200_measured.jsonl", "h200_rows_layouts.jsonl")
        if "id" in row and row.get("world_size") == 2
    }
    for row in rows("tables/llama3_1b_two_gpus.jsonl"):
        if row.get("memory"):
            found[f"table:{row['config_id']}"] = [
                (active / GIB, reserved / GIB) for _, active, reserved, _ in row["memory"]
            ]
    return found


def pairs():
    real = real_peaks()
    for row in rows("h200_dry_runs.jsonl"):
        own = row.get("real_run", {})
        peaks = [
            (active / GIB, reserved / GIB)
            for active, reserved in zip(
                own.get("active_bytes", []), own.get("reserved_bytes", []), strict=True
            )
        ] or real.get(row.get("real"), [])
        for rank, dry in row["ranks"].items() if peaks else []:
            yield pytest.param(row, dry, *peaks[int(rank)], id=f"{row['id']}-rank{rank}")


PAIRS = list(pairs())


def test_there_are_rows_of_every_kind():
    pipelines = [p for p in PAIRS if p.values[1]["chunks"]]
    assert len(PAIRS) >= 14 and len(pipelines) >= 6


@pytest.mark.parametrize(("row", "dry", "active", "reserved"), PAIRS)
def test_memory_is_that_of_the_real_rank(row, dry, active, reserved):
    margin = PIPELINE_MARGIN if dry["chunks"] else MEMORY_MARGIN
    assert dry["active_bytes"] / GIB == pytest.approx(active, rel=margin)
    assert dry["reserved_bytes"] / GIB == pytest.approx(reserved, rel=0.04)


@pytest.mark.parametrize("row", rows("h200_dry_runs.jsonl"), ids=lambda row: row["id"])
def test_every_layout_was_counted(row):
    for dry in row["ranks"].values():
        assert dry["active_bytes"] <= dry["reserved_bytes"]
        assert all(record["count"] > 0 and record["bytes"] > 0 for record in dry["collectives"])


def test_the_pairs_to_be_measured_are_valid_jobs_of_two_h200s_and_on_a_processor(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    pairs = importlib.import_module("dry_run_pairs")
    h200 = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=2)
    assert len(set(pairs.NAMES)) == len(pairs.NAMES) >= 12
    for name in pairs.NAMES:
        job = job_from_text("", name=name).with_values(pairs.values_of(name))
        settings = resolve(job, h200)
        assert first_invalid(settings, job.resolved()) is None, name
        assert estimate_memory(settings).verdict is Verdict.FITS, name
        small = job_from_text("", name=name).with_values(pairs.shrunk(pairs.values_of(name)))
        assert resolve(small, h200).dims == settings.dims, name


@pytest.mark.parametrize("is_calibrated", [False, True])
def test_throughput_is_that_of_the_real_jobs(monkeypatch, is_calibrated):
    """15 jobs on two H200s, by the catalogue's links and by those that were measured on that machine."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    accuracy = importlib.import_module("dry_run_accuracy")
    calibration = Calibration.model_validate_json((DATA / "h200_calibration.json").read_text())
    errors = {}
    for dry in accuracy.dry_runs():
        if (real := accuracy.real_of(dry.row, {})) is None:
            continue
        rates = rates_of(calibration) if is_calibrated else None
        cluster = dry.settings.cluster.model_copy(update={"rates": rates})
        settings = replace(dry.settings, cluster=cluster)
        found = predict(settings, dry.runs, interconnect_of(cluster))
        seconds = accuracy.real_seconds(dry, real)
        assert abs(seconds / found.step_seconds - 1) <= found.relative_interval, dry.row["id"]
        dims = settings.dims
        kind = "EP" if dims.ep > 1 else "TP, PP" if dims.tp > 1 or dims.pp > 1 else "FSDP, DDP, CP"
        errors.setdefault(kind, []).append(abs(seconds / found.step_seconds - 1))
    assert {kind: len(values) for kind, values in errors.items()} == {
        "FSDP, DDP, CP": 8,
        "TP, PP": 6,
        "EP": 1,
    }
    assert max(errors["FSDP, DDP, CP"]) <= 0.012
    assert max(errors["TP, PP"]) <= 0.045
