"""What a model is: the shapes that decide memory and speed."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from titan_tune.domain.base import FrozenModel


class MoeSpec(FrozenModel):
    """Mixture-of-experts layers (torchtitan's ``MoEArgs`` and the layers that use them)."""

    num_experts: PositiveInt
    top_k: PositiveInt
    expert_hidden_dim: PositiveInt
    num_shared_experts: NonNegativeInt = 0
    num_dense_layers: NonNegativeInt = 0
    """Leading layers that keep a dense feed-forward (deepseek_v3's ``n_dense_layers``)."""
    layer_step: PositiveInt = 1
    """Every ``layer_step``-th layer is a MoE layer (llama4's ``interleave_moe_layer_step``)."""
    gate_bias: bool = False
    score_before_experts: bool = True
    """Whether routing scores scale the experts' inputs (else their outputs)."""


class MlaSpec(FrozenModel):
    """Multi-head latent attention (deepseek_v3)."""

    q_lora_rank: NonNegativeInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt


class ModelSpec(FrozenModel):
    """One flavor of one torchtitan train spec, by shape."""

    name: str
    """torchtitan's ``model.name`` (llama3, qwen3, deepseek_v3, llama4, gpt_oss)."""
    flavor: str
    dim: PositiveInt
    n_layers: PositiveInt
    n_heads: PositiveInt
    n_kv_heads: PositiveInt
    head_dim: PositiveInt
    ffn_hidden_dim: PositiveInt
    vocab_size: PositiveInt
    max_seq_len: PositiveInt = 131072
    attention: str = "sdpa"
    """torchtitan's ``attn_type``: sdpa, flex or varlen."""
    qk_norm: bool = False
    tied_embeddings: bool = False
    moe: MoeSpec | None = None
    mla: MlaSpec | None = None
    model_args: dict[str, Any] = Field(default_factory=dict)
    """torchtitan's own model-args fields, kept when the flavor is not one that torchtitan ships."""

    @property
    def is_dense_llama(self) -> bool:
        """Whether the dense Llama closed forms hold: plain GQA, SwiGLU, two RMSNorms a block."""
        return (
            self.name == "llama3"
            and self.moe is None
            and self.mla is None
            and not self.qk_norm
            and not self.tied_embeddings
        )
