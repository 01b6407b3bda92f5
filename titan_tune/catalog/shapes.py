"""Model arguments → shape, as torchtitan 0.2.2 computes it (``models/<name>/model/model.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from titan_tune.domain.model import MlaSpec, ModelSpec, MoeSpec
from titan_tune.errors import InputError

Args = Mapping[str, Any]
"""Every model-args field of the family, dotted, defaults included."""


MAX_LAYERS = 10_000
MAX_SIZE = 2**31
"""Of any dimension or count of a model; ten times beyond the largest published."""


def swiglu_hidden_dim(dim: int, *, multiple_of: int, ffn_dim_multiplier: float | None) -> int:
    """Hidden size of Llama's feed-forward: two thirds of 4·dim, scaled, rounded up.

    The float arithmetic is torchtitan's own (``llama3/model/model.py``, FeedForward), so that the
    result is the same integer for every input.
    """
    hidden_dim = int(2 * (4 * dim) / 3)
    if ffn_dim_multiplier is not None:
        hidden_dim = int(ffn_dim_multiplier * hidden_dim)
    return multiple_of * ((hidden_dim + multiple_of - 1) // multiple_of)


def _llama4_expert_hidden_dim(args: Args) -> int:
    """As ``llama4/model/model.py``, TransformerBlock: one token's active experts share a dense layer's size."""
    hidden_dim = int(2 * (4 * args["dim"]) / 3)
    if args["ffn_dim_multiplier"] is not None:
        hidden_dim = int(args["ffn_dim_multiplier"] * hidden_dim)
    if args["auto_scale_hidden_dim"]:
        hidden_dim = int(hidden_dim / (args["moe_args.top_k"] + args["moe_args.num_shared_experts"]))
    return hidden_dim + -hidden_dim % int(args["multiple_of"])


def _moe(args: Args, expert_hidden_dim: int, **layers: int) -> MoeSpec:
    return MoeSpec(
        num_experts=args["moe_args.num_experts"],
        top_k=args["moe_args.top_k"],
        num_shared_experts=args["moe_args.num_shared_experts"],
        expert_hidden_dim=expert_hidden_dim,
        gate_bias=args["moe_args.gate_bias"],
        score_before_experts=args["moe_args.score_before_experts"],
        **layers,
    )


def _llama3(args: Args) -> dict[str, Any]:
    return {
        "n_kv_heads": args["n_kv_heads"] or args["n_heads"],
        "head_dim": args["dim"] // args["n_heads"],
        "ffn_hidden_dim": swiglu_hidden_dim(
            args["dim"], multiple_of=args["multiple_of"], ffn_dim_multiplier=args["ffn_dim_multiplier"]
        ),
    }


def _llama4(args: Args) -> dict[str, Any]:
    step = args["interleave_moe_layer_step"]
    return _llama3(args) | {"moe": _moe(args, _llama4_expert_hidden_dim(args), layer_step=step)}


def _qwen3(args: Args) -> dict[str, Any]:
    return {
        "n_kv_heads": args["n_kv_heads"],
        "head_dim": args["head_dim"],
        "ffn_hidden_dim": args["hidden_dim"],
        "qk_norm": args["qk_norm"],
        "tied_embeddings": args["enable_weight_tying"],
        "moe": _moe(args, args["moe_inter_dim"]) if args["moe_enabled"] else None,
    }


def _deepseek_v3(args: Args) -> dict[str, Any]:
    mla = {field: args[field] for field in MlaSpec.model_fields}
    return {
        "n_kv_heads": args["n_heads"],
        "head_dim": args["qk_nope_head_dim"] + args["qk_rope_head_dim"],
        "ffn_hidden_dim": args["inter_dim"],
        "moe": _moe(args, args["moe_inter_dim"], num_dense_layers=args["n_dense_layers"]),
        "mla": MlaSpec(**mla),
    }


def _gpt_oss(args: Args) -> dict[str, Any]:
    return {
        "n_kv_heads": args["n_kv_heads"],
        "head_dim": args["head_dim"],
        # every layer is a MoE layer: no dense feed-forward exists
        "ffn_hidden_dim": args["moe_inter_dim"],
        "moe": _moe(args, args["moe_inter_dim"]),
    }


_FAMILIES: Mapping[str, Callable[[Args], dict[str, Any]]] = {
    "llama3": _llama3,
    "qwen3": _qwen3,
    "deepseek_v3": _deepseek_v3,
    "llama4": _llama4,
    "gpt_oss": _gpt_oss,
}


def spec_from_args(name: str, flavor: str, args: Args) -> ModelSpec:
    """The shape of one model. ``args`` holds every field of the family, already type-checked.

    Raises:
        InputError: sizes that torchtitan cannot train with.
    """
    try:
        derived = _FAMILIES[name](args)
        _check_sizes(args, derived)
        spec = ModelSpec(
            name=name,
            flavor=flavor,
            dim=args["dim"],
            n_layers=args["n_layers"],
            n_heads=args["n_heads"],
            vocab_size=args["vocab_size"],
            max_seq_len=args["max_seq_len"],
            attention=args["attn_type"],
            **derived,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InputError(f"model: {first['loc'][-1]} comes to {first['input']}: {first['msg']}") from None
    except OverflowError:
        raise InputError("model: ffn_dim_multiplier makes the feed-forward infinitely large") from None
    _check_bounds(spec.model_dump())
    return spec


def _check_bounds(sizes: Mapping[str, Any]) -> None:
    """Typing errors of many digits would be taken for models, and take for ever."""
    for name, value in sizes.items():
        if isinstance(value, Mapping):
            _check_bounds(value)
        elif isinstance(value, int) and value > (limit := MAX_LAYERS if name == "n_layers" else MAX_SIZE):
            raise InputError(f"model: {name} = {value} is beyond what is supported, {limit}")


def _check_sizes(args: Args, derived: Mapping[str, Any]) -> None:
    n_heads, n_kv_heads, head_dim = args["n_heads"], derived["n_kv_heads"], derived["head_dim"]
    if n_heads % n_kv_heads:
        raise InputError(f"model: n_heads = {n_heads} must be a multiple of n_kv_heads = {n_kv_heads}")
    if head_dim < 2 or head_dim % 2:
        raise InputError(f"model: the head size is {head_dim}; rotary embeddings need an even one")
    if derived["ffn_hidden_dim"] < 1:
        raise InputError("model: ffn_dim_multiplier makes the feed-forward size zero; it must be larger")
    moe: MoeSpec | None = derived.get("moe")
    if moe is not None and moe.top_k > moe.num_experts:
        raise InputError(f"model: moe_args.top_k = {moe.top_k} exceeds num_experts = {moe.num_experts}")
