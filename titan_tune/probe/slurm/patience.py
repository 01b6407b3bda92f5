"""How long the runner waits for Slurm. What concerns the configuration is in ``ProbeSettings``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Patience:
    """Deadlines in seconds."""

    pending: float = 86400.0
    """For a job to start."""
    hopeless: float = 60.0
    """For a job to start whose reason for waiting does not go away by itself."""
    unreachable: float = 1800.0
    """For the controller to answer, while no rank writes."""
    cancel: float = 60.0
    """For the controller to answer, when a job is to end."""
    forgotten: float = 30.0
    """For the controller to remember a job, while no rank writes."""
    requeued: float = 10.0
    """For the controller to say that a job runs whose ranks have written."""
    settle: float = 15.0
    """For files to arrive from other nodes after the job has ended."""
    accounting: float = 5.0
    """For the accounting to learn of an end."""
    limited: float = 600.0
    """For a place below the site's limit of submitted jobs."""
    again: float = 2.0
    """Between two attempts to reach the controller."""
