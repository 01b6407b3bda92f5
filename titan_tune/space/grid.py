"""The combinations of a space as a grid, and functions of a configuration over it.

A rule, a piece of the canonical form or an estimate reads few of a configuration's keys. While it runs at one
cell of the grid, the keys it reads are noted; what it returns then holds for every cell where those keys have
the same values, whatever the others say. So each function runs once for each distinct reading, and a space of
a million combinations costs what its parts cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Generic, TypeAlias, TypeVar, cast

import numpy as np
import numpy.typing as npt

from titan_tune.domain.candidate import Value
from titan_tune.domain.settings import Settings
from titan_tune.space.axes import Axis, AxisValue, Space
from titan_tune.titan.keys import defaults
from titan_tune.titan.settings import FIELD_KEYS, settings_from

GLOBAL_BATCH = "training.global_batch_size"
_CHUNK = 4096
"""Cells between two looks at which are still open."""
_KEPT_CONFIGURATIONS = 4096
_DERIVED = {name: member.fget for name, member in vars(Settings).items() if isinstance(member, property)}

T = TypeVar("T")
_FieldBits: TypeAlias = Mapping[str, "int | _FieldBits"]
Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Function = Callable[[Settings, Mapping[str, Value]], T]
"""Of one configuration, from nothing but what it reads there; ``values`` are all resolved keys."""


@dataclass(frozen=True)
class Table(Generic[T]):
    """A function's value at the cells it was asked for: ``results[number[cell]]``.

    ``results`` are distinct; ``number`` has one entry a cell, -1 where the function was not evaluated.
    """

    results: tuple[T, ...]
    number: npt.NDArray[np.int32]


class Grid:
    """Every combination of a space's axes. Cells are numbered in file order: the last axis runs fastest."""

    def __init__(self, space: Space) -> None:
        self.space = space
        self.raw = space.base.resolved()
        self.held = {**self.raw, GLOBAL_BATCH: space.global_batch_size}
        self.axes = tuple(map(replace_unset, space.axes))
        self.shape = tuple(len(axis.values) for axis in self.axes)
        self.size = math.prod(self.shape)
        self._strides = tuple(math.prod(self.shape[place + 1 :]) for place in range(len(self.shape)))
        keys = sorted({key for axis in self.axes for key in axis.keys})
        self._key_bits = {key: 1 << place for place, key in enumerate(keys)}
        self._field_bits = _field_bits(FIELD_KEYS, self._key_bits)
        self._axis_bits = tuple(sum(self._key_bits[key] for key in axis.keys) for axis in self.axes)
        self._configuration = lru_cache(_KEPT_CONFIGURATIONS)(self._build)
        self._alike = lru_cache(maxsize=None)(self._places_alike)

    def combination(self, cell: int) -> tuple[AxisValue, ...]:
        """The value of every axis at a cell."""
        return tuple(axis.values[place] for axis, place in zip(self.axes, self._places(cell), strict=True))

    def configuration(self, cell: int) -> tuple[Mapping[str, Value], Settings]:
        """All resolved keys at a cell and their typed view."""
        return self._configuration(cell)

    def settings(self, values: Mapping[str, Value]) -> Settings:
        """The typed view of resolved keys."""
        return settings_from(values, self.space.base.model, self.space.cluster)

    def table(self, function: Function[T], wanted: Mask) -> Table[T]:
        """``function`` at the cells that ``wanted`` (one entry a cell) marks; its results are hashable."""
        number = np.full(self.shape, -1, dtype=np.int32)
        flat = number.reshape(-1)
        results: dict[T, int] = {}
        for cell in _still_open(flat, np.flatnonzero(wanted)):
            result, read = self._watch(function, cell)
            of_result = results.setdefault(result, len(results))
            for block in self._cells_alike(cell, read):
                number[block] = of_result
        return Table(tuple(results), flat)

    def _places(self, cell: int) -> tuple[int, ...]:
        return tuple(
            cell // stride % length for stride, length in zip(self._strides, self.shape, strict=True)
        )

    def _cells_alike(self, cell: int, read: int) -> Iterable[tuple[slice, ...]]:
        """The cells where the keys in ``read`` have the values that they have at ``cell``, in blocks."""
        return product(
            *(
                self._alike(axis, place, read & bits)
                for axis, (place, bits) in enumerate(zip(self._places(cell), self._axis_bits, strict=True))
            )
        )

    def _places_alike(self, axis: int, place: int, read: int) -> tuple[slice, ...]:
        """Runs of places on an axis that set the keys in ``read`` to the same as ``place`` does, or not at all
        if it does not."""
        keys = [key for key in self.axes[axis].keys if self._key_bits[key] & read]
        values = [
            {key: value.values[key] for key in keys if key in value.values}
            for value in self.axes[axis].values
        ]
        alike = [other for other, set_there in enumerate(values) if set_there == values[place]]
        starts = [this for this in alike if this - 1 not in alike]
        ends = [this + 1 for this in alike if this + 1 not in alike]
        return tuple(map(slice, starts, ends))

    def _build(self, cell: int) -> tuple[Mapping[str, Value], Settings]:
        values = dict(self.held)
        for choice in self.combination(cell):
            values.update(choice.values)
        return values, self.settings(values)

    def _watch(self, function: Function[T], cell: int) -> tuple[T, int]:
        """``function`` at a cell, and the keys it read there as a bit mask."""
        values, settings = self._configuration(cell)
        reading = _Reading()
        watched = cast(Settings, _WatchedFields(settings, self._field_bits, reading))
        return function(watched, _WatchedValues(values, self._key_bits, reading)), reading.bits


def _still_open(flat: npt.NDArray[np.int32], cells: Indices) -> Iterator[int]:
    """The cells of ``cells`` that have no number when their turn comes."""
    for start in range(0, len(cells), _CHUNK):
        chunk = cells[start : start + _CHUNK]
        for cell in chunk[flat[chunk] < 0].tolist():
            if flat[cell] < 0:
                yield cell


class _Reading:
    """Which keys were read, as a bit mask."""

    __slots__ = ("bits",)

    def __init__(self) -> None:
        self.bits = 0


class _WatchedValues(Mapping[str, Value]):
    """Resolved keys that note which are read."""

    __slots__ = ("_bits", "_reading", "_values")

    def __init__(self, values: Mapping[str, Value], bits: Mapping[str, int], reading: _Reading) -> None:
        self._values, self._bits, self._reading = values, bits, reading

    def __getitem__(self, key: str) -> Value:
        self._reading.bits |= self._bits.get(key, 0)
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class _WatchedFields:
    """Stands for Settings, or for a part of it, and notes which keys decide the fields that are read.

    It can be asked for fields only: comparing or hashing a part would read what is not noted.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, fields: Any, bits: _FieldBits, reading: _Reading) -> None:
        self._fields, self._bits, self._reading = fields, bits, reading

    def __getattr__(self, name: str) -> Any:
        """Called for the first reading of a field only: the value is then kept as an attribute."""
        derived = _DERIVED.get(name)
        if derived is not None:  # a property: what it reads is what counts
            value = derived(self)
        else:
            value, bits = getattr(self._fields, name), self._bits[name]
            if isinstance(bits, int):
                self._reading.bits |= bits
            else:
                value = _WatchedFields(value, bits, self._reading)
        self.__dict__[name] = value
        return value

    def __eq__(self, other: object) -> bool:
        raise TypeError("a watched part of Settings cannot be compared: read its fields")


def _field_bits(fields: Mapping[str, Any], key_bits: Mapping[str, int]) -> _FieldBits:
    """Fields → the bits of the keys that decide them, nested as ``fields`` is."""
    return {
        field: _field_bits(names, key_bits)
        if isinstance(names, Mapping)
        else sum(key_bits.get(key, 0) for key in set(names))
        for field, names in fields.items()
    }


def replace_unset(axis: Axis) -> Axis:
    """The axis with torchtitan's default in place of every "unset"."""
    default = defaults()
    return Axis(
        axis.name,
        tuple(
            AxisValue(value.label, {k: default[k] if v is None else v for k, v in value.values.items()})
            for value in axis.values
        ),
    )
