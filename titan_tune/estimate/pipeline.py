"""Peak memory of each pipeline rank: its stages, its schedule, its receive buffers.

Held against H200 runs of 1F1B and Interleaved1F1B, and against dry runs of one rank of N (FSDP, TP and CP under
PP, zero-bubble schedules; torch 2.11). FSDP under PP keeps weights gathered (``reshard_after_forward`` default) and
accumulates unsharded fp32 gradients until a stage's last microbatch. Weight halves leave theirs in the compute dtype:
FSDP's hooks do not run there, and the next input half adds them up.

A search asks for the worst rank only, so ranks between the ends are bounded first and computed where
the bound is not enough (:meth:`PipelineMemory.worst`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from titan_tune.domain.estimate import Phase
from titan_tune.domain.settings import Settings
from titan_tune.estimate.activations import saved_by_depth
from titan_tune.estimate.parameters import ParamPath, Recompute, Shapes
from titan_tune.estimate.phases import ADAM_MOMENTS, sharded_state
from titan_tune.estimate.pipeline_moments import (
    LOGITS,
    NEW_GRADIENTS,
    RankGradients,
    Row,
    costs_of,
    held_at,
    most_of_half,
    row_items,
    rows_of,
)
from titan_tune.estimate.reserved import (
    WEIGHT_HALF,
    logits_hole_bytes,
    loss_hole_bytes,
    pool_bytes,
    pools_of,
)
from titan_tune.estimate.schedule import ZERO_BUBBLE_SCHEDULES, Moment, moments, stages_of_rank
from titan_tune.estimate.stages import (
    REDUCE_BYTES,
    Split,
    Stage,
    StageKey,
    split_model,
    stage_layers,
    stage_of,
)

__all__ = ["PipelineMemory", "RankPeak", "split_model", "stage_layers"]

_ROUNDING = 1 + 1e-9
"""Above what sums of the same numbers in another order can differ by."""


class _RankPlan(NamedTuple):
    """What a rank runs, whatever the sizes are."""

    stages: tuple[StageKey, ...]
    backwards: tuple[Moment, ...]


_Counts = tuple[tuple[int, ...], tuple[int, ...], int]
"""Microbatches in flight and pending, per local stage; input gradients kept."""


class _Between(NamedTuple):
    """Ranks with neither the first nor the last stage, and what none of them exceeds."""

    stages: tuple[StageKey, ...]
    held: tuple[_Counts, ...]
    """At each moment that no other dominates."""
    rank: int | None
    """The rank where it is one; else they are in ``parts``."""
    parts: tuple[_Between, ...]


class _Plan(NamedTuple):
    ranks: tuple[_RankPlan, ...]
    ends: tuple[int, ...]
    """Ranks that have the first or the last stage."""
    between: tuple[_Between, ...]


@lru_cache(maxsize=4096)
def _plan(
    schedule: str, pp: int, split: Split, microbatches: int, overlap: bool, by_layer: bool, counted: bool
) -> _Plan:
    """``overlap``: whether DualPipeV runs forwards and backwards at once; ``by_layer``: stages of the same length
    differ by their place in the model; ``counted``: by how many blocks their rank has before them."""
    least_held = max(1, min(split.layers))  # each block's input
    ranks = tuple(
        _RankPlan(
            _stage_keys(schedule, rank, pp, split, by_layer, counted),
            moments(schedule, rank, pp, split.stages_per_rank, microbatches, overlap, least_held),
        )
        for rank in range(pp)
    )
    ends = tuple(r for r, plan in enumerate(ranks) if any(k.is_first or k.is_last for k in plan.stages))
    groups: dict[tuple[StageKey, ...], list[_Between]] = {}
    for rank, plan in enumerate(ranks):
        if rank not in ends:
            held = _undominated(
                ((m.in_flight, m.pending, m.kept_gradients) for m in plan.backwards), least_held
            )
            groups.setdefault(plan.stages, []).append(_Between(plan.stages, held, rank, ()))
    between = tuple(_together(keys, members, least_held) for keys, members in groups.items())
    if groups and not by_layer and not counted:  # a longer stage holds more in every respect
        longest = tuple(max(column) for column in zip(*groups, strict=True))
        between = (_together(longest, between, least_held),)
    return _Plan(ranks, ends, between)


def _together(stages: tuple[StageKey, ...], parts: Sequence[_Between], least_held: int) -> _Between:
    if len(parts) == 1:
        return parts[0]
    held = _undominated((counts for part in parts for counts in part.held), least_held)
    return _Between(stages, held, None, tuple(parts))


def _undominated(held: Iterable[_Counts], least_held: int) -> tuple[_Counts, ...]:
    every = sorted(set(held))

    def dominates(a: _Counts, b: _Counts) -> bool:
        more_held = least_held * (sum(a[0]) - sum(b[0]))
        return (
            a != b
            and all(x >= y for x, y in zip(a[0] + a[1], b[0] + b[1], strict=True))
            and a[2] + more_held >= b[2]
        )

    return tuple(counts for counts in every if not any(dominates(other, counts) for other in every))


def _stage_keys(
    schedule: str, rank: int, pp: int, split: Split, by_layer: bool, counted: bool
) -> tuple[StageKey, ...]:
    keys, built, last = [], 0, len(split.layers) - 1
    for number in stages_of_rank(schedule, rank, pp, split.stages_per_rank):
        num_layers = split.layers[number]
        first = sum(split.layers[:number]) if by_layer else 0
        keys.append(StageKey(num_layers, number == 0, number == last, first, built if counted else 0))
        built += num_layers
    return tuple(keys)


class _Rank(NamedTuple):
    """One rank with all its candidate peaks."""

    base: dict[str, float]
    """States, gathered weights, and receive buffers of all microbatches (allocated once)."""
    rows: dict[str, Row]
    """The highest moment of each phase of a backward."""
    step: tuple[tuple[str, dict[str, float]], ...]
    """Phases after the last backward; items that are not in the base."""

    def phases(self) -> tuple[Phase, ...]:
        backwards = (Phase(name, self.base | row_items(row)) for name, row in self.rows.items())
        return (*backwards, *(Phase(name, self.base | items) for name, items in self.step))


class RankPeak(NamedTuple):
    """Peaks of one rank, bytes."""

    rank: int
    phase: Phase
    active_bytes: float
    reserved_bytes: float


class PipelineMemory:
    """The ranks of one job; each is computed when it is asked for."""

    def __init__(self, settings: Settings, shapes: Shapes) -> None:
        pipeline, self._shapes = settings.pipeline, shapes
        self._split = split_model(pipeline, pp=shapes.pp, num_layers=shapes.layers)
        self._microbatches = max(1, settings.local_batch_size // pipeline.microbatch_size)
        self._plan = _plan(
            pipeline.schedule,
            shapes.pp,
            self._split,
            self._microbatches,
            pipeline.ep_overlap,
            shapes.moe is not None,
            shapes.recompute is Recompute.EVERY,
        )
        self._splits_backward = pipeline.schedule.lower() in ZERO_BUBBLE_SCHEDULES
        self._costs = costs_of(shapes)
        self._saved = saved_by_depth(shapes)
        self._stages: dict[StageKey, Stage] = {}

    def phases(self, rank: int) -> tuple[Phase, ...]:
        """The candidate peaks of one rank."""
        return self._rank(rank).phases()

    def worst(self) -> RankPeak:
        """The rank with the highest active peak, the first of equals; reserved is the most of any rank.

        The ends are computed, and ranks between them only where their bound reaches beyond what is known.
        """
        found = [self._peak(rank) for rank in self._plan.ends]
        active = max(peak.active_bytes for peak in found)
        reserved = max(peak.reserved_bytes for peak in found)
        waiting = list(self._plan.between)
        while waiting:
            between = waiting.pop()
            bound = self._bound(between)
            if bound[0] * _ROUNDING < active and bound[1] * _ROUNDING < reserved:
                continue
            if between.rank is None:
                waiting += reversed(between.parts)
                continue
            peak = self._peak(between.rank)
            found.append(peak)
            active, reserved = max(active, peak.active_bytes), max(reserved, peak.reserved_bytes)
        worst = max(found, key=lambda peak: (peak.active_bytes, -peak.rank))
        return worst._replace(reserved_bytes=reserved)

    def _peak(self, rank: int) -> RankPeak:
        s, (base, rows, step) = self._shapes, self._rank(rank)
        is_sharded, always = s.path is ParamPath.FSDP, sum(base.values())
        gather, held_shards = pools_of(s, base)
        name, active, main, shards = "", -1.0, 0.0, 0.0
        for phase, row in rows.items():
            total = sum(row, always)
            if total > active:
                name, active = phase, total
            in_shards = held_shards + row[NEW_GRADIENTS] if is_sharded else 0.0
            in_main = total - gather - in_shards
            if phase == "loss_backward":
                in_main += logits_hole_bytes(s)
            elif phase == WEIGHT_HALF and row[LOGITS]:
                in_main += loss_hole_bytes(s)
            main, shards = max(main, in_main), max(shards, in_shards)
        for phase, items in step:
            total = sum(items.values(), always)
            if total > active:
                name, active = phase, total
            in_shards = held_shards + items.get("gradients", 0.0) if is_sharded else 0.0
            main, shards = max(main, total - gather - in_shards), max(shards, in_shards)
        peak = Phase(name, base | (row_items(rows[name]) if name in rows else dict(step)[name]))
        return RankPeak(rank, peak, active, max(active, pool_bytes(s, main, gather, shards)))

    def _bound(self, between: _Between) -> tuple[float, float]:
        """Active and reserved bytes that none of these ranks exceeds."""
        s, k = self._shapes, self._costs
        stages = [self._stage(key) for key in between.stages]
        params, stored = _totals(stages)
        base = self._always_held(stages, params, stored)
        most = 0.0
        for in_flight, pending, kept_gradients in between.held:
            held = kept_gradients * k.hidden
            for stage, flying, waiting in zip(stages, in_flight, pending, strict=True):
                held += flying * (stage.activations + stage.scores) + waiting * stage.halves.retained
            most = max(most, held)
        most += k.hidden + max(k.working_set + k.scores_backward, *[most_of_half(stage) for stage in stages])
        most += sum([stage.gradient_bytes for stage in stages])
        if self._splits_backward and s.path is ParamPath.FSDP:  # late gradients
            most += sum([stage.compute_params_bytes for stage in stages])
        step = max([sum(items.values()) for _, items in self._step(stages, base, params, stored)])
        active = sum(base.values()) + max(most, step)
        gather, shards = pools_of(s, base)
        return active, max(active, pool_bytes(s, active - gather, gather, max(shards, stored)))

    def _rank(self, rank: int) -> _Rank:
        s, k = self._shapes, self._costs
        keys, backwards = self._plan.ranks[rank]
        stages = [self._stage(key) for key in keys]
        params, stored = _totals(stages)
        is_sharded = s.path is ParamPath.FSDP
        of_rank = RankGradients(
            is_sharded, s.accumulates and not is_sharded, 0.0 if s.accumulates or s.offload else 1.0
        )
        totals: dict[str, float] = {}
        rows: dict[str, Row] = {}
        for moment in backwards:
            held = held_at(stages, moment, k, of_rank)
            for name, row in rows_of(moment, stages[moment.position], held, of_rank, k):
                total = sum(row)
                if name not in totals or total > totals[name]:
                    totals[name], rows[name] = total, row
        base = self._always_held(stages, params, stored)
        return _Rank(base, rows, self._step(stages, base, params, stored))

    def _stage(self, key: StageKey) -> Stage:
        stage = self._stages.get(key)
        if stage is None:
            stage = self._stages[key] = stage_of(
                self._shapes, key, self._saved, splits_backward=self._splits_backward
            )
        return stage

    def _always_held(self, stages: list[Stage], params: float, stored: float) -> dict[str, float]:
        s = self._shapes
        if s.path is ParamPath.FSDP:
            base = sharded_state(s, stored)
            base["gathered_kept"] = s.compute_bytes * params
            if s.accumulates and not s.offload:
                base["gradients"] = stored
        else:
            base = {
                "parameters": stored,
                "optimizer": ADAM_MOMENTS * stored,
                "framework": s.framework_bytes,
            }
        neighbours = 2 * len(stages)
        for stage in stages:
            neighbours -= stage.is_first + stage.is_last
        base["receive_buffers"] = self._microbatches * self._costs.hidden * neighbours
        base["framework"] += (len(stages) - 1) * s.attention.rope_bytes * s.seq_full  # a RoPE table a stage
        return base

    def _step(
        self, stages: list[Stage], base: dict[str, float], params: float, stored: float
    ) -> tuple[tuple[str, dict[str, float]], ...]:
        s = self._shapes
        if s.path is not ParamPath.FSDP:
            return (("optimizer", {"gradients": sum(stage.gradient_bytes for stage in stages)}),)
        largest = s.gathered_params(s.is_moe(s.layers - 1))
        if any(stage.is_first or stage.is_last for stage in stages):
            largest = max(largest, s.gathered_table_params)
        unsharded = sum([stage.gradient_bytes for stage in stages])
        scatter = {
            "unsharded_gradients": unsharded,
            "reduce_scatter_input": REDUCE_BYTES * largest,
        }
        accumulated = "gradients" in base
        gradients = {} if accumulated else {"gradients": 0.0 if s.offload else stored}
        return (("gradient_reduce_scatter", scatter), ("optimizer", gradients))


def _totals(stages: list[Stage]) -> tuple[float, float]:
    """Parameters and stored bytes of a rank's stages."""
    params = stored = 0.0
    for stage in stages:
        params += stage.gathered_params
        stored += stage.stored_bytes
    return params, stored
