"""Frozen data: models, GPUs, settings, candidates, estimates, probes. No I/O."""
