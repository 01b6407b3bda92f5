"""What a search space is: a base job, a cluster, axes of values, and a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from titan_tune.domain.base import FrozenModel
from titan_tune.domain.candidate import Value
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.probe import ProbeSettings
from titan_tune.titan.job import Job

_NUMERICS = (
    "model.converters",
    "quantize.",
    "training.dtype",
    "training.mixed_precision_",
    "training.seq_len",
    "training.max_norm",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.beta",
    "optimizer.eps",
    "optimizer.weight_decay",
    "lr_scheduler.",
)


def changes_numerics(key: str) -> bool:
    """Whether a key changes the mathematics of the training, and not only how it is computed."""
    return key.startswith(_NUMERICS)


@dataclass(frozen=True, slots=True)
class AxisValue:
    """One choice: its label, and the dotted keys it sets (``None`` takes a key back to its default)."""

    label: str
    values: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Axis:
    """One dimension of a search."""

    name: str
    values: tuple[AxisValue, ...]

    @property
    def keys(self) -> frozenset[str]:
        """Every key that some value of the axis sets."""
        return frozenset(key for value in self.values for key in value.values)

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels in order."""
        return tuple(value.label for value in self.values)


class Budget(FrozenModel):
    """The ``[budget]`` table: when a search stops. ``None`` is no limit."""

    max_probes: PositiveInt | None = None
    max_gpu_hours: PositiveFloat | None = None
    max_wall_clock_hours: PositiveFloat | None = None


@dataclass(frozen=True)
class Space:
    """A search space. ``global_batch_size`` is in sequences and the same for every candidate."""

    base: Job
    cluster: ClusterSpec
    axes: tuple[Axis, ...]
    global_batch_size: int
    budget: Budget = field(default_factory=Budget)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    path: Path | None = None
    slurm: Mapping[str, Any] = field(default_factory=dict)
    """The ``[slurm]`` table as it stands in the file; the Slurm runner checks it."""

    @property
    def name(self) -> str:
        """What messages call the space: its file, or its job's."""
        return str(self.path or self.base.name)

    @property
    def numerics_axes(self) -> tuple[str, ...]:
        """Axes that change the mathematics (float8, mxfp8, dtypes, optimizer); reports mark them."""
        return tuple(axis.name for axis in self.axes if any(map(changes_numerics, axis.keys)))

    def with_budget(
        self,
        *,
        max_probes: int | None = None,
        max_gpu_hours: float | None = None,
        max_wall_clock_hours: float | None = None,
    ) -> Space:
        """The space with the limits that are given; the others stay as they are."""
        given = {
            "max_probes": max_probes,
            "max_gpu_hours": max_gpu_hours,
            "max_wall_clock_hours": max_wall_clock_hours,
        }
        update = {name: value for name, value in given.items() if value is not None}
        # model_copy would not check them
        return replace(self, budget=Budget(**{**self.budget.model_dump(), **update}))
