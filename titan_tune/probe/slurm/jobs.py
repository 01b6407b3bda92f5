"""What Slurm says of jobs, as plain data, and the seam between a probe and whatever runs its job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

from titan_tune.domain.probe import ProbeSpec

TERMINAL: Final = frozenset(
    (
        "COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE",
        "PREEMPTED", "REVOKED",
    )
)  # fmt: skip
WAITING: Final = frozenset(
    ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
)
PAUSED: Final = frozenset(("SUSPENDED", "STOPPED"))


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as ``squeue`` lists it."""

    job_id: str
    state: str
    start: float | None
    """Unix time at which it began to run, or is expected to."""
    cpus: int
    num_nodes: int
    node_list: str
    reason: str
    name: str = ""

    @classmethod
    def parse(cls, line: str) -> JobRow:
        """From one line of the format that ``commands`` asks for."""
        job_id, state, start, cpus, nodes, node_list, reason, name = line.split("|", 7)
        return cls(
            job_id=job_id,
            state=state,
            start=float(start) if start.isdigit() else None,
            cpus=int(cpus) if cpus.isdigit() else 0,
            num_nodes=int(nodes) if nodes.isdigit() else 0,
            node_list=node_list,
            reason=reason,
            name=name,
        )


@dataclass(frozen=True, slots=True)
class Listing:
    """One answer of the controller, or that there was none."""

    reachable: bool
    jobs: Mapping[str, JobRow] = field(default_factory=dict)
    message: str = ""


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended. An empty ``state`` is a job of which Slurm knows no end."""

    job_id: str
    state: str = ""
    reason: str = ""
    exit_code: int | None = None
    exit_signal: int = 0
    nodes: tuple[str, ...] = ()
    batch_host: str = ""
    bad_nodes: Mapping[str, str] = field(default_factory=dict)
    """Nodes of the job that are not well now, with Slurm's words."""
    step_states: tuple[str, ...] = ()
    """States of its steps, where there is accounting."""
    cancelled_by: str = ""
    """User id of who cancelled it, where there is accounting."""
    accounted: bool = True
    """Whether the accounting has this end too, where there is one: its steps are then all there."""
    started: float | None = None
    """Unix time."""
    ended: float | None = None
    """Unix time."""


class UnreachableError(Exception):
    """The controller does not answer; nothing is known."""


class SubmissionError(Exception):
    """A job was refused. ``limited``: because too many are submitted already, as far as Slurm says."""

    def __init__(self, message: str, *, limited: bool) -> None:
        super().__init__(message)
        self.limited = limited


class Jobs(Protocol):
    """Whatever runs jobs: a batch queue, or an allocation. All methods block, and run on the monitor's threads."""

    def submit(self, spec: ProbeSpec, name: str, avoid: tuple[str, ...], lane: int) -> str:
        """Start the job, away from some nodes, with the compile caches of a lane; its id.

        Raises SubmissionError and UnreachableError.
        """
        ...

    def locate(self, name: str) -> str | None:
        """The id of the job with that name, or ``None``. Raises UnreachableError."""
        ...

    def listing(self, job_ids: tuple[str, ...]) -> Listing:
        """What is known of these jobs."""
        ...

    def end_of(self, job_id: str, name: str) -> JobEnd:
        """How the job of that id and name ended; an empty ``state`` where that is not known."""
        ...

    def cancel(self, job_id: str, name: str) -> bool:
        """Ask for the end of the job of that id and name; whether that was heard."""
        ...
