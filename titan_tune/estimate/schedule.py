"""In which order a pipeline rank runs forwards and backwards, and what is in flight when.

Follows torch's pipelining schedules (torch 2.11 to 2.13); a test compares with the real classes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

SINGLE_STAGE_SCHEDULES = frozenset({"1f1b", "gpipe"})
V_SCHEDULES = frozenset({"zbvzerobubble", "dualpipev"})
ZERO_BUBBLE_SCHEDULES = frozenset({"interleavedzerobubble", "zbvzerobubble", "dualpipev"})
SCHEDULES = SINGLE_STAGE_SCHEDULES | ZERO_BUBBLE_SCHEDULES | {"interleaved1f1b", "loopedbfs"}

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
Operation = tuple[str, int, int]
"""``(kind, stage, microbatch)``; the kind is a full backward, or its input and weight halves."""


class Moment(NamedTuple):
    """One backward: which of the rank's stages runs it, and what the rank holds just before it."""

    position: int
    """Of the running stage among :func:`stages_of_rank`."""
    in_flight: tuple[int, ...]
    """Microbatches whose activations are alive, per local stage (the running one included)."""
    pending: tuple[int, ...]
    """Microbatches whose weight gradients are still to come, per local stage."""
    accumulated: tuple[bool, ...]
    """Per local stage: whether an earlier microbatch left gradients."""
    kind: str
    """BACKWARD, INPUT or WEIGHT."""
    late: tuple[bool, ...]
    """Per local stage: whether a weight half left gradients that no later backward added to the accumulated."""
    reduced: tuple[bool, ...]
    """Per local stage: whether its last microbatch is done, after which FSDP reduces and reshards."""
    kept_gradients: int
    """Input gradients that input halves left on receive buffers, where they stay to the end of the step."""
    kept_outputs: int
    """Logits of microbatches gone back that torchtitan's overlap of forward and backward keeps as outputs."""


def stages_of_rank(schedule: str, rank: int, pp: int, stages_per_rank: int) -> tuple[int, ...]:
    """The stages of a pipeline rank: looped, or the two arms of a V."""
    if schedule.lower() in V_SCHEDULES:
        return (rank, 2 * pp - 1 - rank)
    return tuple(range(rank, pp * stages_per_rank, pp))


@lru_cache(maxsize=4096)
def moments(
    schedule: str,
    rank: int,
    pp: int,
    stages_per_rank: int,
    microbatches: int,
    overlap: bool = True,
    least_held: int = 1,
) -> tuple[Moment, ...]:
    """The backwards of one rank that can be its peak (dominated ones left out).

    ``overlap``: ``pipeline_parallel_expert_parallel_overlap``, which changes DualPipeV only. ``least_held``: hidden
    states that a microbatch in flight holds at least on any stage; it decides what is dominated.
    """
    stages = stages_of_rank(schedule, rank, pp, stages_per_rank)
    local = {stage: i for i, stage in enumerate(stages)}
    num_stages = len(stages)
    in_flight, pending, done = [0] * num_stages, [0] * num_stages, [0] * num_stages
    accumulated, late = [False] * num_stages, [False] * num_stages
    last = pp * stages_per_rank - 1
    # torchtitan's overlap_callback, unlike torch, saves the outputs of the forwards it runs to the end of the
    # step; the last stage of DualPipeV overlaps all but its first pp microbatches
    first_kept = pp if overlap and schedule.lower() == "dualpipev" else microbatches
    kept_gradients = kept_outputs = 0
    seen: set[Moment] = set()
    for kind, stage, microbatch in rank_operations(schedule, rank, pp, stages_per_rank, microbatches):
        index = local[stage]
        if kind == FORWARD:
            in_flight[index] += 1
            continue
        if kind != INPUT or stage:  # torch leaves the first stage's input half out
            seen.add(
                Moment(
                    index,
                    tuple(in_flight),
                    tuple(pending),
                    tuple(accumulated),
                    kind,
                    tuple(late),
                    tuple([count == microbatches for count in done]),
                    kept_gradients,
                    kept_outputs,
                )
            )
        if kind != WEIGHT:
            kept_outputs += stage == last and microbatch >= first_kept
        if kind == INPUT:
            pending[index] += 1
            if stage:
                accumulated[index] = accumulated[index] or late[index]
                late[index] = False
                # a neighbour on this rank takes the gradient in place of a receive buffer
                kept_gradients += stage - 1 not in local
            continue
        pending[index] -= kind == WEIGHT
        in_flight[index] -= 1  # activations live until the weight gradients are there
        done[index] += 1
        is_half = kind == WEIGHT and stage > 0
        late[index] = is_half
        accumulated[index] = accumulated[index] or not is_half
    kept = [m for m in seen if not any(_dominates(other, m, least_held) for other in seen if other != m)]
    alike: dict[tuple[object, ...], list[Moment]] = {}
    for moment in sorted(kept):
        key = (moment.position, moment.pending, *moment[3:])
        alike.setdefault(key, []).append(moment)
    return tuple(moment for group in alike.values() for moment in _upper_hull(group))


def _upper_hull(group: list[Moment]) -> list[Moment]:
    """Those that a sum linear in what is in flight can have as its largest (two local stages)."""
    if len(group) < 3 or len(group[0].in_flight) != 2:
        return group
    hull: list[Moment] = []
    for moment in group:
        while len(hull) > 1 and _turns_up(hull[-2].in_flight, hull[-1].in_flight, moment.in_flight):
            hull.pop()
        hull.append(moment)
    return hull


def _turns_up(a: tuple[int, ...], b: tuple[int, ...], c: tuple[int, ...]) -> bool:
    """Whether ``b`` lies on or below the line from ``a`` to ``c``."""
    return (b[0] - a[0]) * (c[1] - a[1]) >= (b[1] - a[1]) * (c[0] - a[0])


def _open(moment: Moment) -> tuple[int, ...]:
    """Microbatches in flight whose backward has not begun, per local stage."""
    return tuple(flying - waiting for flying, waiting in zip(moment.in_flight, moment.pending, strict=True))


def _dominates(a: Moment, b: Moment, least_held: int) -> bool:
    more_held = least_held * (sum(a.in_flight) - sum(b.in_flight))
    return (
        a.position == b.position
        and a.kind == b.kind
        # a pending microbatch of the last stage holds less than one whose backward is still to come
        and all(x >= y for x, y in zip(_open(a), _open(b), strict=True))
        and all(x >= y for x, y in zip(a.pending, b.pending, strict=True))
        and all(x >= y for x, y in zip(a.accumulated, b.accumulated, strict=True))
        and all(x >= y for x, y in zip(a.late, b.late, strict=True))
        and all(x <= y for x, y in zip(a.reduced, b.reduced, strict=True))
        and a.kept_gradients + more_held >= b.kept_gradients
        and a.kept_outputs >= b.kept_outputs
    )


def rank_operations(
    schedule: str, rank: int, pp: int, stages_per_rank: int, microbatches: int
) -> Iterator[Operation]:
    """The compute operations of one rank, in order. Unknown names run as 1F1B (rules reject them)."""
    name = schedule.lower()
    if name == "gpipe":
        return _breadth_first((rank,), microbatches, reverse=False)
    if name == "loopedbfs":
        return _breadth_first(stages_of_rank(name, rank, pp, stages_per_rank), microbatches, reverse=True)
    if name in ("interleaved1f1b", "interleavedzerobubble"):
        return _interleaved(rank, pp, stages_per_rank, microbatches, zero_bubble=name != "interleaved1f1b")
    if name == "zbvzerobubble":
        return _zero_bubble_v(rank, pp, microbatches)
    if name == "dualpipev":
        return _dual_pipe_v(rank, pp, microbatches)
    return _one_forward_one_backward(rank, pp, microbatches)


def _breadth_first(stages: tuple[int, ...], microbatches: int, *, reverse: bool) -> Iterator[Operation]:
    for stage in stages:
        for microbatch in range(microbatches):
            yield FORWARD, stage, microbatch
    for stage in reversed(stages):
        order = range(microbatches)
        for microbatch in reversed(order) if reverse else order:
            yield BACKWARD, stage, microbatch


def _one_forward_one_backward(rank: int, pp: int, microbatches: int) -> Iterator[Operation]:
    forwards = min(microbatches, pp - rank)
    for microbatch in range(forwards):
        yield FORWARD, rank, microbatch
    for microbatch in range(microbatches):
        yield BACKWARD, rank, microbatch
        if forwards < microbatches:
            yield FORWARD, rank, forwards
            forwards += 1


class _Counter:
    """Numbers the microbatches of each (kind, stage) in order."""

    def __init__(self) -> None:
        self._next: dict[tuple[str, int], int] = {}

    def __call__(self, kind: str, stage: int) -> Operation:
        key = (INPUT if kind == BACKWARD else kind, stage)
        microbatch = self._next.get(key, 0)
        self._next[key] = microbatch + 1
        return kind, stage, microbatch

    def done(self, kind: str, stage: int) -> int:
        return self._next.get((kind, stage), 0)


def _interleaved(
    rank: int, pp: int, stages_per_rank: int, microbatches: int, *, zero_bubble: bool
) -> Iterator[Operation]:
    per_round = microbatches // max(1, microbatches // pp)
    total = stages_per_rank * microbatches
    hops = (1 if zero_bubble else 2) * (pp - 1 - rank)
    warmup = min((stages_per_rank - 1) * per_round + hops, total)
    number = _Counter()
    pending: list[int] = []
    for step in range(total + warmup):
        if step < total:
            yield number(FORWARD, (step // per_round) % stages_per_rank * pp + rank)
        if step < warmup:
            continue
        chunk = stages_per_rank - 1 - (step - warmup) // per_round % stages_per_rank
        stage = chunk * pp + rank
        yield number(INPUT if zero_bubble else BACKWARD, stage)
        if zero_bubble:
            pending.append(stage)
            if step - warmup >= rank:
                yield number(WEIGHT, pending.pop(0))
    for stage in pending:
        yield number(WEIGHT, stage)


def _zero_bubble_v(rank: int, pp: int, microbatches: int) -> Iterator[Operation]:
    planned = max(2 * pp - 1, microbatches)
    for operation in _zero_bubble_v_full(rank, pp, planned):
        if operation[2] < microbatches:
            yield operation


def _zero_bubble_v_full(rank: int, pp: int, microbatches: int) -> Iterator[Operation]:
    down, up = rank, 2 * pp - 1 - rank
    number = _Counter()
    for _ in range(2 * (pp - rank) - 1):
        yield number(FORWARD, down)
    for _ in range(rank):
        yield number(FORWARD, up)
        yield number(FORWARD, down)
    for _ in range(pp - rank):
        yield number(FORWARD, up)
        yield number(INPUT, up)
        yield number(WEIGHT, up)
    while number.done(FORWARD, up) < number.done(FORWARD, down) or number.done(FORWARD, down) < microbatches:
        if number.done(FORWARD, down) < microbatches:
            yield number(FORWARD, down)
        yield number(INPUT, down)
        yield number(WEIGHT, down)
        yield number(FORWARD, up)
        yield number(INPUT, up)
        yield number(WEIGHT, up)
    for _ in range(rank):
        yield number(INPUT, down)
        yield number(INPUT, up)
    for _ in range(pp - rank):
        yield number(INPUT, down)
        yield number(WEIGHT, down)
    while number.done(WEIGHT, up) < number.done(INPUT, up):
        yield number(WEIGHT, up)
    while number.done(WEIGHT, down) < number.done(INPUT, down):
        yield number(WEIGHT, down)


def _dual_pipe_v(rank: int, pp: int, microbatches: int) -> Iterator[Operation]:
    down, up = rank, 2 * pp - 1 - rank
    number = _Counter()
    waiting: list[Operation] = []

    def weight() -> Iterator[Operation]:
        if waiting:
            _, stage, microbatch = waiting.pop(0)
            yield WEIGHT, stage, microbatch

    def backward(stage: int, *, split: bool) -> Operation:
        operation = number(INPUT if split else BACKWARD, stage)
        if split:
            waiting.append(operation)
        return operation

    for _ in range(2 * (pp - rank - 1)):
        yield number(FORWARD, down)
    for _ in range(rank + 1):
        yield number(FORWARD, down)
        yield number(FORWARD, up)
    for _ in range(pp - rank - 1):
        yield backward(up, split=True)
        yield from weight()
        yield number(FORWARD, up)
    for _ in range(max(0, microbatches - 2 * pp + rank + 1)):
        yield number(FORWARD, down)
        yield backward(up, split=False)
        yield number(FORWARD, up)
        yield backward(down, split=False)
    for _ in range(pp - rank - 1):
        yield backward(up, split=False)
        yield number(FORWARD, up)
        yield backward(down, split=False)
    split = False
    steps = rank + 1
    for step in range(steps):
        split = split or (step == steps // 2 and rank % 2 == 1)
        yield backward(up, split=split)
        split = split or (step == steps // 2 and rank % 2 == 0)
        yield backward(down, split=split)
    for _ in range(pp - rank - 1):
        yield from weight()
        yield backward(down, split=split)
    for _ in range(rank + 1):
        yield from weight()
