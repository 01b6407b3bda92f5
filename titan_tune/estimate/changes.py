"""A job with keys changed or on another number of GPUs, as ``titan-tune estimate`` would read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from titan_tune.domain.candidate import Value
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.domain.settings import AcMode, Settings
from titan_tune.estimate.parameters import ParamPath, param_path
from titan_tune.titan import rules
from titan_tune.titan.settings import settings_from

NODE_SIZE = 8
"""GPUs of a full node where nothing says otherwise."""
MAX_GPUS = 1 << 16
GPU_FACTORS = (2, 4, 8, 16, 32, 64)

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
TENSOR = "parallelism.tensor_parallel_degree"
PIPELINE = "parallelism.pipeline_parallel_degree"
EXPERT = "parallelism.expert_parallel_degree"
LOCAL_BATCH = "training.local_batch_size"
GLOBAL_BATCH = "training.global_batch_size"
AC_MODE = "activation_checkpoint.mode"
AC_OPTION = "activation_checkpoint.selective_ac_option"
OFFLOAD = "training.enable_cpu_offload"
DTYPE = "training.dtype"
CONTEXT = "parallelism.context_parallel_degree"
_OTHER_DEGREES = (REPLICATE, CONTEXT, TENSOR, PIPELINE)


@dataclass(frozen=True, slots=True)
class Asked:
    """The job in question: every key resolved, their typed view on its cluster, and how large a node is."""

    settings: Settings
    values: Mapping[str, Value]
    node_size: int

    @classmethod
    def of(cls, settings: Settings, values: Mapping[str, Value], gpus_per_node: int | None = None) -> Asked:
        """``gpus_per_node`` is a full node's; where it is ``None``, a single node may be part of one."""
        cluster = settings.cluster
        size = cluster.gpus_per_node if cluster.num_nodes > 1 else max(cluster.gpus_per_node, NODE_SIZE)
        return cls(settings, values, gpus_per_node or size)


class Changed(NamedTuple):
    """The job after a change."""

    settings: Settings
    values: Mapping[str, Value]


def cluster_of(asked: Asked, gpus: int) -> ClusterSpec | None:
    """The job's cluster with ``gpus`` in all; ``None`` where they do not fill whole nodes,
    or are more than ``MAX_GPUS``."""
    cluster = asked.settings.cluster
    if gpus == cluster.world_size:
        return cluster
    if gpus > MAX_GPUS:
        return None
    per_node = min(gpus, asked.node_size)
    if gpus % per_node:
        return None
    return cluster.model_copy(update={"num_nodes": gpus // per_node, "gpus_per_node": per_node})


def resized(asked: Asked, gpus: int) -> Changed | None:
    """The same file on ``gpus`` GPUs; only a shard degree that it names follows them."""
    return _read(asked, {}, gpus)


def changed(asked: Asked, keys: Mapping[str, Value], gpus: int) -> Changed | None:
    """The job with ``keys`` on ``gpus`` GPUs.

    Where the file leaves the global batch to torchtitan, and the change would shrink it, it is set to what
    it was: there are more accumulation steps then.
    """
    made = _read(asked, keys, gpus)
    before = asked.settings.global_batch_size
    if made is None or made.values[GLOBAL_BATCH] > 0 or made.settings.global_batch_size >= before:
        return made
    return Changed(replace(made.settings, global_batch_size=before), {**made.values, GLOBAL_BATCH: before})


def _read(asked: Asked, keys: Mapping[str, Value], gpus: int) -> Changed | None:
    cluster = cluster_of(asked, gpus)
    if cluster is None:
        return None
    values = {**asked.values, **keys}
    if values[SHARD] > 0:
        others = prod(values[key] for key in _OTHER_DEGREES)
        if gpus % others:
            return None
        values[SHARD] = gpus // others
    return Changed(settings_from(values, asked.settings.model, cluster), values)


def is_sound(asked: Asked, made: Changed) -> bool:
    """Whether torchtitan runs it, in the precision in which the job runs or which it asks for."""
    before = asked.settings
    precisions = (compute_dtype(before), before.mixed_precision_param)
    return (
        compute_dtype(made.settings) in precisions and rules.first_invalid(made.settings, made.values) is None
    )


def compute_dtype(settings: Settings) -> str:
    """What matrix products are computed in: without FSDP, tensor and pipeline parallelism know no mixed
    precision."""
    plain = param_path(settings) is ParamPath.PLAIN
    return settings.dtype if plain else settings.mixed_precision_param


class Option(NamedTuple):
    """One change that could be made. Of options of one axis at most one is."""

    axis: str
    keys: Mapping[str, Value]
    changes_numerics: bool = False


def options(asked: Asked) -> Iterator[Option]:
    """Every change worth trying on the same GPUs. Rules say which of them are valid."""
    s = asked.settings
    is_op = s.ac.mode is AcMode.SELECTIVE and s.ac.every == 0
    if not is_op and s.ac.mode is not AcMode.FULL:
        yield Option("checkpointing", {AC_MODE: "selective", AC_OPTION: "op"})
    if s.ac.mode is not AcMode.FULL:
        yield Option("checkpointing", {AC_MODE: "full"})
    if not (s.compile.model and s.compile.loss):
        yield Option("compile", {"compile.enable": True, "compile.components": ["model", "loss"]})
    batch = s.local_batch_size
    while batch % 2 == 0:
        batch //= 2
        yield Option("batch", {LOCAL_BATCH: batch})
    if s.dims.dp_replicate > 1:
        yield Option("replicate", {REPLICATE: 1})
    yield from _layouts(s)
    if not s.cpu_offload:
        yield Option("offload", {OFFLOAD: True})
    if s.dtype == "float32":
        yield Option("dtype", {DTYPE: "bfloat16"}, changes_numerics=True)


def _layouts(s: Settings) -> Iterator[Option]:
    """The same GPUs cut differently."""
    dims, experts = s.dims, s.model.moe.num_experts if s.model.moe is not None else 0
    for degree in (2, 4, 8):
        if degree > dims.tp:
            yield Option("layout", {TENSOR: degree})
        if degree > dims.cp:
            yield Option("layout", {CONTEXT: degree})
        if degree > dims.pp:
            # torchtitan 0.2.2 does not normalise the loss under a pipeline (rule pp-unnormalized-loss)
            yield Option("layout", {PIPELINE: degree}, changes_numerics=dims.pp == 1)
    degree = 2 * dims.ep
    while degree <= min(experts, s.cluster.world_size):
        yield Option("layout", {EXPERT: degree})
        degree *= 2
