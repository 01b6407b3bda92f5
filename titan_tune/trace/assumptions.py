"""What a trace takes for granted about the GPU, said with its result. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_tune.domain.candidate import Value


def assumptions(
    config: Any, model_args: Any, dims: Any, torch_version: str, values: Mapping[str, Value]
) -> tuple[str, ...]:
    """One sentence each, for torchtitan's ``JobConfig``, model arguments and ``ParallelDims``."""
    said = [
        f"the autograd, FSDP and Inductor code of torch {torch_version.partition('+')[0]}",
        f"attention: {attention_kernel(config, model_args, dims)}",
        "cuBLAS workspaces of 32 MiB for the forward and for the backward thread (compute capability 9)",
        "nothing is allocated inside NCCL; other libraries stay outside the allocator",
    ]
    if config.compile.enable:
        said.append("compiled graphs allocate as Inductor's wrapper with its Triton schedule for GPUs does")
        if values.get("titan_tune.compile_mode", "default") != "default":
            said.append("CUDA graphs and autotuning of titan_tune.compile_mode are not traced")
    if dims.dp_replicate > 1 and not dims.fsdp_enabled:
        said.append("DDP's buckets are modelled; compiled blocks are not split at them")
    if autocast(dims) and config.training.dtype == "bfloat16":
        said.append("autocast leaves rms_norm in bfloat16, as up to torch 2.11")
    if dims.pp_enabled:
        said.append("stages learn their shapes from a forward without gradients, as in torch 2.11")
        if config.parallelism.pipeline_parallel_schedule.lower() == "dualpipev":
            said.append("DualPipeV's overlapped forward and backward run one after the other")
    if dims.fsdp_enabled and getattr(model_args, "enable_weight_tying", False):
        said.append(
            "embedding and output share one weight, as in torch 2.11; torch 2.13 refuses to shard them apart"
        )
    if has_experts(model_args):
        said.append("tokens are routed evenly: every expert gets the same number")
    return tuple(said)


def autocast(dims: Any) -> bool:
    """Whether torchtitan computes under ``torch.autocast``."""
    return not (dims.fsdp_enabled or dims.tp_enabled or dims.pp_enabled)


def attention_kernel(config: Any, model_args: Any, dims: Any) -> str:
    """The kernel that attention is traced with."""
    kind = getattr(model_args, "attn_type", "flex" if config.model.name == "gpt_oss" else "sdpa")
    if kind != "sdpa":
        return f"{kind} saves what cuDNN's fused kernel does; its masks are not counted"
    mixed = dims.fsdp_enabled or autocast(dims)
    dtype = config.training.mixed_precision_param if mixed else config.training.dtype
    if dtype == "float32":
        return "MATH, since cuDNN and flash attention refuse float32"
    return "cuDNN, as torchtitan prefers it to flash; both save the same tensors"


def has_experts(model_args: Any) -> bool:
    """Whether a model of these arguments routes tokens to experts."""
    routed: bool = getattr(model_args, "moe_args", None) is not None
    # qwen3's dense flavors carry the arguments too
    return routed and getattr(model_args, "moe_enabled", True)
