"""What people use instead of titan-tune to guess memory, written down from its sources; GiB of one GPU.

None of them counts what lies outside the allocator, nor what the allocator's holes cost.
"""

from __future__ import annotations

from titan_tune.domain.settings import Settings
from titan_tune.estimate import estimate_memory
from titan_tune.units import GIB

MEGATRON_BYTES = 18
"""A parameter without the distributed optimizer: megatron/training/theoretical_memory_usage.py."""
ZERO_BYTES = 16
"""2 + 2 + 12: ZeRO, arXiv 1910.02054, section 3.1."""
ADAM_FACTOR = 4
""""When training with Adam, you can expect roughly 4x": Hugging Face's model-memory-usage."""
FP32_BYTES = 4
SELECTIVE_PER_TOKEN = 18
"""Bytes a token and dim of a layer, selective recomputation: arXiv 2205.05198, table 2, without the MLP."""


def parameters(settings: Settings) -> float:
    """Of the whole model."""
    model = settings.model
    kv = model.n_kv_heads * model.head_dim
    attention = 2 * model.dim * (model.n_heads * model.head_dim + kv)
    block = attention + 3 * model.dim * model.ffn_hidden_dim + 2 * model.dim
    return model.n_layers * block + 2 * model.vocab_size * model.dim + model.dim


def rank_parameters(settings: Settings) -> float:
    """Of the most loaded rank, FSDP's sharding included (Megatron's own formula knows none)."""
    model, dims = settings.model, settings.dims
    embeddings = model.vocab_size * model.dim
    layers = parameters(settings) - 2 * embeddings
    loaded = layers / dims.pp + (2 if dims.pp == 1 else 1) * embeddings
    return loaded / dims.tp / dims.fsdp_degree


def megatron_activations(settings: Settings) -> float:
    """``compute_activation_memory`` of Megatron-LM: selective recomputation, sequence parallelism.

    s·b·h·(18 + 4·ffn/h)·layers + 8·s·b + s·b·h, and 4·s·b·h·(1 + V/h) without a pipeline; all over TP.
    It knows neither full recomputation nor none, nor torch.compile.
    """
    model, dims = settings.model, settings.dims
    pp = dims.pp
    sequences = settings.pipeline.microbatch_size if pp > 1 else settings.local_batch_size
    tokens = sequences * settings.seq_len / dims.cp
    per_layer = tokens * (SELECTIVE_PER_TOKEN * model.dim + 4 * model.ffn_hidden_dim)
    total = per_layer * model.n_layers + pp * (8 * tokens + tokens * model.dim)
    if pp == 1:
        total += 4 * tokens * (model.dim + model.vocab_size)
    else:
        microbatches = settings.local_batch_size / settings.pipeline.microbatch_size
        total *= min(1.0, microbatches / pp)
    return total / dims.tp


def megatron(settings: Settings) -> float:
    return (MEGATRON_BYTES * rank_parameters(settings) + megatron_activations(settings)) / GIB


def zero_states_and_activations(settings: Settings) -> float:
    return (ZERO_BYTES * rank_parameters(settings) + megatron_activations(settings)) / GIB


def four_times_weights(settings: Settings) -> float:
    return ADAM_FACTOR * FP32_BYTES * rank_parameters(settings) / GIB


def formula_active(settings: Settings) -> float:
    return estimate_memory(settings).active_bytes / GIB


ESTIMATORS = {
    "titan-tune formula": formula_active,
    "Megatron-LM, 18 bytes": megatron,
    "ZeRO's 16 bytes + Megatron's activations": zero_states_and_activations,
    "4 × fp32 weights (accelerate)": four_times_weights,
}
