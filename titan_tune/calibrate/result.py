"""What a calibration measured, as it is stored: JSON, schema 1."""

from __future__ import annotations

import hashlib
import re
from typing import Final, Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from titan_tune.domain.base import FrozenModel
from titan_tune.estimate.collectives import Op

SCHEMA: Final = 1
MatmulKind = Literal["bfloat16", "float32", "float8_tensorwise", "float8_rowwise"]


class Fingerprint(FrozenModel):
    """What the speeds depend on; another machine or another software measures again."""

    gpu: str
    """The driver's name, or ``cpu``."""
    num_gpus: PositiveInt
    """GPUs that are visible, or processes on a CPU."""
    driver: str
    torch: str

    @property
    def name(self) -> str:
        """A file name: readable, then a digest of all fields."""
        digest = hashlib.sha256(self.model_dump_json().encode()).hexdigest()[:12]
        readable = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        return f"{readable}-x{self.num_gpus}-{digest}"


class Matmul(FrozenModel):
    """One linear layer's products, slowest rank."""

    kind: MatmulKind
    tokens: PositiveInt
    inputs: PositiveInt
    outputs: PositiveInt
    forward_seconds: PositiveFloat
    backward_seconds: PositiveFloat | None = None
    """Both products of the backward; not measured for float8."""

    @property
    def flops(self) -> float:
        """Of what was measured."""
        return 2.0 * self.tokens * self.inputs * self.outputs * (1 if self.backward_seconds is None else 3)

    @property
    def seconds(self) -> float:
        """Of what was measured."""
        return self.forward_seconds + (self.backward_seconds or 0.0)


class AttentionTime(FrozenModel):
    """Causal ``scaled_dot_product_attention`` in bf16, slowest rank."""

    batch: PositiveInt
    heads: PositiveInt
    sequence: PositiveInt
    head_dim: PositiveInt
    forward_seconds: PositiveFloat
    backward_seconds: PositiveFloat


class Copy(FrozenModel):
    """A device-to-device copy, slowest rank."""

    bytes: PositiveInt
    seconds: PositiveFloat


class CollectiveTime(FrozenModel):
    """One collective of all ranks; ``bytes`` as in ``CollectiveRecord``."""

    op: Op
    bytes: PositiveInt
    group_size: PositiveInt
    seconds: PositiveFloat


class Calibration(FrozenModel):
    """One run of ``titan-tune calibrate``."""

    schema_version: Literal[1] = SCHEMA
    fingerprint: Fingerprint
    created: str
    """UTC, ISO 8601."""
    seconds: NonNegativeFloat
    """Spent measuring, imports and start-up left out."""
    world_size: PositiveInt
    backend: str
    """nccl or gloo."""
    nccl: str | None = None
    matmuls: tuple[Matmul, ...] = ()
    attention: tuple[AttentionTime, ...] = ()
    copies: tuple[Copy, ...] = ()
    launch_seconds: PositiveFloat | None = None
    """Host time of one small operator, eager."""
    collectives: tuple[CollectiveTime, ...] = ()
    not_measured: tuple[str, ...] = ()
    """What this torch, GPU or backend cannot do, with its reason; what the time did not allow."""
    measured: NonNegativeInt = 0
    """Measurements made."""
