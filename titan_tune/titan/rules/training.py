"""Validity of activation checkpointing, compilation, async TP, early optimizer steps and offload."""

from __future__ import annotations

from collections.abc import Mapping

from titan_tune.domain.candidate import Value
from titan_tune.domain.settings import AcMode, Settings
from titan_tune.titan.rules.facts import applies_fsdp
from titan_tune.titan.rules.registry import Facts, invalid

Values = Mapping[str, Value]


@invalid(
    "memory-budget-compile",
    'activation_checkpoint.mode="memory_budget" needs a compiled model',
    fix="set compile.enable = true with model among compile.components",
)
def memory_budget_compile(settings: Settings, values: Values) -> Facts | None:
    """Assertion "Memory budget mode requires model to be compiled"
    (torchtitan/distributed/activation_checkpoint.py)."""
    return {} if settings.ac.mode is AcMode.MEMORY_BUDGET and not settings.compile.model else None


@invalid(
    "cpu-compile-tensor-parallel",
    "a compiled model at tensor_parallel_degree={tp} does not train on CPU",
    fix="set compile.enable = false or parallelism.tensor_parallel_degree = 1",
)
def cpu_compile_tensor_parallel(settings: Settings, values: Values) -> Facts | None:
    """``apply_tp`` and ``apply_compile`` (torchtitan/models/llama3/infra/parallelize.py). Step 1 ends in "'Tensor'
    object has no attribute '_local_tensor'" or "expected all tensors_saved_with_vc_check to be Tensors", depending
    on activation checkpointing. Seen with torch 2.13 on CPU; H200s with torch 2.11 train it."""
    if settings.dims.tp == 1 or not settings.compile.model or not settings.cluster.gpu.is_cpu:
        return None
    return {"tp": settings.dims.tp}


@invalid(
    "async-tp-compile",
    "enable_async_tensor_parallel at tensor_parallel_degree={tp} needs a compiled model",
    fix="set compile.enable = true with model among compile.components, or enable_async_tensor_parallel = false",
)
def async_tp_compile(settings: Settings, values: Values) -> Facts | None:
    """RuntimeError "Async TP requires 'model' in --compile.components and --compile.enable"
    (torchtitan/distributed/tensor_parallel.py; models/{qwen3,gpt_oss}/infra/parallelize.py)."""
    if not settings.async_tp or settings.dims.tp == 1 or settings.compile.model:
        return None
    return {"tp": settings.dims.tp}


@invalid(
    "early-step",
    "optimizer.early_step_in_backward with {key}={degree}",
    fix="set optimizer.early_step_in_backward = false or parallelism.{key} = 1",
)
def early_step(settings: Settings, values: Values) -> Facts | None:
    """NotImplementedError "Optimizers in backward is not supported with Expert Parallel / Pipeline Parallel."
    (torchtitan/components/optimizer.py)."""
    if not settings.early_step_in_backward:
        return None
    if settings.dims.ep > 1:
        return {"key": "expert_parallel_degree", "degree": settings.dims.ep}
    if settings.dims.pp > 1:
        return {"key": "pipeline_parallel_degree", "degree": settings.dims.pp}
    return None


@invalid(
    "cpu-offload",
    "training.enable_cpu_offload without FSDP: the parameters stay on the CPU, the tokens do not",
    fix="set parallelism.data_parallel_shard_degree > 1, or training.enable_cpu_offload = false",
)
def cpu_offload(settings: Settings, values: Values) -> Facts | None:
    """``Trainer`` initialises the model on the CPU (torchtitan/train.py) and only ``fully_shard``'s
    ``CPUOffloadPolicy`` moves parameters for the computation. From the source, not run."""
    if not settings.cpu_offload or applies_fsdp(settings) or settings.cluster.gpu.is_cpu:
        return None
    return {}


@invalid(
    "cpu-offload-on-cpu",
    "training.enable_cpu_offload on CPU: there is nothing to offload from",
    fix="set training.enable_cpu_offload = false",
)
def cpu_offload_on_cpu(settings: Settings, values: Values) -> Facts | None:
    """``CPUOffloadPolicy`` pins memory: RuntimeError "Cannot access accelerator device when none is available"
    (torch/distributed/fsdp/_fully_shard, torch 2.13)."""
    if not settings.cpu_offload or not settings.cluster.gpu.is_cpu or not applies_fsdp(settings):
        return None
    return {}
