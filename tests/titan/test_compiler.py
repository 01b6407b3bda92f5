"""The compiler's counters, on the installed torch."""

import pytest

from titan_tune.titan.plugin import compiler

pytestmark = pytest.mark.torchtitan


@pytest.fixture
def symmetric_memory(monkeypatch):
    """The module, with its fused collectives replaced by functions that do nothing and put back afterwards."""
    import torch.distributed._symmetric_memory as module

    for name in compiler.FUSED_COLLECTIVES:
        monkeypatch.setattr(module, name, lambda *args: args)
    monkeypatch.setattr(compiler, "_calls", [])
    return module


def test_fused_collectives_count_once_somebody_asks(symmetric_memory):
    assert compiler.counters()["fused_collective_matmuls"] is None
    compiler.count_fused_collectives()
    assert compiler.counters()["fused_collective_matmuls"] == 0
    for name in compiler.FUSED_COLLECTIVES:
        assert getattr(symmetric_memory, name)(1, 2) == (1, 2)
    assert compiler.counters()["fused_collective_matmuls"] == len(compiler.FUSED_COLLECTIVES)


@pytest.mark.parametrize(
    ("operator", "calls"),
    [
        ("_fused_all_gather_matmul", "_fused_all_gather_matmul_impl"),
        ("_fused_all_gather_matmul", "_fused_all_gather_matmul_native"),
        ("_fused_all_gather_scaled_matmul", "_fused_all_gather_matmul_impl"),
        ("_fused_matmul_reduce_scatter", "_fused_matmul_reduce_scatter_impl"),
        ("_fused_scaled_matmul_reduce_scatter", "_fused_scaled_matmul_reduce_scatter_impl"),
    ],
)
def test_torchs_operators_look_up_what_is_counted(operator, calls):
    import torch.distributed._symmetric_memory as module

    assert calls in getattr(module, operator).__code__.co_names


def test_graphs_recompilations_and_time_of_a_compiled_function():
    import torch

    before = compiler.counters()

    @torch.compile(backend="eager", dynamic=False)
    def double(x):
        return 2 * x

    double(torch.ones(2))
    once = compiler.counters()
    assert once["captured_graphs"] - before["captured_graphs"] == 1
    assert once["recompilations"] == before["recompilations"]
    assert once["compile_seconds"] > before["compile_seconds"]
    double(torch.ones(3))
    twice = compiler.counters()
    assert twice["captured_graphs"] - once["captured_graphs"] == 1
    assert twice["recompilations"] - once["recompilations"] == 1
    assert twice["graph_breaks"] == before["graph_breaks"]
