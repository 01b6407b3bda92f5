"""Names of the items that a phase sums, the component each belongs to and the pool it lives in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

COMPONENTS: Final = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "attention_scores",
    "logits_loss",
    "gathered_parameters",
    "other",
)

COMPONENT_OF: Final[Mapping[str, str]] = {
    "parameters": "parameters",
    "gradients": "gradients",
    "new_gradients": "gradients",
    "ddp_buckets": "gradients",
    "unsharded_gradients": "gradients",
    "reduce_buffers": "gradients",
    "reduce_output": "gradients",
    "reduce_scatter_input": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "tail_activations": "activations",
    "residual_gradient": "activations",
    "working_set": "activations",
    "receive_buffers": "activations",
    "attention_scores": "attention_scores",
    "attention_scores_backward": "attention_scores",
    "logits_loss": "logits_loss",
    "gathered_block": "gathered_parameters",
    "gathered_output": "gathered_parameters",
    "gathered_kept": "gathered_parameters",
    "autocast_weights": "gathered_parameters",
    "embedding_scratch": "other",
    "framework": "other",
}

GATHER_POOL: Final = frozenset({"gathered_block", "gathered_output", "gathered_kept"})
"""Allocated on FSDP's all-gather stream, which has its own allocator pool."""
SHARD_GRADIENTS: Final = frozenset({"gradients", "new_gradients", "reduce_buffers", "reduce_output"})
"""Allocated on FSDP's reduce-scatter stream."""


def by_component(items: Mapping[str, float]) -> dict[str, float]:
    """The items summed by component, every component present; an item may be a whole component."""
    totals = dict.fromkeys(COMPONENTS, 0.0)
    for name, size in items.items():
        totals[COMPONENT_OF.get(name, name)] += size
    return totals
