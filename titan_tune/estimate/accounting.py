"""The rule of thumb for training memory that people quote, beside what torchtitan really holds.

Parameters, gradients and optimizer only, in decimal GB as the rule has it; activations are no part of it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Final

from titan_tune.domain.settings import ParallelDims, Settings
from titan_tune.estimate.memory import estimate_memory

GB: Final = 1e9
_NOMINAL = re.compile(r"(\d+(?:\.\d+)?)([BM])\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Line:
    """One component. ``rank_bytes`` is the largest rank's; ``None`` where a rule knows no ranks."""

    component: str
    dtype: str
    bytes_per_parameter: float
    total_bytes: float
    rank_bytes: float | None = None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """Lines and what they come to."""

    name: str
    source: str
    parameters: float
    lines: tuple[Line, ...]

    @property
    def bytes_per_parameter(self) -> float:
        """Sum over the lines."""
        return sum(line.bytes_per_parameter for line in self.lines)

    @property
    def total_bytes(self) -> float:
        """Sum over the lines, all ranks."""
        return sum(line.total_bytes for line in self.lines)

    @property
    def rank_bytes(self) -> float | None:
        """Sum over the lines, largest rank."""
        ranks = [line.rank_bytes for line in self.lines if line.rank_bytes is not None]
        return sum(ranks) if ranks else None


@dataclass(frozen=True, slots=True)
class Accounting:
    """``quoted`` multiplies the nominal size (70 billion of a 70B); ``held`` counts the model."""

    parameters: int
    world_size: int
    quoted: Table
    mixed: Table
    held: Table
    notes: tuple[str, ...]


def accounting(settings: Settings) -> Accounting:
    """The three tables of one job.

    Raises:
        NotCoveredError: the formula does not cover the model.
    """
    held, parameters = _held(settings)
    nominal = nominal_parameters(settings.model.flavor) or float(parameters)
    return Accounting(
        parameters=parameters,
        world_size=settings.cluster.world_size,
        quoted=_rule(
            "the rule people quote", "2 + 2 + 6 bytes a parameter",
            nominal,
            (("parameters", "bfloat16", 2), ("gradients", "bfloat16", 2), ("optimizer", "3 × bfloat16", 6)),
        ),
        mixed=_rule(
            "the same with fp32 optimizer states", "ZeRO (arXiv 1910.02054), section 3.1",
            nominal,
            (("parameters", "bfloat16", 2), ("gradients", "bfloat16", 2), ("optimizer", "3 × float32", 12)),
        ),
        held=held,
        notes=_notes(settings),
    )  # fmt: skip


def nominal_parameters(flavor: str) -> float | None:
    """What the flavor's name says: 70e9 for ``70B``; ``None`` where it says nothing."""
    match = _NOMINAL.match(flavor)
    if match is None:
        return None
    return float(match[1]) * (1e9 if match[2].upper() == "B" else 1e6)


def _rule(name: str, source: str, parameters: float, lines: tuple[tuple[str, str, int], ...]) -> Table:
    made = (Line(component, dtype, size, size * parameters) for component, dtype, size in lines)
    return Table(name, source, parameters, tuple(made))


def _held(settings: Settings) -> tuple[Table, int]:
    """Read off the formula's stages: a rank's Adam moments are twice its parameters, its gradients once."""
    # the states are the same bytes with offload, in host memory
    resident = replace(settings, cpu_offload=False)
    stages = estimate_memory(resident).stages
    size = 2 if settings.dtype == "bfloat16" else 4
    per_stage = settings.cluster.world_size // len(stages)
    shards = [stage.peak.items["parameters"] for stage in stages]
    total, largest = per_stage * sum(shards), max(shards)
    lines = tuple(
        Line(component, dtype, factor * size, factor * total, factor * largest, note)
        for component, factor, dtype, note in (
            ("parameters", 1, settings.dtype, "masters; blocks are gathered in bfloat16 to compute"),
            ("gradients", 1, settings.dtype, "during backward only, the last of it when all are there"),
            ("optimizer", 2, settings.dtype, "Adam's two moments; the masters are the parameters"),
        )
    )
    table = Table("held by torchtitan 0.2.2", f"training.dtype = {settings.dtype}", total / size, lines)
    return table, _parameter_count(resident)


def _parameter_count(settings: Settings) -> int:
    """Of the model, tied weights once: what one GPU would hold."""
    alone = estimate_memory(replace(settings, dims=ParallelDims())).stages[0]
    return round(alone.peak.items["parameters"] / (2 if settings.dtype == "bfloat16" else 4))


def _notes(settings: Settings) -> tuple[str, ...]:
    dims = settings.dims
    notes = [
        "The quoted 6 bytes of optimizer a parameter are master weights and Adam's two moments at 2 bytes each. "
        "In float32, as mixed-precision training keeps them, they are 12.",
        "torchtitan keeps no bfloat16 copy of the model: its float32 parameters are the master weights, so "
        "4 + 4 + 8 bytes a parameter, or 2 + 2 + 4 with training.dtype = bfloat16.",
    ]
    if dims.dp_replicate > 1:
        notes.append(f"All ranks together hold {dims.dp_replicate} replicas.")
    if dims.tp > 1:
        notes.append("Norm weights are there on every tensor-parallel rank and are counted as often.")
    if dims.dp_replicate > 1 and dims.fsdp_degree == 1:
        notes.append("DDP's buckets are a second copy of the gradients, not in the table.")
    if dims.pp > 1 and dims.fsdp_degree > 1:
        notes.append(
            "Until a step's last microbatch, gradients are not sharded under a pipeline: more than here."
        )
    if settings.cpu_offload:
        notes.append("With training.enable_cpu_offload these bytes lie in host memory.")
    return tuple(notes)


def accounting_json(found: Accounting) -> dict[str, Any]:
    """The ``accounting`` object of ``estimate --json``; decimal GB."""
    return {
        "parameters": found.parameters,
        "world_size": found.world_size,
        "quoted": _table_json(found.quoted),
        "quoted_fp32_optimizer": _table_json(found.mixed),
        "held": _table_json(found.held),
        "notes": list(found.notes),
    }


def _table_json(table: Table) -> dict[str, Any]:
    return {
        "source": table.source,
        "parameters": round(table.parameters),
        "components": [
            {
                "component": line.component,
                "dtype": line.dtype,
                "bytes_per_parameter": line.bytes_per_parameter,
                "rank_gb": _gb(line.rank_bytes),
                "total_gb": _gb(line.total_bytes),
            }
            for line in table.lines
        ],
        "bytes_per_parameter": table.bytes_per_parameter,
        "rank_gb": _gb(table.rank_bytes),
        "total_gb": _gb(table.total_bytes),
    }


def _gb(size: float | None) -> float | None:
    return None if size is None else round(size / GB, 3)
