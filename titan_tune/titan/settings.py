"""Resolved torchtitan keys → :class:`Settings`.

A search calls :func:`settings_from` once per candidate, so it does no checking (values were checked
where they came in) and shares the small parts that repeat.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from titan_tune.domain.candidate import Value
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.model import ModelSpec
from titan_tune.domain.settings import (
    AcMode,
    ActivationCheckpointing,
    Compilation,
    CompileMode,
    Float8,
    ParallelDims,
    Pipeline,
    Settings,
)

if TYPE_CHECKING:
    from titan_tune.titan.job import Job

FLOAT8_LINEAR = "quantize.linear.float8"
MX_LINEAR = "quantize.linear.mx"
FLOAT8_GROUPED_MM = "quantize.grouped_mm.float8"
MX_GROUPED_MM = "quantize.grouped_mm.mx"

_DEGREES = (
    "parallelism.data_parallel_replicate_degree",
    "parallelism.data_parallel_shard_degree",
    "parallelism.context_parallel_degree",
    "parallelism.tensor_parallel_degree",
    "parallelism.pipeline_parallel_degree",
    "parallelism.expert_parallel_degree",
    "parallelism.expert_tensor_parallel_degree",
)
_AC = (
    "activation_checkpoint.mode",
    "activation_checkpoint.selective_ac_option",
    "activation_checkpoint.memory_budget",
)
_FLOAT8 = (
    f"{FLOAT8_LINEAR}.recipe_name",
    f"{FLOAT8_LINEAR}.enable_fsdp_float8_all_gather",
    f"{FLOAT8_LINEAR}.precompute_float8_dynamic_scale_for_fsdp",
    f"{FLOAT8_LINEAR}.emulate",
    f"{FLOAT8_LINEAR}.filter_fqns",
)
_PIPELINE = (
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_first_stage_less_layers",
    "parallelism.pipeline_parallel_last_stage_less_layers",
    "parallelism.pipeline_parallel_expert_parallel_overlap",
)
_EXPLICIT_SPLIT = (
    "parallelism.module_fqns_per_model_part",
    "parallelism.pipeline_parallel_schedule_csv",
)
_BATCH = ("training.local_batch_size", "training.global_batch_size")
_COMPONENTS = ("compile.enable", "compile.components")
_COMPILE_MODE = ("titan_tune.compile_mode",)
_CONVERTERS = ("model.converters",)
_PLAIN = {
    "seq_len": "training.seq_len",
    "dtype": "training.dtype",
    "mixed_precision_param": "training.mixed_precision_param",
    "cpu_offload": "training.enable_cpu_offload",
    "reshard_after_forward": "parallelism.fsdp_reshard_after_forward",
}
_LATE = {
    "async_tp": "parallelism.enable_async_tensor_parallel",
    "loss_parallel": "parallelism.disable_loss_parallel",
    "optimizer": "optimizer.name",
    "optimizer_implementation": "optimizer.implementation",
    "early_step_in_backward": "optimizer.early_step_in_backward",
    "cp_load_balancer": "parallelism.context_parallel_load_balancer",
    "ep_comm_backend": "parallelism.expert_parallel_comm_backend",
}

FIELD_KEYS: Mapping[str, tuple[str, ...] | Mapping[str, tuple[str, ...]]] = {
    "model": (),
    "cluster": (),
    "dims": _DEGREES,
    "local_batch_size": _BATCH[:1],
    "global_batch_size": (*_BATCH, *_DEGREES),
    **{field: (key,) for field, key in _PLAIN.items()},
    "ac": _AC,
    "compile": {"model": _COMPONENTS, "loss": _COMPONENTS, "mode": _COMPILE_MODE},
    "float8": (*_CONVERTERS, *_FLOAT8),
    "mxfp8": _CONVERTERS,
    "grouped_float8": _CONVERTERS,
    "grouped_mxfp8": _CONVERTERS,
    "pipeline": (*_PIPELINE, *_EXPLICIT_SPLIT),
    **{field: (key,) for field, key in _LATE.items()},
}
"""Field of Settings → every key that :func:`settings_from` derives it from (``compile`` by its own fields)."""

_degrees, _ac, _float8, _pipeline, _explicit_split, _batch, _compile, _plain, _late = (
    itemgetter(*names)
    for names in (
        _DEGREES,
        _AC,
        _FLOAT8,
        _PIPELINE,
        _EXPLICIT_SPLIT,
        _BATCH,
        (*_COMPONENTS, *_COMPILE_MODE),
        _PLAIN.values(),
        _LATE.values(),
    )
)


@lru_cache(maxsize=65536)
def _parallel_dims(degrees: tuple[int, ...], world_size: int) -> ParallelDims:
    """As torchtitan's ParallelDims: a shard degree of -1 takes the ranks left over (floor, at least 1)."""
    replicate, shard, cp, tp, pp, ep, etp = degrees
    if shard < 0:
        shard = max(1, world_size // (replicate * cp * tp * pp))
    return ParallelDims(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp)


@lru_cache(maxsize=1024)
def _checkpointing(mode: str, option: str, memory_budget: float) -> ActivationCheckpointing:
    # torchtitan checkpoints every layer for option "0" as for "1" (activation_checkpoint.py)
    every = 0 if option == "op" else max(1, int(option))
    return ActivationCheckpointing(mode=AcMode(mode), every=every, memory_budget=memory_budget)


@lru_cache(maxsize=64)
def _compilation(model: bool, loss: bool, mode: str) -> Compilation:
    return Compilation(model=model, loss=loss, mode=CompileMode(mode))


@lru_cache(maxsize=1024)
def _float8_linear(
    recipe: Any, all_gather: bool, precompute: bool, emulate: bool, filter_fqns: tuple[str, ...]
) -> Float8:
    return Float8(
        recipe=recipe or "tensorwise",
        recipe_named=recipe is not None,
        fsdp_all_gather=all_gather,
        precompute_scale=precompute,
        emulate=emulate,
        filter_fqns=filter_fqns,
    )


@lru_cache(maxsize=4096)
def _pipeline_of(fields: tuple[Any, ...]) -> Pipeline:
    return Pipeline(*fields)


def settings_from(values: Mapping[str, Value], model: ModelSpec, cluster: ClusterSpec) -> Settings:
    """The typed view of ``values``, which holds every key of :func:`titan_tune.titan.keys.keys`.

    ``dp_shard`` of -1 becomes the ranks left over; a global batch of -1 becomes local batch times the
    data-parallel degree, as torchtitan resolves them.
    """
    dims = _parallel_dims(_degrees(values), cluster.world_size)
    local, global_ = _batch(values)
    enabled, components, compile_mode = _compile(values)
    compiled = components if enabled else ()
    converters = values["model.converters"]
    float8 = None
    if FLOAT8_LINEAR in converters:
        *options, fqns = _float8(values)
        float8 = _float8_linear(*options, tuple(fqns))
    fqns_per_part, schedule_csv = _explicit_split(values)
    seq_len, dtype, mixed_param, offload, reshard = _plain(values)
    async_tp, no_loss_parallel, optimizer, implementation, early_step, balancer, ep_comm = _late(values)
    return Settings(
        model,
        cluster,
        dims,
        local,
        global_ if global_ > 0 else local * dims.dp_replicate * dims.dp_shard,
        seq_len,
        dtype,
        mixed_param,
        offload,
        reshard,
        _checkpointing(*_ac(values)),
        _compilation("model" in compiled, "loss" in compiled, compile_mode),
        float8,
        MX_LINEAR in converters,
        FLOAT8_GROUPED_MM in converters,
        MX_GROUPED_MM in converters,
        async_tp,
        not no_loss_parallel,
        _pipeline_of((*_pipeline(values), bool(fqns_per_part or schedule_csv))),
        optimizer,
        implementation,
        early_step,
        balancer,
        ep_comm,
    )


def resolve(job: Job, cluster: ClusterSpec) -> Settings:
    """The settings of a job on a cluster."""
    return settings_from(job.resolved(), job.model, cluster)
