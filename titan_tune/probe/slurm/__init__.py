"""Probes as Slurm jobs, or as steps of an allocation that the search itself runs in."""

from titan_tune.probe.slurm.runner import make_allocation_runner, make_runner

__all__ = ["make_allocation_runner", "make_runner"]
