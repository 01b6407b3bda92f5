"""From what single ranks measured alone to what the job would do. Pure.

A dry run measures compute; communication is computed from the collectives that the rank issued, and a
pipeline's waiting by running its schedule with the measured times of its forwards and backwards.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import RankMemory, StepRecord
from titan_tune.domain.settings import ParallelDims, Settings
from titan_tune.errors import InputError
from titan_tune.estimate import NotCoveredError, estimate_memory, estimate_step_time
from titan_tune.estimate.collectives import (
    Cause,
    CollectiveRecord,
    CommunicationTime,
    Exposure,
    Interconnect,
    Op,
    cause_of,
    collective_seconds,
    exposed_seconds,
)
from titan_tune.estimate.interconnect import exposure_by_links
from titan_tune.estimate.schedule import WEIGHT, rank_operations, stages_of_rank
from titan_tune.estimate.stages import split_model

WORST, ALL = "worst", "all"
RANK_CHOICES: Final = (WORST, ALL)

ALWAYS_ALL: Final = 4
"""Pipelines up to this many ranks run whole."""

DATA_PARALLEL_INTERVAL: Final = 0.08
"""Relative half width of predicted throughput, FSDP, HSDP, DDP and CP. Eight real runs on two H200s lie within 1.2 %
of what was fitted to them, and within 2.3 % of what was fitted to the other seven; nothing larger was measured."""
MODEL_PARALLEL_INTERVAL: Final = 0.15
"""The same with TP, PP or EP, whose communication nothing hides: six such runs within 4.2 %, one with EP 10 % off."""
OTHER_GPU_INTERVAL: Final = 0.10
"""More where the target is another GPU than the one that ran. Assumed."""

EXPOSURE: Final = Exposure(overlapped=0.42, tensor_parallel=1.33)
"""Less than beside the formula's compute, which leaves out the copies into and out of FSDP's buffers and fits TP's
small kernels less well: a dry run makes all of them itself. Fitted to real runs on two H200s, with the next
(benchmarks/dry_run_accuracy.py --print-fit)."""
CALIBRATED_EXPOSURE: Final = Exposure(overlapped=0.25, tensor_parallel=0.70)
"""The same against collectives as a calibration of that machine times them: slower, and the host's launch included."""
SLOWEST_RANK: Final = 0.023
"""Of the compute time, added where ranks meet in every step: the job is as fast as its slowest rank, and steps of
a rank differ. Two ranks; more would have a slower slowest, which was not measured. A pipeline has slack instead."""

_SMALL_MESHES: Final = ("batch", "loss")
"""Groups that only add up losses and counts."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Equal pieces of pipeline work in one step: F, B, I or W of one stage."""

    stage: int
    kind: str
    count: int
    seconds: float
    """Of one piece."""


@dataclass(frozen=True, slots=True)
class RankRun:
    """One simulated rank: what it measured and what it issued."""

    rank: int
    memory: RankMemory
    step_seconds: float
    """Median, collectives taken out."""
    measured_steps: int
    collectives: tuple[CollectiveRecord, ...]
    chunks: tuple[Chunk, ...]


class Prediction(NamedTuple):
    """A step of the whole job, in seconds."""

    compute_seconds: float
    """Of the rank that computes longest."""
    communication_seconds: float
    """What collectives add to it."""
    waiting_seconds: float
    """What waiting for the slowest of equal ranks adds."""
    bubble_seconds: float
    """What waiting for other pipeline ranks adds."""
    exposed: Mapping[Cause, float]
    relative_interval: float
    """Half width of throughput over throughput."""

    @property
    def step_seconds(self) -> float:
        """All together."""
        return self.compute_seconds + self.communication_seconds + self.waiting_seconds + self.bubble_seconds

    def interval(self, tokens_per_second: float) -> tuple[float, float]:
        """Around a throughput."""
        return (
            tokens_per_second * (1 - self.relative_interval),
            tokens_per_second * (1 + self.relative_interval),
        )


def ranks_to_run(settings: Settings, which: str = WORST) -> tuple[int, ...]:
    """Global ranks that stand for all others.

    Only the pipeline makes ranks differ: the others run the same kernels on shards of one size, and where a
    dimension does not divide, the first rank has the largest part. ``all`` takes one rank of every pipeline
    rank; ``worst`` the first, one in the middle, the last and the one that the formula calls worst, and all of a
    short pipeline.
    """
    dims = settings.dims
    if which == ALL or dims.pp <= ALWAYS_ALL:
        positions = set(range(dims.pp))
    else:
        positions = {0, dims.pp // 2, dims.pp - 1, *_formula_worst(settings)}
    return tuple(position * (dims.world_size // dims.pp) for position in sorted(positions))


def _formula_worst(settings: Settings) -> tuple[int, ...]:
    try:
        return (estimate_memory(settings).worst_stage,)
    except (NotCoveredError, InputError):
        return ()


def read_run(
    path: Path,
    dims: ParallelDims,
    memory: RankMemory,
    steps: Sequence[StepRecord],
    *,
    warmup: int,
) -> RankRun:
    """A rank's run from its ``collectives.rank*.json`` and its steps, of which at least one is measured."""
    record = json.loads(path.read_text(encoding="utf-8"))
    kept = [step.step_seconds for step in steps if step.step > warmup]
    counted = next(step.step_seconds for step in steps if step.step == record["step"])
    # the counted step is a little slower than the others, as counting takes time on the host; a pipeline's pieces
    # were timed in it, and where later steps are slower still, something else on the host slowed those
    seconds = min(median(kept), counted) if record["chunks"] else median(kept)
    pace = min(1.0, seconds / counted)
    chunks = [
        Chunk(c["stage"], c["kind"], c["count"], pace * c["seconds"] / c["count"]) for c in record["chunks"]
    ]
    answers = pace * record["answer_seconds"]
    return RankRun(
        rank=record["rank"],
        memory=memory,
        step_seconds=max(0.0, seconds - answers),
        measured_steps=len(kept),
        collectives=tuple(_collective(row, dims) for row in record["collectives"]),
        chunks=_without(chunks, answers),
    )


def _collective(row: Mapping[str, Any], dims: ParallelDims) -> CollectiveRecord:
    op, mesh_dim = Op(row["op"]), row["mesh_dim"]
    named = op.is_p2p or (mesh_dim is not None and mesh_dim not in _SMALL_MESHES)
    cause = cause_of(dims, op, row["group_size"], row["stride"], mesh_dim) if named else Cause.OTHER
    return CollectiveRecord(
        op=op,
        count=row["count"],
        bytes=row["bytes"],
        group_size=row["group_size"],
        stride=row["stride"],
        first_rank=row["first_rank"],
        phase=row["phase"],
        cause=cause,
    )


def _without(chunks: Sequence[Chunk], seconds: float) -> tuple[Chunk, ...]:
    """Chunks with ``seconds`` taken out of all of them in proportion."""
    total = math.fsum(chunk.count * chunk.seconds for chunk in chunks)
    return _scaled(chunks, max(0.0, 1 - seconds / total)) if total > 0 else tuple(chunks)


def _scaled(chunks: Sequence[Chunk], factor: float) -> tuple[Chunk, ...]:
    return tuple(Chunk(c.stage, c.kind, c.count, factor * c.seconds) for c in chunks)


def predict(
    settings: Settings, runs: Sequence[RankRun], interconnect: Interconnect, *, gpu_factor: float = 1.0
) -> Prediction:
    """What a step of the job takes; ``runs`` hold at least one rank.

    ``gpu_factor`` is the target's compute time over that of the GPU that ran.
    """
    interval = _relative_interval(settings.dims) + (OTHER_GPU_INTERVAL if gpu_factor != 1.0 else 0.0)
    if settings.dims.pp == 1:
        run = max(runs, key=lambda run: run.step_seconds)
        compute = gpu_factor * run.step_seconds
        times = _communication(settings, run, interconnect, compute)
        waiting = SLOWEST_RANK * compute if settings.dims.world_size > 1 else 0.0
        return Prediction(compute, times.exposed_seconds, waiting, 0.0, times.exposed, interval)
    return _predict_pipeline(settings, runs, interconnect, gpu_factor, interval)


def _communication(
    settings: Settings, run: RankRun, interconnect: Interconnect, compute: float
) -> CommunicationTime:
    exposure = exposure_by_links(settings.cluster, EXPOSURE, CALIBRATED_EXPOSURE)
    return exposed_seconds(run.collectives, interconnect, compute, exposure)


def _relative_interval(dims: ParallelDims) -> float:
    waits = dims.tp > 1 or dims.pp > 1 or dims.ep > 1
    return MODEL_PARALLEL_INTERVAL if waits else DATA_PARALLEL_INTERVAL


class _Lane(NamedTuple):
    """A simulated pipeline rank with its communication added."""

    compute: float
    exposed: Mapping[Cause, float]
    outside: float
    """Seconds of a step outside forwards and backwards: optimizer, FSDP's gathers and scatters."""
    chunks: tuple[Chunk, ...]


def _predict_pipeline(
    settings: Settings,
    runs: Sequence[RankRun],
    interconnect: Interconnect,
    gpu_factor: float,
    interval: float,
) -> Prediction:
    lanes = [_lane(settings, run, interconnect, gpu_factor) for run in runs]
    longest = max(lanes, key=lambda lane: lane.compute)
    durations = _durations(settings, [chunk for lane in lanes for chunk in lane.chunks])
    span = settings.gradient_accumulation_steps * makespan(
        settings, durations, _hop_seconds(runs, interconnect)
    )
    step = span + max(lane.outside for lane in lanes)
    exposed: dict[Cause, float] = {c: seconds for c, seconds in longest.exposed.items() if c is not Cause.PP}
    communication = math.fsum(exposed.values())
    bubble = max(0.0, step - longest.compute - communication)
    return Prediction(longest.compute, communication, 0.0, bubble, exposed, interval)


def _lane(settings: Settings, run: RankRun, interconnect: Interconnect, gpu_factor: float) -> _Lane:
    compute = gpu_factor * run.step_seconds
    exposed = _communication(settings, run, interconnect, compute).exposed
    waited_for = math.fsum(exposed.get(cause, 0.0) for cause in (Cause.TP, Cause.CP, Cause.EP))
    beside = math.fsum(exposed.get(cause, 0.0) for cause in (Cause.FSDP, Cause.HSDP, Cause.DDP, Cause.OTHER))
    inside = gpu_factor * math.fsum(chunk.count * chunk.seconds for chunk in run.chunks)
    # tensor, context and expert parallelism lengthen every forward and backward
    factor = gpu_factor * (1 + waited_for / inside) if inside > 0 else gpu_factor
    outside = max(0.0, compute - inside) + beside
    return _Lane(compute, exposed, outside, _scaled(run.chunks, factor))


def _hop_seconds(runs: Sequence[RankRun], interconnect: Interconnect) -> float:
    """One hidden state from a stage to the next."""
    sends = [c for run in runs for c in run.collectives if c.op.is_p2p]
    if not sends:
        return 0.0
    largest = max(sends, key=lambda record: record.bytes)
    return collective_seconds(
        largest.op,
        largest.bytes,
        largest.group_size,
        interconnect,
        stride=largest.stride,
        first_rank=largest.first_rank,
    )


def _durations(settings: Settings, chunks: Sequence[Chunk]) -> dict[tuple[str, int], float]:
    """Seconds of one (kind, stage); a stage that did not run takes as long as its likest that did."""
    measured = {(chunk.kind, chunk.stage): chunk.seconds for chunk in chunks}
    dims, pipeline = settings.dims, settings.pipeline
    layers, per_rank = split_model(pipeline, pp=dims.pp, num_layers=settings.model.n_layers)
    stages = dims.pp * per_rank
    found = {}
    for kind in {kind for kind, _ in measured}:
        known = [stage for other, stage in measured if other == kind]
        inner = [stage for stage in known if 0 < stage < stages - 1] or known
        for stage in range(stages):
            like = stage if stage in known else min(inner, key=lambda other: abs(other - stage))
            share = layers[stage] / layers[like] if stage != like and layers[like] else 1.0
            found[kind, stage] = share * measured[kind, like]
    return found


def makespan(settings: Settings, durations: Mapping[tuple[str, int], float], hop_seconds: float) -> float:
    """Seconds from the first forward to the last backward of one pass of the pipeline's schedule.

    Each rank runs its operations in its schedule's order; a forward waits for the stage before it, a backward
    for the stage after it, and a message takes ``hop_seconds`` between ranks.
    """
    dims, pipeline = settings.dims, settings.pipeline
    per_rank = split_model(pipeline, pp=dims.pp, num_layers=settings.model.n_layers).stages_per_rank
    microbatches = max(1, settings.local_batch_size // pipeline.microbatch_size)
    home = {
        stage: rank
        for rank in range(dims.pp)
        for stage in stages_of_rank(pipeline.schedule, rank, dims.pp, per_rank)
    }
    queues = [
        list(rank_operations(pipeline.schedule, rank, dims.pp, per_rank, microbatches))
        for rank in range(dims.pp)
    ]
    last_stage = dims.pp * per_rank - 1
    ended: dict[tuple[str, int, int], float] = {}
    clocks, places = [0.0] * dims.pp, [0] * dims.pp
    waiting = sum(map(len, queues))
    while waiting:
        before = waiting
        for rank, queue in enumerate(queues):
            while places[rank] < len(queue):
                kind, stage, microbatch = queue[places[rank]]
                ready = _ready_at(kind, stage, microbatch, ended, home, last_stage, hop_seconds)
                if ready is None:
                    break
                clocks[rank] = max(clocks[rank], ready) + durations.get((kind, stage), 0.0)
                ended[_done_name(kind), stage, microbatch] = clocks[rank]
                places[rank] += 1
                waiting -= 1
        if waiting == before:
            raise ValueError(f"{pipeline.schedule}: its ranks wait for each other")
    return max(clocks)


def _done_name(kind: str) -> str:
    """What the neighbour waits for: an input half is as good as a whole backward."""
    return {"B": "I"}.get(kind, kind)


def _ready_at(
    kind: str,
    stage: int,
    microbatch: int,
    ended: Mapping[tuple[str, int, int], float],
    home: Mapping[int, int],
    last_stage: int,
    hop_seconds: float,
) -> float | None:
    """When an operation's input is there, or ``None`` while it is not known."""
    if kind == WEIGHT:
        return 0.0
    neighbour = stage - 1 if kind == "F" else stage + 1
    if not 0 <= neighbour <= last_stage:
        return 0.0
    end = ended.get((_done_name(kind), neighbour, microbatch))
    if end is None:
        return None
    return end if home[neighbour] == home[stage] else end + hop_seconds


def gpu_factor(settings: Settings, machine: ClusterSpec) -> float:
    """Compute time on the target's GPU over that on ``machine``'s, by the formula; 1 for the same GPU or where
    the formula does not cover the model."""
    if machine.gpu.name == settings.cluster.gpu.name or machine.gpu.is_cpu:
        return 1.0
    here = settings.cluster.model_copy(update={"gpu": machine.gpu, "rates": machine.rates})
    try:
        return _compute(settings) / _compute(replace(settings, cluster=here))
    except (NotCoveredError, InputError):
        return 1.0


def _compute(settings: Settings) -> float:
    parts = estimate_step_time(settings).components
    return math.fsum(
        seconds for name, seconds in parts.items() if name not in ("communication", "pipeline_bubble")
    )
