"""Write titan_tune/titan/recipe_fields.json: what torchtitan 0.3.0 offers to a recipe. Run under torchtitan 0.3.0.

    python tools/make_recipe_fields.py > titan_tune/titan/recipe_fields.json

Needs torchtitan 0.3.0, torchao and spmd_types importable; no GPU.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
import sys
from importlib.metadata import version
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper
from torchtitan.components.quantization import (
    Float8GroupedExpertsConverter,
    Float8LinearConverter,
    MXFP8GroupedExpertsConverter,
    MXFP8LinearConverter,
)
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.experiments import _supported_experiments
from torchtitan.hf_datasets.text_datasets import DATASETS, HuggingFaceTextDataLoader
from torchtitan.models import _supported_models
from torchtitan.models.common.linear import Linear
from torchtitan.trainer import Trainer

FAMILIES = {
    "llama3": "llama3_configs",
    "qwen3": "qwen3_configs",
    "deepseek_v3": "deepseekv3_configs",
    "gpt_oss": "gptoss_configs",
}
"""Models of torchtitan 0.2.2 that 0.3.0 has too, with the name of its table of flavors."""
FUNCTIONS = {("qwen3", "debugmodel_moe"): "qwen3_moe_debug"}
"""Config functions that are not called <model>_<flavor>."""
SECTIONS = (
    "training", "parallelism", "compile", "comm", "debug", "metrics", "profiler", "checkpoint", "lr_scheduler",
    "validator", "dataloader", "loss", "optimizer",
)  # fmt: skip
CLASSES = (
    FullAC, SelectiveAC, MemoryBudgetAC, Float8LinearConverter, Float8GroupedExpertsConverter, MXFP8LinearConverter,
    MXFP8GroupedExpertsConverter,
)  # fmt: skip


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted fields that JSON can hold."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            if not prefix or field.name == "dataloader":
                found |= leaves(value, f"{prefix}{field.name}.")
        elif isinstance(value, bool | int | float | str | type(None)) or (
            isinstance(value, list)
            and all(isinstance(item, str) for item in value)
            and field.name != "param_groups"
        ):
            found[f"{prefix}{field.name}"] = value
    kept = ("hf_assets_path", "dump_folder")
    return (
        {key: value for key, value in found.items() if key.split(".")[0] in (*SECTIONS, *kept)}
        if not prefix
        else found
    )


def plain_config(model_spec: Any = None) -> Any:
    """What a recipe builds where 0.3.0 has no config function for the flavor."""
    return Trainer.Config(
        model_spec=model_spec,
        loss=ChunkedLossWrapper.Config(),
        dataloader=HuggingFaceTextDataLoader.Config(),
        checkpoint=CheckpointManager.Config(),
    )


def flavor_entry(model: str, flavor: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """The config function of a flavor with what it sets; its Linears; its parameters."""
    package = importlib.import_module(f"torchtitan.models.{model}")
    registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
    name = FUNCTIONS.get((model, flavor)) or f"{model}_{re.sub('[^a-z0-9]+', '_', flavor.lower())}"
    config, function = None, None
    try:
        config = getattr(registry, name)()
        function = name
    except (AttributeError, ValueError) as error:  # none, or it converts to float8, which asks for a GPU
        print(f"{model} {flavor}: no config function to build on: {error}", file=sys.stderr)
    spec = config.model_spec if config is not None else package.model_registry(flavor)
    with torch.device("meta"):
        built = spec.model.build()
    linears: dict[str, list[int]] = {}
    for fqn, linear, *_ in spec.model.traverse(Linear.Config):
        shape = [linear.out_features, linear.in_features]
        assert linears.setdefault(re.sub(r"^layers\.\d+\.", "layers.N.", fqn), shape) == shape
    base = leaves(config) if config is not None else {}
    missing = defaults.keys() - base.keys()
    assert not base or not missing, (name, missing)  # e.g. a loss that is not chunked
    return {
        "function": function,
        "base": {key: value for key, value in base.items() if value != defaults[key]},
        "parameters": sum(parameter.numel() for parameter in built.parameters()),
        "max_seq_len": spec.model.max_seq_len,
        "linears": dict(sorted(linears.items())),
        "tied": bool(getattr(spec.model, "enable_weight_tying", False)),
    }


def main() -> None:
    """Print the file."""
    defaults = leaves(plain_config())
    models = {}
    for model, table in FAMILIES.items():
        package = importlib.import_module(f"torchtitan.models.{model}")
        models[model] = {flavor: flavor_entry(model, flavor, defaults) for flavor in getattr(package, table)}
    fields = {
        "torchtitan": version("torchtitan"),
        "modules": sorted(_supported_models | _supported_experiments),
        "datasets": sorted(DATASETS),
        "defaults": defaults,
        "classes": {
            owner.__name__: {field.name: leaves(owner.Config(), "x.").get(f"x.{field.name}")
                             for field in dataclasses.fields(owner.Config)}
            for owner in CLASSES
        },
        "models": models,
    }  # fmt: skip
    print(json.dumps(fields, indent=1))


if __name__ == "__main__":
    main()
