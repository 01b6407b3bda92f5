"""What the compiler did in this process: graphs, recompilations, cache hits, and collectives fused with matmuls."""

from __future__ import annotations

import functools
from typing import Any, Final

FUSED_COLLECTIVES: Final = (
    "_fused_all_gather_matmul_impl",
    "_fused_all_gather_matmul_native",
    "_fused_matmul_reduce_scatter_impl",
    "_fused_scaled_matmul_reduce_scatter_impl",
)
"""Functions of ``torch.distributed._symmetric_memory`` that run a fused collective; their fallbacks are others."""

_calls: list[int] = []
"""Fused collectives run so far, as the only element; empty where nobody counts."""


def counters() -> dict[str, Any]:
    """Counts since the process began, and the seconds that compiling took.

    ``recompilations`` are failed guards of code that was compiled before. ``fused_collective_matmuls`` is
    ``None`` unless :func:`count_fused_collectives` was called.
    """
    from torch._dynamo import utils

    counts = utils.counters
    return {
        "captured_graphs": counts["stats"]["unique_graphs"],
        "graph_breaks": sum(counts["graph_break"].values()),
        "recompilations": sum(len(reasons) for reasons in utils.guard_failures.values()),
        "fxgraph_cache_hit": counts["inductor"]["fxgraph_cache_hit"],
        "fxgraph_cache_miss": counts["inductor"]["fxgraph_cache_miss"],
        "autograd_cache_hit": counts["aot_autograd"]["autograd_cache_hit"],
        "autograd_cache_miss": counts["aot_autograd"]["autograd_cache_miss"],
        "compile_seconds": round(utils.calculate_time_spent().get("total_wall_time", 0.0), 3),
        "fused_collective_matmuls": sum(_calls) if _calls else None,
    }


def count_fused_collectives() -> None:
    """Count every fused collective that runs: what Inductor fused, also where the graph comes from its cache."""
    import torch.distributed._symmetric_memory as symmetric_memory

    _calls[:] = [0]
    for name in FUSED_COLLECTIVES:
        setattr(symmetric_memory, name, _counted(getattr(symmetric_memory, name)))


def _counted(function: Any) -> Any:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _calls[0] += 1
        return function(*args, **kwargs)

    return counted
