"""Which interconnect a cluster has: the catalogue's for its GPU, or one named there."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any, Final

from titan_tune.domain.calibration import LinkRate
from titan_tune.domain.cluster import ClusterSpec
from titan_tune.errors import InputError, did_you_mean
from titan_tune.estimate.collectives import Exposure, Interconnect, Link, Op, Rate

UNKNOWN_GPU_NODE: Final = "pcie-server"
"""What a GPU that no node lists is taken to sit in: promises least."""
MICROSECOND: Final = 1e-6


@cache
def _catalogue() -> Mapping[str, Any]:
    return tomllib.loads(
        files("titan_tune.catalog").joinpath("interconnects.toml").read_text(encoding="utf-8")
    )


def node_names() -> tuple[str, ...]:
    """Kinds of node in the catalogue."""
    return tuple(_catalogue()["nodes"])


def link_names() -> tuple[str, ...]:
    """Kinds of link in the catalogue."""
    return tuple(_catalogue()["links"])


def interconnect_of(cluster: ClusterSpec) -> Interconnect:
    """The links of a cluster. The rate inside a node is the GPU's own, what NCCL reaches of it the catalogue's;
    a calibrated machine has its measured rates instead.

    Raises:
        InputError: ``cluster.interconnect`` is no link, or one that lives inside a node.
    """
    gpu, rates = cluster.gpu, cluster.rates
    measured = rates.links if rates is not None else ()
    source = rates.source if rates is not None else ""
    return _interconnect(
        gpu.name, gpu.link_gb_per_s, cluster.gpus_per_node, cluster.interconnect, measured, source
    )


@lru_cache(maxsize=256)
def _interconnect(
    gpu: str,
    gb_per_s: float,
    gpus_per_node: int,
    inter: str | None,
    measured: tuple[LinkRate, ...],
    source: str,
) -> Interconnect:
    name = node_of(gpu)
    node = _catalogue()["nodes"][name]
    intra = link(node["intra"], gb_per_s)
    return Interconnect(
        name=name if inter is None else f"{name} with {inter}",
        gpus_per_node=gpus_per_node,
        intra=_measured_link(measured, source) if measured else intra,
        inter=link(inter or node["inter"]),
    )


def _measured_link(measured: tuple[LinkRate, ...], source: str) -> Link:
    """Operations that were not measured go at the pace of the slowest that was."""
    by_op = {Op(item.op): Rate(item.gb_per_s, item.latency_seconds) for item in measured}
    return Link(min(by_op.values()), MappingProxyType(by_op), source)


def exposure_by_links(cluster: ClusterSpec, catalogue: Exposure, calibrated: Exposure) -> Exposure:
    """The one that belongs to the rates of the cluster's links: a calibration is of one node, and the links between
    nodes are the catalogue's. TP stays inside a node."""
    if cluster.rates is None or not cluster.rates.links:
        return catalogue
    if cluster.num_nodes > 1:
        return catalogue._replace(tensor_parallel=calibrated.tensor_parallel)
    return calibrated


def node_of(gpu: str) -> str:
    """The kind of node that a GPU, by catalogue name, usually comes in."""
    nodes = _catalogue()["nodes"]
    return next((name for name, node in nodes.items() if gpu in node["gpus"]), UNKNOWN_GPU_NODE)


def link(name: str, gb_per_s: float | None = None) -> Link:
    """A link by catalogue name; ``gb_per_s`` is its data-sheet rate where that belongs to the GPU.

    Raises:
        InputError: no such link, or one without a rate of its own and none given.
    """
    links: Mapping[str, Any] = _catalogue()["links"]
    if name not in links:
        near = did_you_mean(name, tuple(links))
        raise InputError(f"interconnect: unknown link {name!r}{near}; links: {', '.join(links)}")
    entry = links[name]
    rate = entry.get("gb_per_s", gb_per_s)
    if rate is None:
        between = ", ".join(other for other, values in links.items() if "gb_per_s" in values)
        raise InputError(f"interconnect: {name} lies inside a node; links between nodes: {between}")
    return Link(Rate(rate * entry["efficiency"], entry["latency_us"] * MICROSECOND), source=entry["source"])
