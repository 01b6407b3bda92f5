"""torchtitan 0.2.2's keys in torchtitan 0.3.0, where a job is a Python function that returns a config object.

``recipe_fields.json`` is generated from torchtitan 0.3.0 (``tools/make_recipe_fields.py``): its config fields with
their defaults, and for each flavor the config function of its registry and what that sets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from titan_tune.catalog.loader import parameter_count
from titan_tune.catalog.typed import nearest, show
from titan_tune.errors import InputError
from titan_tune.titan.job import Job

VERSION = "0.3.0"
RENAMED = {
    "job.dump_folder": "dump_folder",
    "job.print_config": "debug.print_config",
    "job.save_config_file": "debug.save_config_file",
    "model.hf_assets_path": "hf_assets_path",
    "parallelism.enable_async_tensor_parallel": "compile.enable_async_tensor_parallel",
    "training.dataset": "dataloader.dataset",
    "training.dataset_path": "dataloader.dataset_path",
    "validation.dataset": "validator.dataloader.dataset",
    "validation.dataset_path": "validator.dataloader.dataset_path",
}
RENAMED_SECTIONS = {
    "training.dataloader.": "dataloader.",
    "validation.": "validator.",
    "profiling.": "profiler.",
}
_NO_KEY = f"{VERSION} has no such key"
_VALIDATES = f"{VERSION} validates with the batch and sequence length of training"
GONE = {
    "job.config_file": _NO_KEY,
    "job.description": _NO_KEY,
    "job.custom_config_module": "a config function takes its place",
    "model.tokenizer_path": "hf_assets_path takes its place",
    "model.print_after_conversion": _NO_KEY,
    "optimizer.early_step_in_backward": _NO_KEY,
    "activation_checkpoint.early_stop": "always false",
    "parallelism.disable_loss_parallel": _NO_KEY,
    "parallelism.pipeline_parallel_expert_parallel_overlap": _NO_KEY,
    "parallelism.context_parallel_rotate_method": _NO_KEY,
    "parallelism.expert_tensor_parallel_degree": "expert parallelism takes its ranks from FSDP and TP",
    "checkpoint.enable_ft_dataloader_checkpoints": _NO_KEY,
    "validation.local_batch_size": _VALIDATES,
    "validation.seq_len": _VALIDATES,
    "experimental.custom_import": "this file can import what the job needs",
    "experimental.custom_args_module": "a config function takes its place",
    "titan_tune.compile_mode": "torchtitan has no key for torch.compile's mode; titan-tune's plug-in set it",
    "titan_tune.data": "synthetic tokens were titan-tune's plug-in's; c.dataloader says what is read here",
    "titan_tune.custom_import": "this file can import what the job needs",
    "memory_estimation.enable": _NO_KEY,
    "memory_estimation.disable_fake_mode": _NO_KEY,
}
WEIGHTY = (
    "activation_checkpoint.",
    "fault_tolerance.enable",
    "optimizer.",
    "parallelism.",
    "titan_tune.compile_mode",
)
"""How gone keys begin that change memory, speed or training."""
GONE_SECTIONS = {"fault_tolerance.": "the experiment torchft.llama3 has it"}
SPECIAL = (
    "model.name",
    "model.flavor",
    "model.converters",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.eps",
    "optimizer.weight_decay",
    "parallelism.expert_parallel_comm_backend",
)
"""Keys that become more than one field; all of ``activation_checkpoint`` and ``quantize`` too."""
SPECIAL_SECTIONS = ("activation_checkpoint.", "quantize.")
_FUSED = "attention.qkv_linear.wqkv"
_ATTENTION_SUFFIX = re.compile(r"_(flex|varlen)(_attn)?$")


@cache
def fields() -> Mapping[str, Any]:
    """The recorded fields of torchtitan 0.3.0."""
    text = files("titan_tune.titan").joinpath("recipe_fields.json").read_text(encoding="utf-8")
    recorded: dict[str, Any] = json.loads(text)
    return recorded


def is_special(key: str) -> bool:
    """Whether a key becomes more than one field."""
    return key not in GONE and (key in SPECIAL or key.startswith(SPECIAL_SECTIONS))


def field_of(key: str) -> str | None:
    """The dotted config field that holds a key's value; None for keys that are gone or special."""
    if key in GONE or is_special(key):
        return None
    if key in RENAMED:
        return RENAMED[key]
    for old, new in RENAMED_SECTIONS.items():
        if key.startswith(old):
            key = new + key.removeprefix(old)
            break
    return key if key in fields()["defaults"] else None


def gone(key: str) -> str:
    """Why there is no field for a key."""
    for section, reason in GONE_SECTIONS.items():
        if key.startswith(section):
            return reason
    return GONE.get(key, _NO_KEY)


@dataclass(frozen=True)
class Flavor:
    """The model of a job in torchtitan 0.3.0."""

    model: str
    name: str
    """The flavor; for ``custom`` the one whose parts the recipe takes."""
    custom: bool
    attention: str | None
    """``attn_backend`` where it is not 0.3.0's default for the model."""
    entry: Mapping[str, Any]
    """What ``recipe_fields.json`` holds of the flavor; a custom one has no config function to start from."""

    @property
    def default_attention(self) -> str:
        """0.3.0's ``attn_backend`` of the model."""
        return "varlen" if self.model == "gpt_oss" else "flex"


def flavor_of(job: Job) -> Flavor:
    """Where a job's model is.

    Raises:
        InputError: torchtitan 0.3.0 does not have that model, or another one under the flavor's name.
    """
    models, model, flavor = fields()["models"], job.model.name, job.model.flavor
    if model not in models:
        raise InputError(
            f"{job.name}: model.name = {show(model)}: torchtitan {VERSION} has no such model; "
            f"a Python recipe takes: {', '.join(models)}"
        )
    known = models[model]
    attention = _attention(job)
    if job.model_args:
        if model != "llama3":
            raise InputError(
                f"{job.name}: titan_tune.model_args: a Python recipe defines flavors of llama3 only, not of {model}; "
                f"{model} has: {', '.join(known)}"
            )
        return Flavor(model, "8B", True, attention, {**known["8B"], "function": None, "base": {}})
    name = flavor if flavor in known else _ATTENTION_SUFFIX.sub("", flavor)
    if name not in known:
        raise InputError(
            f"{job.name}: model.flavor = {show(flavor)}: {model} of torchtitan {VERSION} has no such flavor"
            f"{nearest(flavor, known)}; flavors: {', '.join(known)}"
        )
    here, there = parameter_count(model, flavor), known[name]["parameters"]
    if here != there:
        same = [other for other in known if known[other]["parameters"] == here]
        raise InputError(
            f"{job.name}: model.flavor = {show(flavor)}: another model in torchtitan {VERSION} ({there:,} parameters, "
            f"not {here:,}); flavors: {', '.join(same or [other for other in known if other != name])}"
        )
    return Flavor(model, name, False, attention, known[name])


def _attention(job: Job) -> str | None:
    default = "varlen" if job.model.name == "gpt_oss" else "flex"
    return job.model.attention if job.model.attention not in ("sdpa", default) else None


def linear_names(flavor: Flavor, n_layers: int) -> dict[str, tuple[str, ...]]:
    """Every ``Linear`` of the model by its name in 0.3.0, with its names in 0.2.2: q, k and v are one there."""
    names: dict[str, tuple[str, ...]] = {}
    for pattern in flavor.entry["linears"]:
        for layer in range(n_layers if pattern.startswith("layers.N.") else 1):
            name = pattern.replace("layers.N.", f"layers.{layer}.")
            parts = ("attention.wq", "attention.wk", "attention.wv") if _FUSED in name else (_FUSED,)
            names[name] = tuple(name.replace(_FUSED, part).replace("lm_head", "output") for part in parts)
    return names


def renamed_filters(filters: Iterable[str], names: Mapping[str, Sequence[str]]) -> list[str]:
    """Filters of 0.2.2 (parts of names) that match the same ``Linear``s in 0.3.0; without those that match none."""
    found: list[str] = []
    for given in filters:
        wanted = [name for name, olds in names.items() if any(given in old for old in olds)]
        if wanted == [name for name in names if given in name]:
            found.append(given)
        else:
            found += shortest(wanted, names)
    return list(dict.fromkeys(found))


def shortest(wanted: Sequence[str], names: Iterable[str]) -> list[str]:
    """Parts of names that match ``wanted`` and nothing else of ``names``: without layers where all layers are."""
    everywhere: dict[str, list[str]] = {}
    for name in names:
        everywhere.setdefault(_without_layer(name), []).append(name)
    chosen = set(wanted)
    found: list[str] = []
    for name in wanted:
        part = _without_layer(name)
        found.append(part if chosen.issuperset(everywhere[part]) else name)
    return list(dict.fromkeys(found))


def small_linears(flavor: Flavor) -> list[str]:
    """``Linear``s that torchao's ``auto_filter_small_kn`` leaves out of rowwise float8, as parts of names.

    torchao 0.18's ``_auto_filter_for_rowwise`` on the shapes of 0.3.0, whose own converter passes it config objects
    that are no ``nn.Linear``, so that it leaves out every one.
    """
    return [
        name.removeprefix("layers.N.")
        for name, (n, k) in flavor.entry["linears"].items()
        if n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    ]


def partly_fused(filters: Sequence[str], names: Mapping[str, Sequence[str]]) -> bool:
    """Whether filters match some but not all of q, k and v."""
    for olds in names.values():
        hit = [any(given in old for given in filters) for old in olds]
        if any(hit) and not all(hit):
            return True
    return False


def _without_layer(name: str) -> str:
    return re.sub(r"^layers\.\d+\.", "", name)
