"""The formula against one rank of N on an H200 (torch 2.11): real kernels and allocator, no peers."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from h200 import DryRank, dry_ranks

from titan_tune.domain.estimate import StageMemory
from titan_tune.domain.settings import Settings
from titan_tune.estimate import estimate_memory
from titan_tune.estimate.halves import halves_of
from titan_tune.estimate.parameters import shapes_of
from titan_tune.estimate.schedule import BACKWARD, INPUT, WEIGHT, moments
from titan_tune.estimate.verdict import MEASURED_MARGIN, PIPELINE_MARGIN, relative_margins
from titan_tune.units import MIB

RANKS = dry_ranks()
TOLERANCE = 0.011
RESERVED_TOLERANCE = 0.065


def job(row_id: str) -> Settings:
    return next(row.settings for row in RANKS if row.id == row_id)


def stage_at(settings: Settings, rank: int) -> StageMemory:
    return estimate_memory(settings).stages[rank * settings.dims.pp // settings.dims.world_size]


@pytest.mark.parametrize("row", RANKS, ids=lambda row: f"{row.id}-rank{row.rank}")
def test_every_rank_is_what_was_measured(row: DryRank) -> None:
    stage = stage_at(row.settings, row.rank)
    assert stage.active_bytes == pytest.approx(row.active_bytes, rel=TOLERANCE)
    assert stage.reserved_bytes == pytest.approx(row.reserved_bytes, rel=RESERVED_TOLERANCE)


def test_mean_errors() -> None:
    stages = [stage_at(row.settings, row.rank) for row in RANKS]
    active = [abs(s.active_bytes / row.active_bytes - 1) for s, row in zip(stages, RANKS, strict=True)]
    reserved = [abs(s.reserved_bytes / row.reserved_bytes - 1) for s, row in zip(stages, RANKS, strict=True)]
    assert statistics.mean(active) <= 0.002
    assert statistics.mean(reserved) <= 0.02


@pytest.mark.parametrize("row", RANKS, ids=lambda row: f"{row.id}-rank{row.rank}")
def test_every_rank_lies_in_its_interval(row: DryRank) -> None:
    estimate = estimate_memory(row.settings)
    stage = stage_at(row.settings, row.rank)
    below, above = relative_margins(row.settings, shapes_of(row.settings), stage.peak.name)
    assert stage.active_bytes * (1 - below) <= row.active_bytes <= stage.active_bytes * (1 + above)
    # what rejects is the worst stage's
    assert row.active_bytes >= estimate.active_interval[0] or row.stage != estimate.worst_stage


def test_pipeline_margins_are_twice_the_worst_residual() -> None:
    pipelines = [row for row in RANKS if row.settings.dims.pp > 1]
    errors = [abs(stage_at(r.settings, r.rank).active_bytes / r.active_bytes - 1) for r in pipelines]
    assert 2 * max(errors) <= MEASURED_MARGIN + PIPELINE_MARGIN <= 2.1 * max(errors)


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
