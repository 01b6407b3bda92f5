"""Predicted against measured speeds: their order within a model and a table, and what drives them."""

from __future__ import annotations

import json
import math
import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from h200 import real_pair_rows, rows

from titan_tune.calibrate.rates import rates_of
from titan_tune.calibrate.result import Calibration
from titan_tune.catalog.loader import model_spec
from titan_tune.domain.settings import (
    AcMode,
    ActivationCheckpointing,
    Compilation,
    CompileMode,
    Float8,
    ParallelDims,
    Pipeline,
    Settings,
)
from titan_tune.estimate import estimate_step_time
from titan_tune.estimate.collectives import Cause, Op
from titan_tune.estimate.communication import Work, records
from titan_tune.estimate.parameters import shapes_of
from titan_tune.space.file import load_space
from titan_tune.titan.settings import settings_from
from titan_tune.units import MIB

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "tests" / "data" / "tables").glob("*.jsonl"))
CALIBRATION = ROOT / "tests" / "data" / "h200_calibration.json"
NONE = ActivationCheckpointing(AcMode.NONE)
OP = ActivationCheckpointing(AcMode.SELECTIVE, every=0)
JOB = next(row.settings for row in rows() if row.id == "1B-b4-s4096-op-c-bf16-fsdp2")


@lru_cache(maxsize=4)
def table(path: Path) -> tuple[tuple[float, float], ...]:
    """Predicted and measured tokens/s of a table's completed rows."""
    head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    space = load_space(ROOT / head["space"])
    base = space.base.resolved()
    found = []
    for line in lines:
        if line["status"] == "completed":
            settings = settings_from({**base, **line["values"]}, space.base.model, space.cluster)
            predicted = estimate_step_time(settings).tokens_per_second_per_gpu
            found.append((predicted, line["tokens_per_second_per_gpu"]))
    return tuple(found)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)  # equal ones share the mean of their ranks
        return [(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values]

    first, second = zip(*pairs, strict=True)
    return statistics.correlation(ranks(first), ranks(second))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_is_ordered_as_measured(path: Path) -> None:
    assert len(table(path)) >= 12
    assert rank_correlation(table(path)) >= 0.97


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_tables_ratios_are_as_measured(path: Path) -> None:
    errors = [math.log(predicted / measured) for predicted, measured in table(path)]
    middle = statistics.median(errors)
    assert statistics.median(abs(error - middle) for error in errors) <= 0.03


@pytest.mark.parametrize(("flavor", "count"), [("1B", 44), ("3B", 12), ("8B", 11)])
def test_a_model_is_ordered_as_measured(flavor: str, count: int) -> None:
    pairs = []
    for row in rows() + real_pair_rows():
        if row.settings.model.flavor == flavor:
            estimate = estimate_step_time(row.settings)
            silent = estimate.components["communication"] if row.is_fake else 0.0
            predicted = estimate.tokens_per_second_per_gpu * estimate.seconds / (estimate.seconds - silent)
            pairs.append((predicted, row.tokens_per_second))
    assert len(pairs) == count
    assert rank_correlation(pairs) >= 0.97
    assert statistics.median(abs(predicted / measured - 1) for predicted, measured in pairs) <= 0.02


def test_calibrated_links_predict_as_well_as_the_catalogue() -> None:
    """Real runs on two GPUs; both ways to know the links have their own shares of exposed communication."""
    rates = rates_of(Calibration.model_validate_json(CALIBRATION.read_text(encoding="utf-8")))
    errors = []
    for row in rows() + real_pair_rows():
        if row.settings.dims.world_size == 2 and not row.is_fake:
            cluster = row.settings.cluster.model_copy(update={"rates": rates})
            speed = estimate_step_time(replace(row.settings, cluster=cluster)).tokens_per_second_per_gpu
            errors.append(abs(speed / row.tokens_per_second - 1))
    assert len(errors) == 32
    assert statistics.median(errors) <= 0.02
    assert max(errors) <= 0.1


def parts(job: Settings) -> dict[str, float]:
    return dict(estimate_step_time(job).components)


def test_eager_float8_costs_more_than_it_saves() -> None:
    eager = replace(JOB, compile=Compilation(), ac=NONE)
    quantised = replace(eager, float8=Float8())
    assert estimate_step_time(quantised).seconds > 1.5 * estimate_step_time(eager).seconds
    compiled = replace(JOB, ac=NONE)
    assert (
        estimate_step_time(replace(compiled, float8=Float8())).seconds < estimate_step_time(compiled).seconds
    )


def test_op_ac_keeps_no_eager_float8_product() -> None:
    job = replace(JOB, compile=Compilation(), float8=Float8())
    kept, full = replace(job, ac=OP), replace(job, ac=ActivationCheckpointing(AcMode.FULL))
    assert parts(kept)["matmul"] == pytest.approx(parts(full)["matmul"])
    compiled = replace(kept, compile=JOB.compile)
    assert parts(compiled)["matmul"] < parts(kept)["matmul"]


def test_a_slow_host_weighs_on_small_batches() -> None:
    def share(batch: int) -> float:
        job = replace(JOB, local_batch_size=batch, global_batch_size=2 * batch, compile=Compilation())
        return parts(job)["host"] / estimate_step_time(job).seconds

    assert share(1) > 0.1 > share(8) > 0


@pytest.mark.parametrize("dims", [ParallelDims(tp=2), ParallelDims(cp=2)])
def test_eager_tensor_and_context_parallelism_wait_for_the_host(dims: ParallelDims) -> None:
    eager = replace(JOB, local_batch_size=8, global_batch_size=16, compile=Compilation(), dtype="bfloat16")
    compiled = replace(eager, compile=JOB.compile, dims=dims)
    split = parts(replace(eager, dims=dims))["host"]
    assert split > 5 * parts(eager)["host"]
    assert split > 5 * parts(compiled)["host"]


def test_an_optimizer_step_costs_something_of_its_own() -> None:
    """Two steps of half the batch take longer than one with two passes."""
    one = replace(JOB, dims=ParallelDims(), local_batch_size=4, global_batch_size=4)
    two = replace(one, global_batch_size=8)
    saved = 2 * estimate_step_time(one).seconds - estimate_step_time(two).seconds
    assert 1e-3 < saved < 0.1 * estimate_step_time(two).seconds


def test_autocast_copies_weights_in_every_pass() -> None:
    def optimizer(passes: int) -> float:
        return parts(replace(JOB, dims=ParallelDims(), local_batch_size=1, global_batch_size=passes))[
            "optimizer"
        ]

    assert optimizer(3) - optimizer(2) == pytest.approx(optimizer(2) - optimizer(1))
    assert optimizer(2) > optimizer(1)


def test_rowwise_casts_are_dearer_than_tensorwise() -> None:
    tensorwise, rowwise = (parts(replace(JOB, float8=Float8(recipe=r))) for r in ("tensorwise", "rowwise"))
    assert rowwise["float8_casts"] > 1.5 * tensorwise["float8_casts"]


def test_experts_cost_the_host() -> None:
    settings = next(row.settings for row in real_pair_rows() if row.settings.model.flavor == "16B")
    assert parts(settings)["host"] > 0.5 * estimate_step_time(settings).seconds


def test_cuda_graphs_need_no_host() -> None:
    graphs = replace(JOB, compile=replace(JOB.compile, mode=CompileMode.REDUCE_OVERHEAD))
    assert parts(graphs)["host"] == 0 < parts(JOB)["host"]


def test_matmuls_split_by_tensor_parallelism_lose_efficiency() -> None:
    cluster = JOB.cluster.model_copy(update={"gpus_per_node": 8})
    whole = replace(JOB, cluster=cluster, dims=ParallelDims(dp_shard=8))
    split = replace(JOB, cluster=cluster, dims=ParallelDims(dp_shard=1, cp=1, tp=8), dtype="bfloat16")
    assert parts(split)["matmul"] > parts(whole)["matmul"] / 8


@pytest.mark.parametrize("float8_gather", [False, True])
def test_fsdp_moves_its_parameters(float8_gather: bool) -> None:
    float8 = Float8(fsdp_all_gather=True) if float8_gather else None
    job = replace(JOB, float8=float8)
    s = shapes_of(job)
    found = records(job, s, Work(s.layers, True), 1)
    block = s.block_matmul + s.block_norm
    gathers = [r for r in found if r.op is Op.ALL_GATHER and r.count == s.layers]
    assert {r.phase: r.bytes for r in gathers} == dict.fromkeys(
        ("forward", "backward"), block * (1 if float8_gather else 2)
    )
    (scatter,) = (r for r in found if r.op is Op.REDUCE_SCATTER and r.count == s.layers)
    assert scatter.bytes == 4 * block
    assert {r.cause for r in found} == {Cause.FSDP}
    assert {r.group_size for r in found} == {2}


@pytest.mark.parametrize(
    ("dims", "causes"),
    [
        (ParallelDims(dp_replicate=2, dp_shard=2), {Cause.FSDP, Cause.HSDP}),
        (ParallelDims(dp_replicate=4), {Cause.DDP}),
        (ParallelDims(dp_shard=2, tp=2), {Cause.FSDP, Cause.TP}),
        (ParallelDims(cp=4), {Cause.FSDP, Cause.CP}),
        (ParallelDims(dp_shard=2, pp=2), {Cause.FSDP, Cause.PP}),
    ],
)
def test_each_parallelism_has_its_collectives(dims: ParallelDims, causes: set[Cause]) -> None:
    cluster = JOB.cluster.model_copy(update={"gpus_per_node": 4})
    job = replace(JOB, cluster=cluster, dims=dims, global_batch_size=4 * dims.dp_degree)
    s = shapes_of(job)
    found = records(job, s, Work(s.layers / dims.pp, True), 1)
    assert {r.cause for r in found} == causes
    assert all(r.count > 0 and r.bytes > 0 and r.group_size > 1 for r in found)


def counted(job: Settings, work: Work, passes: int) -> dict[tuple[Cause, Op], tuple[int, int]]:
    """Calls and MiB by cause and operation."""
    found: dict[tuple[Cause, Op], tuple[int, int]] = {}
    for r in records(job, shapes_of(job), work, passes):
        calls, size = found.get((r.cause, r.op), (0, 0))
        found[r.cause, r.op] = (calls + r.count, size + round(r.count * r.bytes / MIB))
    return found


def test_large_job_issues_what_a_dry_run_counted() -> None:
    """70B, FSDP 32 x TP 8, local batch 16, full AC: one rank on an H200 under the fake backend, torch 2.11. It
    gathered once more (163): final norm and output again in backward."""
    model = model_spec("llama3", "70B", seq_len=8192)
    job = replace(
        JOB,
        model=model,
        cluster=JOB.cluster.model_copy(update={"num_nodes": 32, "gpus_per_node": 8}),
        dims=ParallelDims(dp_shard=32, tp=8),
        local_batch_size=16,
        global_batch_size=512,
        seq_len=8192,
        ac=ActivationCheckpointing(AcMode.FULL),
    )
    found = counted(job, Work(model.n_layers, True), 1)
    assert found[Cause.TP, Op.ALL_GATHER] == (482, 987_136)
    assert found[Cause.TP, Op.REDUCE_SCATTER] == (402, 823_296)
    assert found[Cause.FSDP, Op.REDUCE_SCATTER] == (82, pytest.approx(33_647, abs=2))
    gathers, size = found[Cause.FSDP, Op.ALL_GATHER]
    assert gathers == 162
    assert size == pytest.approx(33_396, rel=0.01)


@pytest.mark.parametrize(
    ("ac", "compiled", "eager"),
    [
        (NONE, (4, 4), (4, 4)),
        (OP, (6, 4), (6, 4)),
        (ActivationCheckpointing(AcMode.FULL), (6, 5), (6, 6)),
        (ActivationCheckpointing(AcMode.SELECTIVE, every=2), (5, 4.5), (5, 5)),
    ],
)
def test_recomputed_collectives_of_tensor_parallelism(
    ac: ActivationCheckpointing, compiled: tuple[float, float], eager: tuple[float, float]
) -> None:
    """Gathers and scatters a block; two of each at the ends of the model."""
    for compilation, (gathers, scatters) in ((JOB.compile, compiled), (Compilation(), eager)):
        job = replace(JOB, dims=ParallelDims(tp=2), ac=ac, compile=compilation)
        found = counted(job, Work(16, True), 1)
        assert found[Cause.TP, Op.ALL_GATHER][0] == 16 * gathers + 2
        assert found[Cause.TP, Op.REDUCE_SCATTER][0] == 16 * scatters + 2


def test_float8_scales_of_tensor_parallelism_as_a_dry_run_counted() -> None:
    """405B, PP 8 x FSDP 8 x TP 8, full AC, tensorwise: a rank of 15 blocks reduced 5280 and 7200 single numbers in 32
    microbatches. Rowwise scales need no other rank."""
    job = replace(
        JOB,
        cluster=JOB.cluster.model_copy(update={"num_nodes": 64, "gpus_per_node": 8}),
        dims=ParallelDims(dp_shard=8, tp=8, pp=8),
        local_batch_size=32,
        global_batch_size=256,
        ac=ActivationCheckpointing(AcMode.FULL),
        float8=Float8(),
    )
    work = Work(15, False)
    assert counted(job, work, 32)[Cause.TP, Op.ALL_REDUCE] == (5280 + 7200, 0)
    kept = counted(replace(job, ac=NONE), work, 32)[Cause.TP, Op.ALL_REDUCE][0]
    half = replace(job, ac=ActivationCheckpointing(AcMode.SELECTIVE, every=2))
    assert kept < counted(half, work, 32)[Cause.TP, Op.ALL_REDUCE][0] < 5280 + 7200
    assert (Cause.TP, Op.ALL_REDUCE) not in counted(replace(job, float8=Float8(recipe="rowwise")), work, 32)


def test_pipeline_rank_issues_what_a_dry_run_counted() -> None:
    """1B, PP 2 x FSDP 2, Interleaved1F1B, eight microbatches: rank 2 of 4 sent and received 24 times 16 MiB."""
    job = replace(
        JOB,
        dims=ParallelDims(dp_shard=2, pp=2),
        local_batch_size=8,
        global_batch_size=16,
        pipeline=Pipeline(schedule="Interleaved1F1B"),
    )
    found = counted(job, Work(8, True, chunks=2), 8)
    assert found[Cause.PP, Op.SEND] == found[Cause.PP, Op.RECV] == (24, 384)
    assert found[Cause.FSDP, Op.ALL_GATHER] == (9, pytest.approx(1429, abs=2))
    assert found[Cause.FSDP, Op.REDUCE_SCATTER] == (9, pytest.approx(2858, abs=2))
