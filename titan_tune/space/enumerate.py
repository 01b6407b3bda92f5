"""Space → candidates: every combination, checked by the rules, each run once.

Nothing is done combination by combination: rules, the pieces of the identity and estimates are tables over the
space's grid (``space.grid``), and counting, de-duplication and selection are array operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import overload

import numpy as np
import numpy.typing as npt

from titan_tune.domain.candidate import Candidate, Finding, Value, config_id_of
from titan_tune.domain.settings import Settings
from titan_tune.errors import InputError
from titan_tune.space.axes import Axis, AxisValue, Space
from titan_tune.space.grid import GLOBAL_BATCH, Grid, Indices, Mask, T, Table, replace_unset
from titan_tune.titan.canonical import (
    canonical,
    identity,
    identity_tables,
    join_identity,
    model_shape,
    table_identity,
)
from titan_tune.titan.rules import LAYOUT_RULES, OTHER_RULES, Rule, first_invalid

BASE_LABEL = "base"
MAX_COMBINATIONS = 10_000_000
"""What a plan enumerates at most; each takes some hundred bytes while its rules are checked."""


class Feasible(Sequence[Candidate]):
    """Valid candidates, each run once, in file order. They are built when asked for, and not kept."""

    def __init__(self, grid: Grid, cells: Indices, texts: Sequence[Table[str]]) -> None:
        self._grid, self._cells, self._texts = grid, cells, texts
        self._shape = model_shape(grid.space.base.model)

    def __len__(self) -> int:
        return len(self._cells)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> list[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | list[Candidate]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        cell = int(self._cells[index])
        values, settings = self._grid.configuration(cell)
        combination = self._grid.combination(cell)
        choices = {axis.name: choice.label for axis, choice in zip(self._grid.axes, combination, strict=True)}
        form = canonical(values, settings)
        return Candidate(
            choices, _differing(form, combination, self._grid.raw), settings, self._identity(cell)
        )

    def config_id(self, index: int) -> str:
        """The ``config_id`` of one candidate, without building it."""
        return config_id_of(self._identity(int(self._cells[index])))

    def evaluate(self, function: Callable[[Settings], T]) -> tuple[tuple[T, ...], npt.NDArray[np.int32]]:
        """A pure function of the settings at every candidate: its distinct results (hashable), and for each
        candidate the number of its own."""
        wanted = np.zeros(self._grid.size, dtype=bool)
        wanted[self._cells] = True
        table = self._grid.table(lambda settings, values: function(settings), wanted)
        return table.results, table.number[self._cells]

    def _identity(self, cell: int) -> str:
        texts = [table.results[table.number[cell]] for table in self._texts]
        return join_identity(texts, self._shape, self._grid.space.cluster.world_size)


@dataclass(frozen=True)
class Enumeration:
    """What became of every combination: ``total`` = feasible + rejected + duplicates."""

    feasible: Feasible
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
    """Every combination of the axes, as candidates and rejections by reason.

    Raises:
        InputError: more combinations than ``MAX_COMBINATIONS``.
    """
    grid = Grid(space)
    if grid.size > MAX_COMBINATIONS:
        largest = sorted(space.axes, key=lambda axis: -len(axis.values))[:3]
        lengths = ", ".join(f"{axis.name} ({len(axis.values)})" for axis in largest)
        raise InputError(
            f"{space.name}: more than {MAX_COMBINATIONS:,} combinations: list fewer values; longest axes: {lengths}"
        )
    valid, rejected, examples = _check(grid)
    texts = [grid.table(partial(_identity_part, prefix), valid) for prefix in identity_tables()]
    cells = _first_of_each_run(texts, np.flatnonzero(valid))
    return Enumeration(
        feasible=Feasible(grid, cells, texts),
        baseline=_baseline(grid),
        rejected=rejected,
        examples=examples,
        duplicates=int(valid.sum()) - len(cells),
        total=grid.size,
    )


def baseline(space: Space) -> Candidate:
    """The base job itself. Its choices are the labels of the axis values that leave it unchanged."""
    return _baseline(Grid(space))


def includes_base(axis: Axis, space: Space) -> bool:
    """Whether some value of the axis is what the base job does already."""
    return _base_label(replace_unset(axis), Grid(space)) is not None


def _check(grid: Grid) -> tuple[Mask, Counter[str], dict[str, Finding]]:
    """The cells that pass every rule; combinations and first finding of each rule, in order of appearance."""
    valid = np.ones(grid.size, dtype=bool)
    counts: dict[str, int] = {}
    first_cell: dict[str, int] = {}
    # layout rules reject most, and all read the layout: one table for them all
    for rules in (LAYOUT_RULES, *((rule,) for rule in OTHER_RULES)):
        table = grid.table(partial(_first_of, rules), valid)
        for number, rule_id in enumerate(table.results):
            if rule_id is not None:
                cells = np.flatnonzero(valid & (table.number == number))
                counts[rule_id], first_cell[rule_id] = len(cells), int(cells[0])
                valid[cells] = False
    order = sorted(first_cell, key=first_cell.__getitem__)
    findings = {rule_id: _first_finding(grid, first_cell[rule_id]) for rule_id in order}
    return valid, Counter({rule_id: counts[rule_id] for rule_id in order}), findings


def _first_of(rules: Sequence[Rule], settings: Settings, values: Mapping[str, Value]) -> str | None:
    """Id of the first of ``rules`` that rejects."""
    return next((rule.id for rule in rules if rule.check(settings, values) is not None), None)


def _first_finding(grid: Grid, cell: int) -> Finding:
    values, settings = grid.configuration(cell)
    finding = first_invalid(settings, values)
    assert finding is not None
    return finding


def _identity_part(prefix: str, settings: Settings, values: Mapping[str, Value]) -> str:
    return table_identity(prefix, values, settings)


def _first_of_each_run(texts: Sequence[Table[str]], cells: Indices) -> Indices:
    """Those of ``cells`` (ascending) that no earlier one shares all texts with."""
    code, span = np.zeros(len(cells), dtype=np.int64), 1
    for table in texts:
        if span * len(table.results) >= 2**63:
            _, code = np.unique(code, return_inverse=True)
            span = len(cells)
        code = code * len(table.results) + table.number[cells]
        span *= len(table.results)
    _, first = np.unique(code, return_index=True)
    return cells[np.sort(first)]


def _differing(
    form: Mapping[str, Value], combination: Sequence[AxisValue], raw: Mapping[str, Value]
) -> dict[str, Value]:
    """What the candidate writes over the base job: the keys it sets, in canonical form, where they differ."""
    differing = {key: form[key] for choice in combination for key in choice.values if form[key] != raw[key]}
    if form[GLOBAL_BATCH] != raw[GLOBAL_BATCH]:
        differing[GLOBAL_BATCH] = form[GLOBAL_BATCH]
    return differing


def _baseline(grid: Grid) -> Candidate:
    settings = grid.settings(grid.held)
    form = canonical(grid.held, settings)
    choices = {axis.name: _base_label(axis, grid) or BASE_LABEL for axis in grid.axes}
    return Candidate(choices, _differing(form, (), grid.raw), settings, _identity(grid.held, grid))


def _base_label(axis: Axis, grid: Grid) -> str | None:
    """Label of the axis value that leaves the base job the run it is."""
    own = _identity(grid.held, grid)
    same = (value.label for value in axis.values if _identity({**grid.held, **value.values}, grid) == own)
    return next(same, None)


def _identity(values: Mapping[str, Value], grid: Grid) -> str:
    return identity(values, grid.settings(values), grid.space.base.model)
