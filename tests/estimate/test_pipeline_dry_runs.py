"""The formula against one rank of N on an H200 (torch 2.11): real kernels and allocator, no peers."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.estimate import StageMemory
from titan_tune.domain.settings import Settings
from titan_tune.estimate import estimate_memory
from titan_tune.estimate.halves import halves_of
from titan_tune.estimate.parameters import shapes_of
from titan_tune.estimate.schedule import BACKWARD, INPUT, WEIGHT, moments
from titan_tune.titan.job import job_from_text
from titan_tune.titan.settings import resolve
from titan_tune.units import MIB

DATA = Path(__file__).parents[1] / "data" / "h200_dry_runs.jsonl"
ROWS = tuple(json.loads(line) for line in DATA.read_text(encoding="utf-8").splitlines())
RANKS = tuple((row, int(rank)) for row in ROWS for rank in row["ranks"])
TOLERANCE = 0.02
RESERVED_TOLERANCE = 0.065


@lru_cache(maxsize=len(ROWS))
def job(row_id: str) -> Settings:
    row = next(row for row in ROWS if row["id"] == row_id)
    world = row["world_size"]
    cluster = ClusterSpec(gpu=gpu_spec("h200"), num_nodes=max(1, world // 8), gpus_per_node=min(world, 8))
    base = job_from_text("[model]\nname = 'llama3'\nflavor = 'debugmodel'\n", name=row_id)
    return resolve(base.with_values(row["config"]), cluster)


def stage_at(settings: Settings, rank: int) -> StageMemory:
    return estimate_memory(settings).stages[rank * settings.dims.pp // settings.dims.world_size]


@pytest.mark.parametrize(("row", "rank"), RANKS, ids=[f"{row['id']}-rank{rank}" for row, rank in RANKS])
def test_every_rank_is_what_was_measured(row: dict[str, Any], rank: int) -> None:
    measured = row["ranks"][str(rank)]
    stage = stage_at(job(row["id"]), rank)
    assert stage.active_bytes == pytest.approx(measured["active_bytes"], rel=TOLERANCE)
    assert stage.reserved_bytes == pytest.approx(measured["reserved_bytes"], rel=RESERVED_TOLERANCE)


def test_zero_bubbles_peak_where_traces_do() -> None:
    """Traces of the same jobs with torch 2.11, which agree with the dry runs to the byte."""
    peaks = {
        ("1B-pp2fsdp2-izb-b8-none-e", 2): "loss_backward",
        ("1B-pp2fsdp2-zbv-b8-full-e", 0): "weight_backward",
        ("1B-pp2fsdp2-zbv-b8-full-e", 2): "weight_backward",
        ("1B-pp2fsdp2-dualpipev-b8-full-e", 0): "loss_backward",
        ("1B-pp2fsdp2-dualpipev-b8-full-e", 2): "weight_backward",
    }
    assert {key: stage_at(job(key[0]), key[1]).peak.name for key in peaks} == peaks


def test_the_embeddings_fp32_gradient_has_the_whole_vocabulary() -> None:
    settings = job("405B-fsdp8tp8pp8-1f1b-b32-full-c-tw")
    model, stages = settings.model, estimate_memory(settings).stages
    shard = 4 * model.vocab_size * model.dim / settings.dims.tp
    first, last = (stage.peak.items["unsharded_gradients"] for stage in (stages[0], stages[-1]))
    # both hold as many blocks and one table; the final norm is the last stage's
    assert first - last == pytest.approx(7 * shard - 4 * model.dim)


def test_overlapped_forwards_leave_their_logits() -> None:
    settings = job("1B-pp2fsdp2-dualpipev-b8-full-e")
    without = replace(settings, pipeline=replace(settings.pipeline, ep_overlap=False))
    logits = 2 * settings.seq_len * settings.model.vocab_size
    # microbatches 2 to 6 went back before the last, 7, is at its loss
    difference = estimate_memory(settings).active_bytes - estimate_memory(without).active_bytes
    assert 4 * logits < difference <= 5 * logits


def test_the_last_weight_half_of_a_middle_stage() -> None:
    """Traced: stages of four and five blocks grow by 7960.7 and 9953.2 MiB, 400 and 516 of them gradients."""
    settings = job("1B-pp2fsdp2-zbv-b8-full-e")
    shapes = shapes_of(settings)
    for first, end, peak, gradients in ((9, 13, 7560.7, 400), (4, 9, 9437.2, 516)):
        halves = halves_of(shapes, first, end, is_last=False, logits=0.0)
        assert halves.weight_peak / MIB == pytest.approx(peak, abs=2)
        assert halves.weight_gradients / MIB == pytest.approx(gradients, abs=1)
        assert halves.retained / MIB == pytest.approx((end - first) * 216 - 16)


def test_gradients_of_weight_halves_join_in_the_next_input_half() -> None:
    found = moments("ZBVZeroBubble", 1, 2, 2, 8)
    assert any(m.kind == INPUT and m.late[m.position] for m in found)
    assert all(not m.late[m.position] for m in found if m.kind == WEIGHT and m.pending[m.position] > 1)
    # 8 microbatches of stage 1; stage 2 hands its input gradients over on the rank itself
    assert max(m.kept_gradients for m in found) == 8


def test_a_stage_whose_microbatches_are_done_is_reduced() -> None:
    last = [m for m in moments("DualPipeV", 1, 2, 2, 8) if m.kind == WEIGHT and m.reduced == (False, True)]
    assert [m.position for m in last] == [0]


def test_only_zero_bubbles_keep_input_gradients() -> None:
    for schedule in ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"):
        per_rank = 1 if schedule in ("1F1B", "GPipe") else 2
        for rank in range(4):
            for m in moments(schedule, rank, 4, per_rank, 16):
                assert (m.kind, m.kept_gradients, m.kept_outputs) == (BACKWARD, 0, 0)
                assert not any(m.late)
