"""What a trace says, and how it travels from the child process. No torch here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from titan_tune.trace.events import Point


@dataclasses.dataclass(frozen=True, slots=True)
class TraceResult:
    """Memory of one rank in the steady state (the second traced step), bytes."""

    active_bytes: int
    """Peak of active (allocated) bytes, rounded per allocation as the caching allocator does."""
    phase: str
    """Phase of the step in which the peak is reached, e.g. ``loss_backward``."""
    components: Mapping[str, int]
    """The peak by component (``estimate.items.COMPONENTS``); sums to ``active_bytes``."""
    phases: Mapping[str, int]
    """Peak of active bytes of each phase, in the order in which they first occur."""
    reserved_bytes: int | None
    """Peak of reserved bytes in the allocator model; ``None`` where layers were extrapolated."""
    allocator: str
    """``expandable`` or ``classic``."""
    timeline: tuple[Point, ...]
    """Active bytes over the whole trace, thinned. Of the deepest model traced."""
    rank: int
    stages: tuple[int, ...]
    """Pipeline stages of this rank, ``(0,)`` without a pipeline."""
    traced_layers: tuple[int, ...]
    """Depths of the models that were traced: one, or two where ``layers`` asked for extrapolation."""
    num_events: int
    seconds: float
    """Wall clock of the child process from its first import on."""
    torch_version: str
    assumptions: tuple[str, ...]
    """What the trace takes for granted about the GPU and the kernels; one sentence each."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TraceResult:
        """The inverse of :meth:`as_dict`, also through JSON."""
        tuples = {"stages", "traced_layers", "assumptions"}
        fields: dict[str, Any] = {
            key: tuple(value) if key in tuples else value for key, value in values.items()
        }
        fields["timeline"] = tuple(Point(*point) for point in values["timeline"])
        return cls(**fields)
