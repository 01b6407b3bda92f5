"""The hardware a command is asked about."""

from __future__ import annotations

from titan_tune.catalog.loader import gpu_spec
from titan_tune.cli.console import stderr_console
from titan_tune.domain.cluster import MAX_WORLD_SIZE, ClusterSpec
from titan_tune.errors import InputError
from titan_tune.estimate.changes import NODE_SIZE


def cluster_from(
    machine: ClusterSpec, *, gpus: int | None, nodes: int | None, gpus_per_node: int | None, gpu: str | None
) -> ClusterSpec:
    """The cluster that ``--gpus`` or ``--nodes`` × ``--gpus-per-node`` and ``--gpu`` describe.

    What is not given is this machine's. ``--gpus`` beyond eight (or ``--gpus-per-node``) fills whole nodes.
    A processor's processes say nothing of nodes of GPUs: those have eight, which is said on stderr.
    """
    spec = gpu_spec(gpu) if gpu else machine.gpu
    if gpus is None and gpus_per_node is None and machine.gpu.is_cpu and not spec.is_cpu:
        gpus_per_node = NODE_SIZE
        note = f"{NODE_SIZE} GPUs a node assumed; --gpus or --gpus-per-node say otherwise"
        stderr_console().print(note, style="dim", highlight=False)
    if gpus is not None and nodes is not None:
        raise InputError("--gpus and --nodes exclude each other: give --nodes with --gpus-per-node")
    num_nodes, per_node = nodes or machine.num_nodes, gpus_per_node or machine.gpus_per_node
    ranks = num_nodes * per_node if gpus is None else gpus
    if ranks > MAX_WORLD_SIZE:
        flags = "--gpus" if gpus is not None else "--nodes x --gpus-per-node"
        raise InputError(f"{flags}: {ranks} GPUs; at most {MAX_WORLD_SIZE}")
    if gpus is not None:
        per_node = gpus_per_node or min(gpus, NODE_SIZE)
        if gpus % per_node:
            raise InputError(
                f"--gpus: {gpus} is not a multiple of {per_node} GPUs per node (--gpus-per-node)"
            )
        return ClusterSpec(gpu=spec, num_nodes=gpus // per_node, gpus_per_node=per_node)
    if nodes is None and gpus_per_node is None and gpu is None:
        return machine
    return ClusterSpec(gpu=spec, num_nodes=num_nodes, gpus_per_node=per_node)
