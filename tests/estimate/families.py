"""Small models of every family but Llama 3, and jobs with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_tune.catalog.loader import gpu_spec, model_spec
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import Settings
from titan_tune.titan.keys import defaults
from titan_tune.titan.settings import settings_from

SHAPE = {"dim": 320, "n_layers": 4, "n_heads": 8, "vocab_size": 4096}
MOE = {"moe_args.num_experts": 8, "moe_args.top_k": 2, "moe_args.score_before_experts": False}
DENSE_QWEN = {**SHAPE, "n_kv_heads": 2, "head_dim": 48, "hidden_dim": 896, "qk_norm": True}
DEEPSEEK = {
    **SHAPE, **MOE, "inter_dim": 896, "moe_inter_dim": 224, "n_dense_layers": 1, "kv_lora_rank": 136,
    "q_lora_rank": 0, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16, "v_head_dim": 40,
    "moe_args.num_shared_experts": 2, "moe_args.score_func": "softmax",
}  # fmt: skip
ROUTED = {"moe_args.num_shared_experts": 0, "moe_args.score_func": "softmax", "moe_args.route_norm": True}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", DENSE_QWEN),
    "qwen3 MoE": ("qwen3", {**DENSE_QWEN, **MOE, **ROUTED, "moe_enabled": True, "moe_inter_dim": 224}),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3, query rank": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 176}),
    "llama4": (
        "llama4",
        {
            **SHAPE, "n_kv_heads": 2, "interleave_moe_layer_step": 2, "multiple_of": 32,
            "moe_args.num_experts": 8, "moe_args.top_k": 1, "moe_args.num_shared_experts": 1,
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **SHAPE, **MOE, **ROUTED, "n_kv_heads": 2, "head_dim": 48, "moe_inter_dim": 224,
            "moe_args.gate_bias": True,
        },
    ),
}  # fmt: skip
DEGREES = {
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
    "replicate": "parallelism.data_parallel_replicate_degree",
    "pp": "parallelism.pipeline_parallel_degree",
}


def job(
    model: str, mode: str, compiled: bool, world_size: int, /, keys: Mapping[str, Any], **degrees: int
) -> Settings:
    """FSDP over what other dimensions leave; 2 x 1024 tokens; ``mode`` "op" is selective op AC."""
    name, args = MODELS[model]
    values = values_of(model, mode, compiled, keys, **degrees)
    spec = model_spec(name, "traced", model_args=args, seq_len=values["training.seq_len"])
    cluster = ClusterSpec(gpu=gpu_spec("h200"), gpus_per_node=world_size)
    return settings_from({**defaults(), **values}, spec, cluster)


def values_of(
    model: str, mode: str, compiled: bool, keys: Mapping[str, Any], **degrees: int
) -> dict[str, Any]:
    """The keys of such a job that differ from torchtitan's defaults."""
    return {
        "model.name": MODELS[model][0],
        "model.flavor": "traced",
        "training.local_batch_size": 2,
        "training.seq_len": 1024,
        "activation_checkpoint.mode": "selective" if mode == "op" else mode,
        "activation_checkpoint.selective_ac_option": "op",
        "compile.enable": compiled,
        **{DEGREES[axis]: degree for axis, degree in degrees.items()},
        **keys,
    }
