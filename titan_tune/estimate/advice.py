"""What would make a job fit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import NamedTuple

from titan_tune.domain.candidate import Value
from titan_tune.domain.estimate import MemoryEstimate, Verdict
from titan_tune.domain.settings import Settings
from titan_tune.errors import InputError
from titan_tune.estimate.changes import (
    DTYPE,
    GPU_FACTORS,
    OFFLOAD,
    Asked,
    Changed,
    Option,
    changed,
    is_sound,
    options,
)
from titan_tune.estimate.memory import estimate_memory
from titan_tune.estimate.minimum import is_sure_to_run
from titan_tune.estimate.step_time import estimate_step_time
from titan_tune.titan import rules
from titan_tune.units import GIB

MAX_SUGGESTIONS = 6
MAX_CHANGES = 3
"""At once, the number of GPUs among them."""
SPEED_TOLERANCE = 0.1
"""A suggestion that asks for more must be faster by more than this: predictions are no better."""
MAX_HOST_BYTES = 2048 * GIB
"""Host memory of a node up to which offloading is offered: a DGX H100 has 2 TB."""
STATES = 4
"""Parameters, gradients and Adam's two moments, each as large as the parameters."""


@dataclass(frozen=True, slots=True)
class Suggestion:
    """One change of the job and what it would then need: figures of ``titan-tune estimate`` for the job with
    ``values`` on ``gpus`` GPUs, ``gpus_per_node`` a node."""

    values: tuple[tuple[str, Value], ...]
    """torchtitan keys and their new values."""
    settings: Settings
    memory: MemoryEstimate
    tokens_per_second_per_gpu: float
    changes_numerics: bool = False
    num_changes: int = 1
    """Changes at once; one may take several keys."""
    host_bytes: float | None = None
    """Host memory of a node that offloaded states take; ``None`` where nothing is offloaded."""
    warnings: tuple[str, ...] = ()
    """Rules that warn of the changed job and did not warn of the job."""

    @property
    def text(self) -> str:
        """The change as ``key = value`` pairs; empty where only the number of GPUs changes."""
        return ", ".join(self.lines)

    @property
    def lines(self) -> tuple[str, ...]:
        """One ``key = value`` each."""
        return tuple(f"{key} = {json.dumps(value)}" for key, value in self.values)

    @property
    def gpus(self) -> int:
        """Ranks that the changed job needs."""
        return self.settings.cluster.world_size

    @property
    def gpus_per_node(self) -> int:
        """How many of them a node has."""
        return self.settings.cluster.gpus_per_node


def host_bytes(settings: Settings) -> float:
    """Host memory of a node that ``training.enable_cpu_offload`` takes: the states of its ranks.

    Raises:
        InputError: the formula does not cover the job.
    """
    resident = estimate_memory(replace(settings, cpu_offload=False))
    rank = max(stage.peak.items["parameters"] for stage in resident.stages)
    return STATES * rank * settings.cluster.gpus_per_node


def suggestions(
    asked: Asked, verdict: Verdict = Verdict.DOES_NOT_FIT, *, limit: int = MAX_SUGGESTIONS
) -> tuple[Suggestion, ...]:
    """Changes that make the job fit, on the fewest GPUs and fastest predicted first; those that change
    numerics last.

    ``verdict`` is the job's: under pressure, only changes that take the pressure away are offered. Two changes
    at once are tried only when no single one that keeps the numerics is enough (fits without pressure), and
    three when no two are; on the job's own GPUs until one is found for them.
    """
    wanted = (Verdict.FITS,) if verdict is Verdict.PRESSURE else (Verdict.FITS, Verdict.PRESSURE)
    found: list[_Found] = []
    own, enough, states = asked.settings.cluster.world_size, None, _resident_states(asked.settings)
    for number in range(1, MAX_CHANGES + 1):
        if enough == own:
            break
        for chosen in _combinations(asked, number, more_gpus=enough is None):
            found += _tried(asked, chosen, number, wanted, states)
        enough = min(
            (
                f.suggestion.gpus
                for f in found
                if not f.suggestion.changes_numerics and f.suggestion.memory.verdict is Verdict.FITS
            ),
            default=None,
        )
    found.sort(key=_rank)
    best: dict[tuple[frozenset[str], Verdict], Suggestion] = {}
    for each in found:  # the mildest of those that turn the same keys
        best.setdefault((each.keys, each.suggestion.memory.verdict), each.suggestion)
    kept = [s for s in best.values() if not any(_makes_needless(other, s) for other in best.values())]
    return tuple(_warned(asked, s) for s in kept[:limit])


def _makes_needless(one: Suggestion, other: Suggestion) -> bool:
    """Whether ``one`` asks for no more than ``other`` in any respect and for less in one, and is about as
    fast."""
    asked = [
        (s.changes_numerics, s.memory.verdict is Verdict.PRESSURE, s.gpus, s.num_changes)
        for s in (one, other)
    ]
    no_more = all(mine <= theirs for mine, theirs in zip(*asked, strict=True))
    floor = (1 - SPEED_TOLERANCE) * other.tokens_per_second_per_gpu
    return no_more and asked[0] != asked[1] and one.tokens_per_second_per_gpu >= floor


class _Found(NamedTuple):
    """A combination of changes that is enough."""

    suggestion: Suggestion
    keys: frozenset[str]
    """That the combination turns, and ``gpus``; not those that follow from it."""


def _rank(found: _Found) -> tuple[bool, int, float]:
    suggestion = found.suggestion
    return suggestion.changes_numerics, suggestion.gpus, -suggestion.tokens_per_second_per_gpu


def _combinations(asked: Asked, number: int, *, more_gpus: bool) -> Iterator[tuple[Option, ...]]:
    """``number`` changes at once, and with ``more_gpus`` one fewer, to which they come as the last one."""
    single = list(options(asked))
    for chosen in chain(combinations(single, number - 1) if more_gpus else (), combinations(single, number)):
        crowded = number == MAX_CHANGES and any(option.changes_numerics for option in chosen)
        if not crowded and len({option.axis for option in chosen}) == len(chosen):
            yield chosen


def _resident_states(settings: Settings) -> float:
    """Bytes of parameters and Adam's moments that all GPUs together hold at least, but for offload and dtype."""
    stages = estimate_memory(settings).stages
    shards = sum(stage.peak.items["parameters"] for stage in stages)
    return (STATES - 1) * shards * settings.dims.world_size / len(stages) / settings.dims.dp_replicate


def _tried(
    asked: Asked, chosen: tuple[Option, ...], number: int, wanted: Sequence[Verdict], states: float
) -> Iterator[_Found]:
    """What of the combination is enough: on the same GPUs, or on the fewest more; on fewer under pressure."""
    world_size = asked.settings.cluster.world_size
    keys = {key: value for option in chosen for key, value in option.keys.items()}
    turned, numerics = frozenset(keys), any(option.changes_numerics for option in chosen)
    factors: tuple[int, ...] = (1,)
    if len(chosen) < number:
        factors, turned = GPU_FACTORS, turned | {"gpus"}
    fewest: dict[Verdict, Suggestion] = {}
    before, stay = math.inf, not turned & {OFFLOAD, DTYPE}
    for factor in factors:
        if stay and states > factor * world_size * asked.settings.cluster.gpu.memory_gib * GIB:
            continue
        made = changed(asked, keys, factor * world_size)
        if made is None or made.settings == asked.settings or not is_sound(asked, made):
            continue
        memory = _memory(made.settings)
        if memory is None:
            break
        if memory.verdict in wanted and memory.verdict not in fewest and is_sure_to_run(memory):
            suggestion = _suggestion(asked, made, memory, changes_numerics=numerics, number=number)
            if suggestion is not None:
                fewest[memory.verdict] = suggestion
        need = memory.active_interval[1] + memory.outside_bytes
        # a part is the same on any number of GPUs, the rest halves on twice as many
        if Verdict.FITS in fewest or 2 * need - before > memory.capacity_bytes:
            break
        before = need
    for suggestion in fewest.values():
        yield _Found(suggestion, turned)


def _memory(settings: Settings) -> MemoryEstimate | None:
    try:
        return estimate_memory(settings)
    except InputError:
        return None


def _suggestion(
    asked: Asked, made: Changed, memory: MemoryEstimate, *, changes_numerics: bool, number: int
) -> Suggestion | None:
    """With its figures; ``None`` for offloaded states that no host would hold."""
    settings, values = made
    held = host_bytes(settings) if settings.cpu_offload else None
    if held is not None and held > MAX_HOST_BYTES and not asked.settings.cpu_offload:
        return None
    return Suggestion(
        values=tuple((key, value) for key, value in values.items() if value != asked.values[key]),
        settings=settings,
        memory=memory,
        tokens_per_second_per_gpu=estimate_step_time(settings).tokens_per_second_per_gpu,
        changes_numerics=changes_numerics,
        num_changes=number,
        host_bytes=held,
    )


def _warned(asked: Asked, suggestion: Suggestion) -> Suggestion:
    """With the warnings that the change brings."""
    known = {finding.rule for finding in rules.warnings(asked.settings, asked.values)}
    values = {**asked.values, **dict(suggestion.values)}
    brought = tuple(f.rule for f in rules.warnings(suggestion.settings, values) if f.rule not in known)
    return replace(suggestion, warnings=brought)
