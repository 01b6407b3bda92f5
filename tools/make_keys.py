"""Write titan_tune/titan/keys.json from the JobConfig of the installed torchtitan.

Usage: python tools/make_keys.py
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, Union

OUTPUT = Path(__file__).parent.parent / "titan_tune" / "titan" / "keys.json"

# What JobConfig does not say but torchtitan 0.2.2 requires: ParallelDims._validate (degrees),
# train.py (global_batch_size is positive, or -1 for "derive it"), Validation.__post_init__ (steps),
# build_optimizers (names), context_parallel.py (load balancers), activation_checkpoint.py
# (selective_ac_option), GarbageCollection (gc_freq > 0), MetricsProcessor (modulo log_freq),
# torch.utils.checkpoint (determinism checks), functorch's partitioner (memory budget in [0, 1]), and
# parallelize.py/loss.py: only "model" and "loss" are ever looked up in compile.components.
POSITIVE = {"minimum": 1}
# Of a batch and a sequence no torchtitan bound exists; these are far above any job, and keep sizes finite.
LOCAL_BATCH = {"minimum": 1, "maximum": 1_000_000}
GLOBAL_BATCH = {"minimum": 1, "maximum": 1_000_000_000, "also": [-1]}
SEQUENCE = {"minimum": 1, "maximum": 100_000_000}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "parallelism.data_parallel_replicate_degree": POSITIVE,
    "parallelism.data_parallel_shard_degree": {"minimum": 1, "also": [-1]},
    "parallelism.tensor_parallel_degree": POSITIVE,
    "parallelism.pipeline_parallel_degree": POSITIVE,
    "parallelism.context_parallel_degree": POSITIVE,
    "parallelism.expert_parallel_degree": POSITIVE,
    "parallelism.expert_tensor_parallel_degree": POSITIVE,
    "parallelism.pipeline_parallel_microbatch_size": LOCAL_BATCH,
    "parallelism.pipeline_parallel_layers_per_stage": POSITIVE,
    "parallelism.pipeline_parallel_first_stage_less_layers": {"minimum": 0},
    "parallelism.pipeline_parallel_last_stage_less_layers": {"minimum": 0},
    "parallelism.context_parallel_load_balancer": {"choices": ["headtail", "ptrr"]},
    "training.local_batch_size": LOCAL_BATCH,
    "training.global_batch_size": GLOBAL_BATCH,
    "training.seq_len": SEQUENCE,
    "training.steps": POSITIVE,
    "training.gc_freq": POSITIVE,
    "training.dataloader.num_workers": {"minimum": 0},
    "optimizer.name": {"choices": ["Adam", "AdamW"]},
    "activation_checkpoint.selective_ac_option": {
        "pattern": "op|[0-9]{1,9}",
        "pattern_text": '"op" or a whole number in quotes',
    },
    "activation_checkpoint.memory_budget": {"minimum": 0.0, "maximum": 1.0},
    "activation_checkpoint.determinism_check": {"choices": ["default", "none"]},
    "compile.components": {"choices": ["model", "loss"]},
    "metrics.log_freq": POSITIVE,
    "validation.steps": {"minimum": 1, "also": [-1]},
    "validation.local_batch_size": POSITIVE,
    "validation.seq_len": POSITIVE,
    "comm.init_timeout_seconds": POSITIVE,
    "comm.train_timeout_seconds": POSITIVE,
    "lr_scheduler.warmup_steps": {"minimum": 0},
}


def describe(annotation: Any) -> dict[str, Any]:
    """Type, choices, optional and element of one field's annotation."""
    optional = False
    members = [annotation]
    if typing.get_origin(annotation) in (Union, types.UnionType):
        members = list(typing.get_args(annotation))
        optional = type(None) in members
        members = [member for member in members if member is not type(None)]
    entry: dict[str, Any] = {}
    if members == [float, int]:
        members = [float]
    if len(members) == 2 and members[1] is str:
        # list[str] | str is recorded as a list: torchtitan loops over a text character by character
        members = members[:1]
    (member,) = members
    if typing.get_origin(member) is Literal:
        entry |= {"type": "str", "choices": list(typing.get_args(member))}
    elif typing.get_origin(member) is list:
        (element,) = typing.get_args(member)
        entry |= {"type": "list", "element": element.__name__ if element is str else str(element)}
    else:
        entry["type"] = member.__name__
    if optional:
        entry["optional"] = True
    return entry


def flatten(cls: type, prefix: str = "") -> dict[str, dict[str, Any]]:
    """Dotted key -> entry for every leaf field of a nested dataclass."""
    entries: dict[str, dict[str, Any]] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        name = f"{prefix}{field.name}"
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation):
            entries |= flatten(typing.cast(type, annotation), f"{name}.")
            continue
        default = (
            field.default if field.default is not dataclasses.MISSING else field.default_factory()  # type: ignore[misc]
        )
        entries[name] = describe(annotation) | {"default": default}
    return entries


def build() -> dict[str, Any]:
    """The content of keys.json."""
    from torchtitan.config import JobConfig

    entries = flatten(JobConfig)
    for key, constraint in CONSTRAINTS.items():
        entries[key] |= constraint
    return {"torchtitan": version("torchtitan"), "keys": entries}


def main() -> None:
    content = build()
    lines = [f"    {json.dumps(key)}: {json.dumps(entry)}" for key, entry in content["keys"].items()]
    text = f'{{\n  "torchtitan": {json.dumps(content["torchtitan"])},\n  "keys": {{\n'
    OUTPUT.write_text(text + ",\n".join(lines) + "\n  }\n}\n", encoding="utf-8")
    print(f"{OUTPUT}: {len(lines)} keys")


if __name__ == "__main__":
    main()
