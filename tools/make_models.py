"""Write titan_tune/catalog/models.json from the models of the installed torchtitan.

Every flavor is built on the meta device; its feed-forward sizes and its parameter count are read from
the modules, not computed. Usage: python tools/make_models.py
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from make_keys import describe

OUTPUT = Path(__file__).parent.parent / "titan_tune" / "catalog" / "models.json"
FAMILIES = ("llama3", "qwen3", "deepseek_v3", "llama4", "gpt_oss")

# Sizes and counts that must be positive for the model to be built at all.
POSITIVE = [
    "dim",
    "n_layers",
    "n_heads",
    "n_kv_heads",
    "vocab_size",
    "multiple_of",
    "ffn_dim_multiplier",
    "max_seq_len",
    "head_dim",
    "hidden_dim",
    "inter_dim",
    "moe_inter_dim",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "interleave_moe_layer_step",
    "moe_args.num_experts",
    "moe_args.top_k",
]
NOT_NEGATIVE = ["n_dense_layers", "q_lora_rank", "moe_args.num_shared_experts"]
# gpt_oss builds flex attention whatever attn_type says; the others refuse any other name.
ATTENTION = ("sdpa", "flex", "varlen")
MASKS = ("causal", "block_causal")


def flatten(cls: type, prefix: str = "") -> dict[str, dict[str, Any]]:
    """Dotted model-args field -> entry, private fields left out."""
    entries: dict[str, dict[str, Any]] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        name = f"{prefix}{field.name}"
        nested = next(
            (
                t
                for t in (hints[field.name], *typing.get_args(hints[field.name]))
                if dataclasses.is_dataclass(t)
            ),
            None,
        )
        if nested is not None:
            entries |= flatten(typing.cast(type, nested), f"{name}.")
            continue
        entries[name] = describe(hints[field.name])
        is_float = entries[name]["type"] == "float" and field.default is not None
        entries[name]["default"] = float(field.default) if is_float else field.default
        if name in POSITIVE:
            # a float share may be below one
            entries[name]["minimum"] = 1 if entries[name]["type"] == "int" else 1e-6
        elif name in NOT_NEGATIVE:
            entries[name]["minimum"] = 0
    return entries


def public(value: Any) -> Any:
    """A model-args dataclass as plain data without private fields and unset nested tables."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: public(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {name: item for name, item in fields.items() if not name.startswith("_")}
    return value


def given(args: Any) -> dict[str, Any]:
    """What a flavor sets beyond the family's defaults."""
    default = public(type(args)())
    own = {}
    for name, value in public(args).items():
        if isinstance(value, dict):
            base = default[name] if isinstance(default[name], dict) else public(type(getattr(args, name))())
            value = {k: v for k, v in value.items() if base[k] != v}
            if value or not isinstance(default[name], dict):
                own[name] = value
        elif value != default[name]:
            own[name] = value
    return own


def build_model(spec: Any, args: Any) -> Any:
    """The flavor's model on the meta device, updated from a default job as the trainer does."""
    import torch
    from torchtitan.config import JobConfig

    args = copy.deepcopy(args)
    args.update_from_config(JobConfig())
    with torch.device("meta"):
        return spec.model_cls(args)


def measured(model: Any) -> dict[str, int]:
    """Shapes read from the built modules: unique parameters, dense and expert hidden sizes."""
    sizes = {"parameters": sum(parameter.numel() for parameter in model.parameters())}
    for layer in model.layers.values():
        feed_forward = getattr(layer, "feed_forward", None)
        if feed_forward is not None:
            sizes["ffn_hidden_dim"] = feed_forward.w1.out_features
        moe = getattr(layer, "moe", None)
        if moe is not None:
            experts = moe.experts
            sizes["expert_hidden_dim"] = (
                experts.w2.shape[-1] if hasattr(experts, "w2") else experts.mlp2_weight.shape[-1]
            )
            sizes["moe_layers"] = sizes.get("moe_layers", 0) + 1
    return sizes


def family(name: str) -> dict[str, Any]:
    """Model-args fields and flavors of one train spec."""
    spec = importlib.import_module(f"torchtitan.models.{name}").get_train_spec()
    entries = flatten(type(next(iter(spec.model_args.values()))))
    entries["attn_type"]["choices"] = ["flex"] if name == "gpt_oss" else list(ATTENTION)
    entries["attn_mask_type"]["choices"] = list(MASKS)
    flavors = {
        flavor: {"model_args": given(args), "measured": measured(build_model(spec, args))}
        for flavor, args in spec.model_args.items()
    }
    return {"fields": entries, "flavors": flavors}


def build() -> dict[str, Any]:
    """The content of models.json."""
    return {"torchtitan": version("torchtitan"), "models": {name: family(name) for name in FAMILIES}}


def render(content: dict[str, Any]) -> str:
    """JSON with one line a field and a flavor."""
    families = []
    for name, entry in content["models"].items():
        parts = [
            f'      "{part}": {{\n'
            + ",\n".join(f"        {json.dumps(k)}: {json.dumps(v)}" for k, v in entry[part].items())
            + "\n      }"
            for part in ("fields", "flavors")
        ]
        families.append(f'    "{name}": {{\n' + ",\n".join(parts) + "\n    }")
    head = f'{{\n  "torchtitan": {json.dumps(content["torchtitan"])},\n  "models": {{\n'
    return head + ",\n".join(families) + "\n  }\n}\n"


def main() -> None:
    OUTPUT.write_text(render(build()), encoding="utf-8")
    print(f"{OUTPUT}: written")


if __name__ == "__main__":
    main()
