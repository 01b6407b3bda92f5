"""Configurations for tests: resolved values and settings from a few overrides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_tune.catalog.loader import gpu_spec, model_spec
from titan_tune.domain.cluster import ClusterSpec, GpuSpec
from titan_tune.domain.settings import Settings
from titan_tune.titan.keys import check_value, defaults
from titan_tune.titan.settings import settings_from

CPU = GpuSpec(
    name="cpu",
    memory_gib=8,
    bf16_tflops=0.1,
    memory_gb_per_s=20,
    link_gb_per_s=10,
    is_cpu=True,
    source="test",
)

SHORT = {
    "replicate": "parallelism.data_parallel_replicate_degree",
    "shard": "parallelism.data_parallel_shard_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "microbatch": "parallelism.pipeline_parallel_microbatch_size",
    "layers_per_stage": "parallelism.pipeline_parallel_layers_per_stage",
    "first_less": "parallelism.pipeline_parallel_first_stage_less_layers",
    "last_less": "parallelism.pipeline_parallel_last_stage_less_layers",
    "split": "parallelism.module_fqns_per_model_part",
    "csv": "parallelism.pipeline_parallel_schedule_csv",
    "overlap": "parallelism.pipeline_parallel_expert_parallel_overlap",
    "async_tp": "parallelism.enable_async_tensor_parallel",
    "no_loss_parallel": "parallelism.disable_loss_parallel",
    "balancer": "parallelism.context_parallel_load_balancer",
    "rotate": "parallelism.context_parallel_rotate_method",
    "reshard": "parallelism.fsdp_reshard_after_forward",
    "ep_backend": "parallelism.expert_parallel_comm_backend",
    "local": "training.local_batch_size",
    "global_": "training.global_batch_size",
    "seq": "training.seq_len",
    "dtype": "training.dtype",
    "mixed": "training.mixed_precision_param",
    "offload": "training.enable_cpu_offload",
    "ac": "activation_checkpoint.mode",
    "option": "activation_checkpoint.selective_ac_option",
    "budget": "activation_checkpoint.memory_budget",
    "compile": "compile.enable",
    "components": "compile.components",
    "compile_mode": "titan_tune.compile_mode",
    "converters": "model.converters",
    "recipe": "quantize.linear.float8.recipe_name",
    "all_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "precompute": "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
    "emulate": "quantize.linear.float8.emulate",
    "filters": "quantize.linear.float8.filter_fqns",
    "early_step": "optimizer.early_step_in_backward",
    "timeout": "comm.init_timeout_seconds",
    "warmup": "lr_scheduler.warmup_steps",
    "total_steps": "lr_scheduler.total_steps",
    "steps": "training.steps",
}
FLOAT8 = ["quantize.linear.float8"]
MX = ["quantize.linear.mx"]

Configuration = tuple[Settings, dict[str, Any]]


def configuration(
    model: str = "llama3/8B",
    gpu: str | GpuSpec = "h100-80gb",
    gpus: int = 8,
    values: Mapping[str, Any] | None = None,
    model_update: Mapping[str, Any] | None = None,
    **short: Any,
) -> Configuration:
    """Settings and resolved values; the short names are those of :data:`SHORT`."""
    spec = model_spec(*model.split("/"))
    if model_update:
        spec = spec.model_copy(update=dict(model_update))
    device = gpu_spec(gpu) if isinstance(gpu, str) else gpu
    given = {SHORT[name]: value for name, value in short.items()} | dict(values or {})
    resolved = dict(defaults())
    for key, value in given.items():
        resolved[key] = None if value is None else check_value(key, value, source="test")
    return settings_from(resolved, spec, ClusterSpec(gpu=device, gpus_per_node=gpus)), resolved
