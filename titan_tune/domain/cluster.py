"""What the job runs on."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from titan_tune.domain.base import FrozenModel
from titan_tune.domain.calibration import MeasuredRates

MAX_WORLD_SIZE = 131_072
"""Ranks that commands accept: above the largest training jobs known, and few enough to enumerate layouts."""


class GpuSpec(FrozenModel):
    """One accelerator model. Rates are dense peak rates; ``source`` says where they are from."""

    name: str
    memory_gib: PositiveFloat
    """Memory the driver reports as total, GiB."""
    bf16_tflops: PositiveFloat
    float8_tflops: NonNegativeFloat = 0.0
    memory_gb_per_s: PositiveFloat
    link_gb_per_s: PositiveFloat
    """Per-direction bandwidth to the other GPUs of the node, GB/s."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability; ``None`` where there is none (AMD, CPU)."""
    is_cpu: bool = False
    source: str = ""


class ClusterSpec(FrozenModel):
    """Identical nodes of identical GPUs."""

    gpu: GpuSpec
    num_nodes: PositiveInt = 1
    gpus_per_node: PositiveInt = 1
    interconnect: str | None = Field(default=None, exclude=True)
    """Link between nodes, by catalogue name; ``None`` for the usual one of this GPU's nodes. Predictions depend on it
    only, as on ``rates``."""
    rates: MeasuredRates | None = Field(default=None, exclude=True)
    """What ``calibrate`` measured of this GPU. Predictions depend on it, measurements do not: it is no part of what
    a study records."""

    @property
    def world_size(self) -> int:
        """Ranks of the job, one a GPU."""
        return self.num_nodes * self.gpus_per_node
