"""Float8 blocks, a compiled ring and memory budgets, against traces of whole torchtitan steps (a small vocabulary)."""

from __future__ import annotations

from typing import Any

import pytest
from families import job
from test_block_backward import BF16, FSDP, ONE, SHORT, TP, settings_of

from titan_tune.estimate import estimate_memory
from titan_tune.estimate.activations import saved_block_bytes
from titan_tune.estimate.parameters import Recompute, shapes_of
from titan_tune.units import MIB

RECIPE = "quantize.linear.float8.recipe_name"
TENSORWISE: dict[str, Any] = {
    "model.converters": ["quantize.linear.float8"],
    "quantize.linear.float8.filter_fqns": ["output"],
}
ROWWISE = {**TENSORWISE, RECIPE: "rowwise"}
BF16_GRADIENTS = {**TENSORWISE, RECIPE: "rowwise_with_gw_hp"}
GATHERED = {**TENSORWISE, "quantize.linear.float8.enable_fsdp_float8_all_gather": True}
CP = {"parallelism.context_parallel_degree": 2}
BUDGET = "activation_checkpoint.memory_budget"


def as_torch_2_11(traced: float, world_size: int, mode: str, values: dict[str, Any]) -> float:
    """Of scales for whole tensors without TP, traced with 2.13: one F-wide buffer is bf16, not fp32."""
    shapes = shapes_of(settings_of(world_size, mode, True, values))
    if not shapes.float8 or shapes.rowwise or shapes.bf16_weight_gradients or shapes.tp > 1:
        return traced
    return traced - 2 * shapes.tokens * shapes.ffn / MIB


def peak_mib(world_size: int, mode: str, compiled: bool, values: dict[str, Any]) -> float:
    """The formula's, of the rank that a trace has."""
    memory = estimate_memory(settings_of(world_size, mode, compiled, values))
    assert memory.stages[0].peak.name.endswith("block_backward")
    return memory.active_bytes / MIB


# peak active MiB of one rank: torchtitan 0.2.2, torch 2.13 CPU with fake tensors
@pytest.mark.parametrize(
    ("world_size", "values", "none", "op", "full"),
    [
        (4, {**FSDP, **TENSORWISE}, 628.48, 565.41, 530.41),
        (4, {**SHORT, **TENSORWISE}, 339.38, 336.75, 333.07),
        (4, {**FSDP, **ROWWISE}, 662.55, 593.55, 560.99),
        (4, {**FSDP, **GATHERED}, 625.24, 539.16, 505.67),
        (4, {**FSDP, **BF16_GRADIENTS}, 657.26, 565.51, 522.45),
        (1, {**ONE, **TENSORWISE}, 953.29, 890.21, 870.47),
        (1, {**ONE, **ROWWISE}, 987.35, 918.35, 903.55),
        (4, {**TP, **TENSORWISE}, 439.57, 388.79, 381.04),
        (4, {**TP, **ROWWISE}, 438.75, 399.98, 392.19),
        (4, {**TP, **BF16_GRADIENTS}, 455.46, 362.63, 350.86),
        (4, {**CP, **TENSORWISE}, 456.85, 444.18, 422.31),
        (4, CP, 475.26, 422.42, 399.86),
    ],
)
def test_compiled_block_is_what_traces_say(
    world_size: int, values: dict[str, Any], none: float, op: float, full: float
) -> None:
    for mode, traced in (("none", none), ("selective", op), ("full", full)):
        expected = as_torch_2_11(traced, world_size, mode, values)
        assert peak_mib(world_size, mode, True, values) == pytest.approx(expected, rel=6e-4)


# the same jobs traced with torch 2.11
@pytest.mark.parametrize(
    ("world_size", "mode", "values", "traced"),
    [
        (4, "none", {**FSDP, **TENSORWISE}, 606.48),
        (4, "full", {**FSDP, **TENSORWISE}, 508.41),
        (1, "selective", {**BF16, **TENSORWISE}, 605.67),
    ],
)
def test_scales_for_whole_tensors_are_those_of_torch_2_11(
    world_size: int, mode: str, values: dict[str, Any], traced: float
) -> None:
    assert peak_mib(world_size, mode, True, values) == pytest.approx(traced, rel=3e-4)


@pytest.mark.parametrize(
    ("world_size", "mode", "compiled", "values", "traced"),
    [
        (4, "none", False, TENSORWISE, 805.46),
        (4, "selective", False, TENSORWISE, 633.41),
        (4, "full", False, TENSORWISE, 573.15),
        (4, "selective", False, ROWWISE, 633.44),
        (4, "none", False, {**TP, **TENSORWISE}, 528.69),
        (1, "none", False, {**ONE, **TENSORWISE}, 1234.26),
        (1, "none", True, {**ONE, **BF16_GRADIENTS}, 987.56),
        (
            1,
            "none",
            True,
            {**ONE, **BF16_GRADIENTS, "titan_tune.model_args.ffn_dim_multiplier": 2.0},
            1537.56,
        ),
        (1, "selective", True, {**ONE, **BF16_GRADIENTS}, 898.31),
        (1, "selective", True, {**BF16, **TENSORWISE}, 627.67),
        (4, "none", True, {**SHORT, **ROWWISE}, 345.60),
        (4, "none", True, {**TP, **GATHERED}, 425.34),
        (4, "none", True, {**TP, **SHORT, **TENSORWISE}, 279.10),
        (4, "none", True, {**CP, **ROWWISE}, 473.39),
        (4, "memory_budget", True, {BUDGET: 0.5}, 520.86),
        (4, "memory_budget", True, {BUDGET: 0.7}, 581.71),
        (4, "memory_budget", True, {BUDGET: 0.3, "titan_tune.model_args.dim": 1536}, 881.67),
        (4, "memory_budget", True, {BUDGET: 0.5, **TENSORWISE}, 537.89),
    ],
)
def test_block_is_what_traces_say(
    world_size: int, mode: str, compiled: bool, values: dict[str, Any], traced: float
) -> None:
    expected = as_torch_2_11(traced, world_size, mode, values) if compiled else traced
    assert peak_mib(world_size, mode, compiled, values) == pytest.approx(expected, rel=8e-4)


def test_tensor_parallel_float8_keeps_casts_of_weights_and_norm_outputs() -> None:
    # one byte each: 11.8 M parameters of a block's linears on two ranks, both norm outputs whole
    shapes = shapes_of(settings_of(4, "none", True, {**TP, **TENSORWISE}))
    unsplit = shapes._replace(float8=False)
    difference = saved_block_bytes(shapes, Recompute.NONE) - saved_block_bytes(unsplit, Recompute.NONE)
    # the SwiGLU's product and the bf16 norm outputs are not kept
    assert difference == shapes.block_matmul / 2 + 2 * 4096 * 1024 - 2 * 4096 * 2816 / 2 - 2 * 2 * 4096 * 1024


def test_weights_gradients_in_bf16_keep_what_bf16_keeps() -> None:
    plain = shapes_of(settings_of(4, "none", True, FSDP))
    bf16 = shapes_of(settings_of(4, "none", True, BF16_GRADIENTS))
    assert saved_block_bytes(bf16, Recompute.NONE) == saved_block_bytes(plain, Recompute.NONE)


def test_float8_block_of_experts_keeps_its_norm_outputs() -> None:
    keys = {"training.seq_len": 2048, **TENSORWISE}
    memory = estimate_memory(job("qwen3 MoE", "none", True, 4, keys))
    assert memory.stages[0].peak.name == "loss_backward"
    assert memory.active_bytes / MIB == pytest.approx(353.91, rel=3e-4)
