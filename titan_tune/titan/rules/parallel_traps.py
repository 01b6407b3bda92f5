"""Warnings about layouts that run, but not as their degrees promise: precision, gradients, bubbles."""

from __future__ import annotations

from collections.abc import Mapping

from titan_tune.domain.candidate import Value
from titan_tune.domain.settings import AcMode, Settings
from titan_tune.titan.rules.facts import (
    applies_fsdp,
    microbatches,
    runs_plain,
    schedule_of,
    virtual_stages,
)
from titan_tune.titan.rules.registry import Facts, warning

Values = Mapping[str, Value]

_MEASURED = "H200, torch 2.11, torchtitan 0.2.2"


# --- precision of the path -----------------------------------------------------------------------


@warning(
    "fp32-tensor-parallel",
    "tensor_parallel_degree={tp} without FSDP trains in fp32: no mixed precision applies (4,174 against 45,024 "
    "tokens/s per GPU with training.dtype = bfloat16; " + _MEASURED + ")",
    fix="add FSDP (data_parallel_shard_degree > 1) beside tensor parallelism, or set training.dtype = "
    '"bfloat16" (changes the numerics)',
    numerics=True,
)
def fp32_tensor_parallel(settings: Settings, values: Values) -> Facts | None:
    """``maybe_enable_amp`` neither shards nor autocasts with TP alone (torchtitan/distributed/utils.py); the only
    trace is "Mixed precision training is disabled". torchtitan issue #630."""
    if settings.dims.tp == 1 or not _fp32_by_accident(settings):
        return None
    return {"tp": settings.dims.tp}


@warning(
    "fp32-pipeline-parallel",
    "pipeline_parallel_degree={pp} without FSDP trains in fp32: no mixed precision applies (3,138 against 45,004 "
    "tokens/s per GPU with training.dtype = bfloat16; " + _MEASURED + ")",
    fix="add FSDP (data_parallel_shard_degree > 1) beside pipeline parallelism, or set training.dtype = "
    '"bfloat16" (changes the numerics)',
    numerics=True,
)
def fp32_pipeline_parallel(settings: Settings, values: Values) -> Facts | None:
    """As fp32-tensor-parallel, for PP alone (torchtitan/distributed/utils.py)."""
    if settings.dims.pp == 1 or settings.dims.tp > 1 or not _fp32_by_accident(settings):
        return None
    return {"pp": settings.dims.pp}


def _fp32_by_accident(settings: Settings) -> bool:
    """Whether the job asks for bf16 compute and gets fp32."""
    return (
        runs_plain(settings) and settings.dtype == "float32" and settings.mixed_precision_param == "bfloat16"
    )


@warning(
    "ddp-unsharded",
    "data_parallel_replicate_degree={dp_replicate} without sharding: every rank holds 16 bytes a parameter and an "
    "fp32 residual stream (autocast, not fully_shard)",
    fix="shard: data_parallel_shard_degree = {dp_replicate}, data_parallel_replicate_degree = 1",
    numerics=True,
)
def ddp_unsharded(settings: Settings, values: Values) -> Facts | None:
    """DDP takes the autocast path (torchtitan/distributed/utils.py). torchtitan issue #2886."""
    dims = settings.dims
    if dims.dp_replicate == 1 or applies_fsdp(settings) or settings.dtype != "float32":
        return None
    return {"dp_replicate": dims.dp_replicate}


@warning(
    "ddp-gradient-division",
    "data_parallel_replicate_degree={dp_replicate} without sharding divides the gradients twice: grad_norm is "
    "{dp_replicate} times too small",
    fix="shard instead (data_parallel_shard_degree = {dp_replicate}), or scale training.max_norm by 1/{dp_replicate}",
    numerics=True,
)
def ddp_gradient_division(settings: Settings, values: Values) -> Facts | None:
    """The loss is already divided by the global tokens (torchtitan/train.py), and DDP averages once more:
    grad_norm 0.258 against 0.516 on two ranks. Seen on CPU with torchtitan 0.2.2; repaired in 0.3."""
    if settings.dims.dp_replicate == 1 or applies_fsdp(settings):
        return None
    return {"dp_replicate": settings.dims.dp_replicate}


@warning(
    "ddp-over-tensor-parallel",
    "data_parallel_replicate_degree={dp_replicate} without sharding over tensor_parallel_degree={tp}: {model} misses "
    "torchtitan's check and runs DDP in fp32 over it",
    fix="shard: data_parallel_shard_degree = {dp_replicate}, data_parallel_replicate_degree = 1",
    numerics=True,
)
def ddp_over_tensor_parallel(settings: Settings, values: Values) -> Facts | None:
    """Their parallelize functions ask for ``dp_mesh.ndim > 1``, which never holds
    (models/{qwen3,deepseek_v3,gpt_oss}/infra/parallelize.py). Initialisation seen on CPU."""
    dims = settings.dims
    if dims.dp_replicate == 1 or applies_fsdp(settings) or (dims.tp == 1 and dims.pp == 1):
        return None
    if settings.model.name in ("llama3", "llama4"):
        return None
    return {"dp_replicate": dims.dp_replicate, "tp": dims.tp, "model": settings.model.name}


@warning(
    "ep-without-fsdp",
    "expert_parallel_degree={ep} without sharded data parallelism: qwen3 runs in fp32 without FSDP",
    fix="set parallelism.data_parallel_shard_degree > 1",
    numerics=True,
)
def ep_without_fsdp(settings: Settings, values: Values) -> Facts | None:
    """qwen3 applies FSDP only where ``fsdp_enabled`` (models/qwen3/infra/parallelize.py). Seen on CPU."""
    if settings.dims.ep == 1 or settings.model.name != "qwen3" or settings.model.moe is None:
        return None
    return None if applies_fsdp(settings) else {"ep": settings.dims.ep}


# --- pipeline ------------------------------------------------------------------------------------


@warning(
    "pp-unnormalized-loss",
    "pipeline_parallel_degree={pp} back-propagates the loss summed over tokens: grad_norm is about {tokens:,} times "
    "too large, and clipping at training.max_norm={max_norm} hides it",
    fix="compare losses, not grad_norm, with runs without pipeline parallelism; torchtitan 0.3 repairs it",
    numerics=True,
)
def pp_unnormalized_loss(settings: Settings, values: Values) -> Facts | None:
    """``pp_schedule.step`` gets the summed loss and divides only what is printed (torchtitan/train.py):
    grad_norm 528 against 0.516. Seen on CPU with torchtitan 0.2.2; torchtitan issue #2972."""
    if settings.dims.pp == 1:
        return None
    tokens = settings.global_batch_size * settings.seq_len
    return {"pp": settings.dims.pp, "tokens": tokens, "max_norm": values["training.max_norm"]}


@warning(
    "pp-bubble",
    "{count} pipeline microbatch(es) for {stages} stages: the pipeline is mostly bubble",
    fix="raise training.local_batch_size or lower pipeline_parallel_microbatch_size to get at least {stages} "
    "microbatches",
)
def pp_bubble(settings: Settings, values: Values) -> Facts | None:
    """ "Number of microbatches (..) is less than the total number of stages (..) which may result in a bubble in the
    pipeline." (torchtitan/distributed/pipeline_parallel.py)."""
    if settings.dims.pp == 1:
        return None
    schedule = schedule_of(settings)
    if schedule is None:
        return None
    split = values["parallelism.module_fqns_per_model_part"]
    stages = virtual_stages(settings, schedule) if split is None else len(split)
    count = microbatches(settings)
    return {"count": count, "stages": stages} if count < stages else None


@warning(
    "dualpipev-overlap",
    "pipeline_parallel_schedule=DualPipeV without expert parallelism still installs the overlap callback: forward and "
    "backward run in two threads",
    fix="set parallelism.pipeline_parallel_expert_parallel_overlap = false",
)
def dualpipev_overlap(settings: Settings, values: Values) -> Facts | None:
    """``build_pipeline_schedule`` registers ``overlap_callback`` for DualPipeV whatever expert_parallel_degree is
    (torchtitan/distributed/pipeline_parallel.py)."""
    dims = settings.dims
    if dims.pp == 1 or (dims.ep > 1 and settings.model.moe is not None) or not settings.pipeline.ep_overlap:
        return None
    return {} if settings.pipeline.schedule.lower() == "dualpipev" else None


@warning(
    "pp-ep-compile-checkpoint",
    "pipeline, expert parallelism, a compiled model and activation_checkpoint.mode={mode} together have raised "
    "CheckpointError",
    fix='if it does, use activation_checkpoint.mode = "none" or compile.enable = false',
)
def pp_ep_compile_checkpoint(settings: Settings, values: Values) -> Facts | None:
    """torchtitan issue #2771."""
    dims = settings.dims
    if dims.pp == 1 or dims.ep == 1 or settings.model.moe is None or not settings.compile.model:
        return None
    mode = settings.ac.mode
    return None if mode in (AcMode.NONE, AcMode.MEMORY_BUDGET) else {"mode": mode.value}


# --- tensor parallelism --------------------------------------------------------------------------


@warning(
    "async-tp-not-proven",
    "enable_async_tensor_parallel only sets a compiler flag: {reason}",
    fix="compare tokens/s with it off; look for 'no producer matmul found' in the compiler's log",
)
def async_tp_not_proven(settings: Settings, values: Values) -> Facts | None:
    """ "Async TP is enabled" says nothing about fusion (torchtitan/distributed/tensor_parallel.py); 0.2.2 never enables
    symmetric memory on the TP group (torchtitan issues #4045, #1613); gpt_oss passes ``enable_async_tp=False``."""
    if not settings.async_tp or settings.dims.tp == 1:
        return None
    name = settings.model.name
    if name == "gpt_oss":
        return {"reason": "gpt_oss ignores it"}
    if name == "deepseek_v3":
        return {"reason": "on deepseek_v3 it was found to have no effect"}
    return {"reason": "matmuls and collectives may stay unfused"}


@warning(
    "float8-tensor-parallel",
    "float8 tensorwise with tensor_parallel_degree={tp}: the all-gathers of tensor parallelism stay in bf16",
    fix="count on float8 matmuls only; torchtitan 0.2.2 cannot switch float8 tensor parallelism on",
)
def float8_tensor_parallel(settings: Settings, values: Values) -> Facts | None:
    """The parallelize functions look for "float8" among model.converters, whose name is now
    "quantize.linear.float8" (models/llama3/infra/parallelize.py). Seen on CPU with torchtitan 0.2.2."""
    float8 = settings.float8
    if float8 is None or settings.dims.tp == 1 or float8.recipe != "tensorwise":
        return None
    return {"tp": settings.dims.tp}


@warning(
    "float8-rowwise-tensor-parallel",
    "float8 {recipe} with tensor_parallel_degree={tp} has turned to NaN near step 80: a short probe cannot clear it",
    fix="use tensorwise float8 with tensor parallelism, or watch the loss of a longer run",
)
def float8_rowwise_tensor_parallel(settings: Settings, values: Values) -> Facts | None:
    """torchtitan issue #865."""
    float8 = settings.float8
    if float8 is None or settings.dims.tp == 1 or float8.recipe == "tensorwise":
        return None
    return {"recipe": float8.recipe, "tp": settings.dims.tp}


@warning(
    "qwen3-tensor-context-parallel",
    "qwen3 with tensor_parallel_degree={tp} and context_parallel_degree={cp} is reported to fail",
    fix="probe it before relying on it, or use one of the two",
)
def qwen3_tensor_context_parallel(settings: Settings, values: Values) -> Facts | None:
    """torchtitan issue #2446."""
    dims = settings.dims
    if dims.tp == 1 or dims.cp == 1 or settings.model.name != "qwen3":
        return None
    return {"tp": dims.tp, "cp": dims.cp}
