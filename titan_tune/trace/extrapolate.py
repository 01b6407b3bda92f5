"""Peaks of a deep model from traces of two shallow ones. No torch here.

Identical layers add the same bytes to every moment of a step, so the peak of each phase is linear in
the number of layers. The backward of one block is a phase of its own (``backward.<layer>``), numbered
from the end it is nearer to: between the ends bytes change linearly, so an end is the highest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from titan_tune.trace.events import Event, components_at, last_step, phase_peaks

Components = Mapping[str, int]

LAYERS_APART: Final = 2
"""Blocks at each end that differ from the middle: FSDP gathers the next while one computes."""


@dataclass(frozen=True)
class Depth:
    """A traced model of so many layers."""

    layers: int
    events: list[Event]


@dataclass(frozen=True)
class StepPeak:
    """The peak of a step and of its phases, bytes."""

    active_bytes: int
    phase: str
    components: Mapping[str, int]
    phases: Mapping[str, int]


def depths(full: int, layers: int | None, *, period: int, special: int = 0) -> list[int]:
    """Depths to trace: the full one, or two that are a period of the layer pattern apart.

    ``special`` layers at the beginning follow no pattern; a period of 0 says that there is none.
    """
    if layers is None or period == 0:
        return [full]
    first = max(layers, special + 2 * LAYERS_APART)
    first += (full - first) % period
    return [first, first + period] if first + period < full else [full]


def extrapolated(traces: Sequence[Depth], full: int) -> StepPeak:
    """The peak at depth ``full`` from two traces; with one, that trace's own."""
    if len(traces) == 1:
        return _traced(traces[0].events)
    shallow, deep = (_by_distance(_components(t.events), t.layers) for t in traces)
    scale = (full - traces[0].layers) / (traces[1].layers - traces[0].layers)
    peaks = {name: _line(shallow[name], deep[name], scale) for name in shallow if name in deep}
    name = max(peaks, key=lambda n: sum(peaks[n].values()))
    return StepPeak(
        sum(peaks[name].values()),
        _plain(name),
        peaks[name],
        _merged({name: sum(components.values()) for name, components in peaks.items()}),
    )


def _traced(events: Sequence[Event]) -> StepPeak:
    peaks = phase_peaks(events, first=last_step(events))
    peak = max(peaks.values(), key=lambda point: point.active_bytes)
    totals = {name: point.active_bytes for name, point in peaks.items()}
    return StepPeak(peak.active_bytes, _plain(peak.phase), components_at(events, peak.event), _merged(totals))


def _components(events: Sequence[Event]) -> dict[str, dict[str, int]]:
    peaks = phase_peaks(events, first=last_step(events))
    return {name: components_at(events, point.event) for name, point in peaks.items()}


def _plain(phase: str) -> str:
    return phase.partition(".")[0]


def _merged(totals: Mapping[str, int]) -> dict[str, int]:
    """Highest of the phases that differ in the block only."""
    merged: dict[str, int] = {}
    for name, total in totals.items():
        merged[_plain(name)] = max(merged.get(_plain(name), 0), total)
    return merged


def _by_distance(peaks: Mapping[str, Components], layers: int) -> dict[str, Components]:
    """Backward phases of blocks renamed by their distance from the nearer end; the middle is dropped."""
    renamed: dict[str, Components] = {}
    for name, peak in peaks.items():
        kind, _, layer = name.partition(".")
        if not layer or int(layer) < LAYERS_APART:
            renamed[name] = peak
        elif layers - int(layer) <= LAYERS_APART:
            renamed[f"{kind}.-{layers - int(layer)}"] = peak
    return renamed


def _line(first: Components, second: Components, scale: float) -> dict[str, int]:
    names = dict.fromkeys([*first, *second])
    return {n: round(first.get(n, 0) + scale * (second.get(n, 0) - first.get(n, 0))) for n in names}
