"""What ``fully_shard`` adds to weights whose dimension 0 its shards do not divide."""

from __future__ import annotations

import pytest
from families import MODELS, job, values_of

from titan_tune.catalog.loader import nest
from titan_tune.estimate import NotCoveredError, estimate_memory
from titan_tune.estimate.blocks import Weight, feed_forward_weights, padding_of
from titan_tune.estimate.parameters import shapes_of

WEIGHTS = (Weight(384, 320, "rows"), Weight(320, 384, "columns"), Weight(96, 320, "rows"), Weight(320, 1))


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_the_parameters(name: str) -> None:
    s = shapes_of(job(name, "full", False, 4, {}))

    def elements(weights: tuple[Weight, ...], *, cut: bool) -> int:
        return sum(w.rows * w.columns for w in weights if bool(w.cut) == cut)

    assert elements(s.attention.weights, cut=True) == s.attention.params_split
    assert elements(s.attention.weights, cut=False) == s.attention.params_whole
    dense = s.attention.weights + feed_forward_weights(s.dim, s.ffn)
    assert elements(dense, cut=True) == s.block_matmul
    if s.moe is not None:
        assert elements(s.moe.rest_weights, cut=True) == s.moe.rest_split
        assert elements(s.moe.rest_weights, cut=False) == s.moe.rest_whole


@pytest.mark.parametrize("shards", [1, 2, 12, 64, 100, 4096])
@pytest.mark.parametrize("tp", [1, 2])
def test_padding_is_that_of_torch(shards: int, tp: int) -> None:
    torch = pytest.importorskip("torch")
    common = pytest.importorskip("torch.distributed.fsdp._fully_shard._fsdp_common")
    added = 0
    for weight in WEIGHTS:
        rows = weight.rows // tp if weight.cut == "rows" else weight.rows
        columns = weight.columns // tp if weight.cut == "columns" else weight.columns
        whole = torch.empty(rows, columns, device="meta")
        part = common._chunk_with_empty(whole, shards, dim=0)[0]  # rank 0's, to which the others are padded
        added += shards * part.numel() - whole.numel()
    assert padding_of(WEIGHTS, tp, shards) == added


def test_even_parts_are_not_padded() -> None:
    s = shapes_of(job("qwen3", "full", False, 16, {}))
    assert (s.block_padding, s.table_padding) == (0, 0)
    assert s.gathered_params(False) == s.block_shard_params


def test_gradients_before_they_are_scattered_are_not_padded() -> None:
    s = shapes_of(job("deepseek_v3", "full", False, 4096, {}))
    assert s.moe is not None
    assert s.whole_blocks(1, 2) == s.moe_rest_params + s.moe.expert_params
    assert s.gathered_blocks(1, 2) > 100 * s.whole_blocks(1, 2)


def test_large_padding_is_named() -> None:
    sentence = "with 512 shards gathered blocks are"
    assert any(
        sentence in said for said in estimate_memory(job("gpt_oss", "full", False, 512, {})).assumptions
    )
    few = estimate_memory(job("gpt_oss", "full", False, 8, {})).assumptions
    assert not any("FSDP pads" in said for said in few)


@pytest.mark.parametrize(
    ("world_size", "degrees", "refused"),
    [
        (12, {"ep": 4}, 224),  # dimension 1 of w1: the experts' hidden width, over 3 shards
        (96, {"ep": 8}, 224),
        (56, {"ep": 2}, 320),  # 224 is a multiple of 28, of w2 the model's width is not
        (64, {"ep": 8}, None),
        (8, {"ep": 2}, None),  # no more shards than experts: they are dealt out
        (12, {}, None),
    ],
)
def test_experts_that_fsdp_refuses_to_shard(
    world_size: int, degrees: dict[str, int], refused: int | None
) -> None:
    settings = job("deepseek_v3", "full", False, world_size, {}, **degrees)
    if refused is None:
        assert estimate_memory(settings).active_bytes > 0
        return
    with pytest.raises(NotCoveredError, match=f"refuses {refused}, which"):
        estimate_memory(settings)


@pytest.mark.torchtitan
@pytest.mark.parametrize(("name", "world_size"), [("qwen3", 4096), ("gpt_oss", 512)])
def test_more_shards_than_rows_are_as_traced(name: str, world_size: int) -> None:
    from titan_tune.trace import trace_memory

    traced = trace_memory(
        values_of(name, "full", False, {}), model_args=nest(MODELS[name][1]), world_size=world_size, rank=0
    )
    estimate = estimate_memory(job(name, "full", False, world_size, {}))
    assert estimate.peak.name == "block_backward"
    assert estimate.active_bytes == pytest.approx(traced.active_bytes, rel=1e-3)
