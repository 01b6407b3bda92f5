"""Space → candidates: every combination, checked by the rules, each run once.

Rejections that follow from the layout alone (parallel degrees, batch, sequence) are found once per
layout and not once per combination; everything else is checked for each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from titan_tune.domain.candidate import Candidate, Finding, Value
from titan_tune.domain.settings import Settings
from titan_tune.space.axes import Axis, AxisValue, Space
from titan_tune.titan.canonical import canonical, identity_of_canonical, model_shape
from titan_tune.titan.keys import defaults
from titan_tune.titan.rules import LAYOUT_RULES, OTHER_RULES, first_of
from titan_tune.titan.settings import settings_from

GLOBAL_BATCH = "training.global_batch_size"
_LAYOUT_KEYS = ("parallelism.", "training.seq_len", "training.local_batch_size", GLOBAL_BATCH)
BASE_LABEL = "base"


@dataclass(frozen=True)
class Enumeration:
    """What became of every combination: ``total`` = feasible + rejected + duplicates."""

    feasible: list[Candidate]
    """Valid candidates, each run once, in the order of the file (the last axis runs fastest)."""
    baseline: Candidate
    """The base job with its own values; it need be neither valid here nor among ``feasible``."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Rule id → combinations it rejects (each counts for the first rule that rejects it)."""
    examples: dict[str, Finding] = field(default_factory=dict)
    """Rule id → its first finding."""
    duplicates: int = 0
    """Valid combinations that are the same run as an earlier one."""
    total: int = 0


def candidates(space: Space) -> Enumeration:
    """Every combination of the axes, as candidates and rejections by reason."""
    return _Enumerator(space).run()


def baseline(space: Space) -> Candidate:
    """The base job itself. Its choices are the labels of the axis values that leave it unchanged."""
    return _Enumerator(space).baseline()


def includes_base(axis: Axis, space: Space) -> bool:
    """Whether some value of the axis is what the base job does already."""
    return _Enumerator(space).base_label(axis) is not None


class _Enumerator:
    """The parts of a space that every candidate shares."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.raw = space.base.resolved()
        self.held = {**self.raw, GLOBAL_BATCH: space.global_batch_size}
        self.shape = model_shape(space.base.model)
        self.world_size = space.cluster.world_size
        default = defaults()
        self.axes = tuple(
            Axis(
                axis.name,
                tuple(
                    AxisValue(
                        value.label, {k: default[k] if v is None else v for k, v in value.values.items()}
                    )
                    for value in axis.values
                ),
            )
            for axis in space.axes
        )

    def settings(self, values: Mapping[str, Value]) -> Settings:
        return settings_from(values, self.space.base.model, self.space.cluster)

    def identity(self, form: Mapping[str, Value]) -> str:
        return identity_of_canonical(form, self.shape, self.world_size)

    def run(self) -> Enumeration:
        result = Enumeration([], self.baseline())
        layouts = _Layouts(self)
        seen: set[str] = set()
        names = [axis.name for axis in self.axes]
        total = duplicates = 0
        for combination in product(*(axis.values for axis in self.axes)):
            total += 1
            values, finding = layouts.of(combination)
            if finding is None:
                values = dict(values)
                for choice in combination:
                    values.update(choice.values)
                settings = self.settings(values)
                finding = first_of(OTHER_RULES, settings, values)
            if finding is not None:
                result.rejected[finding.rule] += 1
                result.examples.setdefault(finding.rule, finding)
                continue
            form = canonical(values, settings)
            identity = self.identity(form)
            if identity in seen:
                duplicates += 1
                continue
            seen.add(identity)
            choices = dict(zip(names, (choice.label for choice in combination), strict=True))
            result.feasible.append(Candidate(choices, self._differing(form, combination), settings, identity))
        return replace(result, duplicates=duplicates, total=total)

    def _differing(self, form: Mapping[str, Value], combination: Sequence[AxisValue]) -> dict[str, Value]:
        """What the candidate writes over the base job: the keys it sets, in canonical form, where they differ."""
        differing = {
            key: form[key] for choice in combination for key in choice.values if form[key] != self.raw[key]
        }
        if form[GLOBAL_BATCH] != self.raw[GLOBAL_BATCH]:
            differing[GLOBAL_BATCH] = form[GLOBAL_BATCH]
        return differing

    def baseline(self) -> Candidate:
        settings = self.settings(self.held)
        form = canonical(self.held, settings)
        choices = {axis.name: self.base_label(axis) or BASE_LABEL for axis in self.axes}
        return Candidate(choices, self._differing(form, ()), settings, self.identity(form))

    def base_label(self, axis: Axis) -> str | None:
        """Label of the axis value that leaves the base job the run it is."""
        own = self.identity(canonical(self.held, self.settings(self.held)))
        for value in axis.values:
            values = {**self.held, **value.values}
            if self.identity(canonical(values, self.settings(values))) == own:
                return value.label
        return None


class _Layouts:
    """Values and first layout finding per combination of the axes that decide the layout."""

    def __init__(self, enumerator: _Enumerator) -> None:
        self._enumerator = enumerator
        self._positions = [
            position
            for position, axis in enumerate(enumerator.axes)
            if any(key.startswith(_LAYOUT_KEYS) for key in axis.keys)
        ]
        self._known: dict[tuple[int, ...], tuple[Mapping[str, Value], Finding | None]] = {}

    def of(self, combination: tuple[AxisValue, ...]) -> tuple[Mapping[str, Value], Finding | None]:
        key = tuple(id(combination[position]) for position in self._positions)
        known = self._known.get(key)
        if known is None:
            values = dict(self._enumerator.held)
            for position in self._positions:
                values.update(combination[position].values)
            finding = first_of(LAYOUT_RULES, self._enumerator.settings(values), values)
            known = self._known[key] = (values, finding)
        return known
