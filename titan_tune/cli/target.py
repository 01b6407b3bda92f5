"""The hardware a command is asked about."""

from __future__ import annotations

from titan_tune.catalog.loader import gpu_spec
from titan_tune.domain.cluster import MAX_WORLD_SIZE, ClusterSpec
from titan_tune.errors import InputError

GPUS_PER_NODE = 8
"""Assumed when ``--gpus`` exceeds one node and nothing else is said."""


def cluster_from(
    machine: ClusterSpec, *, gpus: int | None, nodes: int | None, gpus_per_node: int | None, gpu: str | None
) -> ClusterSpec:
    """The cluster that ``--gpus`` or ``--nodes`` × ``--gpus-per-node`` and ``--gpu`` describe.

    What is not given is this machine's. ``--gpus`` beyond eight (or ``--gpus-per-node``) fills whole nodes.
    """
    spec = gpu_spec(gpu) if gpu else machine.gpu
    if gpus is not None and nodes is not None:
        raise InputError("--gpus and --nodes exclude each other: give --nodes with --gpus-per-node")
    ranks = gpus if gpus is not None else (nodes or 1) * (gpus_per_node or 1)
    if ranks > MAX_WORLD_SIZE:
        flags = "--gpus" if gpus is not None else "--nodes x --gpus-per-node"
        raise InputError(f"{flags}: {ranks} GPUs; at most {MAX_WORLD_SIZE}")
    if gpus is not None:
        per_node = gpus_per_node or min(gpus, GPUS_PER_NODE)
        if gpus % per_node:
            raise InputError(
                f"--gpus: {gpus} is not a multiple of {per_node} GPUs per node (--gpus-per-node)"
            )
        return ClusterSpec(gpu=spec, num_nodes=gpus // per_node, gpus_per_node=per_node)
    if nodes is None and gpus_per_node is None and gpu is None:
        return machine
    return ClusterSpec(
        gpu=spec, num_nodes=nodes or machine.num_nodes, gpus_per_node=gpus_per_node or machine.gpus_per_node
    )
