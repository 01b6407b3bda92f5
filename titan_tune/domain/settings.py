"""The typed view of one fully resolved configuration.

Rules, estimates and candidate canonicalisation read this and nothing else. It is a plain frozen
dataclass because a search builds one per candidate: all values were checked where they came in.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.model import ModelSpec


class AcMode(StrEnum):
    """torchtitan's ``activation_checkpoint.mode``."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"
    MEMORY_BUDGET = "memory_budget"


class CompileMode(StrEnum):
    """How compiled components are compiled; the names are ``torch.compile``'s modes."""

    DEFAULT = "default"
    REDUCE_OVERHEAD = "reduce-overhead"
    MAX_AUTOTUNE = "max-autotune"
    MAX_AUTOTUNE_NO_CUDAGRAPHS = "max-autotune-no-cudagraphs"


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Parallel degrees with ``dp_shard`` resolved (never -1)."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def fsdp_degree(self) -> int:
        """Ranks that share one copy of the parameters (torchtitan's dp_shard x cp)."""
        return self.dp_shard * self.cp

    @property
    def dp_degree(self) -> int:
        """Ranks that read different data (torchtitan's batch mesh)."""
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> int:
        """Product of the degrees; ``ep`` and ``etp`` reuse the other ranks."""
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp


@dataclass(frozen=True, slots=True)
class ActivationCheckpointing:
    """``[activation_checkpoint]``. ``every`` is n for selective option "n", 0 for option "op"."""

    mode: AcMode = AcMode.SELECTIVE
    every: int = 2
    memory_budget: float = 0.5


@dataclass(frozen=True, slots=True)
class Compilation:
    """``[compile]`` by component, and the mode that titan-tune's plug-in sets."""

    model: bool = False
    loss: bool = False
    mode: CompileMode = CompileMode.DEFAULT


@dataclass(frozen=True, slots=True)
class Float8:
    """Float8 linear layers. ``recipe`` is tensorwise when torchtitan's ``recipe_name`` is unset."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    recipe_named: bool = False
    """Whether ``recipe_name`` is set in the file (it excludes the fp8 all-gather)."""
    fsdp_all_gather: bool = False
    precompute_scale: bool = False
    emulate: bool = False
    filter_fqns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Pipeline:
    """``parallelism.pipeline_parallel_*``; meaningful while pp > 1."""

    schedule: str = "1F1B"
    microbatch_size: int = 1
    layers_per_stage: int | None = None
    first_stage_less_layers: int = 1
    last_stage_less_layers: int = 1
    ep_overlap: bool = True
    explicit_split: bool = False
    """``module_fqns_per_model_part`` or a schedule CSV is given: the split is the user's own."""


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything about one configuration that decides validity, memory and speed.

    ``local_batch_size`` and ``global_batch_size`` are sequences (global resolved, never -1);
    ``seq_len`` is tokens before context parallelism splits it.
    """

    model: ModelSpec
    cluster: ClusterSpec
    dims: ParallelDims
    local_batch_size: int
    global_batch_size: int
    seq_len: int
    dtype: Literal["float32", "bfloat16"] = "float32"
    mixed_precision_param: Literal["float32", "bfloat16"] = "bfloat16"
    cpu_offload: bool = False
    reshard_after_forward: Literal["default", "always", "never"] = "default"
    ac: ActivationCheckpointing = ActivationCheckpointing()
    compile: Compilation = Compilation()
    float8: Float8 | None = None
    mxfp8: bool = False
    """``quantize.linear.mx`` among the converters."""
    grouped_float8: bool = False
    grouped_mxfp8: bool = False
    async_tp: bool = False
    loss_parallel: bool = True
    """torchtitan's ``not disable_loss_parallel`` (takes effect at tp > 1)."""
    pipeline: Pipeline = Pipeline()
    optimizer: str = "AdamW"
    optimizer_implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    early_step_in_backward: bool = False
    cp_load_balancer: str | None = "headtail"
    ep_comm_backend: str = "standard"

    @property
    def gradient_accumulation_steps(self) -> int:
        """Microbatches a rank runs per optimizer step (at least 1, also where it does not divide)."""
        return max(1, self.global_batch_size // (self.local_batch_size * self.dims.dp_degree))
