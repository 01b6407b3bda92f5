"""How torchtitan 0.2.2 shards routed experts (``apply_fsdp`` of its mixture-of-experts families)."""

from __future__ import annotations

from titan_tune.domain.model import ModelSpec, MoeSpec
from titan_tune.domain.settings import ParallelDims


def expert_shards_of(dims: ParallelDims) -> int:
    """Over how many ranks ``fully_shard`` divides a rank's routed experts."""
    if dims.ep == 1:
        return dims.fsdp_degree
    return max(1, dims.fsdp_degree * dims.tp // (dims.etp * dims.ep))


def shards_dimension_0(moe: MoeSpec, dims: ParallelDims) -> bool:
    """Whether the experts themselves are dealt out to the shards: without expert parallelism always, with it only
    where there are no more shards than experts."""
    return dims.ep == 1 or expert_shards_of(dims) * dims.ep <= moe.num_experts


def uneven_experts(model: ModelSpec, moe: MoeSpec, dims: ParallelDims) -> int | None:
    """Dimension 1 of an expert's weights that its shards do not divide, which FSDP refuses
    (``NotImplementedError`` "FSDP does not support uneven sharding on dim 1"); ``None``: all is well."""
    if shards_dimension_0(moe, dims):
        return None
    hidden = (2 if model.name == "gpt_oss" else 1) * moe.expert_hidden_dim // dims.etp
    return next((size for size in (hidden, model.dim) if size % expert_shards_of(dims)), None)
